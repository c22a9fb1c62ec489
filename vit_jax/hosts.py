"""The processes of a run: how they meet, agree, and stop together.

Large machines run one process on each host. What they tell each other goes
through the key-value store of JAX's coordination service, which lives in
process 0 and needs no devices: it works before anything is compiled, and while
the devices hang. With a single process every function here returns at once.
"""

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import distributed

from vit_jax import watch
from vit_jax.watch import LOST, client, first, name, several

# What the rest of the package asks about processes, it asks here.
__all__ = [
  "LOST",
  "agree",
  "barrier",
  "connect",
  "first",
  "from_first",
  "gather",
  "leave",
  "name",
  "several",
  "stop",
  "suspect",
]

log = logging.getLogger("vit_jax")

_PATIENCE = 300.0  # Seconds in which all processes must have started.
_WAIT = 1800.0  # For another's answer; a start reads data, but not for hours.
_SUSPECTED = 10.0  # The same once the devices report a broken connection.
_LINGER = 4 * watch.BEAT  # So that all have heard, before the store disappears.

_numbers = itertools.count()  # Of conversations: the same in every process.
_watch: "watch.Watch | None" = None


def connect(
  address: str = "", count: int = 0, index: int = -1, detect: bool = True
) -> None:
  """Joins the processes of a run, if there are several.

  Args:
    address: HOST:PORT on which process 0 listens, with `count` and `index`.
    count: number of processes.
    index: of this one.
    detect: without these three, ask the machine: Cloud TPU, GKE, Slurm, MPI.
      Where it knows of no others nothing is started.

  Raises:
    ValueError: one or two of the three are missing; they do not fit together.
  """
  given = [bool(address), count > 0, index >= 0]
  if any(given) and not all(given):
    raise ValueError(
      f"--coordinator_address={address!r}, --num_processes={count}, "
      f"--process_id={index}: give all three, or none where the machine knows "
      "(Cloud TPU, GKE, Slurm, MPI)."
    )
  if all(given) and index >= count:
    raise ValueError(
      f"--process_id={index} of --num_processes={count}: ids are 0 to "
      f"{count - 1}."
    )
  if all(given) and not address.rpartition(":")[2].isdecimal():
    raise ValueError(
      f"--coordinator_address={address!r} has no port; write HOST:PORT."
    )
  if not all(given) and not (detect and _in_cluster()):
    return
  timeouts: dict[str, Any] = {
    # Ours come first, with words of ours.
    "initialization_timeout": int(_PATIENCE + 60),
    "heartbeat_timeout_seconds": int(watch.SILENCE + 20),
  }
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  with _patience(address):
    if all(given):
      jax.distributed.initialize(
        address, count, index, cluster_detection_method="deactivate", **timeouts
      )
    else:
      jax.distributed.initialize(**timeouts)
  global _watch
  if several():
    watch.delay_abort()
    _watch = watch.Watch()
    _watch.start()


def _in_cluster():
  """Whether this process has others beside it, as far as its machine says."""

  def number(name):
    return int(os.environ.get(name) or 1)

  # JAX names this platform itself where it finds chips and their library.
  platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
  on_tpu = "tpu" in (platforms or "")
  by_srun = "SLURM_STEP_NODELIST" in os.environ and number("SLURM_NTASKS") > 1
  return on_tpu or by_srun or number("OMPI_COMM_WORLD_SIZE") > 1


class _patience:
  """Says what a start is waiting for, and ends it with words."""

  def __init__(self, address):
    where = f" at {address}" if address else ""
    self._timers = [
      threading.Timer(
        15.0, lambda: log.warning("Waiting for the other processes%s.", where)
      ),
      threading.Timer(
        _PATIENCE,
        lambda: watch.end(
          watch.LOST,
          f"Not all processes have met{where} within {_PATIENCE:.0f} s. Does "
          "each run, with the same address and number of processes, and can it "
          "reach that port? For one process alone: --detect_processes=False.",
        ),
      ),
    ]

  def __enter__(self):
    for timer in self._timers:
      timer.daemon = True
      timer.start()

  def __exit__(self, *_):
    for timer in self._timers:
      timer.cancel()


def from_first(what: str, make: Callable[[], Any]) -> Any:
  """Returns process 0's value on every process.

  Args:
    what: names it, should it never come.
    make: called in process 0 alone; gives JSON values.

  Raises:
    ValueError: process 0 did not answer.
  """
  if not several():
    return make()
  key = f"vit_jax/{next(_numbers)}/{what}"
  if first():
    value = make()
    client().key_value_set(key, json.dumps(value))
    return value
  return json.loads(_get(key, what, 0))


def gather(what: str, value: Any) -> list[Any]:
  """Returns every process's value, in their order; JSON values."""
  if not several():
    return [value]
  key = f"vit_jax/{next(_numbers)}/{what}"
  client().key_value_set(
    f"{key}/{distributed.global_state.process_id}", json.dumps(value)
  )
  count = distributed.global_state.num_processes
  return from_first(
    what,
    lambda: [
      json.loads(_get(f"{key}/{index}", what, index)) for index in range(count)
    ],
  )


def agree(
  what: str, value: Any, differences: Callable[[Any, Any], Sequence[str]]
) -> None:
  """Refuses to go on where a process has another value than process 0.

  Args:
    what: the value's name, for the message.
    value: JSON.
    differences: (process 0's, ours) -> what to say of two values that differ.

  Raises:
    ValueError: names both processes and what differs.
  """
  theirs = from_first(what, lambda: value)
  if theirs != value:
    raise ValueError(
      f"The processes do not agree on {what}. {name()} differs from "
      f"{name(0)}:\n  " + "\n  ".join(differences(theirs, value))
    )


def barrier(what: str) -> None:
  """Waits until every process is here."""
  gather(what, None)


def _get(key, what, index):
  try:
    return client().blocking_key_value_get(key, int(_WAIT * 1000))
  except jax.errors.JaxRuntimeError as error:
    raise ValueError(
      f"{name(index)} did not answer ({what}): {error}"
    ) from error


def suspect() -> None:
  """Waits for news, as a broken connection says that a process is gone.

  Returns only if none is.
  """
  if _watch:
    _watch.silence = _SUSPECTED
    if _watch.heard.wait(_SUSPECTED + 10 * watch.BEAT):
      time.sleep(10 * watch.BEAT)  # The watch is about to end this process.


def stop(status: int, text: str) -> None:
  """Ends every process of the run because this one cannot go on.

  Args:
    status: exit status, of all of them.
    text: why; is printed by every one.
  """
  if _watch:
    _watch.tell(status, f"{name()}: {text}")
    time.sleep(_LINGER)
  watch.end(status, text)


def leave() -> None:
  """Parts from the others at the end of a run."""
  global _watch
  if not several():
    return
  barrier("the end")
  if _watch:
    _watch.close()
    _watch = None
  jax.distributed.shutdown()
