"""Batches for training and for evaluation.

`order` says which example comes when, `loading` turns its tickets into batches;
here the two are put together, with what a caller may choose: to keep records
close by (`caching`), to go past bad images (`skipping`), to let other machines
do the work (`service`). None of these choices changes the order.
"""

import functools
import logging
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from input_pipeline import (
  caching,
  loading,
  order,
  skipping,
)
from input_pipeline import service as services
from input_pipeline.errors import DataError, suggest
from input_pipeline.loading import Batch, Explain, Ops
from input_pipeline.sources import Features, Source

_AROUND = 8  # Batches, before and after, to search for what a service refused.

log = logging.getLogger("input_pipeline")


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
  max_bad_share: float = 0.01,
  max_labels: int = 1,
  cache: str = "",
  service: str = "",
  prefetch: int = 2,
) -> Iterator[Batch]:
  """An endless iterator over this process's share of the global batches.

  Args:
    source: the training split.
    ops: an op string, or what `parse_ops` made of one.
    batch_size: examples in a global batch, over all processes.
    seed: of order and random ops.
    start_step: the step whose batch comes first; see `order` for what it costs.
    shard: index of this process.
    num_shards: number of processes.
    streams: number S of logical streams; 0 means `num_shards`. A run that may
      resume on another number of processes must keep its S.
    shuffle_buffer: records of each stream that are held for shuffling, where
      many lie in a file. Records that are addressed by index are permuted in
      full. 1 keeps the order of the split.
    on_error: "raise" stops at a bad image and names it; "skip" replaces it by
      another of its stream, drawn from its seed.
    max_bad_share: what "skip" may replace, as a share of the images read or of
      an epoch, whichever is more.
    max_labels: width m of `labels`, unless the source always has more.
    cache: where to keep this process's records: "" nowhere, "memory", or a
      folder on a local disk. A stream in files that is no longer than
      `shuffle_buffer` is kept in memory anyway.
    service: "grpc://HOST:PORT" of a tf.data service that does the work.
    prefetch: batches kept ready, at most.

  Returns:
    Dicts with n = batch_size / num_shards: `image` uint8 [n, h, w, 3], `labels`
    int32 [n, m] (class indices, -1 is padding), `mask` float32 [n] (all 1) and
    `id` int64 [n] (index within the split); with on_error="skip" `skipped`
    int32 [n], 1 where a bad image was replaced.

  Raises:
    ValueError: at once, for options that do not fit, buffers larger than the
      memory, or ops that do not give uint8 images of one size.
    DataError: from the iterator, for an example that cannot be read.
  """
  _check_choice("on_error", on_error, ("raise", "skip"))
  for name, value, least in (
    ("start_step", start_step, 0),
    ("streams", streams, 0),
    ("shuffle_buffer", shuffle_buffer, 1),
    ("max_bad_share", max_bad_share, 0),
    ("max_labels", max_labels, 1),
    ("prefetch", prefetch, 0),
  ):
    if value < least:
      raise ValueError(f"{name} is {value}, but must be at least {least}.")
  streams = streams or num_shards
  local = _local_streams(source, batch_size, streams, shard, num_shards)
  if cache and service:
    raise ValueError(
      f"cache = {cache!r} and service = {service!r} exclude each other: what a "
      "service works on is read by its workers."
    )
  if not service:
    source = _held(source, local, streams, shuffle_buffer, cache)
  size, part = batch_size // num_shards, batch_size // streams
  example = loading.entry_of(source, ops, max_labels)

  def tickets(step: int) -> tf.data.Dataset:
    return order.train_tickets(
      source,
      local,
      streams=streams,
      part=part,
      start=step * part,
      seed=seed,
      shuffle_buffer=shuffle_buffer,
    )

  def explain(number: int, error: tf.errors.OpError) -> DataError:
    # A service may work on batches before and after the one that is due.
    around = _AROUND if service else 0
    first = max(number - around, 0)
    failed = tickets(start_step + first).take(
      (number + around + 1 - first) * size
    )
    return loading.find_culprit(source, example, failed, error)

  dataset = tickets(start_step)
  traced = loading.trace_checked(example, dataset, ops)
  load_chunk = loading.one_by_one(traced)
  if on_error == "skip":
    careful = skipping.replacing(source, ops, max_labels, streams)
    load_chunk = skipping.rescuing(traced, loading.trace(careful, dataset))
  if service:
    services.check(service, traced, source)
    dataset, load_chunk = services.share_out(dataset, size, load_chunk)
    dataset = loading.load(dataset, load_chunk, size, tf.data.AUTOTUNE)
    dataset = services.distribute(dataset, service)
  else:
    dataset = loading.load(dataset, load_chunk, size)
  batches = loading.iterate(dataset.prefetch(prefetch), explain)
  if service:
    batches = services.in_order(batches, service)
  if on_error == "skip":
    ids = _ids(source, local, streams)
    batches = skipping.tally(batches, source, max_bad_share, len(ids))
  return batches


