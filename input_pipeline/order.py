"""Which example comes when: arithmetic on positions, then reading in order.

The stream of training examples is a pure function of (seed, step):

  stream    The examples are cut into S consecutive logical streams whose sizes
            differ by at most one. Process p of P reads streams p*S/P up to
            (p+1)*S/P, and a global batch is the concatenation of S equal parts,
            one of each stream: it is the same on 1, 2 or S processes.
  epoch     A stream walks its own epochs, without end, and in each shows every
            record once, in an order drawn from (seed, stream, epoch).
  draw      To be put in order, things draw 64-bit numbers: sorted, the numbers
            are the order. The number that a record drew is also the seed of its
            random ops.

Records that are addressed by index draw all at once: an epoch is a permutation.
Records that lie many to a file have to be read from front to back:

  block     The stream's files draw and are sorted. Files that begin within the
            same W records of that list make a block: whole files that hold
            about W records, or one that holds more.
  window    A block is read from several files in turn and cut into equal
            windows of about W records; mostly it is one. Within a window the
            records draw and are sorted.

W is half of `shuffle_buffer`, as one window is shown while the next is read.

Position p of a stream lies in epoch p // size; its block and window follow from
the counts of the files. So opening there costs a sort of the files and reading
past at most one block of records, none of which is decoded. Indices too many to
be sorted in a moment are put in order as if they lay in files.

Nothing here depends on how many threads work: all stages keep their order.
"""

import numpy as np
import tensorflow as tf

from input_pipeline import records
from input_pipeline.records import Pieces
from input_pipeline.sources import Source

_SORTED_AT_ONCE = 2**23  # TensorFlow sorts about two million in a second.
_INDICES_IN_A_PIECE = 1024
UNSHUFFLED = 1024  # Records read at once where the order is the split's.


def bounds(size: int, stream: int, streams: int) -> tuple[int, int]:
  """Where a stream begins and ends; takes tensors, too."""
  return stream * size // streams, (stream + 1) * size // streams


