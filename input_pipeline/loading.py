"""From tickets to batches: which example comes next is decided elsewhere.

A ticket is an example's index, the seed of its random ops and, where records
have to be read in order, the record. Examples are loaded and transformed in
parallel, keep their order, and are stacked to numpy batches. What cannot be
read is an error that names the file.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from input_pipeline import records
from input_pipeline.errors import DataError
from input_pipeline.ops import parse_ops
from input_pipeline.sources import Features, Source

Batch = dict[str, np.ndarray]
Ops = str | Callable[[Features], Features]
Example = Callable[..., Features]
LoadChunk = Callable[..., Features]
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
    raise DataError(f"{path}: {reason(error)}") from None


def entry_of(source: Source, ops: Ops, max_labels: int) -> Example:
  """Ticket -> one entry of a batch; plain TensorFlow code."""
  finish = finisher(ops, max_labels)

  def example(index: tf.Tensor, seed: tf.Tensor, *record: tf.Tensor):
    return finish(source.parse(index, *record), index, seed)

  return example


def finisher(ops: Ops, max_labels: int) -> Example:
  """(features, index, seed) -> one entry of a batch."""
  ops = parse_ops(ops) if isinstance(ops, str) else ops

  def finish(features: Features, index: tf.Tensor, seed: tf.Tensor):
    features = ops(features | {"seed": seed})
    return {
      "image": features["image"],
      "labels": _pad_labels(features["labels"], max_labels),
      "mask": tf.constant(1.0),
      "id": index,
    }

  return finish


def _pad_labels(labels: tf.Tensor, width: int) -> tf.Tensor:
  """Fills up with -1 to `width`, or to what a source always has if more."""
  size = labels.shape[0]
  checks = []
  if size is not None:
    width = max(size, width)
  else:
    size = tf.size(labels)
    counts = tf.strings.as_string(size)
    text = tf.strings.join(
      [f"max_labels is {width}, but the example has ", counts, " labels"]
    )
    checks = [tf.debugging.Assert(size <= width, [text])]
  with tf.control_dependencies(checks):
    labels = tf.pad(labels, [[0, width - size]], constant_values=-1)
  return tf.ensure_shape(labels, [width])


def filler_like(like: Features) -> Features:
  """An entry that does not count, of the shapes and types of `like`."""
  filler = {"image": 0, "labels": -1, "mask": 0, "id": PADDING}
  return {
    key: tf.fill(value.shape, tf.cast(filler[key], value.dtype))
    for key, value in like.items()
  }


def trace(example: Example, tickets: tf.data.Dataset) -> Traced:
  """Makes TensorFlow code a graph."""
  function = tf.function(example, autograph=False)
  return function.get_concrete_function(*tickets.element_spec)


def trace_checked(
  example: Example, tickets: tf.data.Dataset, ops: Ops
) -> Traced:
  """Traces `example` and checks that entries can be stacked into a batch."""
  traced = trace(example, tickets)
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


def one_by_one(example: Traced) -> LoadChunk:
  """Chunk of tickets -> entries, stacked."""
  signature = {
    key: tf.TensorSpec(value.shape, value.dtype)
    for key, value in example.structured_outputs.items()
  }

  def load_chunk(*tickets: tf.Tensor) -> Features:
    return tf.map_fn(
      lambda ticket: example(*ticket),
      tickets,
      fn_output_signature=signature,
      parallel_iterations=1,
    )

  return load_chunk


def load(
  tickets: tf.data.Dataset,
  load_chunk: LoadChunk,
  size: int,
  parallel: int = 0,
) -> tf.data.Dataset:
  """Turns tickets into batches of `size` examples, in parallel.

  Args:
    tickets: one by one; what does not fill a batch is dropped.
    load_chunk: a few tickets, stacked -> as many entries.
    size: examples in a batch.
    parallel: how many chunks to load at once; 0 means as many as this process
      has cores.
  """
  chunk = max(c for c in range(1, _CHUNK + 1) if size % c == 0)

  def from_chunks(batch):
    return {
      key: tf.reshape(value, [size, *value.shape[2:]])
      for key, value in batch.items()
    }

  dataset = tickets.batch(chunk, drop_remainder=True)
  dataset = dataset.map(load_chunk, num_parallel_calls=parallel or _num_cores())
  dataset = dataset.batch(size // chunk, drop_remainder=True).map(from_chunks)
  options = tf.data.Options()
  options.deterministic = True
  # All parallelism and buffers are given; nothing is left to tune, and memory
  # stays at the batches kept ready and one chunk for each core.
  options.autotune.enabled = parallel == tf.data.AUTOTUNE
  return dataset.with_options(options)


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
  example: Example,
  tickets: tf.data.Dataset,
  error: tf.errors.OpError,
) -> DataError:
  """Loads a failed batch again, one by one, to say which example it was."""
  tickets = tickets.filter(lambda index, *_: index != PADDING)
  try:
    ids = [int(index) for index, *_ in tickets]
  except tf.errors.OpError as unread:
    return unreadable(source, unread)
  examples = iter(tickets.map(example))
  for index in ids:
    try:
      next(examples)
    except tf.errors.OpError as found:
      return DataError(f"{source.name_of(index)}: {reason(found)}")
  return DataError(
    f"A batch of {source.spec} {source.split} could not be loaded, but each of "
    "its examples can be now (a failing disk or network?): "
    f"{reason(error)}"
  )


def unreadable(source: Source, error: tf.errors.OpError) -> DataError:
  """Says which file could not be read, and why."""
  path = ""
  if isinstance(error, tf.errors.DataLossError):  # Which does not say where.
    path = records.find_broken(source.pieces)
  return DataError(f"{path or source.spec} cannot be read: {reason(error)}")


def reason(error: Exception) -> str:
  """TensorFlow's message without its own bookkeeping."""
  text = re.sub(
    r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:\w+\]( name:)?"
    r"|Error in user-defined .*? iterator: \S+: ",
    "",
    getattr(error, "message", str(error)),
  )
  # What an Assert says stands at the end, in brackets, or in quotes when eager.
  text = text.split("Summarized data: b")[-1].split("assertion failed: ")[-1]
  return text.strip(" \n\t'\"[]")


def _num_cores() -> int:
  """Cores that this process may use, which in containers is not all."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
