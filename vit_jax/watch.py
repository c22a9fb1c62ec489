"""Who the processes of a run are, and noticing when one of them is gone.

Devices that wait for a lost process wait for ever. So each process gives signs
of life through the key-value store of JAX's coordination service, which lives
in process 0, and ends as soon as another has ended, whatever its devices do.
"""

import ctypes
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn

import jax
from jax._src import distributed  # Orbax takes the client from here, too.

LOST = 75  # Exit status: another process is gone; starting again may help.
BEAT = 1.0  # Seconds between two signs of life.
SILENCE = 30.0  # Without one, after which a process counts as gone.

log = logging.getLogger("vit_jax")


def several() -> bool:
  """Whether the run has more processes than this one."""
  return client() is not None and distributed.global_state.num_processes > 1


def first() -> bool:
  """Whether this is process 0, the one that writes and speaks."""
  return distributed.global_state.process_id == 0


def name(index: int | None = None, patience: float = 5.0) -> str:
  """Returns "process 3 (host name)", of this process by default.

  Another's name is waited for, `patience` seconds.
  """
  if index is None:
    index = distributed.global_state.process_id
    return f"process {index} ({socket.gethostname()})"
  try:
    host = client().blocking_key_value_get(
      f"vit_jax/host/{index}", int(patience * 1000)
    )
  except jax.errors.JaxRuntimeError:
    host = "host unknown"  # It never came so far.
  return f"process {index} ({host})"


def client() -> Any:
  """The store that all processes reach; None with a single one."""
  return distributed.global_state.client


def end(status: int, text: str) -> NoReturn:
  """Ends this process with a last word."""
  sys.stdout.flush()
  print(text, file=sys.stderr, flush=True)
  # Nothing else: threads, destructors and exit handlers may hang with the
  # devices, and all that counts is on disk.
  os._exit(status)


def delay_abort() -> None:
  """Leaves a moment between JAX's decision to abort and the end.

  JAX ends a process that lost the coordination service by `abort`, which no
  Python code can follow. With the C library's `sleep` as the signal's handler
  (it takes the signal's number, 6, as seconds) the watch has time to say whom
  it lost, and to end the process with a status of ours; if it does not, the
  abort goes on.
  """
  libc = ctypes.CDLL(None)
  libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
  libc.signal.restype = ctypes.c_void_p
  libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


class Watch(threading.Thread):
  """Gives signs of life, and ends this process when another has ended.

  Process 0 listens to all and decides; the others hear of it from the store. A
  store that does not answer means that process 0 is gone.
  """

  def __init__(self):
    super().__init__(daemon=True, name="watch")
    self.silence = SILENCE
    self.heard = threading.Event()  # That the processes are to stop.
    self._told = False
    self._closed = threading.Event()
    self._beats = 0
    self._index = distributed.global_state.process_id
    self._count = distributed.global_state.num_processes
    self._store = client()
    began = time.monotonic()
    self._seen = {str(i): ("", began) for i in range(self._count)}
    self._store.key_value_set(
      f"vit_jax/host/{self._index}", socket.gethostname()
    )
    self._first = name(0, patience=60.0)  # Later it is too late to ask.

  def close(self) -> None:
    """Ends the watch, before the processes part."""
    self._closed.set()
    self.join()

  def tell(self, status: int, text: str) -> None:
    """Says for this process why all must stop; who is first is heard.

    The others end at once, and this process when its caller ends it, which
    should leave them the time to hear.
    """
    self._told = self._publish(status, text)

  def _publish(self, status, text):
    try:
      self._store.key_value_set("vit_jax/stop", json.dumps([status, text]))
    except jax.errors.JaxRuntimeError:
      log.debug("Another process said so first, or the store is gone.")
      return False
    return True

  def run(self) -> None:
    """Is the thread's work; see the class."""
    threading.Thread(target=self._notice_hanging, daemon=True).start()
    try:
      while not self._closed.is_set():
        self._store.key_value_set(
          f"vit_jax/beat/{self._index}", str(self._beats), allow_overwrite=True
        )
        if self._index == 0:
          self._look()
        status, text = self._listen()
        if status:
          self.heard.set()
          if self._told or self._index == 0:  # The others hear it first.
            time.sleep(2 * BEAT)
          if not self._told:
            end(status, text)
        self._beats += 1
    except jax.errors.JaxRuntimeError as error:
      self._without_first(str(error).splitlines()[0])

  def _notice_hanging(self):
    """Looks after process 0 where the store neither answers nor refuses.

    A host without power does not; nor does this process's own end of the store
    while an abort is delayed.
    """
    beats, ticks = 0, 0
    while ticks < SILENCE and not self._closed.is_set():
      time.sleep(1.0)
      # Ticks and not the clock: where this thread does not run, nor does that.
      ticks = ticks + 1 if self._beats == beats else 0
      beats = self._beats
      if ticks > 1 and not self._closed.is_set() and not self._door_opens():
        return self._without_first("nobody listens at its address")
    return self._without_first(f"silent for {SILENCE:.0f} s")

  def _door_opens(self):
    address = distributed.global_state.coordinator_address or ""
    host, _, port = address.rpartition(":")
    try:
      socket.create_connection((host.strip("[]"), int(port)), 1.0).close()
    except TimeoutError:
      return True  # Perhaps; then it is its silence that counts.
    except OSError:
      return False
    return True

  def _without_first(self, why):
    if not self._closed.is_set():
      end(
        LOST,
        f"{self._first} is gone: it no longer answers {name()}. "
        f"Start all processes again; they go on from the last checkpoint.\n"
        f"({why})",
      )

  def _look(self):
    """Decides, in process 0, whether another one has been silent too long."""
    now = time.monotonic()
    for key, beat in self._store.key_value_dir_get("vit_jax/beat"):
      index = key.rpartition("/")[2]
      if self._seen[index][0] != beat:
        self._seen[index] = (beat, now)
    for index, (_, since) in self._seen.items():
      if now - since > self.silence:
        self._publish(
          LOST,
          f"{name(int(index))} is gone: no sign of life for "
          f"{now - since:.0f} s. Start all processes again; they go on from "
          "the last checkpoint.",
        )

  def _listen(self):
    try:
      answer = self._store.blocking_key_value_get(
        "vit_jax/stop", int(BEAT * 1000)
      )
    except jax.errors.JaxRuntimeError as error:
      if "DEADLINE_EXCEEDED" not in str(error):
        raise
      return 0, ""
    return json.loads(answer)
