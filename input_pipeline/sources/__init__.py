"""Where examples come from: `KIND:ARGUMENT`, one file of this folder per kind.

To add a kind `x:`, put `x.py` here with `make(argument, split, data_dir)` that
returns a `Source`; nothing else knows the list of kinds.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable

import tensorflow as tf

from input_pipeline.errors import suggest

Features = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """One split of one data set: how many examples, and how to get one.

  The pipeline decides *which* record comes when; a source only turns a record
  into features. Records of today's sources are addressed by their index alone:
  each is a file of its own (or a row in memory), so a permutation of records is
  a permutation of files. A source whose records lie many to a file (TFRecords)
  fits the same contract by also giving the number of records of each file and a
  way to open one: the pipeline then permutes files in place of records, walks
  them in blocks and hands `parse` the serialized record in place of the index.

  Attributes:
    spec: the text that made it, e.g. "folder:flowers".
    split: the split expression, e.g. "train[:90%]".
    num_examples: examples in this split.
    class_names: name of each label index, the same for all splits.
    digest: hex digest of what the split holds (names relative to the root),
      equal wherever the data lies.
    parse: record (int64 scalar, 0..num_examples-1) -> `image` (encoded bytes,
      or uint8 [h, w, 3]) and `labels` (int32 [m], class indices). TensorFlow
      code: it runs both eagerly and inside tf.data.
    name_of: index -> what to call that example in an error, e.g. its path.
  """

  spec: str
  split: str
  num_examples: int
  class_names: tuple[str, ...]
  digest: str
  parse: Callable[[tf.Tensor], Features]
  name_of: Callable[[int], str]

  @property
  def num_classes(self) -> int:
    """Number of classes over all splits."""
    return len(self.class_names)


def get_source(spec: str, split: str, data_dir: str = "") -> Source:
  """Opens a data set.

  Args:
    spec: "digits:", "fake:SIZE,CLASSES,N" or "folder:PATH".
    split: a split name, a slice `train[:90%]`, or a sum of slices.
    data_dir: where relative paths of the spec start.

  Returns:
    The source; nothing but names has been read yet.

  Raises:
    ValueError: unknown kind (with the list), malformed spec, missing split.
  """
  kind, colon, argument = spec.partition(":")
  kinds = [module.name for module in pkgutil.iter_modules(__path__)]
  if kind not in kinds:
    raise ValueError(
      f"Unknown kind of source in {spec!r}. "
      + suggest(f"{kind}:", (f"{name}:" for name in kinds))
    )
  if not colon:
    raise ValueError(f"The source {spec!r} lacks its colon: write '{spec}:'.")
  module = importlib.import_module(f"{__name__}.{kind}")
  return module.make(argument, split, data_dir or "")
