"""The transformer's encoder block, and how stacked blocks are stored."""

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models import posemb
from vit_jax.models.derivatives import (
  GELUS,
  attend,
  gelu_product,
  softmax,
  to_heads,
)
from vit_jax.models.posemb import PositionEmbedding

layer_norm = functools.partial(nn.LayerNorm, epsilon=1e-6, dtype=jnp.float32)


def _product(function):
  """Lets a dense layer multiply by `function(x, kernel)`."""
  return lambda x, kernel, *_, **__: function(x, kernel)


class Attention(nn.Module):
  """Multi-head attention (equations 5 to 8).

  Attributes:
    num_heads: must divide the width.
    dropout: rate on the attention probabilities.
    dtype: compute type.
    relative: number of patches whose offsets are learned; 0 learns none.
  """

  num_heads: int
  dropout: float
  dtype: Any
  relative: int = 0

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "n l d"],
    train: bool,
    keys: Float[Array, "n m d"] | None = None,
  ):
    """Attends from `x` to `keys`, which are `x` itself unless given."""
    keys = x if keys is None else keys
    width = x.shape[-1]
    dense = functools.partial(
      nn.DenseGeneral,
      dtype=self.dtype,
      kernel_init=nn.initializers.xavier_uniform(),
    )
    head = (self.num_heads, width // self.num_heads)
    project = functools.partial(dense, head, dot_general=_product(to_heads))
    q = project(name="query")(x)
    k = project(name="key")(keys)
    v = project(name="value")(keys)
    q = q * head[1] ** -0.5
    logits = jnp.einsum("nqkd,nlkd->nkql", q, k)
    if self.relative:
      shape = (2 * self.relative - 1, head[1])
      table = self.param("relative_embedding", posemb.init, shape)
      logits = logits + posemb.relative_logits(table, q, self.relative)
    if self.is_mutable_collection("intermediates"):
      self.sow("intermediates", "attention_weights", softmax(logits))
    if self.dropout and train:
      weights = nn.Dropout(self.dropout)(softmax(logits), deterministic=False)
      y = jnp.einsum("nkql,nlkd->nqkd", weights, v)  # [n, l, k, d / k]
    else:
      y = attend(logits, v)
    return dense(width, axis=(-2, -1), name="out")(y)


class MlpBlock(nn.Module):
  """Two dense layers with a GELU between."""

  mlp_dim: int
  dropout: float
  dtype: Any
  gelu: str

  @nn.compact
  def __call__(self, x: Float[Array, "n l d"], train: bool):
    dense = functools.partial(
      nn.Dense,
      dtype=self.dtype,
      kernel_init=nn.initializers.xavier_uniform(),
      bias_init=nn.initializers.normal(1e-6),
    )
    y = dense(self.mlp_dim, name="Dense_0")(x)  # [n, l, f]
    down = functools.partial(dense, x.shape[-1], name="Dense_1")
    if self.dropout and train:
      y = nn.Dropout(self.dropout)(GELUS[self.gelu](y), deterministic=False)
      y = down()(y)
    else:
      product = functools.partial(gelu_product, self.gelu)
      y = down(dot_general=_product(product))(y)
    return nn.Dropout(self.dropout)(y, deterministic=not train)


class LayerScale(nn.Module):
  """A learned factor for each channel of a branch (arXiv:2103.17239)."""

  initial: float

  @nn.compact
  def __call__(self, x: Float[Array, "n l d"]):
    init = nn.initializers.constant(self.initial)
    gamma = self.param("gamma", init, x.shape[-1:])
    return x * gamma.astype(x.dtype)[None, None]


class StochasticDepth(nn.Module):
  """Leaves a branch out for some examples (arXiv:1603.09382), in training."""

  @nn.compact
  def __call__(self, x: Float[Array, "n l d"], rate: float | jax.Array):
    keep = jax.random.bernoulli(
      self.make_rng("dropout"), 1 - rate, (len(x), 1, 1)
    )
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


class Block(nn.Module):
  """One pre-norm encoder block: attention, then MLP (equations 2 and 3).

  Attributes:
    mlp_dim: f, width of the MLP's hidden layer.
    num_heads: k.
    dropout: rate after attention and both MLP layers.
    attention_dropout: rate on the attention probabilities.
    dtype: compute type.
    gelu: "tanh" or "erf".
    layer_scale: initial factor of both branches; 0 has no factors.
    relative: number of patches whose offsets are learned; 0 learns none.
    positions: a `PositionEmbedding` of its own, as that module's fields.
  """

  mlp_dim: int
  num_heads: int
  dropout: float
  attention_dropout: float
  dtype: Any
  gelu: str = "tanh"
  layer_scale: float = 0.0
  relative: int = 0
  positions: Mapping[str, Any] | None = None

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "n l d"],
    train: bool,
    drop: float | jax.Array | None = None,
  ):
    """Adds both branches to `x`; `drop` is the rate of stochastic depth."""
    if self.positions:
      place = PositionEmbedding(**self.positions, name="posembed_input")
      x = x + place(x)

    def add(x, branch, index):
      if self.layer_scale:
        scale = LayerScale(self.layer_scale, name=f"LayerScale_{index}")
        branch = scale(branch)
      if train and drop is not None:
        branch = StochasticDepth()(branch, drop)
      return x + branch

    y = layer_norm(name="LayerNorm_0")(x)
    y = Attention(
      self.num_heads,
      self.attention_dropout,
      self.dtype,
      self.relative,
      name="MultiHeadDotProductAttention_1",
    )(y, train)
    y = nn.Dropout(self.dropout)(y, deterministic=not train)
    x = add(x, y, 0)
    y = layer_norm(name="LayerNorm_2")(x)
    mlp = MlpBlock(
      self.mlp_dim, self.dropout, self.dtype, self.gelu, name="MlpBlock_3"
    )
    return add(x, mlp(y, train), 1)


