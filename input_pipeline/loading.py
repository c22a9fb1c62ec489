"""From tickets to batches: which example comes next is decided elsewhere.

A ticket is an example's index and the seed of its random ops. Examples are read
and transformed in parallel, keep their order, and are stacked to numpy batches.
What cannot be read is an error that names the file.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from input_pipeline.errors import DataError
from input_pipeline.ops import parse_ops
from input_pipeline.sources import Features, Source

Batch = dict[str, np.ndarray]
Ops = str | Callable[[Features], Features]
Traced: TypeAlias = tf.types.experimental.ConcreteFunction
Explain = Callable[[int, tf.errors.OpError], DataError]

PADDING = -1  # The id of entries that fill up the last batches.

# tf.data takes about 10 us to hand one element from stage to stage, which is
# more than a small image costs. So a few go together.
_CHUNK = 8


def load_image(path: str, ops: Ops) -> np.ndarray:
  """Reads one image file, outside of any source.

  Args:
    path: the file.
    ops: an op string, or what `parse_ops` made of one; nothing random.

  Returns:
    uint8 [h, w, 3].

  Raises:
    DataError: the file cannot be read or decoded; names it and the reason.
  """
  ops = parse_ops(ops) if isinstance(ops, str) else ops
  try:
    features = {
      "image": tf.io.read_file(path),
      "seed": tf.constant(0, tf.int64),
    }
    return ops(features)["image"].numpy()
  except (tf.errors.OpError, ValueError) as error:
    raise DataError(f"{path}: {_reason(error)}") from None


def entry_of(source: Source, ops: Ops) -> Callable[..., Features]:
  """(index, seed) -> one entry of a batch; plain TensorFlow code."""
  ops = parse_ops(ops) if isinstance(ops, str) else ops

  def example(index: tf.Tensor, seed: tf.Tensor) -> Features:
    features = ops(source.parse(index) | {"seed": seed})
    return {
      "image": features["image"],
      "labels": features["labels"],
      "mask": tf.constant(1.0),
      "id": index,
    }

  return example


def filler_like(like: Features) -> Features:
  """An entry that does not count, of the shapes and types of `like`."""
  filler = {"image": 0, "labels": -1, "mask": 0, "id": -1}
  return {
    key: tf.fill(value.shape, tf.cast(filler[key], value.dtype))
    for key, value in like.items()
  }


def trace(example: Callable[..., Features], ops: Ops) -> Traced:
  """Traces `example` and checks that entries can be stacked into a batch."""
  scalar = tf.TensorSpec([], tf.int64)
  function = tf.function(example, autograph=False)
  traced = function.get_concrete_function(scalar, scalar)
  image = traced.structured_outputs["image"]
  text = getattr(ops, "text", ops)
  if image.dtype == tf.string:
    raise ValueError(
      f"The ops {text!r} leave the image encoded: begin with decode or "
      "decode_and_random_crop(SIZE)."
    )
  if image.dtype != tf.uint8:
    raise ValueError(f"The ops {text!r} give {image.dtype.name}, not uint8.")
  if not image.shape.is_fully_defined() or image.shape.rank != 3:
    raise ValueError(
      f"The ops {text!r} give images of different sizes, {image.shape}: add an "
      "op that fixes the size, such as resize(SIZE) or central_crop(SIZE)."
    )
  return traced


def load(
  tickets: tf.data.Dataset, example: Traced, prefetch: int
) -> tf.data.Dataset:
  """Turns batches of (ids, seeds) into batches of examples, in parallel."""
  size = tickets.element_spec[0].shape[0]
  chunk = max(c for c in range(1, _CHUNK + 1) if size % c == 0)
  signature = {
    key: tf.TensorSpec(value.shape, value.dtype)
    for key, value in example.structured_outputs.items()
  }

  def to_chunks(*ticket):
    return tuple(tf.reshape(part, [-1, chunk]) for part in ticket)

  def load(*ticket):
    return tf.map_fn(
      lambda one: example(*one),
      ticket,
      fn_output_signature=signature,
      parallel_iterations=1,
    )

  def from_chunks(batch):
    return {
      key: tf.reshape(value, [size, *value.shape[2:]])
      for key, value in batch.items()
    }

  dataset = tickets.map(to_chunks).unbatch()
  dataset = dataset.map(load, num_parallel_calls=_num_cores())
  dataset = dataset.batch(size // chunk, drop_remainder=True).map(from_chunks)
  options = tf.data.Options()
  options.deterministic = True
  # All parallelism and buffers are given above; nothing is left to tune, and
  # memory stays at `prefetch` batches and one chunk for each core.
  options.autotune.enabled = False
  return dataset.prefetch(prefetch).with_options(options)


def iterate(dataset: tf.data.Dataset, explain: Explain) -> Iterator[Batch]:
  """Numpy batches; a failure is explained by number, as stages keep order."""
  iterator = dataset.as_numpy_iterator()
  for number in itertools.count():
    try:
      batch = next(iterator)
    except StopIteration:
      return
    except tf.errors.OpError as error:
      raise explain(number, error) from None
    yield batch


def find_culprit(
  source: Source,
  example: Callable[..., Features],
  ticket: tuple[tf.Tensor, tf.Tensor],
  error: tf.errors.OpError,
) -> DataError:
  """Loads a failed batch again, one by one, to say which example it was."""
  for index, seed in zip(*ticket):
    if index == PADDING:
      continue
    try:
      example(index, seed)
    except (tf.errors.OpError, ValueError) as found:
      return DataError(f"{source.name_of(int(index))}: {_reason(found)}")
  return DataError(
    f"A batch of {source.spec} {source.split} could not be loaded, but each of "
    f"its examples can be now (a failing disk or network?): {_reason(error)}"
  )


def _reason(error: Exception) -> str:
  """TensorFlow's message without its own bookkeeping."""
  text = re.sub(
    r"\{\{.*?\}\}|\[Op:\w+\]( name:)?",
    "",
    getattr(error, "message", str(error)),
  )
  return text.split("Summarized data: b")[-1].strip(" \n'\"")


def _num_cores() -> int:
  """Cores that this process may use, which in containers is not all."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
