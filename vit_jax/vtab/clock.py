"""Where a sweep's time goes, how far it is, and when it will be done.

On a terminal a bar, elsewhere a line for each unit. Time is charged to one
purpose at a time, so the purposes add up to the whole.
"""

import contextlib
import datetime
import sys
import time
from collections.abc import Iterator

from rich import progress as bars

TRAINING, EVALUATION = "training", "evaluation"


class Clock:
  """Charges time, counts images, and shows both.

  Attributes:
    seconds: purpose -> seconds so far; "other" is what has no name.
    backward: an image that is trained on costs as much as so many judged ones.
  """

  backward = 3

  def __init__(self) -> None:
    """Starts the clock."""
    self.seconds: dict[str, float] = {}
    self._stack = ["other"]
    self._mark = time.perf_counter()
    self._work = self._total = 0
    self._began = 0.0
    self._bar: bars.Progress | None = None
    self._doing = ""

  @contextlib.contextmanager
  def spending(self, purpose: str) -> Iterator[None]:
    """Charges the block to `purpose`, except for blocks within."""
    self._charge()
    self._stack.append(purpose)
    try:
      yield
    finally:
      self._charge()
      self._stack.pop()

  def _charge(self):
    now = time.perf_counter()
    what = self._stack[-1]
    self.seconds[what] = self.seconds.get(what, 0.0) + now - self._mark
    self._mark = now

  def share_outside(self) -> float:
    """Returns the share of time outside training and evaluation steps."""
    self._charge()
    inside = sum(self.seconds.get(what, 0.0) for what in (TRAINING, EVALUATION))
    return 1 - inside / max(sum(self.seconds.values()), 1e-9)

  def summary(self) -> str:
    """Returns in words where the time went, the largest part first."""
    share = self.share_outside()
    parts = sorted(self.seconds.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in parts)
    return (
      f"{sum(self.seconds.values()):.0f} s: {listed}. Outside training and "
      f"evaluation steps: {share:.1%}."
    )

  def plan(self, work: int) -> None:
    """Adds to what there is to do, in images that are judged."""
    self._total += work
    if self._bar:
      self._bar.update(self._task, total=max(self._total, 1))

  def advance(self, number: int, *, training: bool) -> None:
    """Counts images that were trained on, or judged."""
    self._began = self._began or time.perf_counter()
    self._work += number * (self.backward if training else 1)
    if self._bar:
      self._bar.update(
        self._task, completed=self._work, description=self._text()
      )

  def eta(self) -> str:
    """Returns how long the rest will take, as "1:02:03"."""
    if not self._work:
      return "?"
    spent = time.perf_counter() - self._began
    left = max(self._total - self._work, 0) * spent / self._work
    return str(datetime.timedelta(seconds=round(left)))

  def doing(self, what: str) -> None:
    """Says what comes next."""
    self._doing = what

  def line(self, text: str) -> None:
    """Prints what came out of a unit."""
    if self._bar:
      self._bar.console.print(text, highlight=False, markup=False)
    else:
      print(f"{text}  eta {self.eta()}", flush=True)

  def _text(self):
    return f"{self._doing}  eta {self.eta()}"

  def __enter__(self) -> "Clock":
    if sys.stdout.isatty():
      self._bar = bars.Progress(
        bars.BarColumn(bar_width=24), bars.TextColumn("{task.description}")
      )
      self._task = self._bar.add_task("compiling", total=max(self._total, 1))
      self._bar.start()
    return self

  def __exit__(self, *_) -> None:
    if self._bar:
      self._bar.stop()
