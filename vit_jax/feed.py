"""Batches on their way to the devices, a few ahead of the step.

Reading, decoding and copying happen on a thread of their own, so the step finds
its batch where it is needed. What is fetched ahead changes nothing but time.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax import sharding

_Batch = dict[str, np.ndarray]
_IN_FLIGHT = 4  # Enough to keep the device busy, bounded in memory.


class Feed:
  """An iterator of global batches as `jax.Array`s; a context manager.

  Leaving the block stops the thread. An error of the source is raised where the
  batch it belongs to would have come.
  """

  def __init__(self, batches: Iterator[_Batch], mesh: Mesh, *, ahead: int):
    """Starts to fetch.

    Args:
      batches: this process's shares; see `sharding.to_device`.
      mesh: from `sharding.make_mesh`.
      ahead: global batches that are on the devices before they are asked for;
        0 fetches each when it is asked for, without a thread.
    """
    self._batches, self._mesh = batches, mesh
    self._ready: queue.Queue[Any] = queue.Queue(max(1, ahead))
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._fetch, daemon=True)
    if ahead:
      self._thread.start()

  def __enter__(self) -> "Feed":
    return self

  def __exit__(self, *_: object) -> None:
    self._stop.set()
    while not self._ready.empty():  # Room for the last put, so that it returns.
      self._ready.get_nowait()
    if self._thread.ident:
      self._thread.join()

  def __iter__(self) -> "Feed":
    return self

  def __next__(self) -> dict[str, jax.Array]:
    if not self._thread.ident:
      return sharding.to_device(next(self._batches), self._mesh)
    item = self._ready.get()
    if isinstance(item, BaseException):
      self._ready.put(item)  # Whoever asks again gets the same answer.
      raise item
    return item

  def _fetch(self):
    try:
      while not self._stop.is_set():
        batch = sharding.to_device(next(self._batches), self._mesh)
        self._put(batch)
    except BaseException as error:  # Also StopIteration: it ends the iterator.
      self._put(error)

  def _put(self, item):
    while not self._stop.is_set():
      try:
        return self._ready.put(item, timeout=0.1)
      except queue.Full:
        continue
    return None


def results(
  compute: Callable[[dict[str, jax.Array]], Any],
  batches: Iterator[_Batch],
  number: int,
  mesh: Mesh,
  *,
  stop: Callable[[], bool],
  waiting: Callable[[], contextlib.AbstractContextManager] = (
    contextlib.nullcontext
  ),
  done: Callable[[], None] = lambda: None,
) -> list[Any] | None:
  """Computes something of each batch, a few of them in flight.

  Args:
    compute: from a global batch to arrays.
    batches: as in `Feed`.
    number: how many of them.
    mesh: from `sharding.make_mesh`.
    stop: asked before each batch.
    waiting: what to be in while a batch is waited for.
    done: called after each batch is handed over.

  Returns:
    What each batch gave, on the host; None as soon as `stop()` is true.
  """
  found: list[Any] = []
  with Feed(batches, mesh, ahead=_IN_FLIGHT) as feed:
    for _ in range(number):
      if stop():
        return None
      with waiting():
        batch = next(feed)
      found.append(compute(batch))
      if len(found) > _IN_FLIGHT:  # The rest moves to the host meanwhile.
        found[-1 - _IN_FLIGHT] = jax.device_get(found[-1 - _IN_FLIGHT])
      done()
  return jax.device_get(found)
