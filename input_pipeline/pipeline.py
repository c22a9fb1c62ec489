"""The order of examples, and how batches are made of them.

The stream of training batches is a pure function of (seed, step):

  stream    The examples are cut into S consecutive logical streams whose sizes
            differ by at most one. Process p of P reads streams p*S/P up to
            (p+1)*S/P, and a global batch is the concatenation of S equal parts,
            one of each stream: it is the same on 1, 2 or S processes.
  epoch     A stream walks its own epochs. In each, every record draws a 64-bit
            number from (seed, stream, epoch); sorted, the numbers are the order
            of the epoch.
  example   The number that a record drew is the seed of its random ops.
  step      Batches run on across the borders of epochs, so step s begins at
            position s*B/S of every stream, and starting there costs one sort.

All sources of today address records by index, so a "file" has one record and a
permutation of files is one of records, whatever `shuffle_buffer` is. For files
of many records `_stream` is the place to change: the files draw and are sorted,
runs of whole files make blocks, and a block is read through a window shuffle of
`shuffle_buffer` records. Tickets then carry the record beside id and seed, in
evaluation too; what follows them stays.

Nothing here depends on how many threads work: all stages keep their order.
"""

import functools
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from input_pipeline import loading
from input_pipeline.errors import DataError
from input_pipeline.loading import Batch, Explain, Ops
from input_pipeline.sources import Features, Source


def train_batches(
  source: Source,
  ops: Ops,
  *,
  batch_size: int,
  seed: int,
  start_step: int = 0,
  shard: int = 0,
  num_shards: int = 1,
  streams: int = 0,
  shuffle_buffer: int = 50_000,
  on_error: str = "raise",
  prefetch: int = 2,
) -> Iterator[Batch]:
  """An endless iterator over this process's share of the global batches.

  Args:
    source: the training split.
    ops: an op string, or what `parse_ops` made of one.
    batch_size: examples in a global batch, over all processes.
    seed: of order and random ops.
    start_step: the step whose batch comes first; any step costs the same.
    shard: index of this process.
    num_shards: number of processes.
    streams: number S of logical streams; 0 means `num_shards`. A run that may
      resume on another number of processes must keep its S.
    shuffle_buffer: records that a window shuffle may hold; 1 keeps the order of
      the split. Sources that address records by index are otherwise permuted in
      full and hold none.
    on_error: "raise" is all there is today.
    prefetch: batches kept ready, at most.

  Returns:
    Dicts with n = batch_size / num_shards: `image` uint8 [n, h, w, 3], `labels`
    int32 [n, m] (class indices, -1 is padding), `mask` float32 [n] (all 1) and
    `id` int64 [n] (index within the split).

  Raises:
    ValueError: at once, for sizes that do not divide, or ops that do not give
      uint8 images of one size.
    DataError: from the iterator, for an example that cannot be read.
  """
  if on_error != "raise":
    raise ValueError(f"on_error is {on_error!r}, but only 'raise' is allowed.")
  for name, value, least in (
    ("start_step", start_step, 0),
    ("streams", streams, 0),
    ("shuffle_buffer", shuffle_buffer, 1),
    ("prefetch", prefetch, 0),
  ):
    if value < least:
      raise ValueError(f"{name} is {value}, but must be at least {least}.")
  _check_shard(shard, num_shards)
  streams = streams or num_shards
  _check_divides("streams", streams, "num_shards", num_shards)
  _check_divides("batch_size", batch_size, "streams", streams)
  if streams > source.num_examples:
    raise ValueError(
      f"{streams} streams cannot share {source.num_examples} examples of "
      f"{source.spec} {source.split}: use at most as many streams as examples."
    )
  example = loading.entry_of(source, ops)
  local = streams // num_shards

  def tickets(step: int) -> tf.data.Dataset:
    """Local batches from `step` on, as (ids, seeds), each int64 [n]."""
    part = batch_size // streams

    def parts_of(stream: tf.Tensor) -> tf.data.Dataset:
      size, start = source.num_examples, step * part
      return _stream(
        size,
        seed,
        start,
        stream=stream,
        streams=streams,
        shuffle=shuffle_buffer > 1,
      ).batch(part, drop_remainder=True)

    dataset = tf.data.Dataset.range(shard * local, (shard + 1) * local)
    # One part of each stream in turn, over and over.
    dataset = dataset.interleave(parts_of, cycle_length=local, block_length=1)
    return dataset.batch(local, drop_remainder=True).map(_flatten)

  def explain(number: int, error: tf.errors.OpError) -> DataError:
    failed = next(iter(tickets(start_step + number)))
    return loading.find_culprit(source, example, failed, error)

  dataset = loading.load(
    tickets(start_step), loading.trace(example, ops), prefetch
  )
  return loading.iterate(dataset, explain)


