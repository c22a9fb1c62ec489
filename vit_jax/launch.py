"""How every command starts and ends: flags, logging, signals, exit status.

Exit status: 0 done, or nothing left to do; 2 refused (config, data, guard);
3 a loss or a gradient that is not finite; 143 saved after SIGTERM.
"""

import contextlib
import logging
import os
import pathlib
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import tensorflow as tf
from absl import app, flags
from absl import logging as absl_logging
from etils import epath
from ml_collections import config_flags

import input_pipeline

REFUSED, NOT_FINITE, TERMINATED = 2, 3, 143

log = logging.getLogger("vit_jax")


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
  """Latches SIGTERM while a run is in its block, instead of dying of it."""

  def __enter__(self) -> "Terminator":
    self._came = False
    self._previous = signal.signal(signal.SIGTERM, self._handle)
    return self

  def __exit__(self, *_) -> None:
    signal.signal(signal.SIGTERM, self._previous)

  def _handle(self, number: int, frame: types.FrameType | None) -> None:
    self._came = True

  def came(self) -> bool:
    """Whether SIGTERM has come; once true, always true."""
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


def start(command: Callable[[list[str]], Any], *, words: str = "") -> None:
  """Runs `command(words)` as the program and exits with its status.

  Args:
    command: takes the words that stand beside the flags. Its own flags are
      defined before, by absl.
    words: what these words are ("IMAGE …"); "" where there may be none.
  """

  cache = flags.DEFINE_string(
    "compilation_cache",
    os.path.join(
      os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"),
      "vit_jax",
    ),
    'Where compiled programs are kept for the next start; "" keeps none.',
  )

  def main(argv):
    if "config" in flags.FLAGS and flags.FLAGS["config"].value is None:
      raise Refused("Say what to run: --config=configs/digits.py")
    if bool(argv[1:]) != bool(words):
      raise Refused(
        f"Say which: {words}"
        if words
        else f"Unexpected {argv[1]!r}: flags are written --name=value."
      )
    _set_up(cache.value)
    command(argv[1:])

  app.run(lambda argv: _exit_status(lambda: main(argv)), flags_parser=_parse)


def make_workdir(workdir: str) -> epath.Path:
  """Makes a workdir; a relative one lies under where the user is now.

  Raises:
    ValueError: none given.
  """
  if not workdir:
    raise ValueError("Say where the run lives: --workdir=runs/name")
  path = absolute(workdir)
  path.mkdir(parents=True, exist_ok=True)
  return path


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
    _fail(TERMINATED, error)


def _fail(status, error):
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


def _set_up(cache):
  debug = flags.FLAGS.verbosity > 0  # --verbosity=1 shows where it refused.
  if not debug:
    absl_logging.set_verbosity(absl_logging.ERROR)  # Orbax warns of too much.
  handler = logging.StreamHandler()
  handler.setFormatter(logging.Formatter("%(message)s"))
  for ours in (log, logging.getLogger("input_pipeline")):
    ours.handlers, ours.propagate = [handler], False
    ours.setLevel(logging.DEBUG if debug else logging.INFO)
  tf.config.set_visible_devices([], "GPU")  # They are JAX's.
  if not cache:
    return
  try:
    pathlib.Path(cache).mkdir(parents=True, exist_ok=True)
  except OSError as error:
    log.warning("Compiled programs are not kept: %s", error)
    return
  jax.config.update("jax_compilation_cache_dir", cache)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
