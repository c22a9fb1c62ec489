"""`idx:DIR?OPTIONS` — the files of MNIST and of all that took its format.

DIR holds `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and the same with
`t10k` for the split `test`, compressed (`.gz`) or not: MNIST, Fashion-MNIST,
KMNIST. The one option, `names=a,b,c`, says what the classes are called; without
it they are "0", "1" and so on. Slices are cut in the files' order, which these
data sets have shuffled. On Debian and its descendants,

    apt install dataset-fashion-mnist

brings `idx:/usr/share/datasets/fashion-mnist`.
"""

import gzip
import zlib

import numpy as np
import tensorflow as tf

from input_pipeline import tables
from input_pipeline.errors import AbsentError
from input_pipeline.sources import Source, absolute, parse_options

_STEMS = {"train": "train", "test": "t10k"}  # Split -> how its files begin.
_GZIP = b"\x1f\x8b"


def make(argument: str, split: str, data_dir: str) -> Source:
  """Reads the files of the split's terms into memory and builds the source."""
  folder, options = parse_options(argument, {"names": ""})
  if not folder:
    raise ValueError("The source 'idx:' needs a folder: idx:DIR.")
  folder = absolute(folder, data_dir)
  labels = {name: _read(folder, name, "labels", 1) for name in _STEMS}
  sizes = {name: len(values) for name, values in labels.items()}
  chosen = tables.select_rows("idx:", split, sizes)
  count = 1 + max(int(values.max(initial=0)) for values in labels.values())
  names = tuple(filter(None, options["names"].split(",")))
  if names and len(names) < count:
    raise ValueError(
      f"idx:{argument} names {len(names)} classes, but the labels in {folder} "
      f"go up to {count - 1}."
    )
  images = {name: _read(folder, name, "images", 3) for name in chosen}
  for name, values in images.items():
    if len(values) != sizes[name]:
      raise ValueError(
        f"{folder}: {len(values)} {name} images, but {sizes[name]} labels."
      )
  places = [(name, row) for name, rows in chosen.items() for row in rows]

  def name_of(index: int) -> str:
    name, row = places[index]
    return f"{folder}: {name} image {row}"

  def of_rows(arrays: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([arrays[name][rows] for name, rows in chosen.items()])

  return tables.make_source(
    of_rows(images)[..., None],
    of_rows(labels).astype(np.int32),
    spec=f"idx:{argument}",
    split=split,
    class_names=names or tuple(map(str, range(count))),
    name_of=name_of,
  )


def split_names(argument: str, data_dir: str) -> tuple[str, ...]:
  """Both splits, whatever the arguments."""
  del argument, data_dir
  return tuple(_STEMS)


def _read(folder: str, split: str, what: str, rank: int) -> np.ndarray:
  """The uint8 array of one file; every complaint names it."""
  stem = f"{_STEMS[split]}-{what}-idx{rank}-ubyte"
  tried = [f"{folder}/{stem}.gz", f"{folder}/{stem}"]
  path = next(filter(tf.io.gfile.exists, tried), None)
  if path is None:
    raise AbsentError(
      f"No IDX files: neither {tried[0]} nor {stem} is there. Fashion-MNIST "
      "comes with `apt install dataset-fashion-mnist`, as "
      "idx:/usr/share/datasets/fashion-mnist."
    )
  with tf.io.gfile.GFile(path, "rb") as file:
    data = file.read()
  try:
    if data.startswith(_GZIP):
      data = gzip.decompress(data)
  except (EOFError, OSError, zlib.error) as error:
    raise ValueError(f"{path} is damaged: {error}") from None
  # Two zeros, 8 for unsigned bytes, the rank; then the sides, big-endian.
  head = 4 + 4 * rank
  if data[:4] != bytes([0, 0, 8, rank]):
    raise ValueError(
      f"{path} is no IDX file of {rank} dimensions of bytes: it begins with "
      f"{data[:4].hex(' ')}, not {bytes([0, 0, 8, rank]).hex(' ')}."
    )
  if len(data) < head:
    raise ValueError(f"{path} ends within its header, after {len(data)} bytes.")
  shape = np.frombuffer(data, ">u4", rank, 4)
  want, got = int(np.prod(shape, dtype=np.int64)), len(data) - head
  if got != want:
    raise ValueError(
      f"{path} has {got} bytes of values where its header says {want}."
    )
  return np.frombuffer(data, np.uint8, offset=head).reshape(shape)
