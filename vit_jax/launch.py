"""How every command starts and ends: flags, logging, signals, exit status.

Exit status: 0 done, or nothing left to do; 2 refused (config, data, guard);
3 a loss or a gradient that is not finite; 75 another process of the run is
gone; 143 saved after SIGTERM. Of several processes all end with the same one.
"""

import contextlib
import importlib
import itertools
import logging
import os
import secrets
import signal
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import tensorflow as tf
from absl import app, flags
from absl import logging as absl_logging
from etils import epath
from jax.experimental import multihost_utils
from ml_collections import config_flags

import input_pipeline
from vit_jax import files, hosts

REFUSED, NOT_FINITE, TERMINATED = 2, 3, 143

log = logging.getLogger("vit_jax")

_polls = itertools.count(1)  # How often all processes have asked to stop.


class Refused(ValueError):
  """The user asked for what cannot be: a message, not a stack trace."""


class Terminated(Exception):
  """SIGTERM came, and the state is saved."""


@contextlib.contextmanager
def refusal() -> Iterator[None]:
  """Turns the errors of checking config, data and guard into `Refused`."""
  try:
    yield
  except (ValueError, TypeError, OSError, ImportError) as error:
    raise Refused(str(error)) from error


class Terminator:
  """Latches SIGTERM while a run is in its block, instead of dying of it.

  Where there are several processes JAX latches the signal that any of them
  gets, and names the poll at which all of them are to stop: the same one, as
  all poll equally often.
  """

  def __enter__(self) -> "Terminator":
    self._came = False
    if not hosts.several():
      self._previous = signal.signal(signal.SIGTERM, self._handle)
    return self

  def __exit__(self, *_) -> None:
    if not hosts.several():
      signal.signal(signal.SIGTERM, self._previous)

  def _handle(self, number: int, frame: types.FrameType | None) -> None:
    self._came = True

  def came(self) -> bool:
    """Whether SIGTERM has come; once true, always true.

    With several processes every one must call it at the same places.
    """
    if hosts.several() and not self._came:
      self._came = multihost_utils.reached_preemption_sync_point(next(_polls))
    return self._came


def config_flag() -> flags.FlagHolder:
  """Defines `--config=FILE[:ARG]` and its overrides for a command."""
  return config_flags.DEFINE_config_file(
    "config", None, "A recipe and what to change in it.", lock_config=True
  )


def checkpoint_flags() -> tuple[flags.FlagHolder, ...]:
  """Defines `--checkpoint`, `--step` and `--weights` for a command."""
  return (
    flags.DEFINE_string(
      "checkpoint", "", "A workdir, its checkpoints, or one step's directory."
    ),
    flags.DEFINE_string("step", "latest", '"latest", "best" or a number.'),
    flags.DEFINE_enum(
      "weights", "", ["", "params", "ema"], '"": ema where the run kept it.'
    ),
  )


def start(
  command: Callable[[list[str]], Any],
  *,
  words: str = "",
  many_hosts: bool = False,
) -> None:
  """Runs `command(words)` as the program and exits with its status.

  Args:
    command: takes the words that stand beside the flags. Its own flags are
      defined before, by absl.
    words: what these words are ("IMAGE …"); "" where there may be none.
    many_hosts: it can share its work with processes on other hosts.
  """

  cache = flags.DEFINE_string(
    "compilation_cache",
    os.path.join(
      os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"),
      "vit_jax",
    ),
    'Where compiled programs are kept for the next start; "" keeps none.',
  )

  joining = _host_flags() if many_hosts else ()

  def main(argv):
    if "config" in flags.FLAGS and flags.FLAGS["config"].value is None:
      raise Refused("Say what to run: --config=configs/digits.py")
    if bool(argv[1:]) != bool(words):
      raise Refused(
        f"Say which: {words}"
        if words
        else f"Unexpected {argv[1]!r}: flags are written --name=value."
      )
    _set_up_logging()
    if many_hosts:
      with refusal():
        hosts.connect(*(flag.value for flag in joining))
      _set_up_logging()  # Who this process is, is known only now.
    _set_up(cache.value)
    command(argv[1:])
    hosts.leave()

  app.run(lambda argv: _exit_status(lambda: main(argv)), flags_parser=_parse)


def _host_flags():
  return (
    flags.DEFINE_string(
      "coordinator_address", "", "HOST:PORT of process 0, where it listens."
    ),
    flags.DEFINE_integer("num_processes", 0, "Processes of the run."),
    flags.DEFINE_integer("process_id", -1, "Number of this process, from 0."),
    flags.DEFINE_boolean(
      "detect_processes",
      True,
      "Ask Cloud TPU, GKE, Slurm or MPI for the other processes.",
    ),
  )


