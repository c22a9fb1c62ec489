"""The usual functions, with derivatives of their own.

The mathematics is the same; there is less to write to memory and to read back
than autodiff would have, or a product lies better on the TPU. `docs/tpu.md` has
what each gave. Products keep the image and token axes apart: merging them is
faster on CPUs, but costs the TPU, whose tiles do not divide 197 tokens, a copy
at every layer.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


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
def attend(
  logits: Float[Array, "n k q l"], values: Float[Array, "n l k d"]
) -> Float[Array, "n q k d"]:
  """Sums the values, weighed by the softmax of the logits.

  What the softmax's derivative sums over the keys is taken from the result,
  which is smaller than the weights, and the weights' gradient becomes the
  logits' where it is made, in one pass.
  """
  return _attend(logits, values)[0]


def _attend(logits, values):
  weights = softmax(logits)
  y = jnp.einsum("nkql,nlkd->nqkd", weights, values)
  return y, (weights, values, y)


def _attend_vjp(kept, g):
  weights, values, y = kept
  # sum_l w dw = sum_d y dy, as y is what the weights make of the values.
  common = (g.astype(jnp.float32) * y.astype(jnp.float32)).sum(-1)
  to_weights = jnp.einsum("nqkd,nlkd->nkql", g, values).astype(jnp.float32)
  to_logits = to_weights - common.swapaxes(1, 2)[..., None]
  to_logits = (weights.astype(jnp.float32) * to_logits).astype(weights.dtype)
  return to_logits, jnp.einsum("nkql,nqkd->nlkd", weights, g)


attend.defvjp(_attend, _attend_vjp)


@jax.custom_vjp
def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
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


gelu_tanh.defvjp(lambda x: (gelu_tanh(x), x), _gelu_vjp)

# Google's models were trained with the tanh form, PyTorch's with the exact one.
GELUS: dict[str, Callable] = {
  "tanh": gelu_tanh,
  "erf": functools.partial(nn.gelu, approximate=False),
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gelu_product(
  gelu: str, x: Float[Array, "n l f"], kernel: Float[Array, "f d"]
) -> Float[Array, "n l d"]:
  """Multiplies GELU's result with a kernel, and does not keep it.

  The backward pass makes it again from `x` where it reads it, which is next to
  free, and spares one of a block's two largest arrays.
  """
  return GELUS[gelu](x) @ kernel


def _gelu_product_vjp(gelu, kept, g):
  x, kernel = kept
  # Without the barrier the compiler finds the forward pass's result, and keeps
  # it after all.
  x = jax.lax.optimization_barrier(x)
  _, backward = jax.vjp(lambda x, kernel: GELUS[gelu](x) @ kernel, x, kernel)
  return backward(g)


gelu_product.defvjp(
  lambda gelu, x, kernel: (gelu_product(gelu, x, kernel), (x, kernel)),
  _gelu_product_vjp,
)


@jax.custom_vjp
def to_heads(
  x: Float[Array, "n l d"], kernel: Float[Array, "d k h"]
) -> Float[Array, "n l k h"]:
  """Projects tokens to queries, keys or values.

  The kernel's gradient is summed with the channels innermost, and turned when
  it is done: with heads of 64 there, half of the TPU's 128 lanes would idle.
  """
  return jnp.einsum("nld,dkh->nlkh", x, kernel)


def _to_heads_vjp(kept, g):
  x, kernel = kept
  to_kernel = jnp.einsum("nld,nlkh->khd", x, g)
  # Without the barrier the compiler turns it at once, and undoes this.
  to_kernel = jax.lax.optimization_barrier(to_kernel).transpose(2, 0, 1)
  return jnp.einsum("nlkh,dkh->nld", g, kernel), to_kernel


to_heads.defvjp(
  lambda x, kernel: (to_heads(x, kernel), (x, kernel)), _to_heads_vjp
)
