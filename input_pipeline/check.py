"""Looks at every image of a data set: which are bad, and what is there.

python -m input_pipeline.check SOURCE [--split=train] [--fix-list=FILE]

Bad is what cannot be read and decoded to its end: it would stop a training. (A
JPEG that is whole but damaged in its middle decodes, with grey blocks; that is
not noticed.) Exit status: 0 all is good, 1 something is bad, 2 refused.

The fix list has a bad file in each line, for `xargs -d '\\n' rm < FILE`. Where
many records lie in a file, a line is the file and the record's place in it, or
the file alone if it cannot be read through.
"""

import collections
import logging
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from absl import flags

from input_pipeline import commands, headers, loading, records
from input_pipeline.inspecting import Bad, Seen, inspect
from input_pipeline.sources import Source, folder, get_source, split_names

_FORMAT_OF = {"jpg": "jpeg"} | {
  name: name for name in ("bmp", "gif", "jpeg", "png", "webp")
}
_READ_BYTES, _OPEN_FILES = 1 << 20, 16
_SHOWN_CLASSES = 100
_SIDES = ("height", "width", "shorter side")
_COUNTED = (
  "extensions",
  "contents",
  "misnamed",
  "colours",
  *_SIDES,
  "orientation",
)

Counts = dict[str, collections.Counter]


class Report(NamedTuple):
  """What a data set holds.

  Attributes:
    spec: the source.
    images: how many were looked at.
    bad: what cannot be used.
    counts: of the good images, value -> how many: "extensions", "contents"
      (formats), "misnamed" (both, where they differ), "colours", "height",
      "width", "shorter side" (pixels), "orientation" (of EXIF, unless 1).
    classes: split -> class name -> good images; empty classes are there, too.
    unsupported: other images in a folder, of formats that are never read.
  """

  spec: str
  images: int
  bad: tuple[Bad, ...]
  counts: Counts
  classes: dict[str, dict[str, int]]
  unsupported: tuple[str, ...]

  def __str__(self) -> str:
    rows = [("images", f"{self.images}, {len(self.bad)} bad")]
    rows += [(name, _show(name, n)) for name, n in self.counts.items()]
    for split, sizes in self.classes.items():
      empty = ", ".join(name for name, size in sizes.items() if not size)
      rows += [(split, _show_classes(sizes)), ("  empty", empty)]
    rows += [("unsupported", path) for path in self.unsupported]
    rows += [("bad", f"{bad.name}: {bad.reason}") for bad in self.bad]
    shown = [f"  {name:<14}{text}" for name, text in rows if text]
    return "\n".join([self.spec, *shown])


def check(
  spec: str, *, split: str = "", data_dir: str = "", progress: bool = False
) -> Report:
  """Decodes all images of a data set, in parallel.

  Args:
    spec: as for `get_source`.
    split: a split expression; "" is all splits.
    data_dir: as for `get_source`.
    progress: whether to show how far it is.

  Raises:
    ValueError: as `get_source`.
  """
  names = (split,) if split else split_names(spec, data_dir)
  sources = [get_source(spec, name, data_dir) for name in names]
  total = sum(source.num_examples for source in sources)
  bad: list[Bad] = []
  counts: Counts = {name: collections.Counter() for name in _COUNTED}
  classes = {}
  with commands.Progress(total, show=progress) as shown:
    for source in sources:
      sizes = np.zeros(source.num_classes, np.int64)
      unread = np.ones(source.num_examples, bool)
      for seen in inspect(source, _tickets(source)):
        shown.advance()
        unread[seen.id] = False
        name = source.name_of(seen.id)
        if seen.reason:
          bad.append(Bad(name, seen.reason))
          continue
        np.add.at(sizes, seen.labels, 1)
        _count(counts, seen, seen.name or name)
      bad += _broken_files(source, np.flatnonzero(unread))
      classes[source.split] = dict(zip(source.class_names, sizes.tolist()))
  kind, _, path = spec.partition(":")
  left_out = folder.unsupported(path, data_dir) if kind == "folder" else ()
  return Report(spec, total, tuple(bad), counts, classes, left_out)


