"""Makes sharded TFRecords of a folder of images, for the source `tfrecord:`.

python -m input_pipeline.write FOLDER OUT [--max_size=N] [--shards=N]

FOLDER is laid out as for `folder:`; OUT may be in a bucket. All splits are
written, in the order that `folder:` gives them, which is fair to the classes:
every shard holds all of them in proportion, and slices such as `train[:90%]`
are the same images. A record has `image` (the file's bytes), `labels` (one
index) and `name` (the path below FOLDER); `index.json` tells the rest.

A run that was killed goes on where it was when it is started again: a shard
gets its name only when all of it was written and read again. Bad images are
left out and all listed at the end; without --skip_bad there is no index then,
so nothing can be read by mistake. Exit status: 0 done, or nothing left to do;
1 there are bad images; 2 refused.
"""

import itertools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from absl import flags

from input_pipeline import caching, commands, resuming
from input_pipeline import shards as files
from input_pipeline.errors import DataError
from input_pipeline.inspecting import Bad
from input_pipeline.shards import Split
from input_pipeline.sources import split_names

_gfile = tf.io.gfile


class Written(NamedTuple):
  """What lies in the output.

  Attributes:
    out: where.
    images: split -> how many.
    shards: number of files.
    fresh: how many of them this call has written.
    skipped: bad images that this call has left out.
  """

  out: str
  images: dict[str, int]
  shards: int
  fresh: int
  skipped: tuple[Bad, ...]

  def __str__(self) -> str:
    sizes = ", ".join(f"{size} {name}" for name, size in self.images.items())
    done = (
      f"{self.fresh} written now" if self.fresh else "nothing was left to do"
    )
    lines = [f"left out: {bad.name}: {bad.reason}" for bad in self.skipped]
    lines.append(f"{self.out}: {sizes} images; {self.shards} files, {done}.")
    lines.append(f"Use it as --config.input.source=tfrecord:{self.out}")
    return "\n".join(lines)


def write(
  folder: str,
  out: str,
  *,
  max_size: int = 0,
  shards: int = 0,
  shard_mb: int = 128,
  skip_bad: bool = False,
  progress: bool = False,
) -> Written:
  """Writes all splits of a folder, or what is missing of them.

  Args:
    folder: as in `folder:PATH`.
    out: a folder that is empty, or not there yet, or where this was begun
      before with the same arguments.
    max_size: pixels. Images whose shorter side is longer are shrunk to it and
      stored as JPEG; of all others, and if this is 0, the bytes are kept.
    shards: files of each split; 0 lets `shard_mb` decide.
    shard_mb: 10^6 bytes, about what a file may have.
    skip_bad: whether to do without images that cannot be decoded.
    progress: whether to show how far it is.

  Raises:
    ValueError: arguments out of range; an output that holds something else, or
      was begun with other arguments or images (says which); too little space;
      as `get_source`.
    DataError: the bad images, all of them. What is written is kept.
  """
  _check_range("max_size", max_size, 0, 65_535)
  _check_range("shards", shards, 0, files.MOST)
  _check_range("shard_mb", shard_mb, 1, 1_000_000)
  folder, out = _absolute(folder), _absolute(out)
  if f"{out}/".startswith(f"{folder}/"):
    raise ValueError(f"{out} lies in {folder}: it would become a class there.")
  splits = {
    name: files.open_split(
      folder,
      name,
      max_size=max_size,
      number=shards,
      shard_bytes=shard_mb * 10**6,
    )
    for name in split_names(f"folder:{folder}")
  }
  resuming.begin(out, splits, max_size)
  counts = resuming.finished(out, splits)
  fresh, bad = 0, list[Bad]()
  if not counts:
    counts, fresh, bad = _complete(out, splits, max_size, skip_bad, progress)
  images = {
    name: sum(counts[shard] for shard in split.shards)
    for name, split in splits.items()
  }
  return Written(out, images, len(counts), fresh, tuple(bad))


