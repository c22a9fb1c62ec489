"""Records kept close by: in memory, or in a file on a local disk.

What is kept is raw (encoded images, as the source gives them), so random ops
stay random, and it is this process's share only. A source that is kept hands
out its records by index, in the very order that it had without.
"""

import dataclasses
import hashlib
import logging
import os
import pathlib
import uuid
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from input_pipeline import loading, records
from input_pipeline.sources import Features, Source

_SAMPLE = 16
_CONTAINER_LIMIT = pathlib.Path("/sys/fs/cgroup/memory.max")

log = logging.getLogger("input_pipeline")


def keep(source: Source, ids: np.ndarray, cache: str) -> Source:
  """Reads some records once and for all.

  Args:
    source: any; of records in files `ids` must be a range.
    ids: [k] int64, indices of the records to keep, ascending.
    cache: "memory", or a folder on a local disk, where what an earlier start
      has kept is used again.

  Returns:
    The source, to be addressed by these indices.

  Raises:
    ValueError: the data is larger than the memory, or the folder is remote.
    DataError: a record cannot be read.
  """
  if "://" in cache:
    raise ValueError(
      f"cache = {cache!r} must be 'memory' or a folder on a local disk."
    )
  what = f"{source.spec} {source.split}"
  size = int(bytes_per_record(source) * len(ids))
  log.info("%s: keeping about %s in %s.", what, show_bytes(size), cache)
  pack, unpack = _packing(source)
  dataset = _raw(source, ids).map(
    lambda index, *record: (index, pack(index, *record)),
    num_parallel_calls=tf.data.AUTOTUNE,
  )
  try:
    if cache == "memory":
      check_memory(size, what)
      held, data = dataset.batch(len(ids)).get_single_element()
      lookup = data.__getitem__
    else:
      held, lookup = _on_disk(dataset, pathlib.Path(cache), _name(source, ids))
  except tf.errors.OpError as error:
    raise loading.unreadable(source, error) from None
  rows = tf.argsort(held)  # They may have come in any order.
  held = tf.gather(held, rows)

  def parse(index: tf.Tensor) -> Features:
    row = rows[tf.searchsorted(held, index[None])[0]]
    return unpack(index, lookup(row))

  return dataclasses.replace(source, parse=parse, addressed=True)


def bytes_per_record(source: Source) -> float:
  """Estimates how large a record is, from a few.

  Raises:
    DataError: one of them cannot be read.
  """
  some = np.linspace(0, source.num_examples - 1, _SAMPLE).astype(np.int64)
  try:
    if not source.addressed:
      return records.mean_bytes(source.pieces)
    sizes = [
      sum(map(_num_bytes, tf.nest.flatten(source.parse(index), True)))
      for index in tf.constant(np.unique(some))
    ]
  except tf.errors.OpError as error:
    raise loading.unreadable(source, error) from None
  return float(np.mean(sizes))


def check_memory(size: int, what: str) -> None:
  """Refuses to hold more bytes than there are.

  Raises:
    ValueError: both numbers.
  """
  limit = memory_limit()
  if size > limit:
    raise ValueError(
      f"{what}: holding {show_bytes(size)} takes more than the "
      f"{show_bytes(limit)} of memory here. Use a smaller shuffle_buffer, a "
      "folder as cache, or more processes."
    )


def memory_limit() -> int:
  """Bytes of memory of the machine, or of the container if that is less."""
  size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  if _CONTAINER_LIMIT.exists():
    text = _CONTAINER_LIMIT.read_text().strip()
    size = min(size, int(text)) if text.isdecimal() else size
  return size


def show_bytes(size: int) -> str:
  """Bytes for people: `12.3 MB`."""
  thousands = min(max((len(str(size)) - 1) // 3, 1), 3)
  return f"{size / 1000**thousands:.1f} {('kB', 'MB', 'GB')[thousands - 1]}"


def _raw(source: Source, ids: np.ndarray) -> tf.data.Dataset:
  """Records one by one, in any order: (index,) or (index, record)."""
  if source.addressed:
    return tf.data.Dataset.from_tensor_slices((ids,))
  share = records.cut(source.pieces, ids[0], ids[-1] + 1)
  return records.read(share, addressed=False, in_turn=True)


def _packing(source: Source) -> tuple[Callable, Callable]:
  """Functions record -> bytes, and (index, bytes) -> features."""
  if not source.addressed:
    return lambda _, record: record, source.parse
  function = tf.function(source.parse, autograph=False)
  outputs = function.get_concrete_function(
    tf.TensorSpec([], tf.int64)
  ).structured_outputs
  specs = {
    k: v
    for k, v in outputs.items()
    if isinstance(v, (tf.Tensor, tf.TensorSpec))
  }

  def pack(index: tf.Tensor) -> tf.Tensor:
    features = source.parse(index)
    parts = [tf.io.serialize_tensor(features[key]) for key in specs]
    return tf.io.serialize_tensor(tf.stack(parts))

  def unpack(_, data: tf.Tensor) -> Features:
    parts = tf.unstack(tf.io.parse_tensor(data, tf.string), len(specs))
    return {
      key: tf.ensure_shape(tf.io.parse_tensor(part, spec.dtype), spec.shape)
      for part, (key, spec) in zip(parts, specs.items())
    }

  return pack, unpack


def _on_disk(
  dataset: tf.data.Dataset, folder: pathlib.Path, name: str
) -> tuple[np.ndarray, Callable[[tf.Tensor], tf.Tensor]]:
  """Writes records into one file, unless it is there, and looks them up."""
  folder = folder.expanduser()
  data, index = folder / f"{name}.records", folder / f"{name}.npz"
  if not index.exists():
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"{uuid.uuid4().hex}.incomplete"
    held, ends = [], [0]
    with fresh.open("wb") as file:
      for number, record in dataset.as_numpy_iterator():
        held.append(number)
        ends.append(ends[-1] + file.write(record))
    fresh.rename(data)
    with fresh.open("wb") as file:
      np.savez(file, ids=held, ends=ends)
    fresh.rename(index)  # Last: where it is, all is there.
  with np.load(index) as table:
    ids, ends = table["ids"], table["ends"]
  contents = np.memmap(data, np.uint8, "r")

  def lookup(row: tf.Tensor) -> tf.Tensor:
    def read(row):
      return contents[ends[row] : ends[row + 1]].tobytes()

    record = tf.numpy_function(read, [row], tf.string, stateful=False)
    return tf.ensure_shape(record, [])

  return ids, lookup


def _name(source: Source, ids: np.ndarray) -> str:
  """What is the same for the same records of the same data."""
  what = f"{source.spec} {source.digest} ".encode() + ids.tobytes()
  return hashlib.sha256(what).hexdigest()[:32]


def _num_bytes(value: tf.Tensor) -> int:
  if value.dtype == tf.string:
    return int(tf.reduce_sum(tf.strings.length(value)))
  return int(tf.size(value)) * value.dtype.size
