"""From the results of single trainings to the scores of a sweep.

A result is what one training left behind, a dictionary with the keys of
`RESULT`; a failure has `task` and `reason` only. A mean stands for all of its
tasks and all of its seeds or is not given: a mean over fewer is another number.
"""

import collections
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from input_pipeline.vtab import GROUPS, TASKS
from vit_jax import trees

# What a result says: `hyper` are the chosen hyper-parameters by name, `stage`
# is "select" (train800, looked at on val200) or "final" (trained on
# train800val200, tested once), `accuracy` = `correct` / `n`.
RESULT = (
  "task",
  "group",
  "protocol",
  "hyper",
  "seed",
  "stage",
  "split",
  "accuracy",
  "correct",
  "n",
  "input_range",
  "image_size",
  "source",
  "source_version",
  "revision",
  "seconds",
)
# What is the same for all results of a sweep that can be compared.
SETTINGS = ("protocol", "image_size", "input_range", "revision")

Result = Mapping[str, Any]


class Score(NamedTuple):
  """Percent: the mean over seeds and their (sample) standard deviation."""

  mean: float
  std: float | None
  seeds: int


class Row(NamedTuple):
  """One task.

  Attributes:
    task: its name.
    group: of the task.
    by_seed: seed -> test accuracy in percent.
    score: over the seeds; None if there is a problem.
    hyper: the chosen hyper-parameters, as text.
    problem: why there is no score, or "".
  """

  task: str
  group: str
  by_seed: dict[int, float]
  score: Score | None
  hyper: str
  problem: str


class Table(NamedTuple):
  """All 19 tasks in the order of `TASKS`, and the means that are complete."""

  rows: tuple[Row, ...]
  groups: dict[str, Score | None]
  mean: Score | None


class Tried(NamedTuple):
  """Hyper-parameters of one task: accuracy on val200, and if it took them."""

  hyper: str
  score: Score
  chosen: bool


def table(results: Iterable[Result]) -> Table:
  """Returns the scores on the test sets.

  Args:
    results: results and failures in any order; those of the selection are
      passed over.

  Returns:
    A row for each of the 19 tasks. A task that failed, is missing, or lacks a
    seed which another task has, says so and has no score, and neither have its
    group and the mean of 19.

  Raises:
    ValueError: a result that contradicts itself or another one.
  """
  results = list(results)
  check(results)
  finals = [r for r in results if r.get("stage") == "final"]
  seeds = sorted({result["seed"] for result in finals})
  reasons: dict[str, list[str]] = collections.defaultdict(list)
  for result in results:
    if "reason" in result:
      reasons[result["task"]].append(str(result["reason"]))
  rows = []
  for name, task in TASKS.items():
    own = sorted(
      (r for r in finals if r["task"] == name), key=lambda r: r["seed"]
    )
    by_seed = {r["seed"]: 100 * r["correct"] / r["n"] for r in own}
    missing = [str(seed) for seed in seeds if seed not in by_seed]
    problem = ""
    if reasons[name]:
      problem = "; ".join(dict.fromkeys(reasons[name]))
    elif not own:
      problem = "not run"
    elif missing:
      problem = f"not run with seed {', '.join(missing)}"
    score = None if problem else _score(list(by_seed.values()))
    hyper = " or ".join(dict.fromkeys(hyper_text(r["hyper"]) for r in own))
    rows.append(Row(name, task.group, by_seed, score, hyper, problem))
  groups = {
    group: _mean([row for row in rows if row.group == group])
    for group in GROUPS
  }
  return Table(tuple(rows), groups, _mean(rows))


def tried(results: Iterable[Result]) -> dict[str, list[Tried]]:
  """Returns what was tried for each task, as it comes."""
  found: dict[str, dict[str, list[float]]] = {name: {} for name in TASKS}
  chosen = set()
  for result in results:
    if "reason" in result:
      continue
    key = (result["task"], hyper_text(result["hyper"]))
    if result["stage"] == "final":
      chosen.add(key)
    else:
      percent = 100 * result["correct"] / result["n"]
      found[key[0]].setdefault(key[1], []).append(percent)
  return {
    task: [
      Tried(hyper, _score(values), (task, hyper) in chosen)
      for hyper, values in by_hyper.items()
    ]
    for task, by_hyper in found.items()
    if by_hyper
  }


def settings(results: Iterable[Result]) -> dict[str, list[str]]:
  """Returns the values of each of `SETTINGS`; one of each, if all is well."""
  done = [result for result in results if "reason" not in result]
  return {
    key: sorted({value_text(result[key]) for result in done})
    for key in SETTINGS
  }


def hyper_text(hyper: Mapping[str, Any]) -> str:
  """Writes hyper-parameters as a unit's folder does: "lr=0.01,total=2500"."""
  return ",".join(f"{key}={value}" for key, value in hyper.items())


def value_text(value: Any) -> str:
  """Writes a value of a result; a size as 384x384."""
  if isinstance(value, list | tuple):
    return "x".join(map(str, value))
  return str(value)


def check(results: Sequence[Result]) -> None:
  """Refuses results that cannot be true.

  Raises:
    ValueError: an unknown task or stage, a key that is missing, an accuracy
      that is not correct / n, or two results for the same thing.
  """
  seen = set()
  for result in results:
    where = f"The result {dict(result)}"
    wanted = ("task", "reason") if "reason" in result else RESULT
    missing = [key for key in wanted if key not in result]
    if missing:
      raise ValueError(f"{where} lacks {', '.join(missing)}.")
    trees.check_choice("A result has the task ", result["task"], TASKS)
    if "reason" in result:
      continue
    trees.check_choice(
      "A result has the stage ", result["stage"], ("select", "final")
    )
    correct, n = result["correct"], result["n"]
    if not 0 <= correct <= n or abs(result["accuracy"] - correct / n) > 1e-6:
      raise ValueError(
        f"{where} contradicts itself: {correct} of {n} correct are not "
        f"{result['accuracy']}."
      )
    final = result["stage"] == "final"
    # A seed is tested once, whatever was chosen for it.
    hyper = "" if final else hyper_text(result["hyper"])
    key = (result["task"], result["stage"], result["seed"], hyper)
    if key in seen:
      raise ValueError(
        f"There are two {result['stage']} results of {result['task']} for seed "
        f"{result['seed']}{hyper and ', '}{hyper}: each sweep needs a folder "
        "of its own."
      )
    seen.add(key)


def _score(values: Sequence[float]) -> Score:
  std = statistics.stdev(values) if len(values) > 1 else None
  return Score(statistics.fmean(values), std, len(values))


def _mean(rows: Sequence[Row]) -> Score | None:
  """Of all rows, seed by seed; None if one is missing."""
  if any(row.score is None for row in rows):
    return None
  # Complete rows have the same seeds.
  seeds = rows[0].by_seed
  return _score(
    [statistics.fmean(row.by_seed[seed] for row in rows) for seed in seeds]
  )