class MapHead(nn.Module):
  """Multi-head attention pooling: one learned query reads all tokens.

  From "Scaling Vision Transformers" (arXiv:2106.04560); float32 throughout.
  """

  mlp_dim: int
  num_heads: int
  gelu: str

  @nn.compact
  def __call__(self, x: Float[Array, "n l d"]) -> Float[Array, "n d"]:
    init = nn.initializers.xavier_uniform()
    probe = self.param("probe", init, (1, 1, x.shape[-1]))
    probe = jnp.broadcast_to(probe, (len(x), *probe.shape[1:]))
    attention = Attention(
      self.num_heads, 0.0, "float32", name="MultiHeadDotProductAttention_0"
    )
    y = attention(probe, False, x)
    mlp = MlpBlock(self.mlp_dim, 0.0, "float32", self.gelu, name="MlpBlock_0")
    y = y + mlp(layer_norm(name="LayerNorm_0")(y), False)
    return y[:, 0]


def stack_blocks(tree: Mapping[str, Any]) -> dict[str, Any]:
  """Turns the `encoderblock_{i}` of a `Transformer` tree into `encoderblock`.

  Args:
    tree: the subtree `Transformer` of a loop's parameters.

  Returns:
    The subtree of a scan's: every leaf of a block gains a leading layer axis.
  """
  names = [name for name in tree if name.startswith("encoderblock_")]
  names.sort(key=lambda name: int(name.rpartition("_")[2]))
  rest = {name: tree[name] for name in tree if name not in names}
  stacked = jax.tree.map(
    lambda *leaves: jnp.stack(leaves), *[tree[name] for name in names]
  )
  return {**rest, "encoderblock": stacked}


def unstack_blocks(tree: Mapping[str, Any]) -> dict[str, Any]:
  """The inverse of `stack_blocks`."""
  rest = dict(tree)
  stacked = rest.pop("encoderblock")
  depth = len(jax.tree.leaves(stacked)[0])
  blocks = {
    f"encoderblock_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
    for i in range(depth)
  }
  return {**rest, **blocks}
