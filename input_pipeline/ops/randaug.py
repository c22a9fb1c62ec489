"""RandAugment as it was when the AugReg weights were trained.

arXiv 1909.13719, with everything in which the code of arXiv 2106.10270 departs
from it: those quirks are part of the published recipes, so they are kept, and
listed in the docstring of the op. Nearest pixels, truncation to uint8, grey 128
where an image is moved away.
"""

import math
from collections.abc import Callable

import tensorflow as tf

from input_pipeline.ops import op
from input_pipeline.ops.pixels import Image, RandomImageOp, check_decoded

_GREY = 128
# Beyond it, posterize would keep more than all 8 bits.
_MOST_MAGNITUDE = 20

# (image, magnitude / 10, three uniform numbers in 0..1) -> image
Transform = Callable[[Image, float, tf.Tensor], Image]


@op("randaug", random=True)
def randaug(layers: int = 2, magnitude: int = 10) -> RandomImageOp:
  """RandAugment of the AugReg recipes: `layers` of 16 transforms, one by one.

  Each layer draws one of the 16, all equally likely, and always applies it.
  With s = magnitude / 10 (magnitudes 0, 10, 15, 20 are published):

    autocontrast   each channel is stretched to 0..255
    equalize       each channel's histogram is levelled, as in PIL
    invert         255 - x
    rotate         by 30 s degrees, either way
    posterize      keeps int(4 s) bits; with 0 bits one stays
    solarize       inverts values >= int(256 s) modulo 256: at magnitudes 0, 10
                   and 20 that is all of them, at 15 those from 128 on
    solarize_add   adds int(110 s) to values < 128, up to 255
    color          blends from grey by 1.8 s + 0.1 (1 keeps the image)
    contrast       the same from a flat grey, which is not the mean of the image
                   but its number of pixels / 256, at most 255: 196 for 224x224
    brightness     the same from black
    sharpness      the same from a smoothed image; the border pixels stay
    shear_x/y      by 0.3 s, either way
    translate_x/y  by 100 s pixels whatever the size, either way
    cutout         a square of half side int(40 s) pixels, its centre anywhere

  Moves and cutout fill with 128. So magnitude 0 is not the identity: its
  solarize inverts, its posterize leaves two levels, its blends keep a tenth.

  Args:
    layers: transforms for each image.
    magnitude: strength of all of them, in 0..20.
  """
  for name, value, most in (
    ("layers", layers, 16),
    ("magnitude", magnitude, _MOST_MAGNITUDE),
  ):
    if not isinstance(value, int) or not 0 <= value <= most:
      raise ValueError(f"{name} is a whole number in 0..{most}, not {value!r}")
  strength = magnitude / 10

  def apply(image: Image, seed: tf.Tensor) -> Image:
    check_decoded(image, "randaug")
    shape = image.shape
    draws = tf.random.stateless_uniform([layers, 4], seed)
    for layer in range(layers):
      which = tf.cast(draws[layer, 0] * len(TRANSFORMS), tf.int32)
      branches = [
        lambda t=transform, x=image, u=draws[layer, 1:]: t(x, strength, u)
        for transform in TRANSFORMS.values()
      ]
      image = tf.ensure_shape(tf.switch_case(which, branches), shape)
    return image

  return apply


def _autocontrast(image: Image, s: float, draws: tf.Tensor) -> Image:
  del s, draws
  values = tf.cast(image, tf.float32)
  low = tf.reduce_min(values, [0, 1])
  high = tf.reduce_max(values, [0, 1])
  scale = 255 / (high - low)
  stretched = _truncate(values * scale - low * scale)
  return tf.where(high > low, stretched, image)


