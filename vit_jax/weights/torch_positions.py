"""Position tables of PyTorch's files, and ours.

Ours begin with a row for the class token, if there is one, and registers stand
nowhere. timm's have rows for the patches alone, or for class token and
registers as well; Hugging Face's for class token and patches. A register's row
is part of the register here, as both are only ever added.
"""

from collections.abc import Mapping

import numpy as np

from vit_jax.weights import resizing
from vit_jax.weights.leaf import Leaf

POSITIONS = "Transformer/posembed_input/pos_embedding"


def from_torch(
  leaves: Mapping[str, Leaf],
  *,
  grid: resizing.Grid,
  wanted: resizing.Grid,
  position_rows: str,
  hugging_face: bool,
) -> dict[str, Leaf]:
  """Finds the leaves that change for ours.

  Args:
    leaves: under timm's names.
    grid: (h, w) of the stored positions, or ().
    wanted: the model's, or ().
    position_rows: how many rows stand before the grid's, or "" where nothing
      says it.
    hugging_face: whose positions these are.

  Raises:
    ValueError: the rows before the grid cannot be known.
  """
  if "pos_embed" not in leaves:
    return {}
  table = leaves["pos_embed"]
  length, width = table.shape[1:]
  own = int("cls_token" in leaves)
  registers = leaves["reg_token"].shape[1] if "reg_token" in leaves else 0
  options = [own] if hugging_face else [own + registers, 0]
  if position_rows:
    options = [rows for rows in options if str(rows) == position_rows]
  try:
    rows = resizing.rows_before(length, options, known=grid, wanted=wanted)
  except ValueError as error:
    raise ValueError(f"pos_embed {error}") from error
  if rows == own:
    return {}
  shape = (1, own + length - rows, width)
  if rows < own:
    return {
      "pos_embed": table.then(
        shape, lambda x: np.pad(x, ((0, 0), (1, 0), (0, 0)))
      )
    }
  tokens = leaves["reg_token"]

  def placed(tokens):
    place = table.read()[:, own:rows]
    # Nothing is added where there is nothing: -0 + 0 would be another zero.
    return np.where(place == 0, tokens, tokens + place)

  return {
    "pos_embed": table.then(
      shape, lambda x: np.delete(x, np.s_[own:rows], axis=1)
    ),
    "reg_token": tokens.then(tokens.shape, placed),
  }


def to_timm(flat: Mapping[str, Leaf]) -> dict[str, Leaf]:
  """Returns leaves under our names with a row of zeros for each register."""
  if not {"registers", POSITIONS} <= flat.keys():
    return dict(flat)
  own, rows = int("cls" in flat), rows_before(flat)
  table = flat[POSITIONS]
  length, width = table.shape[1:]
  return {
    **flat,
    POSITIONS: table.then(
      (1, length + rows - own, width),
      lambda x: np.insert(x, [own] * (rows - own), 0, axis=1),
    ),
  }


def rows_before(flat: Mapping[str, Leaf]) -> int:
  """Says how many rows `to_timm` has before the grid's: one for each token."""
  registers = flat["registers"].shape[1] if "registers" in flat else 0
  return int("cls" in flat) + registers
