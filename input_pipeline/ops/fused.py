"""Ops that decode no more of a JPEG than they show.

A JPEG can be decoded in part, and at 1/2, 1/4 or 1/8 of its size for less than
the price of all pixels. Both are used only for files that end as a JPEG must:
in any other, as in a PNG, everything is decoded and then cut, so that a
truncated file is noticed even when the missing part is not asked for.

Two kinds of sizes meet here: a *window* is a part of the file's image, in
pixels of the scale at which it is decoded; a *place* counts pixels of the image
that an op returns.
"""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from input_pipeline.ops import op
from input_pipeline.ops.pixels import (
  REACH,
  Image,
  ImageOp,
  RandomImageOp,
  Size,
  check_method,
  check_side,
  decode_image,
  height_width,
  resize_image,
)

_REDUCTIONS = (1, 2, 4, 8)  # What libjpeg offers.
_GROWTH = 8  # Pixels by which a window may grow until its edges fit.


class Cut(NamedTuple):
  """What to decode.

  Attributes:
    level: index into the reductions, int32 scalar.
    window: y, x, height, width, int32 [4], in pixels at that reduction.
    places: for who made the plan: see `_central_window`.
  """

  level: tf.Tensor
  window: tf.Tensor
  places: tf.Tensor


# (sides of the image, int32 [2]; whether it is a JPEG, bool scalar) -> Cut
Plan = Callable[[tf.Tensor, tf.Tensor], Cut]


