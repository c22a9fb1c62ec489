"""`tfrecord:GLOB?OPTIONS` — one's own TFRecord files of `tf.train.Example`.

GLOB names files, or a folder that holds them. The options, as `key=value` with
`&` between, say how the examples are written:

  image    the feature with the encoded image            (`image`)
  labels   the feature with integer class indices         (`labels`)
  name     the feature with the example's name, for ops   (none)
  classes  number of classes, where the index does not say

    tfrecord:gs://bucket/jft/train-*?labels=image/class/label&classes=18291

An example may have several labels, or none. An index, `index.json` beside the
files, tells the same and more; nothing has to be counted then:

  files        {"train-0.tfrecord": 1250, ...}: records in each
  class_names  a list; or num_classes, a number
  splits       {"train": "train-*", "test": "test-*"}: a glob for each
  features     {"image": "image", "labels": "labels", "name": "file_name"}

All keys but `files` may be missing. Without `splits` all files are one split,
called `train` or `all`. Without an index the records are counted by reading the
files once; the counts are kept beside the files or, if nothing can be written
there, in ~/.cache/vit_jax. Slices go by position: files sorted by name, records
in the order of the file.
"""

import concurrent.futures
import fnmatch
import hashlib
import json
import logging
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from input_pipeline import records, splits
from input_pipeline.errors import AbsentError, suggest
from input_pipeline.sources import (
  Features,
  Source,
  absolute,
  parse_options,
)

_OPTIONS = {"image": "", "labels": "", "name": "", "classes": ""}
_FEATURES = {"image": "image", "labels": "labels", "name": ""}
_INDEX_KEYS = ("class_names", "features", "files", "num_classes", "splits")
_COUNTS = ".record_counts.json"
_OTHERS = re.compile(r"(^|/)\.|\.(json|md|txt)$")  # Not taken for data.
_gfile = tf.io.gfile

log = logging.getLogger("input_pipeline")


def make(argument: str, split: str, data_dir: str) -> Source:
  """Lists the files of `split` and builds the source; reads one record."""
  path, options = parse_options(argument, _OPTIONS)
  if not path:
    raise ValueError("The source 'tfrecord:' needs files: tfrecord:GLOB.")
  path = absolute(path, data_dir)
  folder, pattern = _split_glob(path)
  index = _read_index(folder)
  counts = _counts(folder, pattern, index, options)
  class_names = _class_names(path, index, options["classes"])
  chosen = {key: options[key] for key in _FEATURES if options[key]}
  features = {**_FEATURES, **index["features"], **chosen}
  pieces = _pieces(folder, counts, index["splits"], split)
  _check_features(pieces, features)
  names = [name.removeprefix(folder) for name in pieces.paths]
  table = zip(names, pieces.skips.tolist(), pieces.takes.tolist())
  what = json.dumps([class_names, list(table)])
  return Source(
    spec=f"tfrecord:{argument}",
    split=split,
    num_examples=int(pieces.takes.sum()),
    class_names=class_names,
    digest=hashlib.sha256(what.encode()).hexdigest(),
    parse=_parser(features, len(class_names)),
    name_of=lambda index: records.name_of(pieces, index),
    pieces=pieces,
    addressed=False,
  )


def split_names(argument: str, data_dir: str) -> tuple[str, ...]:
  """Splits of the index that have a file which the glob names."""
  path, options = parse_options(argument, _OPTIONS)
  folder, pattern = _split_glob(absolute(path, data_dir))
  index = _read_index(folder)
  if not index["splits"]:
    return ("train",)
  names = _counts(folder, pattern, index, options)
  held = {
    files: split  # Of two names for the same files, the first will do.
    for split, files in reversed(index["splits"].items())
    if any(fnmatch.fnmatchcase(name, files) for name in names)
  }
  return tuple(reversed(held.values()))


