"""Where a token stands: position embeddings, all on (h, w) grids."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float


class PositionEmbedding(nn.Module):
  """Adds the learned position table, class row included."""

  grid: tuple[int, int]

  @nn.compact
  def __call__(self, x: Float[Array, "n l d"]):
    shape = (1, *x.shape[1:])
    if self.has_variable("params", "pos_embedding"):
      stored = self.get_variable("params", "pos_embedding").shape
      if stored != shape:
        raise ValueError(
          f"The parameters hold {stored[1]} positions of width {stored[2]}, "
          f"the images' grid {self.grid} needs {shape[1]} of {shape[2]}. Load "
          "weights with the image size in use (vit_jax.weights.load resizes "
          "the positions)."
        )
    table = self.param("pos_embedding", nn.initializers.normal(0.02), shape)
    return x + table.astype(x.dtype)


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
