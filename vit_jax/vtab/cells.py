"""The tables of a report as text in cells, for Markdown and for HTML alike."""

from collections.abc import Sequence
from typing import NamedTuple

from input_pipeline.vtab import GROUPS, TASKS
from vit_jax.vtab import published, scores
from vit_jax.vtab.scores import Result, Row, Score, Table

NOTHING = "–"


class Cells(NamedTuple):
  """A table. Rows whose first cell is in `means` stand out."""

  header: tuple[str, ...]
  rows: tuple[tuple[str, ...], ...]
  means: tuple[str, ...] = ()


class Other(NamedTuple):
  """Another sweep to stand beside: what to call it, and its results."""

  name: str
  results: Sequence[Result]


def main_table(table: Table, other: tuple[str, Table] | None = None) -> Cells:
  """All tasks and means, beside the paper's and perhaps another sweep's."""
  header = ["task", "this sweep"]
  if other:
    header += [other[0], "difference"]
  header += [*published.PUBLISHED, "setting, or why there is no score"]
  beside = {row.task: row for row in other[1].rows} if other else {}
  rows = []
  for group in (*GROUPS, "mean"):
    for row in table.rows:
      if row.group != group:
        continue
      cells = [row.task, score_text(row.score)]
      if other:
        cells += _beside(row.score, beside[row.task].score)
      cells += [f"{p[row.task]:.1f}" for p in published.PUBLISHED.values()]
      rows.append((*cells, brief(row)))
    score = _mean_of(table, group)
    cells = [_mean_name(group), score_text(score, digits=2)]
    if other:
      cells += _beside(score, _mean_of(other[1], group), digits=2)
    cells += [
      f"{published.published_means(model)[group]:.2f}"
      for model in published.PUBLISHED
    ]
    rows.append((*cells, "" if score else _incomplete(table, group)))
  names = tuple(_mean_name(group) for group in (*GROUPS, "mean"))
  return Cells(tuple(header), tuple(rows), names)


def tried_table(results: Sequence[Result]) -> Cells:
  """What each setting gave on val200; what was chosen has a star."""
  tried = scores.tried(results)
  settings = dict.fromkeys(one.hyper for row in tried.values() for one in row)
  rows = []
  for task, row in tried.items():
    cells = {one.hyper: score_text(one.score) + "*" * one.chosen for one in row}
    rows.append((task, *(cells.get(setting, NOTHING) for setting in settings)))
  header = ("task", *(shown(setting) for setting in settings))
  return Cells(header, tuple(rows))


def data_table(results: Sequence[Result]) -> Cells:
  """What was read for the scores of each task, and how long it all took."""
  rows = []
  for task in TASKS:
    own = [r for r in results if r["task"] == task and "reason" not in r]
    final = [r for r in own if r["stage"] == "final"]
    if not own:
      continue
    # One seed after another reads the same, else all that was read is listed.
    cells = [
      " or ".join(dict.fromkeys(scores.value_text(r[key]) for r in final))
      for key in ("source", "source_version", "split", "n")
    ]
    seeds = ", ".join(str(seed) for seed in sorted(r["seed"] for r in final))
    seconds = sum(r["seconds"] for r in own)
    rows.append((task, *cells, seeds, f"{seconds:.0f}"))
  header = ("task", "source", "version", "split", "n", "seeds", "seconds")
  return Cells(header, tuple(rows))


def remarks(results: Sequence[Result], other: Other | None) -> list[str]:
  """What a reader has to know before comparing numbers, one sentence each."""
  found = []
  own = scores.settings(results)
  for key, values in own.items():
    if len(values) > 1:
      found.append(f"The results differ in {key}: {', '.join(values)}.")
  if other:
    for key, values in scores.settings(other.results).items():
      if values != own[key]:
        found.append(
          f"{other.name} differs in {key}: {', '.join(values) or 'none'} "
          f"there, {', '.join(own[key]) or 'none'} here."
        )
  for name, task in TASKS.items():
    sizes = {
      r["n"] for r in results if r["task"] == name and r.get("stage") == "final"
    } - {task.num_test}
    if sizes:
      found.append(
        f"{name} was tested on {', '.join(map(str, sorted(sizes)))} images; "
        f"VTAB's test set has {task.num_test}."
      )
  return found


def score_text(score: Score | None, digits: int = 1) -> str:
  """A score as "93.1" or, over several seeds, "93.1 ± 0.2"."""
  if score is None:
    return NOTHING
  std = "" if score.std is None else f" ± {score.std:.{digits}f}"
  return f"{score.mean:.{digits}f}{std}"


def shown(hyper: str) -> str:
  """Hyper-parameters with room to break the line."""
  return hyper.replace(",", ", ")


def brief(row: Row) -> str:
  """A task's setting, or the first line of its problem."""
  first = (row.problem.splitlines() or [""])[0]
  first = first if len(first) <= 100 else first[:99] + "…"
  return first or shown(row.hyper)


def _mean_of(table: Table, group: str) -> Score | None:
  return table.mean if group == "mean" else table.groups[group]


def _mean_name(group: str) -> str:
  return "mean of 19" if group == "mean" else f"mean of {group}"


def _incomplete(table: Table, group: str) -> str:
  rows = [row for row in table.rows if group in (row.group, "mean")]
  done = sum(row.score is not None for row in rows)
  return f"no mean: {done} of {len(rows)} tasks have a score"


def _beside(
  this: Score | None, that: Score | None, digits: int = 1
) -> list[str]:
  difference = NOTHING
  if this and that:
    difference = f"{this.mean - that.mean:+.{digits}f}"
  return [score_text(that, digits), difference]
