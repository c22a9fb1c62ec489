"""What the ops on images share: decoding, resizing, sizes and complaints.

No op is defined here. Images are uint8 [h, w, 3], or encoded bytes.
"""

from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf

from input_pipeline.errors import suggest

Image: TypeAlias = tf.Tensor
ImageOp = Callable[[Image], Image]
RandomImageOp = Callable[[Image, tf.Tensor], Image]
Size = int | tuple[int, int]

# How far a filter reaches to either side, in pixels of its input.
REACH = {
  "area": 0,
  "nearest": 0,
  "bilinear": 1,
  "bicubic": 2,
  "lanczos3": 3,
  "lanczos5": 5,
}
# Only these pass the values of their input.
_OVERSHOOT = ("bicubic", "lanczos3", "lanczos5")


def decode_image(image: Image) -> Image:
  """Encoded bytes to uint8 [h, w, 3]; what is decoded passes through."""
  if image.dtype != tf.string:
    return image
  image = tf.io.decode_image(image, channels=3, expand_animations=False)
  return tf.ensure_shape(image, [None, None, 3])


def resize_image(image: Image, size, method: str, antialias: bool) -> Image:
  """`tf.image.resize`, rounded to uint8.

  Args:
    image: uint8 or float32 [h, w, 3], both in 0..255.
    size: (height, width), or an int32 [2] tensor.
    method: a key of `REACH`.
    antialias: widen the filter when shrinking.

  Returns:
    uint8 [height, width, 3].
  """
  shape = image.shape
  if isinstance(size, tuple) and (shape[0], shape[1]) == size:
    return to_uint8(image)
  image = tf.image.resize(image, size, method, antialias=antialias)
  return to_uint8(image, clip=method in _OVERSHOOT)


def to_uint8(image: tf.Tensor, clip: bool = True) -> Image:
  """Rounds half to even; without `clip` the values must lie in 0..255."""
  if image.dtype == tf.uint8:
    return image
  image = tf.round(image)
  return tf.cast(tf.clip_by_value(image, 0, 255) if clip else image, tf.uint8)


def small_sides(sides: tf.Tensor, size: int) -> tf.Tensor:
  """Sides [2] scaled to `size` for the shorter; rounded half to even."""
  exact = tf.cast(sides, tf.float64)
  scaled = tf.round(exact * size / tf.reduce_min(exact))
  return tf.cast(scaled, sides.dtype)


def sides_of(image: Image) -> tuple:
  """Height and width: ints where known while tracing, else int32 scalars."""
  h, w = image.shape[0], image.shape[1]
  dynamic = tf.shape(image)
  return (dynamic[0] if h is None else h, dynamic[1] if w is None else w)


def height_width(size: Size) -> tuple[int, int]:
  """Height and width of an op's `size`, checked."""
  pair = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
  if len(pair) != 2:
    raise ValueError(f"size is a side or (height, width), not {size!r}")
  for side in pair:
    check_side(side)
  return pair


def check_side(size: int) -> None:
  """Raises unless `size` is a number of pixels."""
  if not isinstance(size, int) or isinstance(size, bool) or size < 1:
    raise ValueError(f"a size is a positive number of pixels, not {size!r}")


def check_method(method: str) -> None:
  """Raises unless `method` is one of `tf.image.resize`."""
  if method not in REACH:
    raise ValueError(f"unknown method {method!r}. " + suggest(method, REACH))


def check_range(name: str, value, low: float, high: float) -> None:
  """Raises unless the argument `name` is a number within low..high."""
  is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
  if not is_number or not low <= value <= high:
    raise ValueError(f"{name} is within {low}..{high}, not {value!r}")


def check_decoded(image: Image, name: str) -> None:
  """Raises, while tracing, when the op `name` gets encoded bytes."""
  if image.dtype == tf.string:
    raise ValueError(f"{name} needs a decoded image: put decode before it.")
