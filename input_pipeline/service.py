"""Images prepared on other machines, by a tf.data service (see `serve`).

Every worker walks the tickets of a training process and prepares each w-th
batch of them. Batches carry their number, the workers are asked in turn, and
the client puts the batches in order, so the stream is the one that it would be
without the service.
"""

import re
import socket
import uuid
from collections.abc import Iterator

import tensorflow as tf

from input_pipeline.errors import DataError
from input_pipeline.loading import Batch, LoadChunk, Traced
from input_pipeline.sources import Source

# Workers are asked in turn, so nothing is further ahead than their number.
_MOST_AHEAD = 256
_PATIENCE = 5  # Seconds.


def share_out(
  tickets: tf.data.Dataset, size: int, load_chunk: LoadChunk
) -> tuple[tf.data.Dataset, LoadChunk]:
  """One worker's share of the tickets, in whole batches that are numbered.

  Args:
    tickets: one by one.
    size: examples in a batch.
    load_chunk: tickets -> entries.

  Returns:
    Tickets led by the number of their batch, and what makes entries of them
    that carry the number, too.
  """
  hint = tf.data.experimental.SHARD_HINT  # The worker fills in which it is.
  batches = tickets.batch(size, drop_remainder=True).enumerate()

  def number_each(number, ticket):
    return (tf.fill([size], number), *ticket)

  def load_numbered(numbers, *tickets):
    return load_chunk(*tickets) | {"number": numbers}

  return batches.shard(hint, hint).map(number_each).unbatch(), load_numbered


def check(address: str, example: Traced, source: Source) -> None:
  """Refuses a service that is not there, and what it could not run.

  Raises:
    ValueError: names the address, or the source.
  """
  match = re.fullmatch(r"grpc://(.+):(\d+)", address)
  if not match:
    raise ValueError(f"service is {address!r}, but must be grpc://HOST:PORT.")
  try:
    socket.create_connection((match[1], int(match[2])), _PATIENCE).close()
  except OSError as error:  # TensorFlow would wait without end.
    raise ValueError(
      f"No tf.data service answers at {address} ({error}): start one, see "
      "python -m input_pipeline.serve."
    ) from None
  graph = example.graph.as_graph_def()
  nodes = [
    *graph.node,
    *(n for f in graph.library.function for n in f.node_def),
  ]
  if any("PyFunc" in node.op for node in nodes):
    raise ValueError(
      f"{source.spec} is read by Python code, which a tf.data service cannot "
      "run: leave service empty, or store the data as TFRecords."
    )


def distribute(dataset: tf.data.Dataset, address: str) -> tf.data.Dataset:
  """Lets the service's workers run a data set that was shared out.

  Args:
    dataset: made of the tickets of `share_out`.
    address: of the dispatcher, "grpc://HOST:PORT".
  """
  service = tf.data.experimental.service
  return dataset.apply(
    service.distribute(
      service.ShardingPolicy.HINT,
      service=address,
      # A name of its own: a run that starts again starts a stream again.
      job_name=uuid.uuid4().hex,
      # As the only one of several consumers, we are served strictly in turn.
      consumer_index=0,
      num_consumers=1,
      compression=None,
    )
  )


def in_order(batches: Iterator[Batch], address: str) -> Iterator[Batch]:
  """Sorts batches by their number.

  Raises:
    DataError: from the iterator, if a batch does not come.
  """
  ahead: dict[int, Batch] = {}
  expected = 0
  for batch in batches:
    ahead[int(batch.pop("number")[0])] = batch
    while expected in ahead:
      yield ahead.pop(expected)
      expected += 1
    if len(ahead) > _MOST_AHEAD:
      raise DataError(
        f"The tf.data service at {address} has delivered {len(ahead)} batches "
        f"that follow batch {expected}, but not that one: a worker was lost or "
        "started anew. Start the run again."
      )
