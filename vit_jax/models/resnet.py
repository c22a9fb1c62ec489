"""The convolutional stem of hybrid models, under its published names.

A ResNet with weight standardisation and group normalisation turns an image into
a grid of features, which the transformer then takes for patches (section 3.1 of
the paper). It is *not* the ResNet the paper compares with: here normalisation
and ReLU follow each convolution; in `bit.py` they come before it.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax import trees

# Units in each of the four stages. "R" is the root alone.
BLOCKS: dict[str, tuple[int, ...]] = {
  "R": (),
  "R26": (2, 2, 2, 2),
  "R50": (3, 4, 6, 3),
  "R101": (3, 4, 23, 3),
  "R152": (3, 8, 36, 3),
  "R200": (3, 24, 36, 3),
}

# Rows for the table of mesh axes, which has one for all scales and biases.
PARAM_AXES = ((r"conv(\d|_root|_proj)/kernel", (None, None, None, "fsdp")),)

# Statistics are float32 whatever `dtype` is.
group_norm = functools.partial(nn.GroupNorm, num_groups=32, epsilon=1e-6)


def blocks_of(name: str, patch: int) -> tuple[tuple[int, ...], int]:
  """Says which stem a hybrid's name means: "R50" and 16 of R50+B/16.

  For /32 it is the whole ResNet. For /16 it ends with the third stage, which
  has the fourth's units as well (section 4.1). The published R+Ti/16 is no /16:
  the root divides by 4, its patches by 8, and it has the tokens of a /32.

  Args:
    name: the stem, a key of `BLOCKS`.
    patch: the number behind the slash.

  Returns:
    The units of each stage, and the side of a patch in features.

  Raises:
    ValueError: there is no such stem, or not for such patches; names those
      there are.
  """
  if name not in BLOCKS:
    raise ValueError(
      f"Unknown stem {name!r}; there are {', '.join(BLOCKS)}."
      + trees.nearest(name, BLOCKS)
    )
  units = BLOCKS[name]
  if not units:
    stems = {16: (units, 8)}
  else:
    stems = {16: ((*units[:2], units[2] + units[3]), 1), 32: (units, 1)}
  if patch not in stems:
    raise ValueError(
      f"The stem {name} goes with patches of "
      f"{' or '.join(map(str, stems))} pixels, not {patch}."
    )
  return stems[patch]


def stride(blocks: tuple[int, ...]) -> int:
  """Returns the pixels along a side of one feature of `stem`."""
  return 4 * 2 ** max(len(blocks) - 1, 0)


def root_channels(width: float) -> int:
  """Returns the channels of the root: `width` times 64.

  Raises:
    ValueError: they cannot be put in the 32 groups of the normalisation.
  """
  channels = round(64 * width)
  if width <= 0 or channels != 64 * width or channels % 32:
    raise ValueError(
      f"A ResNet of width {width} would have {64 * width:g} channels, but they "
      "are normalised in 32 groups: the width must be a multiple of 0.5."
    )
  return channels


def standardize(
  kernel: Float[Array, "h w i o"],
) -> Float[Array, "h w i o"]:
  """Gives each output channel's weights mean 0 and deviation 1.

  As in the published hybrids, where 1e-5 is added to the deviation and not to
  the variance: for small weights the two differ.
  """
  centered = kernel - kernel.mean((0, 1, 2), keepdims=True)
  return centered / (kernel.std((0, 1, 2), keepdims=True) + 1e-5)


class StdConv(nn.Module):
  """A convolution by standardised weights (Qiao et al., arXiv:1903.10520).

  What is learned is the kernel before it is standardised, always in float32.
  There is no bias: a normalisation follows.
  """

  channels: int
  size: int
  stride: int = 1
  padding: Any = "SAME"
  standardize: Callable = standardize
  dtype: Any = "float32"

  @nn.compact
  def __call__(self, x: Float[Array, "n h w i"]):
    shape = (self.size, self.size, x.shape[-1], self.channels)
    kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
    return jax.lax.conv_general_dilated(
      x.astype(self.dtype),
      self.standardize(jnp.asarray(kernel)).astype(self.dtype),
      window_strides=(self.stride, self.stride),
      padding=self.padding,
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


class Unit(nn.Module):
  """A bottleneck of three convolutions around which the features pass."""

  width: int
  stride: int
  dtype: Any

  @nn.compact
  def __call__(self, x: Float[Array, "n h w c"]):
    conv = functools.partial(StdConv, dtype=self.dtype)
    norm = functools.partial(group_norm, dtype=self.dtype)
    y = nn.relu(norm(name="gn1")(conv(self.width, 1, name="conv1")(x)))
    y = conv(self.width, 3, stride=self.stride, name="conv2")(y)
    y = nn.relu(norm(name="gn2")(y))
    y = conv(4 * self.width, 1, name="conv3")(y)
    # A unit starts by passing its input on.
    y = norm(scale_init=nn.initializers.zeros, name="gn3")(y)
    if x.shape != y.shape:
      x = conv(4 * self.width, 1, stride=self.stride, name="conv_proj")(x)
      x = norm(name="gn_proj")(x)
    return nn.relu(x + y)


class Stage(nn.Module):
  """Units of one width; the first of them strides."""

  units: int
  width: int
  stride: int
  dtype: Any

  @nn.compact
  def __call__(self, x: Float[Array, "n h w c"]):
    for i in range(self.units):
      unit = Unit(
        self.width,
        self.stride if i == 0 else 1,
        self.dtype,
        name=f"unit{i + 1}",
      )
      x = unit(x)
    return x


def stem(
  images: Float[Array, "n h w c"],
  *,
  blocks: tuple[int, ...],
  width: float,
  dtype: Any,
) -> Float[Array, "n y x d"]:
  """Turns images into features, inside the `__call__` of a compact module.

  A function and not a module, so that its layers are children of the caller's:
  the published names have no scope around the stem.

  Args:
    images: `[n, h, w, 3]` float.
    blocks: units of each stage; () = the root alone.
    width: 1.0 = 64 channels after the root, 256 after the first stage.
    dtype: compute type.

  Returns:
    `[n, y, x, d]`: one feature for every `stride(blocks)` pixels along a side,
    rounded up.

  Raises:
    ValueError: the width does not fit the normalisation's groups.
  """
  channels = root_channels(width)
  x = StdConv(channels, 7, stride=2, dtype=dtype, name="conv_root")(images)
  x = nn.relu(group_norm(dtype=dtype, name="gn_root")(x))
  x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
  for i, units in enumerate(blocks):
    stage = Stage(
      units, channels * 2**i, 1 if i == 0 else 2, dtype, name=f"block{i + 1}"
    )
    x = stage(x)
  return x
