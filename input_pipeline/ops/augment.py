"""Random ops on colour and content: 3-Augment, colour jitter, random erasing.

All take and give uint8 [h, w, 3]; between, they compute in float32 and round
once, half to even. What mixes examples, mixup and CutMix, is the device's work.
"""

from collections.abc import Callable

import tensorflow as tf

from input_pipeline.ops import op
from input_pipeline.ops.pixels import (
  Image,
  RandomImageOp,
  check_decoded,
  check_range,
  to_uint8,
)

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601
_TRIES = 10  # Rectangles that random_erasing draws until one fits.


@op("three_augment", random=True)
def three_augment() -> RandomImageOp:
  """3-Augment (DeiT III, arXiv 2204.07118): grey, solarize or blur.

  One of the three, all equally likely. Grey is the BT.601 luma in all channels.
  Solarize inverts the values from 128 on. Blur is Gaussian, its standard
  deviation uniform in 0.1..2 pixels; at the border the weights of the pixels
  inside are scaled to sum to 1. The paper goes on with
  `color_jitter(0.3, 0.3, 0.3)`.
  """

  def apply(image: Image, seed: tf.Tensor) -> Image:
    check_decoded(image, "three_augment")
    draws = tf.random.stateless_uniform([2], seed)
    changed = tf.switch_case(
      tf.cast(draws[0] * 3, tf.int32),
      [
        lambda: _repeat(to_uint8(_luma(tf.cast(image, tf.float32)))),
        lambda: tf.where(image < 128, image, 255 - image),
        lambda: _blur(image, 0.1 + 1.9 * draws[1]),
      ],
    )
    return tf.ensure_shape(changed, image.shape)

  return apply


@op("color_jitter", random=True)
def color_jitter(
  brightness: float = 0.0,
  contrast: float = 0.0,
  saturation: float = 0.0,
  hue: float = 0.0,
) -> RandomImageOp:
  """Changes brightness, contrast, saturation and hue, in random order.

  The first three blend `f * image + (1 - f) * base`, f uniform in 1 - strength
  .. 1 + strength; the base is black, the mean luma of the image, the luma of
  each pixel. Values are clipped to 0..255 after each.

  Args:
    brightness: strength in 0..1; 0 leaves it out, as below.
    contrast: strength in 0..1.
    saturation: strength in 0..1.
    hue: largest turn of the colour wheel either way, in 0..0.5 of its round.
  """
  check_range("brightness", brightness, 0, 1)
  check_range("contrast", contrast, 0, 1)
  check_range("saturation", saturation, 0, 1)
  check_range("hue", hue, 0, 0.5)
  strengths = (brightness, contrast, saturation, hue)
  chosen = [index for index, value in enumerate(strengths) if value]

  def apply(image: Image, seed: tf.Tensor) -> Image:
    check_decoded(image, "color_jitter")
    draws = tf.random.stateless_uniform([2, 4], seed)
    shifts = (2 * draws[0] - 1) * strengths  # each in -strength..strength
    order = tf.argsort(draws[1, : len(chosen)])
    result = tf.cast(image, tf.float32)
    for turn in range(len(chosen)):
      branches = [_adjuster(index, result, shifts[index]) for index in chosen]
      result = tf.switch_case(order[turn], branches)
    return tf.ensure_shape(to_uint8(result), image.shape)

  return apply


