"""Units of a sweep: what is measured once and then lies on disk.

A unit is one setting of one task, from one seed, in one stage. Its directory
says which it is, and `result.json` there, written in one move, that it is done.
So a sweep needs no other record of what is left to do, and machines that share
the directory need not talk to each other.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from etils import epath

from vit_jax import files
from vit_jax.vtab import splits

Result = dict[str, Any]


class Setting(NamedTuple):
  """Hyper-parameters to be judged.

  Attributes:
    values: name -> value, in the order of the recipe.
    config: the sweep's config with these values in it.
  """

  values: dict[str, Any]
  config: Any

  @property
  def name(self) -> str:
    """The values as a directory's name: "lr=0.01,total=2500"."""
    return ",".join(f"{key}={value}" for key, value in self.values.items())


class Unit(NamedTuple):
  """One thing to measure.

  Attributes:
    task: its name.
    stage: "select" or "final".
    setting: the hyper-parameters.
    seed: of everything random in it.
  """

  task: str
  stage: str
  setting: Setting
  seed: int

  def directory(self, workdir: epath.PathLike) -> epath.Path:
    """Returns where the unit's files are."""
    root = epath.Path(workdir) / "units" / self.task / self.stage
    return root / self.setting.name / f"seed_{self.seed}"

  def __str__(self) -> str:
    return f"{self.task} {self.stage} {self.setting.name} seed={self.seed}"

  def result(self, workdir: epath.PathLike) -> Result | None:
    """Returns what the unit gave, or None where it is not done."""
    text = files.read(self.directory(workdir) / "result.json")
    return json.loads(text) if text else None

  def write(self, workdir: epath.PathLike, result: Result) -> None:
    """Marks the unit as done."""
    directory = self.directory(workdir)
    directory.mkdir(parents=True, exist_ok=True)
    files.write(directory / "result.json", json.dumps(result, indent=2) + "\n")

  def training(self, workdir: epath.PathLike) -> epath.Path:
    """Returns where its state is kept while it is trained."""
    return self.directory(workdir) / "training"

  def clear_training(self, workdir: epath.PathLike) -> None:
    """Removes that state."""
    path = self.training(workdir)
    if path.exists():
      path.rmtree()


def _positive(value):
  return isinstance(value, (int, float)) and value > 0


# What the values of each list must be, and an example.
_LISTS: dict[str, tuple[Callable[[Any], bool], str]] = {
  "lr": (_positive, "(0.01, 0.003)"),
  "total": (lambda value: isinstance(value, str), "('500', '2500')"),
  "strength": (_positive, "(1.0, 1024.0)"),
}


def settings(config: Any, strengths: tuple[float, ...]) -> list[Setting]:
  """Lists the hyper-parameters among which each task chooses.

  Args:
    config: of the sweep; see `common.vtab`.
    strengths: of the probe, where the mode is "linear".

  Raises:
    ValueError: a list that cannot be; names its key.
  """
  lists: dict[str, tuple] = {"strength": strengths}
  if config.mode != "linear":
    lists = {
      "lr": tuple(config.vtab.lrs) or (config.optim.lr,),
      "total": tuple(config.vtab.totals) or (config.total,),
    }
  for name, values in lists.items():
    fits, example = _LISTS[name]
    if len(set(values)) < len(values) or not all(map(fits, values)):
      raise ValueError(
        f"config.vtab.{name}s = {values}: give one or several different values "
        f"like {example}."
      )
  return [
    _setting(config, dict(zip(lists, values)))
    for values in itertools.product(*lists.values())
  ]


def _setting(config, values):
  own = config.copy_and_resolve_references()
  if "lr" in values:
    own.optim.lr, own.total = float(values["lr"]), values["total"].strip()
    values = {"lr": own.optim.lr, "total": own.total}
  return Setting(values, own)


class Failure(NamedTuple):
  """Where a task's last failure is told."""

  path: epath.Path

  def read(self) -> str:
    """Returns the reason, or "" where there is none."""
    text = files.read(self.path)
    return json.loads(text)["reason"] if text else ""

  def write(self, reason: str) -> None:
    """Says why the task failed."""
    self.path.parent.mkdir(parents=True, exist_ok=True)
    files.write(self.path, json.dumps({"reason": reason}) + "\n")

  def clear(self) -> None:
    """Forgets it."""
    if self.path.exists():
      self.path.unlink()


def choose(
  workdir: epath.PathLike, task: str, candidates: list[Setting], seed: int
) -> Setting | None:
  """Chooses a task's setting: the best on val200, the first of equals.

  Returns:
    The setting, or None where some are not judged yet.
  """
  if len(candidates) == 1:
    return candidates[0]  # There is nothing to choose.
  found = [
    Unit(task, splits.SELECT, setting, seed).result(workdir)
    for setting in candidates
  ]
  accuracies = [result["accuracy"] for result in found if result]
  if len(accuracies) < len(candidates):
    return None
  return candidates[accuracies.index(max(accuracies))]


def parse_shard(text: str, most: int) -> tuple[int, int]:
  """Reads "i/n": this machine is number i of n, from 0.

  Args:
    text: the flag.
    most: tasks, each of which stays on one machine.

  Raises:
    ValueError: no such share; says what is allowed.
  """
  first, slash, last = text.partition("/")
  if slash and first.isdecimal() and last.isdecimal():
    index, number = int(first), int(last)
    if index < number <= most:
      return index, number
  raise ValueError(
    f"--shard={text!r}: write i/n for machine i of n, such as 0/2 and 1/2; i "
    f"begins at 0, and n is at most {most}, the number of tasks. A task stays "
    "on one machine, as its choice comes before its test."
  )
