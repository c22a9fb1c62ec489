"""Other grids and other patches: what changes shape with the image.

Positions are resized from grid to grid by `posemb`; this room finds out which
grid a file's positions have. Patches are resized by pseudo-inverse.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.models import posemb
from vit_jax.weights.leaf import Leaf

log = logging.getLogger("vit_jax")

Grid = tuple[int, ...]

_BOTH = slice(0, 2)  # Sides of a grid.


class Grids(NamedTuple):
  """What is known of the grids (h, w) of positions.

  Attributes:
    known: of the file's positions: given, or stored with it; else ().
    wanted: the model's.
    class_token: whether the file has one.
    method: how to resize: one of `posemb.RESIZE_METHODS`.
  """

  known: Grid
  wanted: Grid
  class_token: bool
  method: str


def fit_positions(
  leaves: dict[str, Leaf], wanted: Mapping[str, Any], grids: Grids
) -> tuple[list[str], list[str]]:
  """Brings the position tables to the grid that the model wants.

  A row for the class token is dropped, or added as zeros, where only one of the
  two has it. Equal grids keep their values bit for bit.

  Args:
    leaves: changed in place.
    wanted: the model's leaves, with `shape`.
    grids: see there.

  Returns:
    What was done, and what could not be (the grid of a table cannot be known,
    or is not the one given): in words, once for all tables alike.
  """
  notes: dict[str, bool] = {}  # The tables of all layers make one note.
  complaints: dict[str, str] = {}
  for name, leaf in leaves.items():
    kind = name.rpartition("/")[2]
    if kind not in _KINDS or name not in wanted:
      continue
    shape = wanted[name].shape
    if len(leaf.shape) != len(shape) or leaf.shape[-1] != shape[-1]:
      continue  # Of another width: no resizing will help.
    try:
      old, new, resize = _KINDS[kind](leaf, shape, grids)
    except ValueError as error:
      complaints.setdefault(str(error), name)
      continue
    if old == new and leaf.shape == shape:
      continue
    leaves[name] = leaf.then(shape, resize)
    if old != new:
      notes[
        f"{kind} resized from the grid {_by(old)} to {_by(new)} "
        f"({grids.method}); a resized model usually needs fine-tuning"
      ] = True
  return list(notes), [f"{name} {text}" for text, name in complaints.items()]


def _learned_1d(leaf, shape, grids):
  new = grids.wanted
  rows, wanted_rows = _class_rows(leaf, grids), shape[1] - math.prod(new)
  old = _old_grid(leaf.shape[1] - rows, grids)

  def resize(table):
    table = posemb.resize_grid(
      table, old, new, prefix=rows, method=grids.method
    )
    if rows == wanted_rows:
      return table
    return np.pad(table[:, rows:], ((0, 0), (wanted_rows, 0), (0, 0)))

  return old, new, resize


def _class_rows(leaf, grids):
  """How many rows of a table are not of the grid, but the class token's."""
  if grids.class_token:
    return 1
  # A token may have been taken away, and its row not: only a grid can tell.
  return int(leaf.shape[1] == math.prod(grids.known) + 1) if grids.known else 0


def _learned_2d(side, leaf, shape, grids):
  """The table of the rows, or of the columns: a grid with one side."""
  if grids.known:
    _check_count(leaf.shape[1], grids.known, side)
  old, new = (1, leaf.shape[1]), (1, shape[1])

  def resize(table):
    return posemb.resize_grid(table, old, new, prefix=0, method=grids.method)

  return old, new, resize


