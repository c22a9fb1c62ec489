"""The shards that a folder of images becomes: which image lies where, and how.

A shard is a TFRecord file of `tf.train.Example`: `image` (encoded), `labels`
(one index) and `name` (the path below the folder). The format has a checksum
for each record, so reading a shard through tells whether it is sound.
"""

import concurrent.futures
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from input_pipeline import order
from input_pipeline.inspecting import Seen, inspect
from input_pipeline.ops import parse_ops
from input_pipeline.sources import Source, get_source

FEATURES = {"image": "image", "labels": "labels", "name": "name"}
MOST = 99_999  # Shards of a split: their names have five digits.

_JPEG_QUALITY = 95
_SAMPLE, _THREADS = 32, 16
_gfile = tf.io.gfile


class Split(NamedTuple):
  """A split of the folder, and how it is divided.

  Attributes:
    source: of the folder.
    names: [n] paths below the folder, in order.
    stats: [n] of (bytes, time of the last change in ns, which on local disks
      is in whole seconds).
    share: bytes written for a byte read, estimated.
    shards: file name -> positions in the split.
  """

  source: Source
  names: Sequence[str]
  stats: Sequence[tuple[int, int]]
  share: float
  shards: Mapping[str, range]


def open_split(
  folder: str, name: str, *, max_size: int, number: int, shard_bytes: int
) -> Split:
  """Lists a split and divides it.

  Args:
    folder: absolute path.
    name: of the split.
    max_size: as in `read`.
    number: of shards; 0 lets `shard_bytes` decide.
    shard_bytes: what a shard may have, about.
  """
  source = get_source(f"folder:{folder}", name)
  size = source.num_examples
  paths = [source.name_of(i) for i in range(size)]
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    stats = list(pool.map(_stat, paths))
  share = _share(source, stats, max_size) if max_size else 1.0
  total = share * sum(length for length, _ in stats)
  number = min(number or int(total // shard_bytes) + 1, size, MOST)
  files = {
    f"{name}-{i:05d}-of-{number:05d}.tfrecord": range(
      *order.bounds(size, i, number)
    )
    for i in range(number)
  }
  names = [path.removeprefix(f"{folder}/") for path in paths]
  return Split(source, names, stats, share, files)


def pattern(split: str) -> str:
  """The glob that names the shards of a split, and no other split's."""
  return f"{split}-?????-of-?????.tfrecord"


def read(source: Source, ids: np.ndarray, max_size: int) -> Iterator[Seen]:
  """Reads, decodes and perhaps shrinks images of a folder.

  An image whose shorter side is longer than `max_size` pixels is shrunk to it
  by area, after the accurate DCT, and becomes a JPEG of quality 95: without
  alpha, in 8 bits. Of all others, and if `max_size` is 0, the bytes are kept.
  """
  tickets = tf.data.Dataset.from_tensor_slices((ids,))
  if not max_size:
    return inspect(source, tickets)
  shrink = parse_ops(f"resize_small({max_size}, 'area')")

  def finish(image: tf.Tensor, pixels: tf.Tensor) -> tf.Tensor:
    def shrunk():
      smaller = shrink({"image": pixels})["image"]
      return tf.io.encode_jpeg(smaller, quality=_JPEG_QUALITY)

    shorter = tf.reduce_min(tf.shape(pixels)[:2])
    return tf.cond(shorter > max_size, shrunk, lambda: image)

  return inspect(source, tickets, decode="decode(precise=True)", finish=finish)


def serialize(seen: Seen, name: str) -> bytes:
  """Makes a record, always of the same bytes."""
  image = tf.train.BytesList(value=[seen.image])
  labels = tf.train.Int64List(value=seen.labels)
  text = tf.train.BytesList(value=[name.encode()])
  features = {
    FEATURES["image"]: tf.train.Feature(bytes_list=image),
    FEATURES["labels"]: tf.train.Feature(int64_list=labels),
    FEATURES["name"]: tf.train.Feature(bytes_list=text),
  }
  example = tf.train.Example(features=tf.train.Features(feature=features))
  return example.SerializeToString(deterministic=True)


def names_in(path: str) -> list[str]:
  """Names of a shard's records; none if it is not sound."""
  names = []
  try:
    for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
      feature = tf.train.Example.FromString(record).features.feature
      names.append(feature[FEATURES["name"]].bytes_list.value[0].decode())
  except tf.errors.DataLossError:
    return []
  return names


def part(path: str) -> str:
  """What a file is called until it is whole: a hidden name beside it."""
  folder, name = path.rsplit("/", 1)
  return f"{folder}/.{name.lstrip('.')}.part"


def write_json(path: str, content: Mapping[str, Any]) -> None:
  """Writes a file that is never seen half-written."""
  with _gfile.GFile(part(path), "w") as file:
    json.dump(content, file, indent=1)
  _gfile.rename(part(path), path, overwrite=True)


def _stat(path: str) -> tuple[int, int]:
  try:
    found = _gfile.stat(path)
  except tf.errors.OpError:  # It will be met as a bad image.
    return 0, 0
  return found.length, found.mtime_nsec


def _share(
  source: Source, stats: Sequence[tuple[int, int]], max_size: int
) -> float:
  """Estimates from a few images how much smaller they become."""
  some = np.linspace(0, source.num_examples - 1, _SAMPLE).astype(np.int64)
  some = np.unique(some)
  after = sum(len(seen.image) for seen in read(source, some, max_size))
  return after / max(sum(stats[i][0] for i in some), 1) or 1.0