def _complete(
  out: str,
  splits: Mapping[str, Split],
  max_size: int,
  skip_bad: bool,
  progress: bool,
) -> tuple[dict[str, int], int, list[Bad]]:
  """Writes the shards that are missing, and then the index.

  Returns:
    All shards and their records, the number of new ones, the bad images.
  """
  total = sum(len(split.names) for split in splits.values())
  fresh = 0
  with commands.Progress(total, show=progress) as shown:
    counts, bad = resuming.kept(out, splits, shown.advance)
    _check_space(out, splits, counts)
    for split in splits.values():
      todo = {k: v for k, v in split.shards.items() if k not in counts}
      for shard, names, worse in _write_shards(
        out, split, todo, max_size, shown
      ):
        bad += worse
        _keep(f"{out}/{shard}", names)
        counts[shard] = len(names)
        fresh += 1
  if bad and not skip_bad:
    listed = "\n".join(f"  {name}: {reason}" for name, reason in bad)
    raise DataError(
      f"{len(bad)} of {total} images are bad:\n{listed}\n{out} is not "
      "complete. To do without them, add --skip_bad. To mend them, remove that "
      "folder and start again."
    )
  _write_index(out, splits, counts)
  return counts, fresh, bad


def _check_space(
  out: str, splits: Mapping[str, Split], counts: Mapping[str, int]
) -> None:
  """Refuses to begin what would fill the disk."""
  if "://" in out:
    return
  needed = sum(
    split.share * sum(split.stats[i][0] for i in positions)
    for split in splits.values()
    for shard, positions in split.shards.items()
    if shard not in counts
  )
  free = shutil.disk_usage(out).free
  if needed > free:
    raise ValueError(
      f"{out} has {caching.show_bytes(free)} left, but about "
      f"{caching.show_bytes(int(needed))} are to be written."
    )


def _write_shards(
  out: str,
  split: Split,
  todo: Mapping[str, range],
  max_size: int,
  shown: commands.Progress,
) -> Iterator[tuple[str, list[str], list[Bad]]]:
  """Writes shards under their hidden names.

  Yields:
    The shard, the names of its records, and the bad images left out of it.
  """
  if not todo:
    return
  # One stream for all: the next shard is read while this one is finished.
  ids = np.concatenate([np.arange(v.start, v.stop) for v in todo.values()])
  stream = files.read(split.source, ids, max_size)
  for shard, positions in todo.items():
    names, bad = [], []
    with tf.io.TFRecordWriter(files.part(f"{out}/{shard}")) as writer:
      for seen in itertools.islice(stream, len(positions)):
        shown.advance()
        if seen.reason:
          bad.append(Bad(split.source.name_of(seen.id), seen.reason))
          continue
        names.append(split.names[seen.id])
        writer.write(files.serialize(seen, names[-1]))
    yield shard, names, bad


def _keep(path: str, names: Sequence[str]) -> None:
  """Reads a shard again and gives it its name."""
  hidden = files.part(path)
  if files.names_in(hidden) != names:
    raise ValueError(
      f"{hidden} is not the same when it is read as when it was written (a "
      "failing disk?). Start again: what is good is kept."
    )
  _gfile.rename(hidden, path, overwrite=True)


def _write_index(
  out: str, splits: Mapping[str, Split], counts: Mapping[str, int]
) -> None:
  """Tells the source what is there; until then the output is not complete."""
  patterns = {name: files.pattern(name) for name in splits}
  if len(patterns) == 1:  # `folder:` knows a single split by both names.
    patterns["all"] = patterns["train"]
  index = {
    "class_names": splits["train"].source.class_names,
    "features": files.FEATURES,
    "splits": patterns,
    "files": dict(sorted(counts.items())),
  }
  files.write_json(f"{out}/{resuming.INDEX}", index)


def _absolute(path: str) -> str:
  path = path.rstrip("/")
  return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def _check_range(name: str, value: int, low: int, high: int) -> None:
  if not low <= value <= high:
    raise ValueError(f"{name} is {value}, but must be in {low}..{high}.")


if __name__ == "__main__":
  MAX_SIZE = flags.DEFINE_integer("max_size", 0, "Shorter side; 0: keep all.")
  SHARDS = flags.DEFINE_integer("shards", 0, "Files of each split; 0: by size.")
  SHARD_MB = flags.DEFINE_integer("shard_mb", 128, "Size of a file, about.")
  SKIP_BAD = flags.DEFINE_bool("skip_bad", False, "Leave out bad images.")

  def main(folder: str, out: str) -> int:
    """Writes what the command line says."""
    written = write(
      folder,
      out,
      max_size=MAX_SIZE.value,
      shards=SHARDS.value,
      shard_mb=SHARD_MB.value,
      skip_bad=SKIP_BAD.value,
      progress=True,
    )
    print(written)
    return 0

  commands.start(main, words=["FOLDER", "OUT"])