def _parser(features: Mapping[str, str], num_classes: int):
  """(index, record) -> features; checks what no later stage would notice."""
  spec = {
    features["image"]: tf.io.FixedLenFeature([], tf.string),
    features["labels"]: tf.io.VarLenFeature(tf.int64),
  }
  if features["name"]:
    spec[features["name"]] = tf.io.FixedLenFeature([], tf.string)

  def parse(index: tf.Tensor, record: tf.Tensor) -> Features:
    del index
    example = tf.io.parse_single_example(record, spec)
    labels = example[features["labels"]].values
    text = f"a label is outside of 0..{num_classes - 1}, the classes known"
    known = tf.reduce_all((labels >= 0) & (labels < num_classes))
    with tf.control_dependencies([tf.debugging.Assert(known, [text])]):
      labels = tf.cast(labels, tf.int32)
    found = {"image": example[features["image"]], "labels": labels}
    if features["name"]:
      found["name"] = example[features["name"]]
    return found

  return parse


def _split_glob(path: str) -> tuple[str, str]:
  """The folder in front of a glob, with its slash, and the rest."""
  if _gfile.isdir(path):
    return path.rstrip("/") + "/", "*"
  fixed = re.split(r"[*?\[]", path)[0]
  folder = fixed[: fixed.rfind("/") + 1]
  return folder, path[len(folder) :]


def _read_index(folder: str) -> dict[str, Any]:
  """The index beside the files; without one all of its entries are empty."""
  index: dict[str, Any] = {
    "files": {},
    "splits": {},
    "features": {},
    "class_names": [],
    "num_classes": 0,
  }
  path = f"{folder}index.json"
  if not _gfile.exists(path):
    return index
  with _gfile.GFile(path) as file:
    try:
      found = dict(json.load(file))
    except (TypeError, ValueError) as error:
      raise ValueError(f"{path} is no JSON object: {error}") from None
  for key in found:
    if key not in _INDEX_KEYS:
      raise ValueError(f"{path} has a key {key!r}. {suggest(key, _INDEX_KEYS)}")
  if not found.get("files"):
    raise ValueError(
      f"{path} lists no files: 'files' must be an object of names and counts."
    )
  return index | found


def _counts(
  folder: str,
  pattern: str,
  index: Mapping[str, Any],
  options: Mapping[str, str],
) -> dict[str, int]:
  """Records in each file that the glob names, by path below the folder."""
  path = folder + pattern
  if index["files"]:
    listed = sorted(index["files"], key=os.fsencode)
    names = [name for name in listed if fnmatch.fnmatchcase(name, pattern)]
    if not names:
      raise ValueError(
        f"{path}: {folder}index.json lists no such files, but {_show(listed)}."
      )
    return {name: int(index["files"][name]) for name in names}
  try:
    found = [name.removeprefix(folder) for name in _gfile.glob(path)]
  except tf.errors.NotFoundError:
    found = []
  names = sorted((n for n in found if not _OTHERS.search(n)), key=os.fsencode)
  if not names:
    raise AbsentError(
      f"{path}: there are no such files. {_neighbours(folder)} "
      f"{_expected(options)}"
    )
  return _count(folder, names)


def _expected(options: Mapping[str, str]) -> str:
  """What records would have to look like, for those who have none yet."""
  number = options["classes"]
  last = str(int(number) - 1) if number.isdecimal() else "C-1"
  image, labels = (
    options[key] or _FEATURES[key] for key in ("image", "labels")
  )
  return (
    f"A record is a tf.train.Example with the features {image!r} (bytes: the "
    f"image file as it is) and {labels!r} (int64: its classes, one or several "
    f"of 0..{last}, or none); ?image=NAME&labels=NAME says other names. "
    "python -m input_pipeline.write FOLDER OUT makes such files of a folder of "
    "images."
  )


def _count(folder: str, names: list[str]) -> dict[str, int]:
  """Counts records by reading the files, but each only once in its life."""
  with concurrent.futures.ThreadPoolExecutor(16) as pool:
    sizes = list(pool.map(lambda n: _gfile.stat(folder + n).length, names))
  digest = hashlib.sha256(folder.encode()).hexdigest()[:16]
  home = os.environ.get("XDG_CACHE_HOME") or str(pathlib.Path.home() / ".cache")
  places = [folder + _COUNTS, f"{home}/vit_jax/{digest}{_COUNTS}"]
  known: dict[str, list[int]] = {}  # name -> [bytes, records]
  for place in places:
    if _gfile.exists(place):
      with _gfile.GFile(place) as file:
        known |= json.load(file)
  fresh = [
    name for name, size in zip(names, sizes) if known.get(name, [-1])[0] != size
  ]
  if fresh:
    log.info("Counting the records of %d files in %s.", len(fresh), folder)
    counts = records.count([folder + name for name in fresh]).tolist()
    size_of = dict(zip(names, sizes))
    known |= {n: [size_of[n], count] for n, count in zip(fresh, counts)}
    _write_first(places, json.dumps(known))
  return {name: known[name][1] for name in names}