def train_tickets(
  source: Source,
  local: range,
  *,
  streams: int,
  part: int,
  start: int,
  seed: int,
  shuffle_buffer: int,
) -> tf.data.Dataset:
  """Tickets of some streams, without end: `part` of each stream in turn.

  Args:
    source: the split.
    local: the streams wanted, of 0..streams-1.
    streams: number S of streams.
    part: records of each stream in a batch.
    start: position in every stream to begin at.
    seed: of order and tickets.
    shuffle_buffer: 2 W; 1 keeps the order of the split.

  Returns:
    Tickets: index, seed and, of sources that are not addressed by index, the
    serialized record.
  """
  size, shuffle = source.num_examples, shuffle_buffer > 1
  key = tf.constant(seed, tf.int64)

  def permuted(stream: tf.Tensor, key: tf.Tensor, skip: tf.Tensor):
    first, stop = bounds(size, stream, streams)
    order, draws = _draw(stop - first, key, shuffle)
    order = order[skip:]
    ids = first + tf.cast(order, tf.int64)
    return tf.data.Dataset.from_tensors((ids, tf.gather(draws, order)))

  def in_pieces(stream: tf.Tensor, key: tf.Tensor, skip: tf.Tensor):
    held = slice(ends[stream - local.start], ends[stream - local.start + 1])
    pieces = Pieces(*(column[held] for column in table))
    window = max(shuffle_buffer // 2, 1) if shuffle else UNSHUFFLED
    return _windows(pieces, key, skip, window, shuffle, source.addressed)

  epoch_of = permuted
  if len(source.pieces.takes) or size // streams > _SORTED_AT_ONCE:
    epoch_of = in_pieces
    table, ends = _pieces_of(source, local, streams)

  def stream_of(stream: tf.Tensor) -> tf.data.Dataset:
    first, stop = bounds(size, stream, streams)
    begin, offset = start // (stop - first), start % (stop - first)

    def epoch_from(epoch: tf.Tensor) -> tf.data.Dataset:
      epoch_key = tf.random.fold_in(tf.stack([key, stream]), epoch)
      return epoch_of(stream, epoch_key, tf.where(epoch == begin, offset, 0))

    windows = tf.data.Dataset.counter(begin).flat_map(epoch_from)
    return windows.prefetch(1).flat_map(_tickets_of)

  return tf.data.Dataset.range(local.start, local.stop).interleave(
    stream_of, cycle_length=len(local), block_length=part
  )


def eval_tickets(source: Source, ids: np.ndarray) -> tf.data.Dataset:
  """Tickets of some records, each once.

  Evaluation should not draw random numbers; if it does, from the index alone.

  Args:
    source: the split.
    ids: [k] int64; of records in files a range, which then comes from several
      files in turn.
  """
  if source.addressed:
    return tf.data.Dataset.from_tensor_slices((ids, ids))
  start, stop = (ids[0], ids[-1] + 1) if len(ids) else (0, 0)
  share = records.cut(source.pieces, start, stop)
  found = records.read(share, addressed=False, in_turn=True)
  return found.map(lambda index, record: (index, index, record))


def _pieces_of(
  source: Source, local: range, streams: int
) -> tuple[Pieces, tf.Tensor]:
  """Pieces of the local streams, one stream after the other, and its ends."""
  parts = []
  for stream in local:
    first, stop = bounds(source.num_examples, stream, streams)
    if len(source.pieces.takes):
      parts.append(records.cut(source.pieces, first, stop))
      continue
    firsts = np.arange(first, stop, _INDICES_IN_A_PIECE)
    takes = np.minimum(stop - firsts, _INDICES_IN_A_PIECE)
    nowhere, none = np.full(len(firsts), ""), np.zeros_like(firsts)
    parts.append(Pieces(nowhere, none, takes, firsts))
  table = [np.concatenate(columns) for columns in zip(*parts)]
  ends = np.cumsum([0, *(len(part.takes) for part in parts)])
  return Pieces(*map(tf.constant, table)), tf.constant(ends)


def _windows(
  pieces: Pieces,
  key: tf.Tensor,
  skip: tf.Tensor,
  window: int,
  shuffle: bool,
  addressed: bool,
) -> tf.data.Dataset:
  """One epoch of a stream's pieces from position `skip` on, as windows.

  Returns:
    (ids, seeds) in order; records in files come as (ids, seeds, rows, records),
    where `rows` says which of `records` is whose, since copying them costs.
  """
  order, _ = _draw(tf.size(pieces.takes), key, shuffle)
  pieces = Pieces(*(tf.gather(column, order) for column in pieces))
  stops = tf.cumsum(pieces.takes)
  starts = stops - pieces.takes
  _, _, files = tf.unique_with_counts(starts // window, tf.int64)
  last = tf.cumsum(files)
  first = last - files
  blocks = (first, last, tf.gather(starts, first), tf.gather(stops, last - 1))
  ahead = blocks[-1] > skip

  def windows_of(first, last, start, stop):
    block = Pieces(*(column[first:last] for column in pieces))
    number = tf.maximum((stop - start + window // 2) // window, 1)
    each = -((start - stop) // number)
    past = tf.maximum(skip - start, 0) // each
    found = records.read(block, addressed=addressed, in_turn=shuffle)
    found = found.skip(past * each).batch(each)

    def arrange(number, held):
      ids, *data = held
      here = start + number * each
      draw_key = tf.random.fold_in(key, here)
      rows, draws = _draw(tf.size(ids), draw_key, shuffle)
      rows = rows[tf.maximum(skip - here, 0) :]
      placed = [rows, *data] if data else []
      return (tf.gather(ids, rows), tf.gather(draws, rows), *placed)

    return found.enumerate(past).map(arrange)

  dataset = tf.data.Dataset.from_tensor_slices(
    tuple(tf.boolean_mask(column, ahead) for column in blocks)
  )
  return dataset.flat_map(windows_of)


def _draw(
  size: tf.Tensor, key: tf.Tensor, shuffle: bool
) -> tuple[tf.Tensor, tf.Tensor]:
  """Draws `size` numbers: the order that they give, and the numbers."""
  draws = tf.random.stateless_uniform([size], key, None, None, tf.int64)
  return tf.argsort(draws) if shuffle else tf.range(size), draws


def _tickets_of(ids, seeds, *placed) -> tf.data.Dataset:
  """Hands out what lies in a window."""
  if not placed:
    return tf.data.Dataset.from_tensor_slices((ids, seeds))
  rows, data = placed
  return tf.data.Dataset.from_tensor_slices((ids, seeds, rows)).map(
    lambda index, seed, row: (index, seed, data[row])
  )
