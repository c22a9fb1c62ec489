"""Ops on the image: encoded bytes in, uint8 [h, w, 3] out.

Every op that computes in floats rounds half to even and clips to 0..255 before
it returns, so images are uint8 between any two ops and nothing is truncated.
"""

from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf

from input_pipeline.errors import suggest
from input_pipeline.ops import op

Image: TypeAlias = tf.Tensor
ImageOp = Callable[[Image], Image]
RandomImageOp = Callable[[Image, tf.Tensor], Image]
Size = int | tuple[int, int]

_METHODS = ("area", "bicubic", "bilinear", "lanczos3", "lanczos5", "nearest")


@op("decode")
def decode() -> ImageOp:
  """Encoded bytes to uint8 RGB, whatever the format and the file's name.

  Grey is replicated, alpha dropped, 16 bits scaled to 8, CMYK converted, of an
  animation the first frame is taken, EXIF orientation is ignored. An image that
  is decoded already passes through, so one op string serves all sources.
  """
  return _decode


@op("decode_and_random_crop", random=True)
def decode_and_random_crop(
  size: Size,
  area_min: float = 0.05,
  area_max: float = 1.0,
  ratio_min: float = 3 / 4,
  ratio_max: float = 4 / 3,
  method: str = "bilinear",
  antialias: bool = False,
) -> RandomImageOp:
  """Inception crop (arXiv 1409.4842): a random window, resized to `size`.

  Of a JPEG only the window is decoded. When no window of the wanted kind is
  found in 100 tries, as in very long images, the whole image is taken.

  Args:
    size: side, or (height, width), in pixels.
    area_min: smallest share of the image's area, in 0..1.
    area_max: largest share.
    ratio_min: smallest width / height of the window.
    ratio_max: largest width / height.
    method: see `resize`.
    antialias: see `resize`.
  """
  if not 0 < area_min <= area_max <= 1 or not 0 < ratio_min <= ratio_max:
    raise ValueError("areas must ascend within 0..1, ratios must ascend from 0")
  fit = resize(size, method, antialias)

  def window(shape: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Corner and size in pixels of an image of `shape`: y, x, h, w."""
    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
      shape,
      bounding_boxes=tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
      seed=seed,
      min_object_covered=0.0,
      aspect_ratio_range=(ratio_min, ratio_max),
      area_range=(area_min, area_max),
      max_attempts=100,
    )
    return tf.concat([begin[:2], extent[:2]], 0)

  def crop(image: Image, seed: tf.Tensor) -> Image:
    y, x, h, w = tf.unstack(window(tf.shape(image), seed))
    return image[y : y + h, x : x + w]

  def crop_jpeg(data: tf.Tensor, seed: tf.Tensor) -> Image:
    where = window(tf.io.extract_jpeg_shape(data), seed)
    return tf.io.decode_and_crop_jpeg(data, where, channels=3)

  def apply(image: Image, seed: tf.Tensor) -> Image:
    if image.dtype != tf.string:
      return fit(crop(image, seed))
    patch = tf.cond(
      tf.io.is_jpeg(image),
      lambda: crop_jpeg(image, seed),
      lambda: crop(_decode(image), seed),
    )
    patch = tf.ensure_shape(patch, [None, None, 3])
    return fit(patch)

  return apply


@op("resize")
def resize(
  size: Size, method: str = "bilinear", antialias: bool = False
) -> ImageOp:
  """Resizes to `size` whatever the aspect ratio, as `tf.image.resize` does.

  Args:
    size: side, or (height, width), in pixels.
    method: bilinear, bicubic, area, nearest, lanczos3 or lanczos5.
    antialias: widen the filter when shrinking (no effect on area, nearest).
  """
  height, width = _height_width(size)
  _check_method(method)

  def apply(image: Image) -> Image:
    _check_decoded(image, "resize")
    return _resize(image, (height, width), method, antialias)

  return apply


@op("resize_small")
def resize_small(
  size: int, method: str = "area", antialias: bool = False
) -> ImageOp:
  """Resizes so that the shorter side has `size` pixels; keeps the aspect.

  The longer side is rounded half to even.
  """
  _check_side(size)
  _check_method(method)

  def apply(image: Image) -> Image:
    _check_decoded(image, "resize_small")
    h, w = _sides(image)
    if isinstance(h, int) and isinstance(w, int):
      sides = tuple(round(side * size / min(h, w)) for side in (h, w))
      return _resize(image, sides, method, antialias)
    both = tf.cast(tf.stack([h, w]), tf.float64)
    sides = tf.round(both * size / tf.reduce_min(both))
    return _resize(image, tf.cast(sides, tf.int32), method, antialias)

  return apply


@op("central_crop")
def central_crop(size: Size) -> ImageOp:
  """Cuts `size` pixels from the middle, at floor((side - size) / 2)."""
  height, width = _height_width(size)

  def apply(image: Image) -> Image:
    with tf.control_dependencies(_check_fits(image, height, width, "central")):
      h, w = _sides(image)
      y, x = (h - height) // 2, (w - width) // 2
      patch = image[y : y + height, x : x + width]
    return tf.ensure_shape(patch, [height, width, 3])

  return apply


@op("random_crop", random=True)
def random_crop(size: Size) -> RandomImageOp:
  """Cuts `size` pixels anywhere, all places equally likely."""
  height, width = _height_width(size)

  def apply(image: Image, seed: tf.Tensor) -> Image:
    with tf.control_dependencies(_check_fits(image, height, width, "random")):
      h, w = _sides(image)
      room = tf.stack([h - height + 1, w - width + 1])
      # 31 random bits modulo at most a few thousand: no visible bias.
      draws = tf.random.stateless_uniform(
        [2], seed, minval=0, maxval=2**31 - 1, dtype=tf.int32
      )
      y, x = tf.unstack(draws % room)
      patch = tf.slice(image, [y, x, 0], [height, width, 3])
    return tf.ensure_shape(patch, [height, width, 3])

  return apply


@op("flip_lr", random=True)
def flip_lr() -> RandomImageOp:
  """Mirrors left and right in half of the cases."""

  def apply(image: Image, seed: tf.Tensor) -> Image:
    _check_decoded(image, "flip_lr")
    return tf.image.stateless_random_flip_left_right(image, seed)

  return apply


def _decode(image: Image) -> Image:
  if image.dtype != tf.string:
    return image
  image = tf.io.decode_image(image, channels=3, expand_animations=False)
  return tf.ensure_shape(image, [None, None, 3])


def _resize(image: Image, size, method: str, antialias: bool) -> Image:
  """`tf.image.resize`, rounded; `size` is a pair or an int32 [2] tensor."""
  shape = image.shape
  if isinstance(size, tuple) and (shape[0], shape[1]) == size:
    return image
  image = tf.image.resize(image, size, method, antialias=antialias)
  if image.dtype == tf.uint8:  # nearest
    return image
  return tf.cast(tf.clip_by_value(tf.round(image), 0, 255), tf.uint8)


def _sides(image: Image) -> tuple:
  """Height and width: ints where known while tracing, else int32 scalars."""
  h, w = image.shape[0], image.shape[1]
  dynamic = tf.shape(image)
  return (dynamic[0] if h is None else h, dynamic[1] if w is None else w)


def _check_fits(image: Image, height: int, width: int, kind: str) -> list:
  """Raises now if the image is known to be too small, else when it runs."""
  _check_decoded(image, f"{kind}_crop")
  h, w = _sides(image)
  if isinstance(h, int) and isinstance(w, int):
    if h < height or w < width:
      raise ValueError(
        f"{kind}_crop(({height}, {width})) needs a larger image than {h}x{w}: "
        f"put resize or resize_small before it."
      )
    return []
  message = (
    f"the image is smaller than {kind}_crop(({height}, {width})): put resize "
    "or resize_small before it"
  )
  # Not tf.debugging.assert_*: its message would carry a dump of the tensors.
  return [tf.debugging.Assert((h >= height) & (w >= width), [message])]


def _check_decoded(image: Image, name: str) -> None:
  if image.dtype == tf.string:
    raise ValueError(f"{name} needs a decoded image: put decode before it.")


def _check_side(size: int) -> None:
  if not isinstance(size, int) or isinstance(size, bool) or size < 1:
    raise ValueError(f"a size is a positive number of pixels, not {size!r}")


def _check_method(method: str) -> None:
  if method not in _METHODS:
    raise ValueError(f"unknown method {method!r}. " + suggest(method, _METHODS))


def _height_width(size: Size) -> tuple[int, int]:
  pair = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
  if len(pair) != 2:
    raise ValueError(f"size is a side or (height, width), not {size!r}")
  for side in pair:
    _check_side(side)
  return pair