def eval_batches(
  source: Source,
  ops: Ops,
  *,
  batch_size: int,
  shard: int = 0,
  num_shards: int = 1,
) -> tuple[Iterator[Batch], int]:
  """One pass over a split, in order, every example on exactly one process.

  Args:
    source: the split.
    ops: an op string, or what `parse_ops` made of one; nothing random.
    batch_size: examples in a global batch, over all processes.
    shard: index of this process.
    num_shards: number of processes.

  Returns:
    The iterator and its length, equal on all processes. Batches are those of
    `train_batches`; the last are filled up with examples of mask 0 (image 0,
    labels -1, id -1).

  Raises:
    ValueError: as `train_batches`.
    DataError: from the iterator, for an example that cannot be read.
  """
  _check_shard(shard, num_shards)
  _check_divides("batch_size", batch_size, "num_shards", num_shards)
  dataset, explain, num_batches = _one_pass(
    source, ops, batch_size, shard, num_shards
  )
  return loading.iterate(dataset, explain), num_batches


# A run evaluates the same split again and again: tracing it once saves 0.2 s.
@functools.lru_cache(maxsize=16)
def _one_pass(
  source: Source, ops: Ops, batch_size: int, shard: int, num_shards: int
) -> tuple[tf.data.Dataset, Explain, int]:
  """Batches of an evaluation, what explains a failed one, and their number."""
  example = loading.entry_of(source, ops)
  traced = loading.trace(example, ops)
  size = source.num_examples
  num_batches = -(-size // batch_size)
  ids = np.arange(num_batches * batch_size)
  ids = np.where(ids < size, ids, loading.PADDING)
  ids = ids.reshape(num_batches, num_shards, -1)[:, shard]  # [batches, n]

  def example_or_padding(index: tf.Tensor, seed: tf.Tensor) -> Features:
    return tf.cond(
      index == loading.PADDING,
      lambda: loading.filler_like(traced.structured_outputs),
      lambda: traced(index, seed),
    )

  def explain(number: int, error: tf.errors.OpError) -> DataError:
    failed = (tf.constant(ids[number]), tf.constant(ids[number]))
    return loading.find_culprit(source, example, failed, error)

  # Evaluation should not draw random numbers; if it does, from the id alone.
  tickets = tf.data.Dataset.from_tensor_slices((ids, ids))
  traced_or_padding = loading.trace(example_or_padding, ops)
  return (
    loading.load(tickets, traced_or_padding, prefetch=2),
    explain,
    num_batches,
  )


def _stream(
  size: int,
  seed: int,
  start: int,
  *,
  stream: tf.Tensor,
  streams: int,
  shuffle: bool,
) -> tf.data.Dataset:
  """One logical stream from position `start` on: pairs of id and seed."""
  first = stream * size // streams
  count = (stream + 1) * size // streams - first
  first_epoch, offset = start // count, start % count

  def epoch_from(epoch: tf.Tensor) -> tf.data.Dataset:
    key = tf.random.fold_in(
      tf.stack([tf.constant(seed, tf.int64), stream]), epoch
    )
    draws = tf.random.stateless_uniform([count], key, None, None, tf.int64)
    order = tf.argsort(draws) if shuffle else tf.range(count)
    order = order[tf.where(epoch == first_epoch, offset, 0) :]
    ids = first + tf.cast(order, tf.int64)
    return tf.data.Dataset.from_tensor_slices((ids, tf.gather(draws, order)))

  return tf.data.Dataset.counter(first_epoch).flat_map(epoch_from)


def _flatten(*parts: tf.Tensor) -> tuple[tf.Tensor, ...]:
  """[streams, part] -> [n]: the parts of all streams, one after the other."""
  return tuple(tf.reshape(part, [-1]) for part in parts)


def _check_shard(shard: int, num_shards: int) -> None:
  if not 0 <= shard < num_shards:
    raise ValueError(f"shard is {shard}, but must be in 0..{num_shards - 1}.")


def _check_divides(what: str, value: int, by_what: str, divisor: int) -> None:
  if value < 1 or value % divisor:
    below, above = value // divisor * divisor, -(-value // divisor) * divisor
    near = " or ".join(str(v) for v in dict.fromkeys((below, above)) if v > 0)
    raise ValueError(
      f"{what} is {value}, but must be a positive multiple of {by_what} "
      f"({divisor}): for example {near or divisor}."
    )
