"""The transformer's encoder block, and how stacked blocks are stored.

`softmax` and `gelu` are the usual functions with derivatives of their own: the
same mathematics, less to write to memory and to read back. Products keep the
image and token axes apart: merging them is faster on CPUs, but costs the TPU,
whose tiles do not divide 197 tokens, a copy at every layer.
"""

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

layer_norm = functools.partial(nn.LayerNorm, epsilon=1e-6, dtype=jnp.float32)


@jax.custom_jvp
def softmax(x: Float[Array, "..."]) -> Float[Array, "..."]:
  """Softmax over the last axis, in float32 whatever the type of `x`.

  The derivative reads the result in the type of `x`, so that in bfloat16 no
  float32 copy of the attention weights waits for the backward pass.
  """
  return jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)


@softmax.defjvp
def _(primals, tangents):
  y = softmax(*primals)
  p, t = y.astype(jnp.float32), tangents[0].astype(jnp.float32)
  return y, (p * (t - (p * t).sum(-1, keepdims=True))).astype(y.dtype)


@jax.custom_vjp
def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
  """GELU in its tanh form.

  Its derivative is computed again from `x` in the backward pass: reading x is
  cheaper than writing and reading the intermediates that autodiff would keep.
  """
  return nn.gelu(x, approximate=True)


def _gelu_vjp(x, g):
  slope = 0.7978845608028654  # sqrt(2 / pi)
  t = jnp.tanh(slope * (x + 0.044715 * x**3))
  inner = slope * (1 + 3 * 0.044715 * x**2)
  return (g * 0.5 * (1 + t + x * (1 - t**2) * inner),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_vjp)


class Attention(nn.Module):
  """Multi-head self-attention (equations 5 to 8)."""

  num_heads: int
  dropout: float
  dtype: Any

  @nn.compact
  def __call__(self, x: Float[Array, "n l d"], train: bool):
    width = x.shape[-1]
    dense = functools.partial(
      nn.DenseGeneral,
      dtype=self.dtype,
      kernel_init=nn.initializers.xavier_uniform(),
    )
    head = (self.num_heads, width // self.num_heads)
    q, k, v = (dense(head, name=name)(x) for name in ("query", "key", "value"))
    q = q * head[1] ** -0.5
    weights = softmax(jnp.einsum("nqkd,nlkd->nkql", q, k))
    if self.is_mutable_collection("intermediates"):
      self.sow("intermediates", "attention_weights", weights)
    weights = nn.Dropout(self.dropout)(weights, deterministic=not train)
    y = jnp.einsum("nkql,nlkd->nqkd", weights, v)  # [n, l, k, d / k]
    return dense(width, axis=(-2, -1), name="out")(y)


class MlpBlock(nn.Module):
  """Two dense layers with a GELU between."""

  mlp_dim: int
  dropout: float
  dtype: Any

  @nn.compact
  def __call__(self, x: Float[Array, "n l d"], train: bool):
    dense = functools.partial(
      nn.Dense,
      dtype=self.dtype,
      kernel_init=nn.initializers.xavier_uniform(),
      bias_init=nn.initializers.normal(1e-6),
    )
    y = dense(self.mlp_dim, name="Dense_0")(x)  # [n, l, f]
    y = gelu(y)
    y = nn.Dropout(self.dropout)(y, deterministic=not train)
    y = dense(x.shape[-1], name="Dense_1")(y)
    return nn.Dropout(self.dropout)(y, deterministic=not train)


class Block(nn.Module):
  """One pre-norm encoder block: attention, then MLP (equations 2 and 3)."""

  mlp_dim: int
  num_heads: int
  dropout: float
  attention_dropout: float
  dtype: Any

  @nn.compact
  def __call__(self, x: Float[Array, "n l d"], train: bool):
    y = layer_norm(name="LayerNorm_0")(x)
    y = Attention(
      self.num_heads,
      self.attention_dropout,
      self.dtype,
      name="MultiHeadDotProductAttention_1",
    )(y, train)
    y = nn.Dropout(self.dropout)(y, deterministic=not train)
    x = x + y
    y = layer_norm(name="LayerNorm_2")(x)
    mlp = MlpBlock(self.mlp_dim, self.dropout, self.dtype, name="MlpBlock_3")
    return x + mlp(y, train)


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
