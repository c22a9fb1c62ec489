"""Images on their way into the model: size, value range, mixing.

They come as uint8, as the host decoded and cropped them; everything after that
happens here, on the device.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, UInt8

# Offset and scale of pixel values 0..255, per channel.
INPUT_RANGES = {
  "-1,1": ((127.5,) * 3, (127.5,) * 3),
  "0,1": ((0.0,) * 3, (255.0,) * 3),
  "imagenet": (
    (0.485 * 255, 0.456 * 255, 0.406 * 255),
    (0.229 * 255, 0.224 * 255, 0.225 * 255),
  ),
}


def normalize(
  images: UInt8[Array, "n h w 3"], input_range: str
) -> Float[Array, "n h w 3"]:
  """Maps uint8 pixels to the range that the model was made for."""
  offset, scale = (
    jnp.array(x)[None, None, None] for x in INPUT_RANGES[input_range]
  )
  return (images.astype(jnp.float32) - offset) / scale


def mix(
  images: Float[Array, "n h w 3"],
  targets: Float[Array, "n c"],
  key: Key[Array, ""],
  *,
  mixup: float,
  cutmix: float,
) -> tuple[Float[Array, "n h w 3"], Float[Array, "n c"]]:
  """Mixes each example with its neighbour in the batch.

  mixup (Zhang et al., 2018): x <- a x + (1 - a) x', a ~ Beta(mixup, mixup), one
  draw per batch. CutMix (Yun et al., 2019): a box of area 1 - a of x' is pasted
  into x. Targets mix by the share of pixels. With both on, a fair coin decides.
  """
  if not mixup and not cutmix:
    return images, targets
  coin, beta, box = jax.random.split(key, 3)
  paste = (
    jax.random.bernoulli(coin) if mixup and cutmix else jnp.array(bool(cutmix))
  )
  strength = jnp.where(paste, cutmix, mixup)
  share = jax.random.beta(beta, strength, strength)
  if cutmix:
    keep = jnp.where(paste, _outside_box(box, images.shape[1:3], share), share)
    share = jnp.where(paste, keep.mean(), share)
    keep = keep[None, :, :, None]
  else:
    keep = share
  return (
    images * keep + jnp.roll(images, 1, axis=0) * (1 - keep),
    targets * share + jnp.roll(targets, 1, axis=0) * (1 - share),
  )


def _outside_box(key, size, share):
  """Returns [h, w]: 0 in a random box of area about 1 - share, 1 outside."""
  corner = jax.random.uniform(key, (2,))
  side = jnp.sqrt(1 - share)

  def inside(length, centre):
    pixels = jnp.arange(length)
    half = side * length / 2
    return (pixels >= jnp.round(centre * length - half)) & (
      pixels < jnp.round(centre * length + half)
    )

  rows, columns = (inside(n, c) for n, c in zip(size, corner))
  return 1.0 - (rows[:, None] & columns[None, :])


def size_of(config: Any) -> tuple[int, int]:
  """Returns `config.image_size` as (height, width) in pixels.

  Raises:
    ValueError: not one or two positive numbers.
  """
  size = tuple(config.image_size)
  if len(size) not in (1, 2) or not all(
    isinstance(side, int) and side > 0 for side in size
  ):
    raise ValueError(
      f"config.image_size = {size}: give (side,) or (height, width) in pixels."
    )
  return (size[0], size[-1])


def sized(ops: str, size: tuple[int, int]) -> str:
  """Writes the image size into a string of host ops.

  "{size}" becomes (height, width) and "{side}" the shorter of them;
  "{size*8/7}" and "{side*8/7}" are as much larger, rounded to whole pixels.

  Raises:
    ValueError: other braces.
  """

  def write(match):
    factor = int(match[2] or 1) / int(match[3] or 1)
    pixels = [round(side * factor) for side in size]
    return str(min(pixels) if match[1] == "side" else tuple(pixels))

  text = re.sub(r"\{(size|side)(?:\*(\d+)/([1-9]\d*))?\}", write, ops)
  if "{" in text:
    raise ValueError(
      f"The ops {ops!r} have braces that mean nothing; there are {{size}}, "
      "{side}, and multiples like {size*8/7}."
    )
  return text


def check_size(
  images: UInt8[np.ndarray, "n h w 3"], size: tuple[int, int], *, key: str
) -> None:
  """Refuses images that the ops named by `key` gave another size than `size`.

  Raises:
    ValueError: names both sizes.
  """
  if images.shape[1:3] != size:
    found = "x".join(str(side) for side in images.shape[1:3])
    raise ValueError(
      f"{key} gives images of {found} pixels, config.image_size says "
      f"{size[0]}x{size[1]}. Write {{size}} in the ops to follow it."
    )