def _write_first(places: list[str], text: str) -> None:
  """Writes to the first place that allows it, whole or not at all."""
  for place in places:
    fresh = f"{place}.{os.getpid()}"
    try:
      _gfile.makedirs(os.path.dirname(place))
      with _gfile.GFile(fresh, "w") as file:
        file.write(text)
      _gfile.rename(fresh, place, overwrite=True)
      return
    except tf.errors.OpError as error:
      log.info("Cannot keep counts in %s: %s", place, error.message)
  log.warning("The counts could not be kept: the next start counts again.")


def _class_names(
  path: str, index: Mapping[str, Any], option: str
) -> tuple[str, ...]:
  """Names of the classes, or their numbers where only the count is known."""
  if option and not option.isdecimal():
    raise ValueError(f"{path}: classes={option} must be a number.")
  names = tuple(map(str, index["class_names"]))
  number = int(option or index["num_classes"] or len(names))
  if not number:
    raise ValueError(
      f"{path}: the number of classes is unknown. Put 'class_names' or "
      f"'num_classes' into index.json beside the files, or append it: "
      "tfrecord:GLOB?classes=1000."
    )
  if names and len(names) != number:
    raise ValueError(
      f"{path}: there are {number} classes by one count, but index.json names "
      f"{len(names)}."
    )
  return names or tuple(map(str, range(number)))


def _pieces(
  folder: str, counts: Mapping[str, int], globs: Mapping[str, str], split: str
) -> records.Pieces:
  """Cuts the slices of a split expression out of the files."""
  parts = []
  known = globs or {"train": "*", "all": "*"}
  for name, slices in splits.parse_split(split).items():
    if name not in known:
      more = (
        ""
        if globs
        else " More can be named by 'splits' in an index.json beside the files."
      )
      raise ValueError(
        f"{folder} has no split {name!r}. {suggest(name, known)}{more}"
      )
    files = [n for n in counts if fnmatch.fnmatchcase(n, known[name])]
    whole = records.make_pieces(
      [folder + n for n in files],
      [0] * len(files),
      [counts[n] for n in files],
    )
    ranges = splits.take_ranges(slices, int(whole.takes.sum()))
    parts.append(records.take_ranges(whole, ranges))
  return records.join(parts)


def _check_features(
  pieces: records.Pieces, features: Mapping[str, str]
) -> None:
  """Looks at one record, so that a wrong name is found before the start."""
  data = records.read_one(pieces.paths[0], 0).numpy()
  found = tf.train.Example.FromString(data).features.feature
  for key, kind in (
    ("image", "bytes_list"),
    ("labels", "int64_list"),
    ("name", "bytes_list"),
  ):
    name = features[key]
    if not name:
      continue
    if name not in found:
      raise ValueError(
        f"{pieces.paths[0]} has no feature {name!r} (for {key}: name another "
        f"by ?{key}=...). {suggest(name, found)}"
      )
    actual = found[name].WhichOneof("kind")
    if actual not in (kind, None):
      raise ValueError(
        f"{pieces.paths[0]}: feature {name!r} (for {key}) is a {actual}, but "
        f"must be a {kind}."
      )


def _neighbours(folder: str) -> str:
  """What lies where files were expected."""
  if not folder or not _gfile.isdir(folder):
    return f"{folder or 'That folder'} does not exist."
  return f"In {folder}: {_show(sorted(_gfile.listdir(folder)))}."


def _show(names: list[str]) -> str:
  more = f" and {len(names) - 10} more" if len(names) > 10 else ""
  return (", ".join(names[:10]) or "nothing") + more
