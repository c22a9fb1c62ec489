"""Ops of size and place: decode, resize, crop, pad, flip.

Every op that computes in floats rounds half to even and clips to 0..255 before
it returns, so images are uint8 between any two ops and nothing is truncated.
"""

import tensorflow as tf

from input_pipeline.errors import suggest
from input_pipeline.ops import op
from input_pipeline.ops.pixels import (
  Image,
  ImageOp,
  RandomImageOp,
  Size,
  check_decoded,
  check_method,
  check_side,
  decode_image,
  height_width,
  resize_image,
  sides_of,
  small_sides,
)

# A result of resize_small beyond this many pixels is a mistake: as floats it
# takes 400 MB, once for every thread.
_MOST_PIXELS = 2**25
_PAD_MODES = ("constant", "reflect", "symmetric")


@op("decode")
def decode(precise: bool = False) -> ImageOp:
  """Encoded bytes to uint8 RGB, whatever the format and the file's name.

  Grey is replicated, alpha dropped, 16 bits scaled to 8, CMYK converted, of an
  animation the first frame is taken, EXIF orientation is ignored, as in all
  published pipelines. An image that is decoded already passes through, so one
  op string serves all sources.

  Args:
    precise: JPEG with the accurate integer DCT, as PIL and OpenCV decode. By
      default the fast one, as in the TensorFlow pipelines that trained the
      published weights; they differ by up to 5 levels.
  """

  def decode_precisely(image: Image) -> Image:
    if image.dtype != tf.string:
      return image
    pixels = tf.cond(
      tf.io.is_jpeg(image),
      lambda: tf.io.decode_jpeg(
        image, channels=3, dct_method="INTEGER_ACCURATE"
      ),
      lambda: decode_image(image),
    )
    return tf.ensure_shape(pixels, [None, None, 3])

  return decode_precisely if precise else decode_image


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
  sides = height_width(size)
  check_method(method)

  def apply(image: Image) -> Image:
    check_decoded(image, "resize")
    return resize_image(image, sides, method, antialias)

  return apply


@op("resize_small")
def resize_small(
  size: int, method: str = "area", antialias: bool = False
) -> ImageOp:
  """Resizes so that the shorter side has `size` pixels; keeps the aspect.

  The longer side is rounded half to even. An image so long that the result
  would have more than 2^25 pixels is an error: 2x2560 pixels would become
  256x327680. `decode_and_central_crop` handles those.

  Args:
    size: of the shorter side, in pixels.
    method: see `resize`.
    antialias: see `resize`.
  """
  check_side(size)
  check_method(method)

  def apply(image: Image) -> Image:
    check_decoded(image, "resize_small")
    h, w = sides_of(image)
    if isinstance(h, int) and isinstance(w, int):
      sides = tuple(round(side * size / min(h, w)) for side in (h, w))
      _check_pixels(size, *sides)
      return resize_image(image, sides, method, antialias)
    sides = small_sides(tf.stack([h, w]), size)
    with tf.control_dependencies(_check_pixels(size, sides[0], sides[1])):
      return resize_image(image, tf.identity(sides), method, antialias)

  return apply


@op("resize_long")
def resize_long(
  size: int, method: str = "area", antialias: bool = True
) -> ImageOp:
  """Resizes so that the longer side has `size` pixels; keeps the aspect.

  The shorter side is rounded half to even, but not to 0.

  Args:
    size: of the longer side, in pixels.
    method: see `resize`.
    antialias: see `resize`.
  """
  check_side(size)
  check_method(method)

  def apply(image: Image) -> Image:
    check_decoded(image, "resize_long")
    exact = tf.cast(tf.shape(image)[:2], tf.float64)
    sides = tf.round(exact * size / tf.reduce_max(exact))
    sides = tf.maximum(tf.cast(sides, tf.int32), 1)
    return resize_image(image, sides, method, antialias)

  return apply


@op("central_crop")
def central_crop(size: Size = 0) -> ImageOp:
  """Cuts `size` pixels from the middle, at floor((side - size) / 2).

  Args:
    size: side, or (height, width), in pixels; 0 is the largest square.
  """
  sides = (0, 0) if size == 0 else height_width(size)

  def apply(image: Image) -> Image:
    height, width = sides
    with tf.control_dependencies(_check_fits(image, height, width, "central")):
      h, w = sides_of(image)
      if size == 0:
        height = width = tf.minimum(h, w)
      y, x = (h - height) // 2, (w - width) // 2
      patch = image[y : y + height, x : x + width]
    return tf.ensure_shape(patch, [*(side or None for side in sides), 3])

  return apply


@op("random_crop", random=True)
def random_crop(size: Size) -> RandomImageOp:
  """Cuts `size` pixels anywhere, all places equally likely.

  Args:
    size: side, or (height, width), in pixels.
  """
  height, width = height_width(size)

  def apply(image: Image, seed: tf.Tensor) -> Image:
    with tf.control_dependencies(_check_fits(image, height, width, "random")):
      h, w = sides_of(image)
      room = tf.stack([h - height + 1, w - width + 1])
      # 31 random bits modulo at most a few thousand: no visible bias.
      draws = tf.random.stateless_uniform(
        [2], seed, minval=0, maxval=2**31 - 1, dtype=tf.int32
      )
      y, x = tf.unstack(draws % room)
      patch = tf.slice(image, [y, x, 0], [height, width, 3])
    return tf.ensure_shape(patch, [height, width, 3])

  return apply


@op("pad")
def pad(size: int, mode: str = "reflect") -> ImageOp:
  """Adds `size` pixels on all four sides.

  Args:
    size: pixels added to each side.
    mode: reflect (mirrored, without the border pixel), symmetric (mirrored,
      with it) or constant (black). The mirrors need an image larger than
      `size`.
  """
  check_side(size)
  if mode not in _PAD_MODES:
    raise ValueError(f"unknown mode {mode!r}. " + suggest(mode, _PAD_MODES))

  def apply(image: Image) -> Image:
    check_decoded(image, "pad")
    return tf.pad(image, [[size, size], [size, size], [0, 0]], mode)

  return apply


@op("flip_lr", random=True)
def flip_lr() -> RandomImageOp:
  """Mirrors left and right in half of the cases."""

  def apply(image: Image, seed: tf.Tensor) -> Image:
    check_decoded(image, "flip_lr")
    return tf.image.stateless_random_flip_left_right(image, seed)

  return apply


def _check_pixels(size: int, height, width) -> list:
  """Raises now, or when it runs, if resize_small would fill the memory."""
  advice = (
    f"resize_small({size}) would make more than {_MOST_PIXELS} pixels of this "
    "very long image: use decode_and_central_crop, or resize"
  )
  if isinstance(height, int):
    if height * width > _MOST_PIXELS:
      raise ValueError(f"{advice} ({height}x{width} pixels).")
    return []
  area = tf.cast(height, tf.int64) * tf.cast(width, tf.int64)
  return [tf.debugging.Assert(area <= _MOST_PIXELS, [advice])]


def _check_fits(image: Image, height: int, width: int, kind: str) -> list:
  """Raises now if the image is known to be too small, else when it runs."""
  check_decoded(image, f"{kind}_crop")
  h, w = sides_of(image)
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