def eval_batches(
  source: Source,
  ops: Ops,
  *,
  batch_size: int,
  shard: int = 0,
  num_shards: int = 1,
  max_labels: int = 1,
  cache: str = "",
) -> tuple[Iterator[Batch], int]:
  """One pass over a split, every example on exactly one process.

  Examples that are addressed by index come in the order of the split, and a
  global batch is the same on any number of processes. Of records in files each
  process reads a run of its own, from several files in turn.

  Args:
    source: the split.
    ops: an op string, or what `parse_ops` made of one; nothing random.
    batch_size: examples in a global batch, over all processes.
    shard: index of this process.
    num_shards: number of processes.
    max_labels: as in `train_batches`.
    cache: as in `train_batches`; what is kept serves all passes.

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
    source, ops, batch_size, shard, num_shards, max_labels, cache
  )
  return loading.iterate(dataset, explain), num_batches


# A run evaluates the same split again and again: tracing it once saves 0.2 s,
# and what is kept of it is read once.
@functools.lru_cache(maxsize=16)
def _one_pass(
  source: Source,
  ops: Ops,
  batch_size: int,
  shard: int,
  num_shards: int,
  max_labels: int,
  cache: str,
) -> tuple[tf.data.Dataset, Explain, int]:
  """Batches of an evaluation, what explains a failed one, and their number."""
  size, n = source.num_examples, batch_size // num_shards
  num_batches = -(-size // batch_size)
  if len(source.pieces.takes):
    ids = np.arange(*order.bounds(size, shard, num_shards))
  else:
    ids = np.arange(num_batches * batch_size)
    ids = ids.reshape(num_batches, num_shards, n)[:, shard].ravel()
    ids = ids[ids < size]
  if cache and len(ids):
    source = caching.keep(source, ids, cache)
  example = loading.entry_of(source, ops, max_labels)
  tickets = order.eval_tickets(source, ids)
  traced = loading.trace_checked(example, tickets, ops)

  def example_or_padding(index: tf.Tensor, *rest: tf.Tensor) -> Features:
    return tf.cond(
      index == loading.PADDING,
      lambda: loading.filler_like(traced.structured_outputs),
      lambda: traced(index, *rest),
    )

  def explain(number: int, error: tf.errors.OpError) -> DataError:
    failed = tickets.skip(number * n).take(n)
    return loading.find_culprit(source, example, failed, error)

  padding = tuple(
    "" if spec.dtype == tf.string else tf.constant(loading.PADDING, spec.dtype)
    for spec in tickets.element_spec
  )
  fill = tf.data.Dataset.from_tensors(padding).repeat(
    num_batches * n - len(ids)
  )
  padded = tickets.concatenate(fill)
  load_chunk = loading.one_by_one(loading.trace(example_or_padding, padded))
  dataset = loading.load(padded, load_chunk, n)
  return dataset.prefetch(2), explain, num_batches


def _local_streams(
  source: Source, batch_size: int, streams: int, shard: int, num_shards: int
) -> range:
  """The streams that this process reads."""
  _check_shard(shard, num_shards)
  _check_divides("streams", streams, "num_shards", num_shards)
  _check_divides("batch_size", batch_size, "streams", streams)
  if streams > source.num_examples:
    raise ValueError(
      f"{streams} streams cannot share {source.num_examples} examples of "
      f"{source.spec} {source.split}: use at most as many streams as examples."
    )
  share = streams // num_shards
  return range(shard * share, (shard + 1) * share)


def _ids(source: Source, local: range, streams: int) -> np.ndarray:
  """Indices of the examples of this process's streams: [k] int64."""
  size = source.num_examples
  first, _ = order.bounds(size, local.start, streams)
  stop, _ = order.bounds(size, local.stop, streams)
  return np.arange(first, stop)


def _held(
  source: Source, local: range, streams: int, shuffle_buffer: int, cache: str
) -> Source:
  """Reads what is to be kept; says and checks how much memory is held."""
  longest = -(-source.num_examples // streams)
  if not cache and source.addressed:
    return source
  if not cache and longest <= shuffle_buffer:
    cache = "memory"
  if cache:
    return caching.keep(source, _ids(source, local, streams), cache)
  held = shuffle_buffer if shuffle_buffer > 1 else 2 * order.UNSHUFFLED
  number = len(local) * min(longest, held)
  size = int(number * caching.bytes_per_record(source))
  what = f"{source.spec} {source.split}"
  log.info("%s: shuffling holds about %s.", what, caching.show_bytes(size))
  caching.check_memory(size, what)
  return source


def _check_choice(what: str, value: str, allowed: tuple[str, ...]) -> None:
  if value not in allowed:
    raise ValueError(f"{what} is {value!r}. " + suggest(value, allowed))


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
