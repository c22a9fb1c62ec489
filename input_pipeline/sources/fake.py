"""`fake:SIZE,CLASSES,N` — images made from their index alone, for trying out.

SIZE is `32` or `HEIGHTxWIDTH` in pixels. Every class has its colour, under as
much noise, so a model has something to learn. Any split name works; another
name gives other images of the same classes.
"""

import hashlib
import re

import tensorflow as tf

from input_pipeline import splits
from input_pipeline.sources import Features, Source


def make(argument: str, split: str, data_dir: str) -> Source:
  """Builds the source; `data_dir` plays no part."""
  del data_dir
  match = re.fullmatch(
    r"(\d+)(?:x(\d+))?,(\d+),(\d+)", argument.replace(" ", "")
  )
  if not match or "0" in match.groups():
    raise ValueError(
      f"Cannot read the source 'fake:{argument}'. Write fake:SIZE,CLASSES,N, "
      "for example fake:32,10,1000 or fake:32x48,10,1000."
    )
  height, width = int(match[1]), int(match[2] or match[1])
  num_classes, size = int(match[3]), int(match[4])
  slices = splits.parse_split(split)
  if len(slices) > 1:
    raise ValueError(f"fake: cannot add splits of different names: {split!r}.")
  ((name, parts),) = slices.items()
  positions = splits.take_slices(parts, size)
  split_seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
  table = tf.constant(positions)

  def parse(record: tf.Tensor) -> Features:
    index = table[record]
    label = index % num_classes
    uniform = tf.random.stateless_uniform
    colour = uniform([1, 1, 3], tf.stack([label, -1]), maxval=128)
    noise = uniform(
      [height, width, 3], tf.stack([index, split_seed]), maxval=128
    )
    return {
      "image": tf.cast(colour + noise, tf.uint8),
      "labels": tf.cast(label, tf.int32)[None],
    }

  what = f"fake:{argument} {name} ".encode() + positions.tobytes()
  return Source(
    spec=f"fake:{argument}",
    split=split,
    num_examples=len(positions),
    class_names=tuple(f"class_{i}" for i in range(num_classes)),
    digest=hashlib.sha256(what).hexdigest(),
    parse=parse,
    name_of=lambda index: f"fake: image {positions[index]} of {name}",
  )


def split_names(argument: str, data_dir: str) -> tuple[str, ...]:
  """One of the names, as any will do."""
  del argument, data_dir
  return ("train",)
