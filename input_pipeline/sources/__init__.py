"""Where examples come from: `KIND:ARGUMENT`, one file of this folder per kind.

To add a kind `x:`, put `x.py` here with `make(argument, split, data_dir)` that
returns a `Source`, and `split_names(argument, data_dir)`; nothing else knows
the list of kinds.
"""

import dataclasses
import importlib
import os
import pkgutil
import re
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from input_pipeline import records
from input_pipeline.errors import suggest
from input_pipeline.records import Pieces

Features = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Source:
  """One split of one data set: how many examples, and how to get one.

  The pipeline decides *which* record comes when; a source only turns a record
  into features. There are two kinds. Where records are addressed by index (each
  is a file of its own, or a row in memory), the index is the record. Where many
  lie in a file, `pieces` says where, the pipeline reads them from front to
  back, and a record is its index and its serialized bytes.

  Attributes:
    spec: the text that made it, e.g. "folder:flowers".
    split: the split expression, e.g. "train[:90%]".
    num_examples: examples in this split.
    class_names: name of each label index, the same for all splits.
    digest: hex digest of what the split holds (names relative to the root),
      equal wherever the data lies.
    parse: record -> features: `image` (encoded bytes, or uint8 [h, w, 3]),
      `labels` (int32 [m], class indices), and whatever else the source knows,
      for the ops to use: `name` (bytes) says what the example is called. The
      record is an int64 scalar in 0..num_examples-1, followed by a string
      scalar unless `addressed`. TensorFlow code: it runs both eagerly and
      inside tf.data.
    name_of: index -> what to call that example in an error, e.g. its path.
    pieces: where the records lie, for sources whose files hold many.
    addressed: whether `parse` takes the index alone.
  """

  spec: str
  split: str
  num_examples: int
  class_names: tuple[str, ...]
  digest: str
  parse: Callable[..., Features]
  name_of: Callable[[int], str]
  pieces: Pieces = records.NO_PIECES
  addressed: bool = True

  @property
  def num_classes(self) -> int:
    """Number of classes over all splits."""
    return len(self.class_names)


def get_source(spec: str, split: str, data_dir: str = "") -> Source:
  """Opens a data set.

  Args:
    spec: "digits:", "fake:SIZE,CLASSES,N", "folder:PATH", "idx:DIR",
      "tfds:NAME" or "tfrecord:GLOB"; the files of this folder say more.
    split: a split name, a slice `train[:90%]`, or a sum of slices.
    data_dir: where relative paths of the spec start, and where data sets of
      `tfds:` lie.

  Returns:
    The source; nothing but names has been read yet.

  Raises:
    ValueError: unknown kind (with the list), malformed spec, missing data (with
      the folders searched) or split.
  """
  module, argument = _module_of(spec)
  return module.make(argument, split, data_dir)


def split_names(spec: str, data_dir: str = "") -> tuple[str, ...]:
  """All splits of a data set; `train` where any name will do.

  Raises:
    ValueError: as `get_source`.
  """
  module, argument = _module_of(spec)
  return module.split_names(argument, data_dir)


def _module_of(spec: str) -> tuple[Any, str]:
  """The file of this folder that a spec names, and what follows its colon."""
  kind, colon, argument = spec.partition(":")
  kinds = [module.name for module in pkgutil.iter_modules(__path__)]
  if kind not in kinds:
    raise ValueError(
      f"Unknown kind of source in {spec!r}. "
      + suggest(f"{kind}:", (f"{name}:" for name in kinds))
    )
  if not colon:
    raise ValueError(f"The source {spec!r} lacks its colon: write '{spec}:'.")
  return importlib.import_module(f"{__name__}.{kind}"), argument


def absolute(path: str, data_dir: str) -> str:
  """A spec's path: `~` is the home, relative ones begin in `data_dir`."""
  path = os.path.expanduser(path)
  return path if "://" in path else os.path.join(data_dir, path)


def parse_options(
  argument: str, defaults: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
  """Splits `PATH?key=value&key=value`, where PATH may be a glob with `?`.

  Args:
    argument: what follows the colon of a spec.
    defaults: the keys that are allowed, and their values when not given.

  Returns:
    PATH and the values of all keys.

  Raises:
    ValueError: an unknown key, with the list.
  """
  match = re.fullmatch(r"(.*?)(?:\?(\w+=[^?]*))?", argument)
  assert match
  path, text = match.groups(default="")
  given = dict(part.partition("=")[::2] for part in text.split("&") if part)
  for key in given:
    if key not in defaults:
      raise ValueError(
        f"Unknown option {key!r} in {argument!r}. " + suggest(key, defaults)
      )
  return path, {**defaults, **given}
