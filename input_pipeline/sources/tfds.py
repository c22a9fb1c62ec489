"""`tfds:NAME[/CONFIG][:VERSION][?OPTIONS]` — what TensorFlow Datasets prepared.

The data has to lie there already, as `tfds build` leaves it; nothing here asks
the network. It is looked for in `data_dir` if that is given, else where TFDS
keeps its data ($TFDS_DATA_DIR, or ~/tensorflow_datasets). VERSION may hold
stars (`3.*.*`); without one the newest is taken. Split expressions are those of
TFDS.

Options, as `key=value` with `&` between, name features; those of a sequence are
reached by `/`:

  image    the image             (`image`)
  labels   class index or indices (`label`, `labels` or `objects/label`)
  name     the example's name    (`file_name`, `filename` or `image/filename`)
  classes  number of classes, where the feature does not tell

    tfds:imagenet2012_real?labels=real_label

Images stay encoded. All other features go to the ops under their own names.
Without labels, a label op has to make some. An example without a name is called
`FILE__NUMBER`, as TFDS itself does.
"""

import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from input_pipeline import records
from input_pipeline.errors import AbsentError, suggest
from input_pipeline.records import Pieces
from input_pipeline.sources import Features, Source, parse_options

_OPTIONS = {"image": "image", "labels": "", "name": "", "classes": ""}
_LABELS = ("label", "labels", "objects/label")
_NAMES = ("file_name", "filename", "image/filename")
# `tfds build` does the same, but starts only where apache-beam is installed.
_PREPARE = (
  'python -c "import tensorflow_datasets as tfds; '
  "tfds.builder('%s', data_dir='%s').download_and_prepare()\""
)
_gfile = tf.io.gfile


def make(argument: str, split: str, data_dir: str) -> Source:
  """Finds the prepared data and builds the source; reads no record."""
  # Importing it takes a second, which other sources need not spend.
  import tensorflow_datasets as tfds

  wanted, options = parse_options(argument, _OPTIONS)
  folder = _find(wanted, _root(tfds, data_dir))
  info = tfds.builder_from_directory(folder).info
  instructions = _instructions(info, split)
  pieces = records.make_pieces(
    *zip(*((i.filename, i.skip, i.take) for i in instructions))
  )
  class_names, parse_record = _parser(tfds, info.features, options, pieces)
  format_name = info.file_format.value
  if format_name not in ("array_record", "tfrecord"):
    raise ValueError(
      f"{folder} is stored as {format_name}: prepare it as tfrecord or "
      "array_record (tfds build --file_format=tfrecord)."
    )
  addressed = format_name == "array_record"
  rows = [
    (os.path.basename(path), int(skip), int(take))
    for path, skip, take, _ in zip(*pieces)
  ]
  what = json.dumps([info.full_name, class_names, rows])
  return Source(
    spec=f"tfds:{argument}",
    split=split,
    num_examples=int(pieces.takes.sum()),
    class_names=class_names,
    digest=hashlib.sha256(what.encode()).hexdigest(),
    parse=_at_index(parse_record, instructions) if addressed else parse_record,
    name_of=lambda index: records.name_of(pieces, index),
    pieces=records.NO_PIECES if addressed else pieces,
    addressed=addressed,
  )


def split_names(argument: str, data_dir: str) -> tuple[str, ...]:
  """All splits that the prepared data has."""
  import tensorflow_datasets as tfds

  wanted, _ = parse_options(argument, _OPTIONS)
  folder = _find(wanted, _root(tfds, data_dir))
  return tuple(tfds.builder_from_directory(folder).info.splits)


def _root(tfds: Any, data_dir: str) -> str:
  return os.path.expanduser(data_dir or tfds.core.constants.DATA_DIR)


def _find(wanted: str, root: str) -> str:
  """The folder of the newest prepared version that fits."""
  match = re.fullmatch(r"(\w+)(?:/([^:]+))?(?::([\d.*]+))?", wanted)
  if not match:
    raise ValueError(
      f"Cannot read the source 'tfds:{wanted}'. Write "
      "tfds:NAME[/CONFIG][:VERSION], for example tfds:cifar100 or "
      "tfds:eurosat/rgb:2.*.*."
    )
  name, config, version = match.groups(default="")
  folder = os.path.join(root, name, config).rstrip("/")
  found = _versions(folder)
  if not found and not config:
    configs = [c for c in _listdir(folder) if _versions(f"{folder}/{c}")]
    if len(configs) > 1:
      raise ValueError(
        f"{folder} has several configs, name one of them: "
        + ", ".join(f"tfds:{name}/{c}" for c in configs)
      )
    if configs:
      folder = f"{folder}/{configs[0]}"
      found = _versions(folder)
  fitting = [v for v in found if fnmatch.fnmatchcase(v, version or "*")]
  if fitting:
    return f"{folder}/{fitting[-1]}"
  exact = version if version and "*" not in version else ""
  what = "/".join(filter(None, (name, config))) + (exact and f":{exact}")
  there = [n for n in _listdir(root) if n != "downloads"]
  raise AbsentError(
    f"tfds:{wanted} is not prepared. Searched: {folder}/"
    f"{version or 'VERSION'} (versions there: {', '.join(found) or 'none'}; "
    f"data sets in {root}: {', '.join(there) or 'none'}). Nothing is "
    "downloaded by itself; to prepare it, where there is a network, type:\n  "
    f"{_PREPARE % (what, root)}\nWhat has to be downloaded by hand has to lie "
    f"in {root}/downloads/manual before."
  )


