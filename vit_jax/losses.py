"""Losses and targets per example. Sums and means are taken elsewhere."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

LOSSES = ("softmax", "sigmoid")


def multi_hot(
  labels: Int[Array, "n m"], num_classes: int
) -> Float[Array, "n c"]:
  """Returns 1 for each class listed in a row; -1 pads short lists."""
  # One-hot of -1 is all zeros; max, so that a class listed twice counts once.
  return jax.nn.one_hot(labels, num_classes, dtype=jnp.float32).max(axis=1)


def softmax_targets(hot: Float[Array, "n c"]) -> Float[Array, "n c"]:
  """Spreads a softmax's probability evenly over the listed classes."""
  return hot / jnp.maximum(hot.sum(axis=-1, keepdims=True), 1)


def smooth(targets: Float[Array, "n c"], share: float) -> Float[Array, "n c"]:
  """Label smoothing: (1 - share) y + share / c."""
  return targets * (1 - share) + share / targets.shape[-1]


def softmax(
  logits: Float[Array, "n c"], targets: Float[Array, "n c"]
) -> Float[Array, " n"]:
  """Cross-entropy with soft targets, -sum_c y log softmax(x)."""
  return -jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)


def sigmoid(
  logits: Float[Array, "n c"], targets: Float[Array, "n c"]
) -> Float[Array, " n"]:
  """Binary cross-entropy of each class, summed over the classes."""
  return optax.sigmoid_binary_cross_entropy(logits, targets).sum(axis=-1)


def top_k_hit(
  logits: Float[Array, "n c"], hot: Float[Array, "n c"], k: int
) -> Float[Array, " n"]:
  """Returns 1 where one of the k highest logits belongs to a listed class.

  With several listed classes this is the ImageNet-ReaL rule. k above the number
  of classes means all of them.
  """
  _, best = jax.lax.top_k(logits, min(k, logits.shape[-1]))
  return jnp.take_along_axis(hot, best, axis=-1).max(axis=-1)