@op("decode_and_random_crop", random=True)
def decode_and_random_crop(
  size: Size,
  area_min: float = 0.05,
  area_max: float = 1.0,
  ratio_min: float = 3 / 4,
  ratio_max: float = 4 / 3,
  method: str = "bilinear",
  antialias: bool = False,
  reduction: int = 8,
) -> RandomImageOp:
  """Inception crop (arXiv 1409.4842): a random window, resized to `size`.

  When no window of the wanted kind is found in 100 tries, as in very long
  images, the whole image is taken.

  Of a JPEG only the window is decoded, and at 1/r of its size for the largest r
  of 1, 2, 4, 8 with r * height <= the window's height and r * width <= its
  width: the result has all the resolution asked for. Such a window is rounded
  down to multiples of r pixels and is smoother than full decoding without
  `antialias`, which skips pixels, would make it.

  Args:
    size: side, or (height, width), in pixels.
    area_min: smallest share of the image's area, in 0..1.
    area_max: largest share.
    ratio_min: smallest width / height of the window.
    ratio_max: largest width / height.
    method: see `resize`.
    antialias: see `resize`.
    reduction: largest r; 1 decodes every pixel, as the published pipelines do.
  """
  if not 0 < area_min <= area_max <= 1 or not 0 < ratio_min <= ratio_max:
    raise ValueError("areas must ascend within 0..1, ratios must ascend from 0")
  height, width = height_width(size)
  check_method(method)
  reductions = _reductions_to(reduction)

  def apply(image: Image, seed: tf.Tensor) -> Image:
    def plan(sides: tf.Tensor, is_jpeg: tf.Tensor) -> Cut:
      begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.concat([sides, [3]], 0),
        bounding_boxes=tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
        seed=seed,
        min_object_covered=0.0,
        aspect_ratio_range=(ratio_min, ratio_max),
        area_range=(area_min, area_max),
        max_attempts=100,
      )
      times = tf.reduce_min(extent[:2] // [height, width])
      level, by = _reduce(times, is_jpeg, reductions)
      window = tf.concat([begin[:2], extent[:2]], 0) // by
      return Cut(level, window, tf.constant(0))

    patch, _ = _decode_cut(image, plan, reductions)
    return resize_image(patch, (height, width), method, antialias)

  return apply


@op("decode_jpeg_and_inception_crop", "inception_crop", random=True)
def inception_crop(
  size: Size,
  area_min: float = 5,
  area_max: float = 100,
  ratio_min: float = 0.75,
  ratio_max: float = 1.33,
  method: str = "bilinear",
  antialias: bool = False,
) -> RandomImageOp:
  """`decode_and_random_crop` under big_vision's names, areas in percent.

  Every pixel of the window is decoded, as there.

  Args:
    size: side, or (height, width), in pixels.
    area_min: smallest share of the image's area, in percent.
    area_max: largest share, in percent.
    ratio_min: smallest width / height of the window.
    ratio_max: largest width / height.
    method: see `resize`.
    antialias: see `resize`.
  """
  return decode_and_random_crop(
    size,
    area_min / 100,
    area_max / 100,
    ratio_min,
    ratio_max,
    method,
    antialias,
    reduction=1,
  )


@op("decode_and_central_crop")
def decode_and_central_crop(
  size: Size,
  small: int,
  method: str = "area",
  antialias: bool = False,
  reduction: int = 8,
) -> ImageOp:
  """`decode|resize_small(small)|central_crop(size)` at a lower price.

  Only what the crop shows is decoded and resized, of a JPEG at 1/r of its size
  for the largest r of 1, 2, 4, 8 with r * small <= the shorter side.

  The picture lies at most half a pixel of the result beside that of the three
  ops, mostly a tenth: on photographs at r = 1 values differ by 0.02 to 0.3
  levels on average with `area`. At larger r by 0.7 to 2.1, because JPEG's own
  shrinking is a little sharper than `area`.

  Args:
    size: of the crop: side, or (height, width), in pixels.
    small: what the image's shorter side is resized to, in pixels; at least
      `size`.
    method: see `resize`.
    antialias: see `resize`.
    reduction: largest r; 1 decodes every pixel of the window.
  """
  crop = height_width(size)
  check_side(small)
  check_method(method)
  if small < max(crop):
    raise ValueError(f"small is {small}, but the crop of {size} needs as much")
  reductions = _reductions_to(reduction)

  def plan(sides: tf.Tensor, is_jpeg: tf.Tensor) -> Cut:
    times = tf.reduce_min(sides) // small
    level, by = _reduce(times, is_jpeg, reductions)
    window, places = _central_window(
      tf.cast(sides, tf.float32),
      tf.cast(by, tf.float32),
      crop,
      small,
      reach=REACH[method],
      antialias=antialias,
    )
    return Cut(level, window, places)

  def apply(image: Image) -> Image:
    patch, places = _decode_cut(image, plan, reductions)
    patch = resize_image(patch, places[1], method, antialias)
    patch = tf.slice(patch, tf.pad(places[0], [[0, 1]]), [*crop, 3])
    return tf.ensure_shape(patch, [*crop, 3])

  return apply


def _central_window(
  sides: tf.Tensor,
  reduction: tf.Tensor,
  crop: tuple[int, int],
  small: int,
  *,
  reach: int,
  antialias: bool,
) -> tuple[tf.Tensor, tf.Tensor]:
  """The window under a central crop, grown until its edges meet whole places.

  `tf.image.resize` knows no fractions of pixels. So of the next few edges
  outside the crop and the filter's reach, one is taken that lies almost at a
  whole place. Both edges are handled as one, the first as its negative.

  Args:
    sides: of the image, float32 [2].
    reduction: at which it is decoded, float32 scalar.
    crop: of the result, in places.
    small: the shorter side of the image, in places.
    reach: of the filter, in pixels of its input.
    antialias: whether shrinking widens the filter.

  Returns:
    The window, int32 [4], and the places, int32 [2, 2]: y, x where the crop
    begins in the resized window, and height, width of the latter.
  """
  full = tf.round(sides * small / tf.reduce_min(sides))
  step = sides / (full * reduction)  # pixels per place, [2]
  first = (full - crop) // 2
  corners = tf.stack([-first, first + crop])  # [edge, axis], as all below
  margin = tf.math.ceil(reach * tf.maximum(step, 1)) if antialias else reach
  edges = tf.math.ceil(corners * step) + margin
  growth = tf.range(_GROWTH, dtype=tf.float32)
  edges = edges[..., None] + growth  # [edge, axis, candidate]
  ends = tf.stack([[0.0, 0.0], tf.math.ceil(sides / reduction)])
  edges = tf.minimum(edges, ends[..., None])
  places = edges / step[:, None]
  misfit = tf.abs(places - tf.round(places)) + 0.002 * growth
  best = tf.argmin(misfit, -1)
  begin, end = tf.unstack(tf.gather(edges, best, batch_dims=2))
  window = tf.concat([-begin, begin + end], 0)
  begin, end = tf.unstack(tf.round(tf.gather(places, best, batch_dims=2)))
  places = tf.stack([first + begin, begin + end])
  return tf.cast(window, tf.int32), tf.cast(places, tf.int32)


def _decode_cut(
  image: Image, plan: Plan, reductions: tuple[int, ...]
) -> tuple[tf.Tensor, tf.Tensor]:
  """The planned part of an image, float32 [h, w, 3], and the plan's places."""
  if image.dtype != tf.string:
    cut = plan(tf.shape(image)[:2], tf.constant(False))
    patch = _slice(image, cut.window)
  else:
    is_jpeg = _is_whole_jpeg(image)
    pixels, shape = tf.cond(
      is_jpeg,
      lambda: (tf.zeros([0, 0, 3], tf.uint8), tf.io.extract_jpeg_shape(image)),
      lambda: _with_shape(decode_image(image)),
    )
    cut = plan(shape[:2], is_jpeg)

    def decode(reduction: int) -> Callable[[], tf.Tensor]:
      return lambda: tf.io.decode_and_crop_jpeg(
        image, cut.window, channels=3, ratio=reduction
      )

    patch = tf.switch_case(
      tf.where(is_jpeg, cut.level, len(reductions)),
      [*map(decode, reductions), lambda: _slice(pixels, cut.window)],
    )
  patch = tf.ensure_shape(patch, [None, None, 3])
  # The kernels of tf.image.resize read floats twice as fast as uint8.
  return tf.cast(patch, tf.float32), cut.places


def _slice(pixels: Image, window: tf.Tensor) -> Image:
  return tf.slice(
    pixels, tf.pad(window[:2], [[0, 1]]), tf.concat([window[2:], [3]], 0)
  )


def _with_shape(pixels: Image) -> tuple[Image, tf.Tensor]:
  return pixels, tf.shape(pixels)


def _is_whole_jpeg(data: tf.Tensor) -> tf.Tensor:
  """Whether bytes begin and end as those of a JPEG."""
  length = tf.strings.length(data)
  tail = tf.strings.substr(data, tf.maximum(length - 2, 0), 2)
  return tf.io.is_jpeg(data) & (tail == b"\xff\xd9")


def _reduce(
  times: tf.Tensor, is_jpeg: tf.Tensor, reductions: tuple[int, ...]
) -> tuple[tf.Tensor, tf.Tensor]:
  """The largest reduction up to `times`: its index, and itself, int32."""
  fits = is_jpeg & (times >= tf.constant(reductions[1:], tf.int32))
  level = tf.reduce_sum(tf.cast(fits, tf.int32))
  return level, tf.gather(reductions, level)


def _reductions_to(largest: int) -> tuple[int, ...]:
  if largest not in _REDUCTIONS or isinstance(largest, bool):
    raise ValueError(f"reduction is one of {_REDUCTIONS}, not {largest!r}")
  return _REDUCTIONS[: _REDUCTIONS.index(largest) + 1]
