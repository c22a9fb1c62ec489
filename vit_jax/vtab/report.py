"""What a sweep found: report.md and report.html for people, report.csv.

`scores` has the arithmetic, `cells` the tables, `page` the HTML; here they are
put into files.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence

from etils import epath

from vit_jax import files
from vit_jax.vtab import cells, page, plots, scores
from vit_jax.vtab.cells import Cells, Other
from vit_jax.vtab.scores import Result, Table, table

__all__ = ["Other", "Table", "table", "text", "write"]


def write(
  directory: epath.PathLike,
  results: Sequence[Result],
  *,
  curves: Mapping[tuple[str, str], plots.Curve],
  compare: Other | None = None,
) -> None:
  """Writes report.md, report.csv and report.html.

  Args:
    directory: where to.
    results: what the units left, see `scores.RESULT`, and the failures: `task`
      and `reason`.
    curves: (task, `scores.hyper_text`) -> (step, loss) in order.
    compare: another sweep, to stand beside this one.

  Raises:
    ValueError: results that cannot be true, see `scores.check`; nothing has
      been written then.
  """
  found = table(results)
  texts = {
    "report.md": _markdown(found, results, compare),
    "report.csv": _csv(results),
    "report.html": page.render(found, results, curves=curves, other=compare),
  }
  directory = epath.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  for name, content in texts.items():
    files.write(directory / name, content)


def text(results: Sequence[Result]) -> str:
  """Returns the table of tasks and means for a terminal."""
  return _grid(cells.main_table(table(results)))


def _markdown(
  found: Table, results: Sequence[Result], other: Other | None
) -> str:
  beside = (other.name, table(other.results)) if other else None
  parts = ["# VTAB-1k", page.settings_text(results)]
  parts += [f"- {remark}" for remark in cells.remarks(results, other)]
  parts += [
    "## Test accuracy in percent",
    _grid(cells.main_table(found, beside)),
  ]
  parts += [page.FOOTNOTE]
  problems = [row for row in found.rows if row.problem]
  if problems:
    parts.append("## Tasks without a score")
    parts += [f"- {row.task}: {_one_line(row.problem)}" for row in problems]
  tried = cells.tried_table(results)
  if tried.rows:
    parts += [f"## {page.TRIED}", _grid(tried)]
  parts += ["## What was read", _grid(cells.data_table(results))]
  # Reasons may hold what Markdown would take for HTML.
  return "\n\n".join(filter(None, parts)).replace("<", "&lt;") + "\n"


def _grid(given: Cells) -> str:
  """A table of Markdown that can be read as it stands."""
  rows = [
    [_one_line(cell).replace("|", "\\|") for cell in row]
    for row in (given.header, *given.rows)
  ]
  widths = [max(map(len, column)) for column in zip(*rows)]
  lines = [
    "| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows
  ]
  rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
  return "\n".join([lines[0], rule, *lines[1:]])


def _one_line(value: str) -> str:
  return " ".join(value.split())


def _csv(results: Sequence[Result]) -> str:
  """One line for each result or failure, with all that it says."""
  out = io.StringIO()
  writer = csv.writer(out, lineterminator="\n")
  writer.writerow([*scores.RESULT, "reason"])
  for result in results:
    row = {**result}
    if "hyper" in row:
      row["hyper"] = json.dumps(row["hyper"])
    if "image_size" in row:
      row["image_size"] = scores.value_text(row["image_size"])
    writer.writerow([row.get(key, "") for key in (*scores.RESULT, "reason")])
  return out.getvalue()
