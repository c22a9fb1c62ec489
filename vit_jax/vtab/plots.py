"""Drawings of a sweep as inline SVG, which any browser shows without help.

Colours are those of Okabe and Ito, which colour-blind people tell apart; text
and axes take the colour of the page around them.
"""

import html
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

COLOURS = (
  "#0072b2",
  "#d55e00",
  "#009e73",
  "#cc79a7",
  "#e69f00",
  "#56b4e9",
  "#a6761d",
  "#888888",
)
_MOST_POINTS = 200  # Of a curve: more cannot be seen.

Curve = Sequence[tuple[int, float]]


class Marks(NamedTuple):
  """Accuracies of one sweep or paper: task -> percent, or None."""

  name: str
  values: Mapping[str, float | None]


def dots(tasks: Sequence[str], series: Sequence[Marks]) -> str:
  """Draws accuracies as dots on one line for each task.

  Args:
    tasks: from top to bottom.
    series: the first is drawn filled and on top.

  Returns:
    An `<svg>` element.
  """
  left, right, line, top = 170, 20, 22, 60
  width, height = 860, top + line * len(tasks) + 10

  def x(percent: float) -> float:
    return left + (width - left - right) * percent / 100

  parts = [_open(width, height, "Accuracy on the test set of each task")]
  for percent in range(0, 101, 20):
    parts.append(
      f'<line class="grid" x1="{x(percent):.1f}" x2="{x(percent):.1f}" '
      f'y1="{top - 14}" y2="{height - 10}"/>'
      f'<text class="small" x="{x(percent):.1f}" y="{top - 20}" '
      f'text-anchor="middle">{percent} %</text>'
    )
  place = float(left)
  for index, marks in enumerate(series):
    parts.append(_dot(place, 12, index, marks.name))
    parts.append(
      f'<text x="{place + 10:.0f}" y="16">{html.escape(marks.name)}</text>'
    )
    place += 30 + 7.2 * len(marks.name)
  for row, task in enumerate(tasks):
    y = top + line * row + 4
    parts.append(
      f'<line class="grid" x1="{left}" x2="{width - right}" '
      f'y1="{y}" y2="{y}"/>'
      f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">'
      f"{html.escape(task)}</text>"
    )
    for index, marks in reversed(list(enumerate(series))):
      value = marks.values.get(task)
      if value is not None:
        title = f"{task}: {marks.name} {value:.1f} %"
        parts.append(_dot(x(value), y, index, title))
  return "".join([*parts, "</svg>"])


def curves(title: str, lines: Mapping[str, Curve]) -> str:
  """Draws losses over updates, a line for each name.

  Args:
    title: of the drawing.
    lines: name -> (step, loss) in order; losses that are not finite are left
      out.

  Returns:
    An `<svg>` element.
  """
  width, left, right, top, bottom = 270, 42, 8, 26, 24
  height = top + 120 + bottom + 14 * len(lines)
  finite = {
    name: [(step, loss) for step, loss in line if math.isfinite(loss)]
    for name, line in lines.items()
  }
  points = [point for line in finite.values() for point in line]
  parts = [_open(width, height, f"Training loss of {title}")]
  parts.append(f'<text class="title" x="4" y="15">{html.escape(title)}</text>')
  last = max((step for step, _ in points), default=0) or 1
  most = max((loss for _, loss in points), default=0) or 1

  def place(step: int, loss: float) -> str:
    x = left + (width - left - right) * step / last
    return f"{x:.1f},{top + 120 * (1 - loss / most):.1f}"

  for value, y in ((f"{most:.3g}", top + 4), ("0", top + 124)):
    parts.append(
      f'<text class="small" x="{left - 5}" y="{y}" text-anchor="end">'
      f"{value}</text>"
    )
  parts.append(
    f'<path class="axis" d="M{left},{top} V{top + 120} H{width - right}"/>'
    f'<text class="small" x="{width - right}" y="{top + 136}" '
    f'text-anchor="end">{last} updates</text>'
  )
  for index, (name, line) in enumerate(finite.items()):
    colour = COLOURS[index % len(COLOURS)]
    every = max(1, math.ceil(len(line) / _MOST_POINTS))
    drawn = list(dict.fromkeys([*line[::every], *line[-1:]]))
    parts.append(
      f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" '
      f'points="{" ".join(place(*point) for point in drawn)}"/>'
    )
    y = top + 120 + bottom + 14 * index + 6
    note = "" if len(line) == len(lines[name]) else " (not finite at times)"
    parts.append(
      f'<line x1="{left}" x2="{left + 14}" y1="{y - 4}" y2="{y - 4}" '
      f'stroke="{colour}" stroke-width="3"/><text class="small" '
      f'x="{left + 19}" y="{y}">{html.escape(name + note)}</text>'
    )
  return "".join([*parts, "</svg>"])


def _open(width: float, height: float, title: str) -> str:
  title = html.escape(title)
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{title}" '
    f'viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
  )


def _dot(x: float, y: float, index: int, title: str) -> str:
  colour = COLOURS[index % len(COLOURS)]
  fill = colour if index == 0 else "none"
  return (
    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}" '
    f'stroke="{colour}" stroke-width="2"><title>{html.escape(title)}</title>'
    "</circle>"
  )
