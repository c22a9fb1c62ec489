"""The ResNets that the paper compares with: BiT (arXiv:1912.11370).

ResNets of the second kind: each convolution is preceded by its normalisation
and ReLU, and nothing but sums happens on the way past a unit. Weights are
standardised and normalisation is by groups, as in the hybrids' stem, with other
constants; every choice here is that of the published weights.
"""

import functools
import re
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax import trees
from vit_jax.models import resnet
from vit_jax.models.fields import pair

# Rows for the table of mesh axes, beside the convolutions' of `resnet`.
PARAM_AXES = ((r"conv_head/kernel", ("fsdp", "model")),)

CHOICES = {"dtype": ("float32", "bfloat16"), "remat": ("none", "full")}

# Names in the published .npz files, and ours. All shapes agree but that of the
# head's kernel, there a 1 by 1 convolution (1, 1, d, c).
_NAMES = (
  ("resnet/root_block/{conv}", "root_block/conv_root/kernel"),
  ("resnet/{unit}/a/proj/{conv}", "{unit}/conv_proj/kernel"),
  *(
    (f"resnet/{{unit}}/{letter}/{theirs}", f"{{unit}}/{ours}")
    for i, letter in enumerate("abc", start=1)
    for theirs, ours in (
      ("{conv}", f"conv{i}/kernel"),
      ("group_norm/gamma", f"gn{i}/scale"),
      ("group_norm/beta", f"gn{i}/bias"),
    )
  ),
  ("resnet/group_norm/gamma", "norm-pre-head/scale"),
  ("resnet/group_norm/beta", "norm-pre-head/bias"),
  ("resnet/head/conv2d/kernel", "conv_head/kernel"),
  ("resnet/head/conv2d/bias", "conv_head/bias"),
)
_AS_REGEX = {
  "unit": r"(block\d+/unit\d+)",
  "conv": r"standardized_conv2d(?:_\d+)?/kernel",  # Some files number them.
}
_AS_NAME = {"unit": r"\1", "conv": "standardized_conv2d/kernel"}

# Regexes for whole names, and what becomes of them: either way.
FROM_PUBLISHED = tuple(
  (theirs.format(**_AS_REGEX), ours.format(**_AS_NAME))
  for theirs, ours in _NAMES
)
TO_PUBLISHED = tuple(
  (ours.format(**_AS_REGEX), theirs.format(**_AS_NAME))
  for theirs, ours in _NAMES
)

# The variance is taken in a second pass, as when the weights were trained.
group_norm = functools.partial(
  nn.GroupNorm, num_groups=32, epsilon=1e-5, use_fast_variance=False
)


def standardize(
  kernel: Float[Array, "h w i o"],
) -> Float[Array, "h w i o"]:
  """Gives each output channel's weights mean 0 and variance 1.

  Unlike in the hybrids' stem, a constant is added to the variance.
  """
  centered = kernel - kernel.mean((0, 1, 2), keepdims=True)
  variance = jnp.square(centered).mean((0, 1, 2), keepdims=True)
  return centered / jnp.sqrt(variance + 1e-10)


