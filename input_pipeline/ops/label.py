"""Ops on labels: to class indices, int32 [m], padded with -1.

Several indices are several right answers (multi-hot on the device); an example
whose labels are all -1 has none.
"""

import json
import re
from collections import Counter
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from input_pipeline.ops import op

_PADDING = -1
_MOST_HASH = 2**63 - 1
_FOLDER_OR_EXTENSION = r"^.*/|\.[^./]*$"


@op("names", on="labels")
def names(file: str) -> Callable[[tf.Tensor], tf.Tensor]:
  """Class names to class indices.

  Args:
    file: text with one name in a line; the first is class 0. A name that is not
      in it is an error.
  """
  classes = [line.strip() for line in _read(file).splitlines()]
  index_of = _finder([name for name in classes if name], file)

  def apply(labels: tf.Tensor) -> tf.Tensor:
    if labels.dtype != tf.string:
      raise ValueError(
        f"names({file!r}) needs class names, but the labels of this source are "
        f"{labels.dtype.name}: leave it out."
      )
    return index_of(tf.reshape(labels, [-1]))

  return apply


@op("real_labels", on="labels", needs=("name",))
def real_labels(file: str) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
  """Replaces labels by the ReaL labels of ImageNet (arXiv 2006.07159).

  Args:
    file: JSON. Either a list of lists of class indices whose i-th entry, from 1
      on, belongs to `ILSVRC2012_val_%08d`, as published (`real.json`), or an
      object from names to lists. Names are compared without folder and
      extension; one that is not there is an error. An empty list, an image
      without any label, becomes all -1.
  """
  entries = json.loads(_read(file))
  if isinstance(entries, list):
    entries = {f"ILSVRC2012_val_{i + 1:08d}": e for i, e in enumerate(entries)}
  if not isinstance(entries, dict) or not entries:
    raise ValueError(f"{file} is neither a list nor an object of lists")
  most = max(1, *map(len, entries.values()))
  table = np.full([len(entries), most], _PADDING, np.int32)
  for row, indices in zip(table, entries.values()):
    row[: len(indices)] = indices
  row_of = _finder(
    [re.sub(_FOLDER_OR_EXTENSION, "", name) for name in entries], file
  )

  def apply(labels: tf.Tensor, name: tf.Tensor) -> tf.Tensor:
    del labels
    stem = tf.strings.regex_replace(name, _FOLDER_OR_EXTENSION, "")
    return tf.gather(table, row_of(stem))

  return apply


@op("pad_labels", on="labels")
def pad_labels(most: int) -> Callable[[tf.Tensor], tf.Tensor]:
  """Fills a list of class indices up with -1, so that lists can be stacked.

  Args:
    most: length of the result; a longer list is an error.
  """
  if not isinstance(most, int) or isinstance(most, bool) or most < 1:
    raise ValueError(f"most is a positive number of labels, not {most!r}")

  def apply(labels: tf.Tensor) -> tf.Tensor:
    labels = tf.cast(tf.reshape(labels, [-1]), tf.int32)
    count = tf.size(labels)
    message = tf.strings.join(
      [tf.strings.as_string(count), f" labels, but pad_labels allows {most}"]
    )
    with tf.control_dependencies(
      [tf.debugging.Assert(count <= most, [message])]
    ):
      padded = tf.pad(labels, [[0, most - count]], constant_values=_PADDING)
    return tf.ensure_shape(padded, [most])

  return apply


def _finder(keys: list[str], file: str) -> Callable[[tf.Tensor], tf.Tensor]:
  """keys -> a function from strings to their indices among the keys, int32.

  It searches sorted hashes rather than a lookup table, because a table lives in
  one process, and the ops of a data service run in others.
  """
  if not keys:
    raise ValueError(f"{file} is empty")
  twice = sorted(key for key, count in Counter(keys).items() if count > 1)
  if twice:
    raise ValueError(f"{file} has these names more than once: {twice}")
  hashes = tf.strings.to_hash_bucket_fast(keys, _MOST_HASH).numpy()
  order = np.argsort(hashes)
  hashes = hashes[order]

  def find(strings: tf.Tensor) -> tf.Tensor:
    sought = tf.strings.to_hash_bucket_fast(strings, _MOST_HASH)
    flat = tf.reshape(sought, [-1])
    place = tf.minimum(tf.searchsorted(hashes, flat), len(keys) - 1)
    message = tf.strings.join(
      [tf.strings.reduce_join(strings, separator=", "), f" not found in {file}"]
    )
    found = tf.reduce_all(tf.gather(hashes, place) == flat)
    with tf.control_dependencies([tf.debugging.Assert(found, [message])]):
      index = tf.gather(order.astype(np.int32), place)
    return tf.ensure_shape(tf.reshape(index, tf.shape(strings)), strings.shape)

  return find


def _read(file: str) -> str:
  try:
    with tf.io.gfile.GFile(file) as stream:
      return stream.read()
  except tf.errors.OpError as error:
    raise ValueError(f"cannot read {file!r}: {error.message}") from None
