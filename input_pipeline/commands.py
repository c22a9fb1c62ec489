"""How the commands of this package start, show how far they are, and end.

Exit status: 0 all is good, or nothing is left to do; 1 some of the data is bad;
2 refused.
"""

import datetime
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import tensorflow as tf
from absl import app, flags
from rich import console
from rich import progress as bars

from input_pipeline.errors import DataError

BAD, REFUSED = 1, 2

_DRAW_EVERY, _LINE_EVERY = 0.1, 10.0  # Seconds, on a terminal and elsewhere.


def start(command: Callable[..., int], *, words: Sequence[str]) -> None:
  """Runs `command(*words)` as the program and exits with the status it returns.

  Args:
    command: takes as many words as are named. Its flags are defined before, by
      absl; `--a-b` is read as `--a_b`.
    words: what to call them.
  """

  def main(argv):
    try:
      if len(argv) != len(words) + 1:
        raise ValueError(
          f"Say {' '.join(words)} and nothing else beside --flags, not: "
          f"{' '.join(argv[1:]) or 'nothing'}"
        )
      _set_up()
      sys.exit(command(*argv[1:]))
    except DataError as error:
      _fail(BAD, error)
    except (ValueError, OSError, ImportError, tf.errors.OpError) as error:
      _fail(REFUSED, error)

  app.run(main, flags_parser=_parse)


class Progress:
  """Images done so far: a bar on a terminal, else a line now and then.

  Both go to stderr, so that a report on stdout stands alone.
  """

  def __init__(self, total: int, *, show: bool):
    """Counts up to `total` images; says nothing unless `show`."""
    self._total, self._done = total, 0
    self._began = self._said = time.perf_counter()
    self._every = _LINE_EVERY if show else math.inf
    self._bar = None
    if show and sys.stderr.isatty():
      self._every = _DRAW_EVERY
      self._bar = bars.Progress(
        bars.BarColumn(bar_width=24),
        bars.TextColumn("{task.description}"),
        console=console.Console(stderr=True),
      )
      self._task = self._bar.add_task("starting", total=total)

  def __enter__(self) -> "Progress":
    if self._bar:
      self._bar.start()
    return self

  def __exit__(self, *_) -> None:
    if self._bar:
      self._say()
      self._bar.stop()

  def advance(self, count: int = 1) -> None:
    """Notes that `count` more images are done."""
    self._done += count
    if time.perf_counter() - self._said > self._every:
      self._say()

  def _say(self):
    self._said = time.perf_counter()
    rate = max(self._done, 1) / max(self._said - self._began, 1e-3)
    left = datetime.timedelta(seconds=round((self._total - self._done) / rate))
    text = f"{self._done}/{self._total}  {rate:.0f} images/s  eta {left}"
    if self._bar:
      self._bar.update(self._task, completed=self._done, description=text)
    else:
      print(text, file=sys.stderr, flush=True)


def _parse(argv: list[str]) -> list[str]:
  try:
    return flags.FLAGS([_underscored(word) for word in argv])
  except flags.Error as error:
    _fail(REFUSED, error)


def _underscored(word: str) -> str:
  name, equals, value = word.partition("=")
  if name.startswith("--"):
    name = "--" + name[2:].replace("-", "_")
  return name + equals + value


def _set_up() -> None:
  tf.config.set_visible_devices([], "GPU")  # Whoever trains may need it.
  if flags.FLAGS.verbosity <= 0:
    _silence_native_code()
  handler = logging.StreamHandler()
  handler.setFormatter(logging.Formatter("%(message)s"))
  ours = logging.getLogger("input_pipeline")
  ours.handlers, ours.propagate = [handler], False


def _silence_native_code() -> None:
  """Sends to nowhere what decoders print of bad images: we say it better."""
  ours = os.dup(2)
  nowhere = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, 2)
  os.close(nowhere)
  sys.stderr = os.fdopen(ours, "w", buffering=1)


def _fail(status: int, error: Exception) -> NoReturn:
  print(error, file=sys.stderr, flush=True)
  sys.exit(status)