def std_conv(channels: int, size: int, **kwargs: Any) -> resnet.StdConv:
  """Returns a convolution that pads both sides alike, at any image size."""
  padding = ((size // 2, size // 2),) * 2
  return resnet.StdConv(
    channels, size, padding=padding, standardize=standardize, **kwargs
  )


class Root(nn.Module):
  """A convolution and a pooling, without normalisation."""

  channels: int
  dtype: Any

  @nn.compact
  def __call__(self, images: Float[Array, "n h w c"]):
    x = std_conv(
      self.channels, 7, stride=2, dtype=self.dtype, name="conv_root"
    )(images)
    # Zeros, where max_pool would pad with -inf: with no ReLU before, a border
    # of negative features shows the difference.
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return nn.max_pool(x, (3, 3), strides=(2, 2), padding="VALID")


class Unit(nn.Module):
  """A bottleneck of three convolutions around which the features pass."""

  width: int
  stride: int
  dtype: Any

  @nn.compact
  def __call__(self, x: Float[Array, "n h w c"]):
    conv = functools.partial(std_conv, dtype=self.dtype)
    norm = functools.partial(group_norm, dtype=self.dtype)
    y = nn.relu(norm(name="gn1")(x))
    if x.shape[-1] != 4 * self.width or self.stride != 1:
      x = conv(4 * self.width, 1, stride=self.stride, name="conv_proj")(y)
    y = conv(self.width, 1, name="conv1")(y)
    y = nn.relu(norm(name="gn2")(y))
    y = conv(self.width, 3, stride=self.stride, name="conv2")(y)
    y = nn.relu(norm(name="gn3")(y))
    return x + conv(4 * self.width, 1, name="conv3")(y)


class Stage(nn.Module):
  """Units of one width; the first of them strides."""

  units: int
  width: int
  stride: int
  dtype: Any
  remat: str

  @nn.compact
  def __call__(self, x: Float[Array, "n h w c"]):
    unit = nn.remat(Unit) if self.remat == "full" else Unit
    for i in range(self.units):
      stride = self.stride if i == 0 else 1
      x = unit(self.width, stride, self.dtype, name=f"unit{i + 1:02d}")(x)
    return x


class BiT(nn.Module):
  """BiT's ResNet; `create` fills in a variant.

  Attributes:
    num_classes: width of the head; 0 = no head, `logits` is `pre_logits`.
    blocks: units of each stage.
    width_factor: 1 = 64 channels after the root, 256 after the first stage.
    head_bias: initial value of the head's bias.
    dtype: compute type, "float32" or "bfloat16"; parameters stay float32.
    remat: what to recompute in the backward pass: "none", or "full" (the
      insides of each unit).
  """

  num_classes: int
  blocks: tuple[int, ...]
  width_factor: float = 1.0
  head_bias: float = 0.0
  dtype: Any = "float32"
  remat: str = "none"

  def __post_init__(self):
    if not isinstance(self.dtype, str):
      object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
    for field, choices in CHOICES.items():
      value = getattr(self, field)
      if value not in choices:
        raise ValueError(
          f"{field}={value!r}; for a ResNet there are {', '.join(choices)}."
          + trees.nearest(str(value), choices)
        )
    if not isinstance(self.num_classes, int) or self.num_classes < 0:
      raise ValueError(
        f"num_classes={self.num_classes!r} must be an int, 0 for none."
      )
    resnet.root_channels(self.width_factor)
    super().__post_init__()

  def grid(self, image_size: Any) -> tuple[int, int]:
    """Returns the grid (h, w) of features of images of any size in pixels."""
    height, width = pair(image_size, "image_size")
    stride = resnet.stride(self.blocks)
    return -(-height // stride), -(-width // stride)

  @nn.compact
  def __call__(
    self, images: Float[Array | np.ndarray, "n h w 3"], *, train: bool = False
  ) -> dict[str, Any]:
    """Classifies images.

    Args:
      images: `[n, h, w, 3]` float in the range the weights were trained with,
        of any size.
      train: changes nothing: there is no dropout.

    Returns:
      As a ViT's: `logits [n, c]` float32, `pre_logits [n, d]` float32 (the mean
      over the tokens), `tokens [n, l, d]` float32 (the features after the final
      norm and ReLU, row by row) and their `grid (h, w)`.
    """
    del train
    channels = resnet.root_channels(self.width_factor)
    x = Root(channels, self.dtype, name="root_block")(jnp.asarray(images))
    for i, units in enumerate(self.blocks):
      x = Stage(
        units,
        channels * 2**i,
        1 if i == 0 else 2,
        self.dtype,
        self.remat,
        name=f"block{i + 1}",
      )(x)
    x = nn.relu(group_norm(dtype=jnp.float32, name="norm-pre-head")(x))
    tokens = x.reshape(len(x), -1, x.shape[-1])
    x = tokens.mean(axis=1)
    logits = x
    if self.num_classes:
      logits = nn.Dense(
        self.num_classes,
        kernel_init=nn.initializers.zeros,
        bias_init=nn.initializers.constant(self.head_bias),
        name="conv_head",
      )(x)
    grid = self.grid(images.shape[1:3])
    return dict(logits=logits, pre_logits=x, tokens=tokens, grid=grid)


def create(
  name: str,
  *,
  num_classes: int,
  head_bias: float = 0.0,
  dtype: Any = "float32",
  remat: str = "none",
) -> BiT:
  """Builds a ResNet by its depth and width factor.

  Args:
    name: "R50x1" and so on. The paper has R50x1, R50x2, R101x1, R152x1, R152x2
      and R200x3; weights are published for R50x1, R50x3, R101x1, R101x3, R152x2
      and R152x4.
    num_classes: as in `BiT`, like all that follow.
    head_bias: its initial value.
    dtype: compute type.
    remat: what to recompute.

  Returns:
    The module; it holds no arrays.

  Raises:
    ValueError: the name is not of that form or the depth unknown (names those
      there are), or a field value that cannot be.
  """
  depths = [depth for depth, blocks in resnet.BLOCKS.items() if blocks]
  match = re.fullmatch(r"(R\d+)x([1-9]\d*)", name)
  if not match or match[1] not in depths:
    raise ValueError(
      f"Unknown ResNet {name!r}: names are a depth ({', '.join(depths)}), 'x' "
      "and a width factor, such as 'R50x1'."
    )
  return BiT(
    num_classes=num_classes,
    blocks=resnet.BLOCKS[match[1]],
    width_factor=float(match[2]),
    head_bias=head_bias,
    dtype=dtype,
    remat=remat,
  )
