"""What a run tells people: metrics files, progress, throughput, summary.

Row s of `metrics.jsonl` says what was true after s updates: the loss of batch
s - 1, the learning rate that made the update, and the evaluations of step s. A
row is on disk before the checkpoint of its step, so a resumed run writes the
very rows of an uninterrupted one. Only process 0 writes and prints.
"""

import contextlib
import datetime
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
from clu import metric_writers
from etils import epath
from rich import progress as bars

from vit_jax import files, hosts

Row = dict[str, Any]

_OFTEN = 30.0  # Seconds; a bucket takes a file only as a whole, so not oftener.


class Metrics:
  """The metrics of a workdir: `metrics.jsonl` and TensorBoard events.

  A context manager; all rows are on disk when it is left.

  Attributes:
    final: evaluation value -> {"value", "step"} of the newest.
    best: the same for the best: highest, or lowest where it ends in "loss".
  """

  def __init__(self, workdir: epath.PathLike, start: int):
    """Opens the files at step `start` and cuts the rows of a lost future."""
    self._path = files.join(workdir, "metrics.jsonl")
    self._remote = files.is_remote(self._path)
    self._active = hosts.first()
    self._last: Row = {"step": -1}
    self.final: dict[str, Row] = {}
    self.best: dict[str, Row] = {}
    self._lines: list[str] = []  # Of a file in a bucket, as it is to be.
    self._written = time.monotonic()
    if self._active:
      rows = [row for row in _read(self._path) if row["step"] <= start]
      for row in rows:
        self._note(row)
      self._lines = [_line(row) for row in rows]
      files.write(self._path, "".join(self._lines))
      self._events = metric_writers.SummaryWriter(str(workdir))
    # What is evaluated again depends on it, so all must see the same.
    self._last, self.final, self.best = hosts.from_first(
      "metrics.jsonl", lambda: (self._last, self.final, self.best)
    )

  def at(self, step: int) -> Row:
    """Returns the values that the newest row has, if it is `step`'s."""
    return self._last if self._last["step"] == step else {}

  def write(self, step: int, values: dict[str, float]) -> None:
    """Records values of a step, joining those that its row already has."""
    joined = self.at(step)
    self._note({"step": step} | joined | values)
    if not self._active:
      return
    self._events.write_scalars(step, values)
    if self._remote:
      self._lines[len(self._lines) - bool(joined) :] = [_line(self._last)]
      if time.monotonic() - self._written > _OFTEN:
        self.sync()
      return
    if joined:
      rows = [*_read(self._path)[:-1], self._last]
      files.write(self._path, "".join(map(_line, rows)))
    else:
      with open(self._path, "a") as file:
        file.write(_line(self._last))
    self._events.flush()

  def _note(self, row):
    self._last = row
    for name, value in row.items():
      if name == "step" or name.startswith("train/") or name.endswith("/n"):
        continue
      self.final[name] = {"value": value, "step": row["step"]}
      best = self.best.setdefault(name, self.final[name])
      if score(name, value) > score(name, best["value"]):
        self.best[name] = self.final[name]

  def __enter__(self) -> "Metrics":
    return self

  def __exit__(self, *_) -> None:
    self.sync()

  def sync(self) -> None:
    """Makes sure that the rows outlive the machine, as a checkpoint does."""
    if not self._active:
      return
    if self._remote:
      files.write(self._path, "".join(self._lines))
      self._events.flush()
      self._written = time.monotonic()
    else:
      with open(self._path, "a") as file:
        files.sync(file)


def score(name: str, value: float) -> float:
  """Returns how good an evaluation value is: higher is better.

  Names that end in "loss" count downwards; what is not finite is worst. Where
  two are equal the earlier step is the best one.
  """
  if not math.isfinite(value):
    return -math.inf
  return -value if name.endswith("loss") else value


def _read(path):
  rows = []
  for line in files.read(path).splitlines():
    try:
      rows.append(json.loads(line))
    except json.JSONDecodeError:
      break  # A line cut short by a kill; it will be written again.
  return rows


def _line(row):
  return json.dumps(row) + "\n"