def make_workdir(workdir: str) -> epath.Path:
  """Makes a workdir; a relative one lies under where the user is now.

  Raises:
    ValueError: none given; a bucket that cannot be written to; the processes of
      the run do not share it.
  """
  if not workdir:
    raise ValueError("Say where the run lives: --workdir=runs/name")
  path = absolute(workdir)
  try:
    if str(path).startswith("gs://"):
      # Orbax would look for them in the middle of the first save.
      for package in ("storage", "storage_control_v2"):
        importlib.import_module(f"google.cloud.{package}")
    path.mkdir(parents=True, exist_ok=True)
  except ImportError as error:
    raise ValueError(
      f"--workdir={path}: checkpoints in a bucket need two packages more: "
      f"pip install 'vit-jax[gcs]' ({error})"
    ) from error
  except tf.errors.OpError as error:
    raise ValueError(f"--workdir={path}: {error.message}") from error
  _check_shared(path)
  return path


def _check_shared(path):
  """Lets process 0 write a word that all must find."""
  if not hosts.several():
    return
  mark = files.join(path, ".shared")

  def write():
    word = secrets.token_hex(8)
    files.write(mark, word)
    return [str(path), word]

  theirs, word = hosts.from_first("the workdir", write)
  for _ in range(10):  # Network disks may be a few seconds behind.
    if files.read(mark) == word:
      break
    time.sleep(1)
  else:
    raise ValueError(
      f"The workdir is not shared: what {hosts.name(0)} wrote in {theirs} is "
      f"not in {path} of {hosts.name()}. All processes need one directory: "
      "--workdir=gs://BUCKET/NAME, or a network disk."
    )
  hosts.barrier("the workdir")
  if hosts.first():
    files.remove(mark)


def absolute(path: str) -> epath.Path:
  """Returns a path that means the same wherever the program goes."""
  return epath.Path(path if "://" in path else os.path.abspath(path))


def _exit_status(main):
  try:
    main()
  except (Refused, input_pipeline.DataError) as error:
    log.debug("Refused here:", exc_info=True)
    _fail(REFUSED, error)
  except FloatingPointError as error:
    _fail(NOT_FINITE, error)
  except Terminated as error:
    hosts.leave()  # All processes come here together.
    _fail(TERMINATED, error)
  except (Exception, KeyboardInterrupt) as error:
    if not hosts.several():
      raise
    traceback.print_exc()
    if isinstance(error, jax.errors.JaxRuntimeError):
      hosts.suspect()
    _fail(1, f"{type(error).__name__}: {error}")


def _fail(status, error):
  if hosts.several():
    hosts.stop(status, f"{error}")
  print(f"{error}", file=sys.stderr, flush=True)
  sys.exit(status)


def _parse(argv):
  try:
    with warnings.catch_warnings():
      # How ml_collections loads a config file is not ours to mend.
      warnings.filterwarnings("ignore", "the load_module", DeprecationWarning)
      return flags.FLAGS(argv)
  except (KeyError, AttributeError) as error:
    _fail(REFUSED, f"There is no such config key: {error.args[0]}")
  except (flags.Error, ValueError, TypeError, OSError) as error:
    # absl and ml_collections raise all of these for a flag that cannot be.
    _fail(REFUSED, error)


def _set_up_logging():
  debug = flags.FLAGS.verbosity > 0  # --verbosity=1 shows where it refused.
  if not debug:
    absl_logging.set_verbosity(absl_logging.ERROR)  # Orbax warns of too much.
  level = logging.INFO if hosts.first() else logging.WARNING
  who = "" if hosts.first() else f"{hosts.name()}: "
  handler = logging.StreamHandler()
  handler.setFormatter(logging.Formatter(f"{who}%(message)s"))
  for ours in (log, logging.getLogger("input_pipeline")):
    ours.handlers, ours.propagate = [handler], False
    ours.setLevel(logging.DEBUG if debug else level)


def _set_up(cache):
  tf.config.set_visible_devices([], "GPU")  # They are JAX's.
  if not cache:
    return
  try:
    absolute(cache).mkdir(parents=True, exist_ok=True)
  except OSError as error:
    log.warning("Compiled programs are not kept: %s", error)
    return
  jax.config.update("jax_compilation_cache_dir", cache)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
