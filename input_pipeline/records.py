"""Records that lie many to a file: where they are, and how to read them.

A split of such a data set is a list of pieces, each a run of records of one
TFRecord file. Records get their index by position in that list. All access goes
through TensorFlow, so a bucket serves as well as a disk.
"""

import concurrent.futures
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

_READ_BYTES = 1 << 20  # Of each open file; a bucket answers slowly to less.
_OPEN_FILES = 16
_IN_TURN = 8  # Records of a file; one by one costs twice the time.


class Pieces(NamedTuple):
  """Runs of consecutive records, one after the other; columns of a table.

  Attributes:
    paths: [f] str, the file of each.
    skips: [f] int64, records of the file that come before.
    takes: [f] int64, records in the piece.
    firsts: [f] int64, index of a piece's first record within the split.
  """

  paths: np.ndarray
  skips: np.ndarray
  takes: np.ndarray
  firsts: np.ndarray


def make_pieces(
  paths: npt.ArrayLike, skips: npt.ArrayLike, takes: npt.ArrayLike
) -> Pieces:
  """Lists the pieces of a split in order; leaves out the empty ones."""
  counts = np.asarray(takes, np.int64)
  held = counts > 0
  counts = counts[held]
  return Pieces(
    np.asarray(paths, str)[held],
    np.asarray(skips, np.int64)[held],
    counts,
    np.cumsum(counts) - counts,
  )


NO_PIECES = make_pieces((), (), ())


def cut(pieces: Pieces, start: int, stop: int) -> Pieces:
  """The part of a split from position `start` to `stop`; ids stay."""
  low = np.maximum(pieces.firsts, start)
  high = np.minimum(pieces.firsts + pieces.takes, stop)
  held = high > low
  skips = pieces.skips + low - pieces.firsts
  return Pieces(pieces.paths[held], skips[held], (high - low)[held], low[held])


def take_ranges(pieces: Pieces, ranges: Iterable[tuple[int, int]]) -> Pieces:
  """Makes a split of its own from ranges of positions, in their order."""
  return join([cut(pieces, start, stop) for start, stop in ranges])


def join(parts: Sequence[Pieces]) -> Pieces:
  """Makes one split of several."""
  return make_pieces(
    np.concatenate([part.paths for part in parts]),
    np.concatenate([part.skips for part in parts]),
    np.concatenate([part.takes for part in parts]),
  )


def name_of(pieces: Pieces, index: int) -> str:
  """Says where a record lies: its file and its place there, from 0."""
  piece = np.searchsorted(pieces.firsts, index, side="right") - 1
  place = pieces.skips[piece] + index - pieces.firsts[piece]
  return f"{pieces.paths[piece]}, record {place}"


def read(pieces: Pieces, *, addressed: bool, in_turn: bool) -> tf.data.Dataset:
  """Reads pieces: (index, serialized record), or (index,) if `addressed`.

  Args:
    pieces: numpy arrays or tensors.
    addressed: whether the records need no reading, as indices will do.
    in_turn: whether to read several files at once and take a few records of
      each in turn, an order that depends on the pieces alone; else one file
      after the other.
  """
  several = _OPEN_FILES if in_turn else 1

  def open_piece(path, skip, take, first):
    ids = tf.data.Dataset.range(first, first + take)
    if addressed:
      return tf.data.Dataset.zip((ids,))
    found = tf.data.TFRecordDataset(path, buffer_size=_READ_BYTES).skip(skip)
    # A file that ends too soon must not shorten the stream in silence.
    short = tf.data.Dataset.range(1).repeat().map(lambda _: _too_short(path))
    return tf.data.Dataset.zip((ids, found.concatenate(short).take(take)))

  return tf.data.Dataset.from_tensor_slices(tuple(pieces)).interleave(
    open_piece,
    cycle_length=several,
    block_length=_IN_TURN,
    num_parallel_calls=several,
    deterministic=True,
  )


def read_one(path: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
  """The record at `place` of a file; reads all that comes before it."""
  return tf.data.TFRecordDataset(path).skip(place).take(1).get_single_element()


def count(paths: Sequence[str]) -> np.ndarray:
  """Counts the records of files by reading them, several at once: [f] int64."""

  def count_one(path):
    file = tf.data.TFRecordDataset(path, buffer_size=_READ_BYTES)
    return file.reduce(np.int64(0), lambda number, _: number + 1)

  dataset = tf.data.Dataset.from_tensor_slices(list(paths))
  dataset = dataset.map(count_one, num_parallel_calls=_OPEN_FILES)
  return np.fromiter(dataset.as_numpy_iterator(), np.int64)


def find_broken(pieces: Pieces) -> str:
  """Reads files through and names the first that is damaged; "" if none is."""

  def is_broken(path: str) -> bool:
    try:
      count([path])
    except tf.errors.DataLossError:
      return True
    return False

  with concurrent.futures.ThreadPoolExecutor(_OPEN_FILES) as pool:
    paths = np.unique(pieces.paths).tolist()
    found = zip(paths, pool.map(is_broken, paths))
    return next((path for path, broken in found if broken), "")


def mean_bytes(pieces: Pieces, files: int = 8, each: int = 4) -> float:
  """Bytes of a record, estimated from the first few of some files."""
  some = np.unique(np.linspace(0, len(pieces.paths) - 1, files).astype(int))
  sample = Pieces(*(column[some] for column in pieces))
  sample = sample._replace(
    skips=np.zeros(len(some), np.int64), takes=np.minimum(sample.takes, each)
  )
  dataset = read(sample, addressed=False, in_turn=True)
  return float(np.mean([len(x) for _, x in dataset.as_numpy_iterator()]))


def _too_short(path: tf.Tensor) -> tf.Tensor:
  text = tf.strings.join(
    [path, ": the file holds fewer records than its index says: count again"]
  )
  with tf.control_dependencies([tf.debugging.Assert(False, [text])]):
    return tf.identity(path)
