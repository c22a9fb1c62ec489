"""Decodes examples one by one, in parallel, and goes on after bad ones.

A training stops at what it cannot read, or replaces it; here it is noted why.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from input_pipeline import headers, loading
from input_pipeline.ops import parse_ops
from input_pipeline.sources import Features, Source

# (encoded image, its pixels) -> what is wanted of it
Finish = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

# To hand over one example takes longer than to decode a small image.
_CHUNK = 16
_FIELDS = {  # Of a chunk: type, shape of an empty one, what fills it up.
  "index": (tf.int64, [0], 0),
  "image": (tf.string, [0], ""),
  "name": (tf.string, [0], ""),
  "sides": (tf.int32, [0, 2], 0),
  "labels": (tf.int32, [0, 0], -1),
}
_NO_LABELS = np.zeros([0], np.int32)


class Bad(NamedTuple):
  """What cannot be used: what it is called, and why."""

  name: str
  reason: str


class Seen(NamedTuple):
  """An example that was looked at.

  Attributes:
    id: index within the split.
    image: encoded; empty where the source has pixels, or the example is bad.
    name: what the source calls it, or "".
    sides: height and width in pixels.
    labels: [m] int32, class indices; without padding.
    reason: why it is bad; "" if it is good.
  """

  id: int
  image: bytes
  name: str
  sides: tuple[int, int]
  labels: np.ndarray
  reason: str


def inspect(
  source: Source,
  tickets: tf.data.Dataset,
  *,
  decode: str = "decode",
  finish: Finish = lambda image, _: image,
) -> Iterator[Seen]:
  """Reads and decodes examples.

  Args:
    source: the split.
    tickets: which examples: indices and, unless the source is addressed by
      index, serialized records.
    decode: the op that decodes.
    finish: what to do with an encoded image that can be decoded.

  Yields:
    The examples in order. A few dozen for each core are in memory at a time.
  """
  decoded = parse_ops(decode)

  def look(index: tf.Tensor, *record: tf.Tensor) -> Features:
    features = source.parse(index, *record)
    image, labels = features["image"], features["labels"]
    pixels = decoded(features)["image"]
    known = tf.reduce_all(labels < source.num_classes)
    text = f"a label is outside of 0..{source.num_classes - 1}"
    with tf.control_dependencies([tf.debugging.Assert(known, [text])]):
      sides = tf.shape(pixels)[:2]
    return {
      "index": index,
      "image": finish(image, pixels) if image.dtype == tf.string else "",
      "name": features.get("name", ""),
      "sides": sides,
      "labels": labels,
    }

  nothing = {k: tf.zeros(shape, t) for k, (t, shape, _) in _FIELDS.items()}
  padding = {k: tf.constant(fill, t) for k, (t, _, fill) in _FIELDS.items()}

  def attempt(*tickets: tf.Tensor) -> tuple[Features, tuple[tf.Tensor, ...]]:
    # A failure inside of a data set is the only one that a graph can survive.
    good = tf.data.Dataset.from_tensor_slices(tickets).map(look).ignore_errors()
    found = good.padded_batch(_CHUNK, padding_values=padding)
    found = found.concatenate(tf.data.Dataset.from_tensors(nothing))
    features = found.take(1).get_single_element()
    ids, *data = tickets
    # The records of bad examples will be looked at again.
    kept = tf.where(tf.size(ids) == tf.size(features["index"]), 0, _CHUNK)
    return features, (ids, *(records[:kept] for records in data))

  options = tf.data.Options()
  options.deterministic = True
  options.autotune.enabled = False
  dataset = tickets.batch(_CHUNK)
  dataset = dataset.map(attempt, num_parallel_calls=os.cpu_count() or 1)
  for found, (ids, *data) in dataset.with_options(options).as_numpy_iterator():
    rows = {index: row for row, index in enumerate(found["index"].tolist())}
    for place, index in enumerate(ids.tolist()):
      if index in rows:
        yield _seen(found, rows[index])
      else:
        reason = _why(
          source, look, index, *(records[place] for records in data)
        )
        yield Seen(index, b"", "", (0, 0), _NO_LABELS, reason)


def _seen(found: dict[str, np.ndarray], row: int) -> Seen:
  """A good example, out of its chunk."""
  height, width = found["sides"][row].tolist()
  labels = found["labels"][row]
  return Seen(
    int(found["index"][row]),
    found["image"][row],
    found["name"][row].decode(errors="replace"),
    (height, width),
    labels[labels >= 0],
    "",
  )


def _why(source: Source, look: Callable, index: int, *record: bytes) -> str:
  """Looks at a bad example again, to say what is wrong with it."""
  ticket = (tf.constant(index, tf.int64), *map(tf.constant, record))
  plain = ""
  try:
    image: Any = source.parse(*ticket)["image"]
    if image.dtype == tf.string:
      plain = headers.complaint(image.numpy())
    look(*ticket)
  except (tf.errors.OpError, ValueError) as error:
    return plain or loading.reason(error)
  return "it could not be read, but can be now (a failing disk or network?)"
