"""`on_error="skip"`: a bad image makes room for another one, and is counted.

Which other one is drawn from the seed of the bad one's ticket, so the stream
stays a function of (seed, step). Only what the ops refuse is bad: a record that
cannot be *read* stops the run as ever, since a network that fails for a moment
must not change the stream.
"""

import logging
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from input_pipeline import loading, order, records
from input_pipeline.errors import DataError
from input_pipeline.loading import Batch, Example, LoadChunk, Ops, Traced
from input_pipeline.sources import Features, Source

_TRIES = 16  # A replacement may be bad, too.
_SHOWN = 10

log = logging.getLogger("input_pipeline")


def rescuing(plain: Traced, careful: Traced) -> LoadChunk:
  """Chunk of tickets -> entries, with `bad`.

  To be ready for a failure costs as much as a small image, so it is done once
  for a chunk; where something failed, the chunk is loaded again with care.

  Args:
    plain: ticket -> entry.
    careful: of `replacing`.
  """
  load_again = loading.one_by_one(careful)
  filler = loading.filler_like(plain.structured_outputs)

  def load_chunk(*tickets: tf.Tensor) -> Features:
    size = tickets[0].shape[0]
    fine = tf.data.Dataset.from_tensor_slices(tickets).map(plain)
    # A failure inside of a data set is the only one that a graph can survive.
    fill = tf.data.Dataset.from_tensors(filler).repeat(size)
    fine = fine.ignore_errors().concatenate(fill)
    entries = fine.batch(size, drop_remainder=True).take(1).get_single_element()
    nothing = tf.fill([size], tf.constant(-1, tf.int64))
    return tf.cond(
      tf.reduce_all(entries["mask"] > 0),
      lambda: entries | {"bad": nothing},
      lambda: load_again(*tickets),
    )

  return load_chunk


def replacing(
  source: Source, ops: Ops, max_labels: int, streams: int
) -> Example:
  """Ticket -> one entry; `bad` is the id that was replaced, or -1."""
  finish = loading.finisher(ops, max_labels)

  def example(index: tf.Tensor, seed: tf.Tensor, *record: tf.Tensor):
    features = source.parse(index, *record)

    def another(number):
      record = _another(source, index, tf.stack([seed, -number]), streams)
      return source.parse(*record), record[0]

    def attempt(number):
      found, chosen = tf.cond(
        number == 0, lambda: (features, index), lambda: another(number)
      )
      bad = tf.where(number == 0, tf.cast(-1, tf.int64), index)
      return finish(found, chosen, seed) | {"bad": bad}

    tries = tf.data.Dataset.range(_TRIES).map(attempt).ignore_errors()
    return tries.take(1).get_single_element()

  return example


def tally(
  batches: Iterator[Batch], source: Source, share: float, epoch: int
) -> Iterator[Batch]:
  """Turns `bad` into `skipped`, names bad examples, stops if they are many.

  Args:
    batches: with `bad`.
    source: for names.
    share: what may be bad, of all that was read or of one epoch if that is
      more.
    epoch: examples in an epoch of this process.

  Raises:
    DataError: from the iterator, once the share is passed.
  """
  known: set[int] = set()
  bad = seen = 0
  for batch in batches:
    ids = batch.pop("bad")
    batch["skipped"] = (ids >= 0).astype(np.int32)
    for index in ids[ids >= 0]:
      bad += 1
      if index not in known:
        log.warning("Skipped a bad image: %s", source.name_of(int(index)))
        known.add(index)
    seen += len(ids)
    if bad > share * max(seen, epoch):
      first = sorted(known)[:_SHOWN]
      names = ", ".join(source.name_of(int(index)) for index in first)
      raise DataError(
        f"Skipped {bad} bad images of {seen} read since the start, more than "
        f"max_bad_share = {share} of them or of an epoch ({epoch}). The log "
        f"names them all; the first are {names}."
      )
    yield batch


def _another(
  source: Source, index: tf.Tensor, seed: tf.Tensor, streams: int
) -> tuple[tf.Tensor, ...]:
  """A record of the stream that has `index`; in files, the first of a piece."""
  size, pieces = source.num_examples, source.pieces
  stream = ((index + 1) * streams - 1) // size
  first, stop = order.bounds(size, stream, streams)
  drawn = tf.random.stateless_uniform([], seed, first, stop, tf.int64)
  if not len(pieces.takes):
    return (drawn,)
  piece = tf.searchsorted(pieces.firsts, drawn[None], side="right")[0] - 1
  # The beginning of a file is found without reading through it.
  begin = tf.constant(pieces.firsts)[piece]
  chosen = tf.maximum(begin, first)
  if source.addressed:
    return (chosen,)
  place = tf.constant(pieces.skips)[piece] + chosen - begin
  path = tf.constant(pieces.paths.astype(str))[piece]
  return (chosen, records.read_one(path, place))