def _versions(folder: str) -> list[str]:
  """Prepared versions in a folder, the newest last."""
  found = [
    name
    for name in _listdir(folder)
    if re.fullmatch(r"\d+\.\d+\.\d+", name)
    and _gfile.exists(f"{folder}/{name}/dataset_info.json")
  ]
  return sorted(found, key=lambda name: tuple(map(int, name.split("."))))


def _listdir(folder: str) -> list[str]:
  if not _gfile.isdir(folder):
    return []
  names = (name.rstrip("/") for name in _gfile.listdir(folder))
  return sorted(name for name in names if name and not name.startswith("."))


def _instructions(info: Any, split: str) -> Sequence[Any]:
  """What TFDS says to read of which file, for any of its expressions."""
  try:
    found = info.splits[split].file_instructions
  except (AssertionError, KeyError, ValueError) as error:
    raise ValueError(
      f"{info.full_name} cannot give the split {split!r}: "
      f"{str(error).rstrip('.')}. " + suggest(split, info.splits, "Splits")
    ) from None
  if not sum(instruction.take for instruction in found):
    raise ValueError(f"{info.full_name}: {split!r} selects no example.")
  return found


def _parser(
  tfds: Any, features: Any, options: dict[str, str], pieces: Pieces
) -> tuple[tuple[str, ...], Callable[..., Features]]:
  """Class names, and (index, record) -> features."""
  image_key = _known(features, options["image"], "image")
  if not isinstance(_walk(features, image_key), tfds.features.Image):
    raise ValueError(
      f"The feature {image_key!r} is no image. "
      + suggest(image_key, features, "Features")
    )
  label_key = _choose(features, options["labels"], _LABELS, "labels")
  name_key = _choose(features, options["name"], _NAMES, "name")
  class_names = _class_names(features, label_key, options["classes"])
  encoded = {
    key: tfds.decode.SkipDecoding()
    for key, feature in features.items()
    if isinstance(feature, tfds.features.Image)
  }
  files = np.array([os.path.basename(path) for path in pieces.paths])

  def made_up(index: tf.Tensor) -> tf.Tensor:
    piece = tf.searchsorted(pieces.firsts, index[None], side="right")[0] - 1
    place = tf.constant(pieces.skips - pieces.firsts)[piece] + index
    return tf.strings.join(
      [tf.constant(files)[piece], tf.strings.as_string(place)], "__"
    )

  def parse(index: tf.Tensor, record: tf.Tensor) -> Features:
    example = features.deserialize_example(record, decoders=encoded)
    labels = tf.constant([-1], tf.int32)
    if label_key:
      labels = tf.cast(_walk(example, label_key), tf.int32)
      # Several objects of one class are one label.
      labels = tf.unique(labels)[0] if labels.shape.rank else labels[None]
    name = _walk(example, name_key) if name_key else made_up(index)
    image = _walk(example, image_key)
    return example | {"image": image, "labels": labels, "name": name}

  return class_names, parse


def _class_names(features: Any, key: str, number: str) -> tuple[str, ...]:
  """Names of the label's classes; their numbers if only `number` is known."""
  if number:
    if not number.isdecimal():
      raise ValueError(f"classes={number} must be a number.")
    return tuple(map(str, range(int(number))))
  if not key:
    return ()
  feature = _walk(features, key)
  feature = getattr(feature, "feature", feature)  # of a sequence
  if not getattr(feature, "num_classes", 0):
    raise ValueError(
      f"The feature {key!r} does not tell its classes: append their number, "
      "as in tfds:NAME?classes=10."
    )
  return tuple(feature.names)


def _choose(features: Any, given: str, usual: Sequence[str], what: str) -> str:
  """The key given, else the first usual one that exists, else none."""
  if given:
    return _known(features, given, what)
  return next((key for key in usual if _walk(features, key) is not None), "")


def _known(features: Any, key: str, what: str) -> str:
  if _walk(features, key) is None:
    raise ValueError(
      f"There is no feature {key!r} (for {what}: name another by ?{what}=...). "
      + suggest(key, features, "Features")
    )
  return key


def _walk(tree: Any, key: str) -> Any:
  """What a key such as `objects/label` leads to; None if nowhere."""
  if key in tree:
    return tree[key]
  first, _, rest = key.partition("/")
  if not rest or first not in tree or not hasattr(tree[first], "keys"):
    return None
  return _walk(tree[first], rest)


def _at_index(
  parse: Callable[..., Features], instructions: Sequence[Any]
) -> Callable[[tf.Tensor], Features]:
  """index -> features, of array_record files, which allow access by index."""
  from array_record.python import array_record_data_source

  reader = array_record_data_source.ArrayRecordDataSource(instructions)

  def parse_at(index: tf.Tensor) -> Features:
    record = tf.numpy_function(
      lambda i: reader[int(i)], [index], tf.string, stateful=False
    )
    return parse(index, tf.ensure_shape(record, []))

  return parse_at