def _relative(leaf, shape, grids):
  del shape
  new = grids.wanted
  old = _old_grid((leaf.shape[0] + 1) // 2, grids)

  def resize(table):
    return posemb.resize_relative(table, old, new, method=grids.method)

  return old, new, resize


# The part of (h, w) that a table of rows, or of columns, is of.
_SIDES = {"y_embedding": slice(0, 1), "x_embedding": slice(1, 2)}

_KINDS: dict[str, Callable] = {
  "pos_embedding": _learned_1d,
  "relative_embedding": _relative,
  **{kind: functools.partial(_learned_2d, _SIDES[kind]) for kind in _SIDES},
}


def check_grid(path: str, leaves: Mapping[str, Leaf], grid: Grid) -> None:
  """Refuses a grid that is none of the positions under our names.

  Args:
    path: of the file, for messages.
    leaves: with their `shape`.
    grid: (h, w); () is not known, which is warned of where it is not square.

  Raises:
    ValueError: names the table and both numbers.
  """
  counts = {}
  for name, leaf in leaves.items():
    kind = name.rpartition("/")[2]
    if kind == "relative_embedding":
      counts[name] = (leaf.shape[0] + 1) // 2
    elif kind in _KINDS:
      class_row = kind == "pos_embedding" and "cls" in leaves
      counts[name] = leaf.shape[1] - class_row
  for name, count in counts.items():
    side = _SIDES.get(name.rpartition("/")[2], _BOTH)
    if grid:
      try:
        _check_count(count, grid, side)
      except ValueError as error:
        raise ValueError(f"{path}: {name} {error}") from error
    elif side == _BOTH and not _grid_of(count):
      log.warning(
        "%s: %d positions are no square; without grid=(h, w) the file cannot "
        "be loaded for another image size.",
        path,
        count,
      )
      return


def _check_count(count, grid, side):
  if count != math.prod(grid[side]):
    raise ValueError(
      f"has {count} positions, the grid {_by(grid)} has "
      f"{math.prod(grid[side])}."
    )


def _old_grid(count, grids):
  """The grid of `count` stored positions, class row not counted."""
  if grids.known:
    _check_count(count, grids.known, _BOTH)
    return grids.known
  old = _grid_of(count, wanted=grids.wanted)
  if not old:
    raise ValueError(
      f"has {count} positions, which are no square, and the model's grid "
      f"{_by(grids.wanted)} has {math.prod(grids.wanted)}. Say of which grid "
      "they are: grid=(h, w)."
    )
  return old


def _grid_of(count, *, known=(), wanted=()):
  """The grid of so many positions: known, else square, else the model's.

  () if it is none of them.
  """
  side = math.isqrt(max(0, count))
  for grid in [known] if known else [(side, side), wanted]:
    if grid and count == math.prod(grid) > 0:
      return tuple(grid)
  return ()


def rows_before(
  length: int, options: Iterable[int], *, known: Grid, wanted: Grid
) -> int:
  """Finds how many rows of a table stand before those of its grid.

  Args:
    length: rows of the table.
    options: how many can be; of one there is nothing to find.
    known: the grid (h, w), or () where it can be any square or `wanted`.
    wanted: the model's grid, or ().

  Raises:
    ValueError: none of them leaves a grid, or several do. The text begins after
      the table's name.
  """
  options = list(dict.fromkeys(options))
  if len(options) == 1:
    return options[0]
  grids = {
    rows: _grid_of(length - rows, known=known, wanted=wanted)
    for rows in options
  }
  fits = [rows for rows in options if grids[rows]]
  if len(fits) == 1:
    return fits[0]
  reason = f"{' or '.join(map(str, options))} of them before the grid"
  if known:
    reason += f"; the grid {_by(known)} has {math.prod(known)}."
  elif fits:
    reason += (
      f", which can be {' or '.join(_by(grids[rows]) for rows in fits)}. Say "
      "which it is: grid=(h, w)."
    )
  else:
    reason += (
      ": the rest is no square"
      + (f", nor the model's {_by(wanted)}" if wanted else "")
      + ". Say which grid it is: grid=(h, w)."
    )
  raise ValueError(f"has {length} rows, {reason}")


def _by(grid):
  return "x".join(map(str, grid))


def fit_patch(leaves: dict[str, Leaf], wanted: Mapping[str, Any]) -> list[str]:
  """Brings the patch embedding to the model's patch size.

  Args:
    leaves: changed in place.
    wanted: the model's leaves, with `shape`.

  Returns:
    What was done, in words.
  """
  name = "embedding/kernel"
  if name not in leaves or name not in wanted:
    return []
  leaf, shape = leaves[name], wanted[name].shape
  if leaf.shape[2:] != shape[2:] or leaf.shape == shape:
    return []
  size = shape[:2]
  leaves[name] = leaf.then(shape, lambda kernel: resize_patch(kernel, size))
  return [f"patches resized from {_by(leaf.shape[:2])} to {_by(size)}"]


def resize_patch(kernel: np.ndarray, size: tuple[int, int]) -> np.ndarray:
  """Resizes the kernel of a patch embedding (FlexiViT, arXiv:2212.08013).

  Let B resize patches, bilinearly. The new kernel w' is the one whose products
  with resized patches come nearest to the old: pinv(B^T) w. When patches grow
  the products are equal: <B x, w'> = <x, w> for every patch x.

  Args:
    kernel: `[h, w, c, d]`.
    size: (h', w').

  Returns:
    `[h', w', c, d]`; the kernel itself if the sizes are equal.
  """
  if kernel.shape[:2] == tuple(size):
    return kernel
  # B is the Kronecker product of one matrix for each side, and so is pinv(B^T).
  down, across = (
    np.linalg.pinv(
      posemb.resizing_matrix(*sides, "bilinear", antialias=False).T
    )
    for sides in zip(kernel.shape, size)
  )
  resized = np.einsum("ah,bw,hwcd->abcd", down, across, kernel, optimize=True)
  return resized.astype(kernel.dtype)