def _tickets(source: Source) -> tf.data.Dataset:
  """All examples of a split; a file that breaks off just ends."""
  if source.addressed:
    return tf.data.Dataset.range(source.num_examples).map(lambda i: (i,))

  def open_piece(path, skip, take, first):
    ids = tf.data.Dataset.range(first, first + take)
    found = tf.data.TFRecordDataset(path, buffer_size=_READ_BYTES).skip(skip)
    return tf.data.Dataset.zip((ids, found)).ignore_errors()

  return tf.data.Dataset.from_tensor_slices(tuple(source.pieces)).interleave(
    open_piece,
    cycle_length=_OPEN_FILES,
    num_parallel_calls=_OPEN_FILES,
    deterministic=True,
  )


def _broken_files(source: Source, unread: np.ndarray) -> Iterator[Bad]:
  """Says of the files that broke off what is wrong with them."""
  pieces = source.pieces
  rows = np.searchsorted(pieces.firsts, unread, side="right") - 1
  for path, lost in collections.Counter(pieces.paths[rows].tolist()).items():
    try:
      records.count([path])
      reason = "the file holds fewer records than its index says"
    except tf.errors.OpError as error:
      reason = loading.reason(error)
    yield Bad(path, f"{lost} records are lost: {reason}")


def _count(counts: Counts, seen: Seen, name: str) -> None:
  """Adds a good image to the counts."""
  header = headers.read(seen.image)
  extension = os.path.splitext(name)[1].lower().lstrip(".")
  if extension in _FORMAT_OF:
    counts["extensions"][extension] += 1
    if header.format not in ("", _FORMAT_OF[extension]):
      counts["misnamed"][f"{extension} with {header.format} in it"] += 1
  if seen.image:
    counts["contents"][header.format or "unknown"] += 1
    counts["colours"][header.mode or "unknown"] += 1
  if header.orientation != 1:
    counts["orientation"][header.orientation] += 1
  height, width = seen.sides
  counts["height"][height] += 1
  counts["width"][width] += 1
  counts["shorter side"][min(height, width)] += 1


def _show(name: str, counter: collections.Counter) -> str:
  """A line of the report; "" if nothing was counted."""
  text = ", ".join(f"{n} {value}" for value, n in counter.most_common())
  if text and name in _SIDES:
    sides = sorted(counter)
    passed = np.cumsum([counter[side] for side in sides])
    median = sides[np.searchsorted(passed, passed[-1] / 2)]
    return f"{sides[0]} to {sides[-1]} pixels, median {median}"
  if text and name == "misnamed":
    return f"{text}: decoded all the same"
  if text and name == "orientation":
    pairs = (f"{value} in {n} images" for value, n in counter.most_common())
    return f"{', '.join(pairs)}, by EXIF: ignored, they stay as stored"
  return text


def _show_classes(sizes: dict[str, int]) -> str:
  """All classes with their images; of very many, only what is typical."""
  text = ", ".join(f"{name} {size}" for name, size in sizes.items())
  if len(sizes) > _SHOWN_CLASSES:
    least, *_, most = sorted(sizes.values())
    text = f"{least} to {most} in a class"
  return f"{sum(sizes.values())} in {len(sizes)} classes: {text}"


def _main(spec: str, split: str, data_dir: str, fix_list: str) -> int:
  if fix_list:
    _write_lines(fix_list, [])  # Better fail now than at the end.
  logging.getLogger("input_pipeline").setLevel(logging.ERROR)  # All is in here:
  report = check(spec, split=split, data_dir=data_dir, progress=True)
  print(report)
  if fix_list:
    names = [bad.name.replace(", record ", " ") for bad in report.bad]
    _write_lines(fix_list, names)
  return commands.BAD if report.bad else 0


def _write_lines(path: str, lines: list[str]) -> None:
  with tf.io.gfile.GFile(path, "w") as file:
    file.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
  SPLIT = flags.DEFINE_string("split", "", 'As in config.input.split; "": all.')
  DATA_DIR = flags.DEFINE_string("data_dir", "", "As in config.input.data_dir.")
  FIX_LIST = flags.DEFINE_string("fix_list", "", "Where to list bad files.")
  commands.start(
    lambda spec: _main(spec, SPLIT.value, DATA_DIR.value, FIX_LIST.value),
    words=["SOURCE"],
  )
