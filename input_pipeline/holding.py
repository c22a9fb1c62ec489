"""Small splits in memory, decoded, so that many passes read them once.

What is random in the ops stays to be done anew for every example and step.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from input_pipeline import caching, loading, order, records
from input_pipeline.ops import divide
from input_pipeline.sources import Features, Source


class Held(NamedTuple):
  """A split in memory.

  Attributes:
    images: uint8 `[n, h, w, 3]`.
    labels: int32 `[n, m]`, class indices; -1 is padding.
    ids: int64 `[n]`, whose these are: indices within the split.
  """

  images: np.ndarray
  labels: np.ndarray
  ids: np.ndarray


def read(source: Source, ops: str) -> Held:
  """Reads a whole split; every time in the same order.

  Args:
    source: the split.
    ops: nothing random; they give uint8 images of one size.

  Raises:
    ValueError: the ops give other images; they are larger than the memory.
    DataError: an example cannot be read.
  """
  example = loading.entry_of(source, ops, 1)
  tickets = order.eval_tickets(source, np.arange(source.num_examples))
  dataset = tickets.map(example, num_parallel_calls=tf.data.AUTOTUNE)
  image = dataset.element_spec["image"]
  if image.dtype != tf.uint8 or not image.shape.is_fully_defined():
    raise ValueError(
      f"The ops {ops!r} give images of {image.dtype.name} {image.shape}; to be "
      "held in memory they must be uint8 and of one size: decode and resize."
    )
  size = source.num_examples * image.shape.num_elements()
  caching.check_memory(size, f"{source.spec} {source.split}")
  try:
    whole = dataset.batch(source.num_examples).get_single_element()
  except tf.errors.OpError as error:
    raise loading.find_culprit(source, example, tickets, error) from None
  return Held(*(whole[key].numpy() for key in ("image", "labels", "id")))


def hold(source: Source, ops: str) -> tuple[Source, str, Held]:
  """Does once what is not random, and keeps what comes of it.

  Args:
    source: a split that is to be trained on.
    ops: what is before the first random one makes uint8 images of one size.

  Returns:
    The source to train on, the ops that are left to do, and what is held.
    Random ops draw other numbers than they would with the whole string, as
    those depend on an op's place.

  Raises:
    ValueError, DataError: as `read`.
  """
  once, each_time = divide(ops)
  held = read(source, once)
  with tf.device("/CPU:0"):
    images, labels = tf.constant(held.images), tf.constant(held.labels)
    rows = tf.constant(np.argsort(held.ids))

  def parse(index: tf.Tensor) -> Features:
    row = rows[index]
    return {"image": images[row], "labels": labels[row]}

  kept = dataclasses.replace(
    source, parse=parse, addressed=True, pieces=records.NO_PIECES
  )
  return kept, each_time, held
