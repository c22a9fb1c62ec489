"""A report as one HTML file that needs nothing beside it, nor a network."""

import html
from collections.abc import Mapping, Sequence

from input_pipeline.vtab import TASKS
from vit_jax.vtab import cells, plots, published, scores
from vit_jax.vtab.cells import Cells, Other
from vit_jax.vtab.scores import Result, Table

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem;
  max-width: 1100px; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--line);
  text-align: right; vertical-align: top; }
th:first-child, td:first-child, th.text, td.text { text-align: left; }
td { white-space: nowrap; }
td.text { white-space: normal; min-width: 15rem; }
tr.mean td { font-weight: 600; background: var(--soft); }
.scores { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.2rem 0; }
.scores div { border: 1px solid var(--line); border-radius: .5rem;
  padding: .6rem 1rem; }
.scores b { display: block; font-size: 1.5rem; }
.remarks { border-left: 4px solid #d55e00; padding-left: 1rem;
  list-style: none; }
pre { white-space: pre-wrap; background: var(--soft); padding: .6rem; }
svg { max-width: 100%; height: auto; }
.wide svg { min-width: 720px; }
svg text { font: 13px system-ui, sans-serif; fill: currentColor; }
svg .small { font-size: 11px; }
svg .title { font-weight: 600; }
svg .grid { stroke: var(--line); }
svg .axis { stroke: currentColor; fill: none; }
.curves { display: flex; flex-wrap: wrap; gap: .8rem; align-items: start; }
"""
_TEXTS = ("setting, or why there is no score", "source", "split")


def render(
  table: Table,
  results: Sequence[Result],
  *,
  curves: Mapping[tuple[str, str], plots.Curve],
  other: Other | None = None,
) -> str:
  """Returns the whole page.

  Args:
    table: the scores.
    results: what they were made of, failures included.
    curves: (task, hyper-parameters) -> (step, loss).
    other: a sweep to compare with.
  """
  beside = (other.name, scores.table(other.results)) if other else None
  parts = [
    "<!DOCTYPE html>",
    '<html lang="en"><head><meta charset="utf-8">',
    '<meta name="viewport" content="width=device-width, initial-scale=1">',
    f"<title>VTAB-1k</title><style>{_STYLE}</style></head><body>",
    "<h1>VTAB-1k</h1>",
    _paragraph(settings_text(results)),
    _headline(table),
    _remarks(cells.remarks(results, other)),
    _problems(table),
    "<h2>Test accuracy in percent</h2>",
    _table(cells.main_table(table, beside)),
    _paragraph(FOOTNOTE),
    f'<div class="wide">{_dots(table, beside)}</div>',
  ]
  tried = cells.tried_table(results)
  if tried.rows:
    parts += [f"<h2>{TRIED}</h2>", _table(tried)]
  if curves:
    parts += ["<h2>Training loss</h2>", _curves(curves)]
  parts += ["<h2>What was read</h2>", _table(cells.data_table(results))]
  return "\n".join(filter(None, [*parts, "</body></html>", ""]))


TRIED = "Accuracy of each setting on val200; * was chosen"
FOOTNOTE = (
  "The columns with names of models are the ViT paper's results (arXiv "
  "2010.11929, Table 9). Means are plain means over tasks, those of the paper "
  "from its rounded entries; ± is the sample standard deviation over seeds."
)


def settings_text(results: Sequence[Result]) -> str:
  """Says how all of the sweep was done: "protocol paper, image_size 384"."""
  settings = scores.settings(results)
  return ", ".join(
    f"{key} {' or '.join(values)}" for key, values in settings.items() if values
  )


def _headline(table: Table) -> str:
  named = {"mean of 19": table.mean} | {
    f"mean of {group}": score for group, score in table.groups.items()
  }
  boxes = [
    f"<div>{name}<b>{cells.score_text(score, digits=2)}</b></div>"
    for name, score in named.items()
  ]
  return f'<div class="scores">{"".join(boxes)}</div>'


def _remarks(sentences: Sequence[str]) -> str:
  if not sentences:
    return ""
  items = "".join(f"<li>{html.escape(text)}</li>" for text in sentences)
  return f'<ul class="remarks">{items}</ul>'


def _problems(table: Table) -> str:
  rows = [row for row in table.rows if row.problem]
  if not rows:
    return ""
  parts = [
    f"<details><summary>{html.escape(row.task)}: "
    f"{html.escape(cells.brief(row))}</summary>"
    f"<pre>{html.escape(row.problem)}</pre></details>"
    for row in rows
  ]
  title = f"<h2>Tasks without a score: {len(rows)} of {len(table.rows)}</h2>"
  return "\n".join([title, *parts])


def _table(table: Cells) -> str:
  kinds = [' class="text"' if name in _TEXTS else "" for name in table.header]
  head = "".join(
    f"<th{kind}>{html.escape(name)}</th>"
    for kind, name in zip(kinds, table.header)
  )
  body = []
  for row in table.rows:
    kind = ' class="mean"' if row[0] in table.means else ""
    body.append(
      f"<tr{kind}>"
      + "".join(
        f"<td{kind}>{html.escape(cell)}</td>" for kind, cell in zip(kinds, row)
      )
      + "</tr>"
    )
  return (
    f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>'
    + "\n".join(body)
    + "</tbody></table></div>"
  )


def _dots(table: Table, beside: tuple[str, Table] | None) -> str:
  series = [plots.Marks("this sweep", _means_by_task(table))]
  if beside:
    series.append(plots.Marks(beside[0], _means_by_task(beside[1])))
  series += [
    plots.Marks(model, row) for model, row in published.PUBLISHED.items()
  ]
  return plots.dots(list(TASKS), series)


def _means_by_task(table: Table) -> dict[str, float | None]:
  return {row.task: row.score and row.score.mean for row in table.rows}


def _curves(curves: Mapping[tuple[str, str], plots.Curve]) -> str:
  drawings = []
  for task in TASKS:
    lines = {
      cells.shown(hyper): line
      for (name, hyper), line in curves.items()
      if name == task
    }
    if lines:
      drawings.append(plots.curves(task, lines))
  return f'<div class="curves">{"".join(drawings)}</div>'


def _paragraph(text: str) -> str:
  return f"<p>{html.escape(text)}</p>" if text else ""