def _equalize(image: Image, s: float, draws: tf.Tensor) -> Image:
  del s, draws

  def level(channel: tf.Tensor) -> tf.Tensor:
    """[h, w] -> [h, w], int32."""
    counts = tf.math.bincount(tf.reshape(channel, [-1]), minlength=256)
    last = counts[tf.reduce_max(channel)]
    step = (tf.size(channel) - last) // 255
    below = tf.cumsum(counts, exclusive=True)
    table = (below + step // 2) // tf.maximum(step, 1)
    table = tf.minimum(table, 255)
    table = tf.where(step == 0, tf.range(256), table)
    return tf.gather(table, channel)

  channels = tf.unstack(tf.cast(image, tf.int32), axis=-1)
  return tf.cast(tf.stack([level(c) for c in channels], -1), tf.uint8)


def _invert(image: Image, s: float, draws: tf.Tensor) -> Image:
  del s, draws
  return 255 - image


def _rotate(image: Image, s: float, draws: tf.Tensor) -> Image:
  angle = math.radians(30 * s) * _sign(draws)
  sine, cosine = tf.sin(angle), tf.cos(angle)
  far = tf.cast(tf.shape(image)[:2] - 1, tf.float32)  # y, x
  x = (far[1] - (cosine * far[1] - sine * far[0])) / 2
  y = (far[0] - (sine * far[1] + cosine * far[0])) / 2
  return _move(image, [cosine, -sine, x, sine, cosine, y])


def _posterize(image: Image, s: float, draws: tf.Tensor) -> Image:
  del draws
  dropped = min(8 - int(s * 4), 7)
  return image & (0xFF << dropped & 0xFF)


def _solarize(image: Image, s: float, draws: tf.Tensor) -> Image:
  del draws
  return tf.where(image < int(s * 256) % 256, image, 255 - image)


def _solarize_add(image: Image, s: float, draws: tf.Tensor) -> Image:
  del draws
  added = tf.minimum(tf.cast(image, tf.int32) + int(s * 110), 255)
  return tf.where(image < 128, tf.cast(added, tf.uint8), image)


def _color(image: Image, s: float, draws: tf.Tensor) -> Image:
  del draws
  return _blend(tf.image.rgb_to_grayscale(image), image, s)


def _contrast(image: Image, s: float, draws: tf.Tensor) -> Image:
  del draws
  pixels = tf.reduce_prod(tf.shape(image)[:2])
  return _blend(tf.minimum(pixels // 256, 255), image, s)


def _brightness(image: Image, s: float, draws: tf.Tensor) -> Image:
  del draws
  return _blend(tf.constant(0), image, s)


def _sharpness(image: Image, s: float, draws: tf.Tensor) -> Image:
  del draws
  kernel = tf.constant([[1, 1, 1], [1, 5, 1], [1, 1, 1]], tf.float32) / 13
  kernel = tf.repeat(kernel[..., None, None], 3, 2)  # [3, 3, 3, 1]
  smooth = tf.nn.depthwise_conv2d(
    tf.cast(image, tf.float32)[None], kernel, [1, 1, 1, 1], "VALID"
  )[0]
  inner = _blend(_truncate(smooth), image[1:-1, 1:-1], s)
  middle = tf.concat([image[1:-1, :1], inner, image[1:-1, -1:]], 1)
  return tf.concat([image[:1], middle, image[-1:]], 0)


def _shear_x(image: Image, s: float, draws: tf.Tensor) -> Image:
  return _move(image, [1.0, 0.3 * s * _sign(draws), 0.0, 0.0, 1.0, 0.0])


def _shear_y(image: Image, s: float, draws: tf.Tensor) -> Image:
  return _move(image, [1.0, 0.0, 0.0, 0.3 * s * _sign(draws), 1.0, 0.0])


def _translate_x(image: Image, s: float, draws: tf.Tensor) -> Image:
  return _move(image, [1.0, 0.0, 100 * s * _sign(draws), 0.0, 1.0, 0.0])


def _translate_y(image: Image, s: float, draws: tf.Tensor) -> Image:
  return _move(image, [1.0, 0.0, 0.0, 0.0, 1.0, 100 * s * _sign(draws)])


def _cutout(image: Image, s: float, draws: tf.Tensor) -> Image:
  half = int(s * 40)
  sides = tf.shape(image)[:2]
  centre = tf.cast(draws[1:] * tf.cast(sides, tf.float32), tf.int32)

  def near(side: tf.Tensor, middle: tf.Tensor) -> tf.Tensor:
    place = tf.range(side)
    return (place >= middle - half) & (place < middle + half)

  inside = near(sides[0], centre[0])[:, None] & near(sides[1], centre[1])
  return tf.where(inside[..., None], tf.constant(_GREY, tf.uint8), image)


def _sign(draws: tf.Tensor) -> tf.Tensor:
  """1 or -1, equally likely."""
  return 2 * tf.floor(draws[0] + 0.5) - 1


def _truncate(values: tf.Tensor) -> Image:
  return tf.cast(tf.clip_by_value(values, 0, 255), tf.uint8)


def _blend(base: tf.Tensor, image: Image, s: float) -> Image:
  """From `base` (0) over the image (1) and beyond, by 1.8 s + 0.1."""
  base = tf.cast(base, tf.float32)
  difference = tf.cast(image, tf.float32) - base
  return _truncate(base + (s * 1.8 + 0.1) * difference)


def _move(image: Image, rows: list) -> Image:
  """Takes the pixel (x, y) from (a x + b y + c, d x + e y + f), or grey."""
  moved = tf.raw_ops.ImageProjectiveTransformV3(
    images=image[None],
    transforms=tf.stack([*map(tf.convert_to_tensor, rows), 0.0, 0.0])[None],
    output_shape=tf.shape(image)[:2],
    fill_value=float(_GREY),
    interpolation="NEAREST",
    fill_mode="CONSTANT",
  )
  return moved[0]


TRANSFORMS: dict[str, Transform] = {
  "autocontrast": _autocontrast,
  "equalize": _equalize,
  "invert": _invert,
  "rotate": _rotate,
  "posterize": _posterize,
  "solarize": _solarize,
  "color": _color,
  "contrast": _contrast,
  "brightness": _brightness,
  "sharpness": _sharpness,
  "shear_x": _shear_x,
  "shear_y": _shear_y,
  "translate_x": _translate_x,
  "translate_y": _translate_y,
  "cutout": _cutout,
  "solarize_add": _solarize_add,
}