@op("random_erasing", random=True)
def random_erasing(
  probability: float = 0.25,
  area_min: float = 0.02,
  area_max: float = 1 / 3,
  ratio_min: float = 0.3,
  ratio_max: float = 10 / 3,
  fill: int = -1,
) -> RandomImageOp:
  """Overwrites a random rectangle (arXiv 1708.04896).

  The area is uniform, the logarithm of the ratio is uniform, and of the places
  where the rectangle fits all are equally likely. One that fits nowhere is
  drawn anew, up to ten times, then the image stays as it is.

  Args:
    probability: share of the images that are changed, in 0..1.
    area_min: smallest share of the image's area, in 0..1.
    area_max: largest share.
    ratio_min: smallest width / height.
    ratio_max: largest width / height.
    fill: level 0..255 of the rectangle; -1 is noise, uniform in 0..255 for
      every pixel and channel.
  """
  check_range("probability", probability, 0, 1)
  check_range("fill", fill, -1, 255)
  if not 0 < area_min <= area_max <= 1 or not 0 < ratio_min <= ratio_max:
    raise ValueError("areas must ascend within 0..1, ratios must ascend from 0")

  def rectangle(sides: tf.Tensor, draws: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Corner and size, int32 [2] each; the size is 0 if nothing fitted."""
    area = area_min + (area_max - area_min) * draws[:, 0]
    area *= tf.cast(tf.reduce_prod(sides), tf.float32)
    ratio = ratio_min * (ratio_max / ratio_min) ** draws[:, 1]
    size = tf.sqrt(tf.stack([area / ratio, area * ratio], 1))
    size = tf.cast(tf.round(size), tf.int32)
    fits = tf.reduce_all(size <= sides, 1)
    first = tf.argmax(fits)
    size = size[first] * tf.cast(fits[first], tf.int32)
    room = tf.cast(sides - size + 1, tf.float32)
    return tf.cast(draws[first, 2:] * room, tf.int32), size

  def apply(image: Image, seed: tf.Tensor) -> Image:
    check_decoded(image, "random_erasing")
    draws = tf.random.stateless_uniform([_TRIES + 1, 4], seed)

    def erase() -> Image:
      sides = tf.shape(image)[:2]
      corner, size = rectangle(sides, draws[1:])
      inside = _span(sides[0], corner[0], size[0])[:, None, None]
      inside &= _span(sides[1], corner[1], size[1])[:, None]
      if fill >= 0:
        return tf.where(inside, tf.constant(fill, tf.uint8), image)
      key = tf.random.fold_in(seed, 1)
      noise = tf.random.stateless_uniform(
        tf.shape(image), key, minval=0, maxval=256, dtype=tf.int32
      )
      return tf.where(inside, tf.cast(noise, tf.uint8), image)

    erased = tf.cond(draws[0, 0] < probability, erase, lambda: image)
    return tf.ensure_shape(erased, image.shape)

  return apply


def _adjuster(
  index: int, image: tf.Tensor, shift: tf.Tensor
) -> Callable[[], tf.Tensor]:
  """Change of brightness (0), contrast, saturation or hue (3) by `shift`."""

  def adjust() -> tf.Tensor:
    if index == 3:
      return tf.image.adjust_hue(image, shift)
    if index == 0:
      base = tf.zeros([])
    elif index == 1:
      base = tf.reduce_mean(_luma(image))
    else:
      base = _luma(image)
    return tf.clip_by_value(image + shift * (image - base), 0, 255)

  return adjust


def _luma(image: tf.Tensor) -> tf.Tensor:
  """float32 [h, w, 3] -> [h, w, 1]."""
  return tf.reduce_sum(image * _LUMA, -1, keepdims=True)


def _repeat(channel: tf.Tensor) -> tf.Tensor:
  return tf.repeat(channel, 3, -1)


def _blur(image: Image, sigma: tf.Tensor) -> Image:
  """Gaussian blur; both directions are products with a band of weights."""

  def down(x: tf.Tensor) -> tf.Tensor:
    """Blurs [h, w, 3] along h."""
    place = tf.range(tf.shape(x)[0], dtype=tf.float32)
    distance = (place[:, None] - place) / sigma
    weights = tf.nn.softmax(-(distance**2) / 2)  # The rows sum to 1.
    columns = tf.reshape(x, [tf.shape(x)[0], -1])
    return tf.reshape(tf.matmul(weights, columns), tf.shape(x))

  across = tf.transpose(down(tf.cast(image, tf.float32)), [1, 0, 2])
  return to_uint8(tf.transpose(down(across), [1, 0, 2]))


def _span(side: tf.Tensor, begin: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
  """bool [side], true on `size` entries from `begin` on."""
  place = tf.range(side)
  return (place >= begin) & (place < begin + size)