class Progress:
  """A bar on a terminal, plain lines elsewhere; measures throughput.

  Time spent `aside` (evaluating, saving) and the first update, which compiles,
  do not count.
  """

  def __init__(self, start: int, total: int, batch_size: int):
    """Starts at `start` updates done of `total`, `batch_size` images each."""
    self._total, self._batch_size = total, batch_size
    self._step = start
    self._began: tuple[int, float] | None = None
    self._mark: tuple[int, float] | None = None
    self._aside = 0.0
    self._rate = 0.0
    self._accuracy = ""
    self._bar = None
    if sys.stdout.isatty() and hosts.first():
      self._bar = bars.Progress(
        bars.BarColumn(bar_width=24), bars.TextColumn("{task.description}")
      )
      self._task = self._bar.add_task("compiling", total=total, completed=start)

  def __enter__(self) -> "Progress":
    if self._bar:
      self._bar.start()
    return self

  def __exit__(self, *_) -> None:
    if self._bar:
      self._bar.stop()

  @contextlib.contextmanager
  def aside(self) -> Iterator[None]:
    """Wraps what is not training."""
    began = time.perf_counter()
    yield
    self._aside += time.perf_counter() - began

  def evaluated(self, values: dict[str, float]) -> None:
    """Shows the newest accuracies from now on."""
    shown = [
      f"  {name} {value:.2%}"
      for name, value in values.items()
      if name.endswith("/top1")
    ]
    self._accuracy = "".join(shown) or self._accuracy

  def updated(self, step: int, loss: float) -> None:
    """Notes that update `step` is done, with the loss of its batch."""
    now = time.perf_counter() - self._aside
    self._step = step
    self._began = self._began or (step, now)
    self._mark = self._mark or (step, now)
    if self._bar:
      self._bar.update(self._task, completed=step, description=self._text(loss))

  def rate(self) -> float:
    """Returns the images per second since the last call."""
    now = time.perf_counter() - self._aside
    step, since = self._mark or (self._step, now)
    if self._step > step:
      self._rate = (self._step - step) * self._batch_size / (now - since)
    self._mark = (self._step, now)
    return self._rate

  def line(self, loss: float) -> None:
    """Prints the state as a line, where there is no bar."""
    if not self._bar and hosts.first():
      print(self._text(loss), flush=True)

  def _text(self, loss):
    step, since = self._began or (self._step, 0.0)
    now = time.perf_counter() - self._aside
    eta = (self._total - self._step) * (now - since) / max(self._step - step, 1)
    return (
      f"step {self._step}/{self._total}  loss {loss:.4f}{self._accuracy}  "
      f"{self._rate:.0f} images/s  "
      f"eta {datetime.timedelta(seconds=round(eta))}"
    )


class Profiler:
  """Traces the updates START:STOP of a run for TensorBoard's profiler.

  Process 0 traces its own devices; the others do the same work.
  """

  def __init__(self, window: str, workdir: epath.PathLike):
    """Takes `config.profile`; "" is off.

    Raises:
      ValueError: not "START:STOP" with START < STOP.
    """
    start, _, stop = window.partition(":")
    self._window = range(0)
    if window:
      if not (
        start.isdecimal() and stop.isdecimal() and int(start) < int(stop)
      ):
        raise ValueError(
          f'config.profile = {window!r}: write "START:STOP", the updates to '
          'trace, such as "100:105"; "" is off.'
        )
      self._window = range(int(start), int(stop)) if hosts.first() else range(0)
    self._workdir = str(workdir)
    self._directory = ""  # Where the trace is written, while there is one.

  def before(self, step: int) -> None:
    """Starts or stops the trace, as update `step` is about to be made."""
    if step in self._window and not self._directory:
      # The profiler writes to disks only.
      remote = files.is_remote(self._workdir)
      self._directory = tempfile.mkdtemp() if remote else self._workdir
      jax.profiler.start_trace(self._directory)
    elif step not in self._window:
      self.close()

  def close(self) -> None:
    """Ends a trace that is still open."""
    if not self._directory:
      return
    jax.profiler.stop_trace()
    if self._directory != self._workdir:
      files.copy_tree(self._directory, self._workdir)
      shutil.rmtree(self._directory)
    self._directory = ""

  def __enter__(self) -> "Profiler":
    return self

  def __exit__(self, *_) -> None:
    self.close()


def finish(
  workdir: epath.PathLike, total: int, metrics: Metrics, seconds: float
) -> None:
  """Writes summary.json, and says what came out and what to type next.

  Args:
    workdir: of the run.
    total: updates done.
    metrics: of the run.
    seconds: that this start took.
  """
  if not hosts.first():
    return
  summary = {
    "status": "done",
    "step": total,
    "final": metrics.final,
    "best": metrics.best,
    "wall_seconds": round(seconds, 1),
  }
  files.write(
    files.join(workdir, "summary.json"), json.dumps(summary, indent=2) + "\n"
  )
  print(f"\nDone: {total} updates; this start took {seconds:.0f} s.")
  for name, final in metrics.final.items():
    best = metrics.best[name]
    style = ".2%" if "/top" in name else ".4f"
    print(
      f"  {name:12} final {final['value']:{style}}   "
      f"best {best['value']:{style}} at step {best['step']}"
    )
  print(
    f"In {workdir}: checkpoints/, metrics.jsonl, config.json, summary.json\n"
    "Next:\n"
    f"  tensorboard --logdir={workdir}\n"
    f"  python -m vit_jax.predict --checkpoint={workdir} IMAGE …\n"
    "  python -m vit_jax.main --config=configs/digits.py --workdir=runs/mine "
    "--config.input.source=folder:PATH --config.image_size=64 "
    "--config.model.name=mu/8",
    flush=True,
  )
