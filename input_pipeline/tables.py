"""Sources whose examples fit in memory: arrays of images and of labels."""

import hashlib
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from input_pipeline import splits
from input_pipeline.errors import suggest
from input_pipeline.sources import Features, Source


def select_rows(
  kind: str, split: str, sizes: Mapping[str, int]
) -> dict[str, np.ndarray]:
  """Positions that a split expression takes of each split it names.

  Args:
    kind: of the source, with its colon, for the error.
    split: the expression.
    sizes: of each split.

  Raises:
    ValueError: no such split, or slices that cannot be.
  """
  chosen = {}
  for name, parts in splits.parse_split(split).items():
    if name not in sizes:
      raise ValueError(f"{kind} has no split {name!r}. " + suggest(name, sizes))
    chosen[name] = splits.take_slices(parts, sizes[name])
  return chosen


def make_source(
  images: np.ndarray,
  labels: np.ndarray,
  *,
  spec: str,
  split: str,
  class_names: tuple[str, ...],
  name_of: Callable[[int], str],
) -> Source:
  """Builds the source of arrays that hold just the examples of its split.

  Args:
    images: uint8 [n, h, w, c]; one channel is shown as three.
    labels: int32 [n].
    spec: see `Source`, as the others.
    split: the expression that chose them.
    class_names: of all labels.
    name_of: row -> what to call it.
  """
  digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
  image_table, label_table = tf.constant(images), tf.constant(labels[:, None])

  def parse(index: tf.Tensor) -> Features:
    image = image_table[index]
    if images.shape[-1] == 1:
      image = tf.image.grayscale_to_rgb(image)
    return {"image": image, "labels": label_table[index]}

  return Source(
    spec=spec,
    split=split,
    num_examples=len(images),
    class_names=class_names,
    digest=digest,
    parse=parse,
    name_of=name_of,
  )
