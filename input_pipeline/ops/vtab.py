"""Ops that make VTAB's labels of what its data sets know about an image.

The rules are those of google-research/task_adaptation. A class is a range of
the number that is to be estimated; what lies outside all of them is an error,
never a label that some loss would accept.
"""

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from input_pipeline.ops import op
from input_pipeline.ops.pixels import Image, ImageOp, check_decoded

LabelOp = Callable[..., tf.Tensor]

# A class k holds the distances d with edges[k] < d <= edges[k + 1].
_CLEVR_EDGES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)  # Of the image's depth.
_CLEVR_FEWEST, _CLEVR_MOST = 3, 10  # Objects.
_NO_VEHICLE = 1000.0  # Metres; a class of its own.
_KITTI_EDGES = (-100.0, 8.0, 20.0, 999.0, _NO_VEHICLE)
_KITTI_VEHICLES = 3  # The types 0, 1, 2 are car, van and truck.
_DSPRITES_CLASSES = 16
_DSPRITES_POSITIONS, _DSPRITES_ORIENTATIONS = 32, 40


@op("clevr_count", on="labels", needs=("objects",))
def clevr_count() -> LabelOp:
  """How many objects there are: 3 … 10 become the classes 0 … 7."""

  def apply(labels: tf.Tensor, objects: Mapping[str, tf.Tensor]) -> tf.Tensor:
    del labels
    count = tf.shape(_column(objects, "pixel_coords", "clevr_count"))[0]
    inside = (count >= _CLEVR_FEWEST) & (count <= _CLEVR_MOST)
    return _label(count - _CLEVR_FEWEST, inside, "clevr_count", count)

  return apply


@op("clevr_distance", on="labels", needs=("objects",))
def clevr_distance() -> LabelOp:
  """How far the nearest object is, in six classes: up to 8, 8.5, 9, 9.5, 10."""

  def apply(labels: tf.Tensor, objects: Mapping[str, tf.Tensor]) -> tf.Tensor:
    del labels
    depths = _column(objects, "pixel_coords", "clevr_distance")[:, 2]
    return _range_of(tf.reduce_min(depths), _CLEVR_EDGES, "clevr_distance")

  return apply


@op("kitti_distance", on="labels", needs=("objects",))
def kitti_distance() -> LabelOp:
  """How far the nearest car, van or truck is, in four classes.

  Up to 8 metres, up to 20, farther, and none at all.
  """

  def apply(labels: tf.Tensor, objects: Mapping[str, tf.Tensor]) -> tf.Tensor:
    del labels
    depths = _column(objects, "location", "kitti_distance")[:, 2]
    types = _column(objects, "type", "kitti_distance")
    vehicles = tf.boolean_mask(depths, types < _KITTI_VEHICLES)
    # The least of nothing would be infinity.
    nearest = tf.reduce_min(tf.concat([vehicles, [_NO_VEHICLE]], 0))
    return _range_of(nearest, _KITTI_EDGES, "kitti_distance")

  return apply


@op("dsprites_location", on="labels", needs=("label_x_position",))
def dsprites_location() -> LabelOp:
  """The horizontal position, 32 steps in 16 classes of two."""
  return _coarse("dsprites_location", _DSPRITES_POSITIONS)


@op("dsprites_orientation", on="labels", needs=("label_orientation",))
def dsprites_orientation() -> LabelOp:
  """The orientation, 40 steps in 16 classes of two and a half."""
  return _coarse("dsprites_orientation", _DSPRITES_ORIENTATIONS)


@op("smallnorb_azimuth", on="labels", needs=("label_azimuth",))
def smallnorb_azimuth() -> LabelOp:
  """From which of 18 sides the left camera looks."""
  return _plain


@op("smallnorb_elevation", on="labels", needs=("label_elevation",))
def smallnorb_elevation() -> LabelOp:
  """From which of nine heights the left camera looks."""
  return _plain


@op("binary_to_grey")
def binary_to_grey() -> ImageOp:
  """Makes 0 and 1, as dSprites has them, the levels 0 and 255."""

  def apply(image: Image) -> Image:
    check_decoded(image, "binary_to_grey")
    message = "binary_to_grey is for pixels of 0 and 1, but the brightest is "
    most = tf.reduce_max(image)
    message = tf.strings.join([message, tf.strings.as_string(most)])
    with tf.control_dependencies([tf.debugging.Assert(most <= 1, [message])]):
      return image * tf.constant(255, tf.uint8)

  return apply


def _plain(labels: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
  del labels
  return tf.reshape(tf.cast(value, tf.int32), [1])


def _coarse(name: str, steps: int) -> LabelOp:
  """A step of `steps` to one of 16 classes, rounding down."""

  def apply(labels: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    del labels
    step = tf.cast(step, tf.int32)
    # In integers: 2.5 steps to a class leave nothing to round.
    coarse = step * _DSPRITES_CLASSES // steps
    return _label(coarse, (step >= 0) & (step < steps), name, step)

  return apply


def _range_of(value: tf.Tensor, edges: Sequence[float], name: str) -> tf.Tensor:
  """The k with edges[k] < value <= edges[k + 1], as a label int32 [1]."""
  inside = (edges[0] < value) & (value <= edges[-1])
  below = tf.reduce_sum(tf.cast(tf.constant(edges) < value, tf.int32))
  return _label(below - 1, inside, name, value)


def _label(
  label: tf.Tensor, inside: tf.Tensor, name: str, value: tf.Tensor
) -> tf.Tensor:
  """`label` as int32 [1], or an error that says of which value none is made."""
  message = tf.strings.join(
    [f"{name} has no class for ", tf.strings.as_string(value)]
  )
  with tf.control_dependencies([tf.debugging.Assert(inside, [message])]):
    return tf.reshape(label, [1])


def _column(objects: Mapping[str, tf.Tensor], key: str, name: str) -> tf.Tensor:
  """One feature of all objects, or an error that names it."""
  if not hasattr(objects, "keys") or key not in objects:
    raise ValueError(
      f"The op {name} needs 'objects' with {key!r} in them, as TFDS has them."
    )
  return objects[key]
