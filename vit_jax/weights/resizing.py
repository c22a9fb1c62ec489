"""Other grids and other patches: what changes shape with the image.

Positions are resized from grid to grid by `posemb`; this room finds out which
grid a file's positions have. Patches are resized by pseudo-inverse.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.models import posemb
from vit_jax.weights.leaf import Leaf

log = logging.getLogger("vit_jax")

Grid = tuple[int, ...]


class Grids(NamedTuple):
  """What is known of the grids (h, w) of positions.

  Attributes:
    path: of the file, for messages.
    known: of the file's positions: given, or stored with it; else ().
    wanted: the model's.
    class_token: whether the file has one.
    method: how to resize: one of `posemb.RESIZE_METHODS`.
  """

  path: str
  known: Grid
  wanted: Grid
  class_token: bool
  method: str


def fit_positions(
  leaves: dict[str, Leaf], wanted: Mapping[str, Any], grids: Grids
) -> list[str]:
  """Brings the position tables to the grid that the model wants.

  A row for the class token is dropped, or added as zeros, where only one of the
  two has it. Equal grids keep their values bit for bit.

  Args:
    leaves: changed in place.
    wanted: the model's leaves, with `shape`.
    grids: see there.

  Returns:
    What was done, in words, once for all tables alike.

  Raises:
    ValueError: the grid of a table cannot be known, or is not the one given.
  """
  notes = {}  # The tables of all layers make one note.
  for name, leaf in leaves.items():
    kind = name.rpartition("/")[2]
    if kind not in _KINDS or name not in wanted:
      continue
    shape = wanted[name].shape
    if len(leaf.shape) != len(shape) or leaf.shape[-1] != shape[-1]:
      continue  # Of another width: no resizing will help.
    old, new, resize = _KINDS[kind](name, leaf, shape, grids)
    if old == new and leaf.shape == shape:
      continue
    leaves[name] = leaf.then(shape, resize)
    if old != new:
      notes[
        f"{kind} resized from the grid {_by(old)} to {_by(new)} "
        f"({grids.method}); a resized model usually needs fine-tuning"
      ] = True
  return list(notes)


def _learned_1d(name, leaf, shape, grids):
  new = grids.wanted
  rows, wanted_rows = _class_rows(leaf, grids), shape[1] - math.prod(new)
  old = _old_grid(name, leaf.shape[1] - rows, grids)

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


def _learned_2d(name, leaf, shape, grids):
  """The table of the rows, or of the columns: a grid with one side."""
  del name
  old, new = (1, leaf.shape[1]), (1, shape[1])

  def resize(table):
    return posemb.resize_grid(table, old, new, prefix=0, method=grids.method)

  return old, new, resize


def _relative(name, leaf, shape, grids):
  del shape
  new = grids.wanted
  old = _old_grid(name, (leaf.shape[0] + 1) // 2, grids)

  def resize(table):
    return posemb.resize_relative(table, old, new, method=grids.method)

  return old, new, resize


_KINDS = {
  "pos_embedding": _learned_1d,
  "y_embedding": _learned_2d,
  "x_embedding": _learned_2d,
  "relative_embedding": _relative,
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
  for name, leaf in leaves.items():
    if name.endswith("/pos_embedding"):
      count = leaf.shape[1] - ("cls" in leaves)
      if grid:
        _check_count(path, name, count, grid)
      elif math.isqrt(count) ** 2 != count:
        log.warning(
          "%s: %d positions are no square; without grid=(h, w) the file cannot "
          "be loaded for another image size.",
          path,
          count,
        )
        return


def _check_count(path, name, count, grid):
  if count != math.prod(grid):
    raise ValueError(
      f"{path}: {name} has {count} positions, the grid {_by(grid)} has "
      f"{math.prod(grid)}."
    )


def _old_grid(name, count, grids):
  """The grid of `count` stored positions, class row not counted."""
  if grids.known:
    _check_count(grids.path, name, count, grids.known)
    return grids.known
  side = math.isqrt(count)
  if side * side == count:
    return side, side
  if count == math.prod(grids.wanted):
    return grids.wanted
  raise ValueError(
    f"{grids.path}: {name} has {count} positions, which are no square, and the "
    f"model's grid {_by(grids.wanted)} has {math.prod(grids.wanted)}. Say of "
    "which grid they are: grid=(h, w)."
  )


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
    np.linalg.pinv(_bilinear(*sides).T) for sides in zip(kernel.shape, size)
  )
  resized = np.einsum("ah,bw,hwcd->abcd", down, across, kernel, optimize=True)
  return resized.astype(kernel.dtype)


def _bilinear(old, new):
  """The matrix [new, old] of a resize with half-pixel centres, no antialias.

  Unlike that of positions, which antialiases when it shrinks.
  """
  center = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
  return np.maximum(0, 1 - np.abs(center[:, None] - np.arange(old)))
