"""Where a token stands: position embeddings, all on (h, w) grids.

The kinds of the paper's Table 8: one table over the raster of patches
(`learned_1d`), one for the columns and one for the rows (`learned_2d`), fixed
waves (`sincos2d`), and offsets between patches, which attention adds to its
logits (`relative`). Tables are resized here, too, when a model is to see images
of another size; that is numpy on the host, done once, when weights are loaded.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

RESIZE_METHODS = ("bicubic", "bilinear", "bilinear_corners")

init = nn.initializers.normal(0.02)


class PositionEmbedding(nn.Module):
  """The positions of all tokens, to be added to them.

  Tokens that stand nowhere have the position zero: registers always, and the
  class token but in `learned_1d`, where it has a row of its own.
  """

  kind: str
  grid: tuple[int, int]
  class_token: bool

  @nn.compact
  def __call__(self, x: Float[Array, "n l d"]) -> Float[Array, "1 l d"]:
    h, w = self.grid
    width = x.shape[-1]
    rows = 0  # those that the class token has in the table
    if self.kind == "learned_1d":
      rows = int(self.class_token)
      table = self._table("pos_embedding", rows + h * w, width)
    elif self.kind == "learned_2d":
      by_x = self._table("x_embedding", w, width // 2)[
        :, None
      ]  # [1, 1, w, d/2]
      by_y = self._table("y_embedding", h, width // 2)[:, :, None]
      table = jnp.concatenate(
        [jnp.repeat(by_x, h, axis=1), jnp.repeat(by_y, w, axis=2)], axis=-1
      ).reshape(1, h * w, width)
    else:
      table = sincos2d(self.grid, width)[None]
    nowhere = x.shape[1] - table.shape[1]
    if nowhere:
      zeros = jnp.zeros((1, nowhere, width))
      table = jnp.concatenate([table[:, :rows], zeros, table[:, rows:]], axis=1)
    return jnp.asarray(table, x.dtype)

  def _table(self, name, length, width):
    shape = (1, length, width)
    if self.has_variable("params", name):
      stored = self.get_variable("params", name).shape
      if stored != shape:
        raise ValueError(
          f"The parameters hold {stored[1]} positions of width {stored[2]}, "
          f"the images' grid {self.grid} needs {length} of {width}. Load "
          "weights with the image size in use (vit_jax.weights.load resizes "
          "the positions)."
        )
    return self.param(name, init, shape)


def relative_logits(
  table: Float[Array, "o e"], q: Float[Array, "n l k e"], num_patches: int
) -> Float[Array, "n k l l"]:
  """Attention logits for the offsets between patches (appendix D.4).

  The offset of query i and key j is i - j, counted along the raster. All heads
  share the table, `[2 * num_patches - 1, e]`; a pair with a class token or a
  register, which stand before the patches, gets 0.
  """
  place = np.arange(num_patches)
  keys = table[place[:, None] - place + num_patches - 1]  # [i, j, e]
  logits = jnp.einsum(
    "nike,ije->nkij", q[:, -num_patches:], keys.astype(q.dtype)
  )
  others = q.shape[1] - num_patches
  return jnp.pad(logits, ((0, 0), (0, 0), (others, 0), (others, 0)))


def sincos2d(
  grid: tuple[int, int], width: int, temperature: float = 10_000.0
) -> Float[Array, "l d"]:
  """Fixed positions: sines and cosines of x, then of y; d/4 frequencies."""
  h, w = grid
  exponent = jnp.arange(width // 4) / (width // 4 - 1)
  omega = temperature ** -exponent[None]
  y = jnp.repeat(jnp.arange(h), w)[:, None] * omega  # [l, d/4]
  x = jnp.tile(jnp.arange(w), h)[:, None] * omega
  waves = [jnp.sin(x), jnp.cos(x), jnp.sin(y), jnp.cos(y)]
  return jnp.concatenate(waves, axis=1)


def resize_grid(
  table: np.ndarray | jax.Array,
  old: tuple[int, int],
  new: tuple[int, int],
  *,
  prefix: int,
  method: str = "bicubic",
) -> np.ndarray:
  """Resizes a table of positions to another grid.

  Args:
    table: `[1, p + h * w, d]`, rows of the grid in raster order.
    old: the grid (h, w) of the table.
    new: the grid (h', w') wanted.
    prefix: p, leading rows that belong to no place and stay as they are.
    method: "bicubic" or "bilinear", which take pixels for areas and average
      when shrinking; or "bilinear_corners", which keeps the corners in place
      (the published fine-tuning code; `scipy.ndimage.zoom` of order 1).

  Returns:
    `[1, p + h' * w', d]` in the table's dtype (float32 of integers); the table
    itself if the grids are equal.

  Raises:
    ValueError: unknown method, a table that is not of the old grid, or a new
      grid without places.
  """
  table = np.asarray(table)
  if table.ndim != 3 or table.shape[1] != prefix + old[0] * old[1]:
    raise ValueError(
      f"A table of shape {table.shape} is not one of the grid {old} with "
      f"{prefix} rows before it, [1, {prefix + old[0] * old[1]}, d]."
    )
  down, across = (resizing_matrix(*sizes, method) for sizes in zip(old, new))
  if tuple(old) == tuple(new):
    return table
  if np.issubdtype(table.dtype, np.integer):
    table = table.astype(np.float32)
  grid = table[0, prefix:].reshape(*old, -1).astype(np.float64)
  grid = np.einsum("ah,bw,hwd->abd", down, across, grid, optimize=True)
  rows = grid.reshape(-1, table.shape[2]).astype(table.dtype)
  return np.concatenate([table[0, :prefix], rows])[None]


def resize_relative(
  table: np.ndarray | jax.Array,
  old: tuple[int, int],
  new: tuple[int, int],
  *,
  method: str = "bicubic",
) -> np.ndarray:
  """Resizes a table of offsets to another grid.

  An offset along the raster stands for steps (down, right); the table is laid
  out by these, resized there, and read back. Where several steps make the same
  offset, their mean is taken.

  Args:
    table: `[2 * h * w - 1, e]`, of offsets from -(h * w - 1) on.
    old: the grid (h, w) of the table.
    new: the grid (h', w') wanted.
    method: as in `resize_grid`.

  Returns:
    `[2 * h' * w' - 1, e]` in the table's dtype.

  Raises:
    ValueError: as `resize_grid`.
  """
  table = np.asarray(table)
  if table.ndim != 2 or len(table) != 2 * old[0] * old[1] - 1:
    raise ValueError(
      f"A table of shape {table.shape} does not hold the offsets of the grid "
      f"{old}, [{2 * old[0] * old[1] - 1}, e]."
    )
  if tuple(old) == tuple(new):
    return table
  steps_old, steps_new = ((2 * h - 1, 2 * w - 1) for h, w in (old, new))
  by_steps = table[_offsets(old)][None]  # [1, steps, e]
  by_steps = resize_grid(
    by_steps, steps_old, steps_new, prefix=0, method=method
  )
  offsets = _offsets(new)
  counts = np.bincount(offsets)
  sums = np.zeros((len(counts), table.shape[1]))
  np.add.at(sums, offsets, by_steps[0])
  return (sums / counts[:, None]).astype(by_steps.dtype)


def _offsets(grid):
  """Index into a table of offsets for each (down, right), in raster order."""
  h, w = grid
  down = np.arange(1 - h, h)[:, None]
  right = np.arange(1 - w, w)
  return (down * w + right + h * w - 1).reshape(-1)


def resizing_matrix(
  old: int, new: int, method: str, *, antialias: bool = True
) -> np.ndarray:
  """Returns the matrix [new, old] that resizes one side.

  Args:
    old: places along the side.
    new: places wanted.
    method: as in `resize_grid`.
    antialias: whether shrinking widens the filter.
  """
  if method not in RESIZE_METHODS:
    raise ValueError(
      f"Unknown way to resize {method!r}; there are "
      f"{', '.join(RESIZE_METHODS)}."
    )
  if new < 1:
    raise ValueError(f"A grid cannot have {new} places on a side.")
  if method == "bilinear_corners":
    center, scale = np.linspace(0, old - 1, new), 1.0
  else:
    center = (np.arange(new) + 0.5) * old / new - 0.5
    scale = max(1.0, old / new) if antialias else 1.0
  x = np.abs(center[:, None] - np.arange(old)) / scale
  if method == "bicubic":  # Keys' kernel with a = -1/2
    near, far = (
      1.5 * x**3 - 2.5 * x**2 + 1,
      -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2,
    )
    weights = np.where(x < 1, near, np.where(x < 2, far, 0))
  else:
    weights = np.maximum(0, 1 - x)
  return weights / weights.sum(axis=1, keepdims=True)
