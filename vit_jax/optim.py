"""From `config.optim` to an optax chain.

The chain is, in this order: clip the global norm, first and second moments (or
momentum), decoupled weight decay, factors by path, learning rate. Frozen
parameters stay outside of all of it: they have no moments and do not count in
the norm that is clipped.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax import trees
from vit_jax.schedules import Schedule

OPTIMIZERS = ("adamw", "sgd")


def make_optimizer(
  config: Any, params: Any, schedule: Schedule
) -> optax.GradientTransformation:
  """Builds the optimiser of a run.

  adamw: u = m / (sqrt(v) + eps) + weight_decay * p (Loshchilov & Hutter), with
  bias-corrected moments; sgd: u = momentum * u + g, then + weight_decay * p.
  Either way p <- p - lr * factor * u. big_vision's decay of 1e-4 at a learning
  rate of 1e-3 is 0.1 here.

  Args:
    config: `config.optim`.
    params: the parameter tree; shapes are enough.
    schedule: updates done -> learning rate.

  Raises:
    ValueError: unknown optimiser or dtype; a path regex that fits nothing.
  """
  trees.check_choice("config.optim.name = ", config.name, OPTIMIZERS)
  if config.moment_dtype not in ("float32", "bfloat16"):
    raise ValueError(
      f"config.optim.moment_dtype = {config.moment_dtype!r}; there are "
      "float32, bfloat16."
    )
  dtype = jnp.dtype(config.moment_dtype)
  chain = []
  if config.clip:
    chain.append(optax.clip_by_global_norm(config.clip))
  if config.name == "adamw":
    chain.append(
      optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=dtype)
    )
  else:
    chain.append(optax.trace(config.momentum, accumulator_dtype=dtype))
  if config.weight_decay:
    decays = trees.select(
      params, config.decay_paths, key="config.optim.decay_paths"
    )
    chain.append(optax.add_decayed_weights(config.weight_decay, decays))
  if config.multipliers:
    chain.append(_scale_by_path(config.multipliers, params))
  chain.append(optax.scale_by_learning_rate(schedule))
  return _freeze(optax.chain(*chain), config.freeze, params)


def _scale_by_path(multipliers, params):
  trees.select(
    params,
    [regex for regex, _ in multipliers],
    key="config.optim.multipliers",
  )
  factors = trees.map_with_path(
    lambda path, _: trees.first_match(multipliers, path, 1.0), params
  )
  # Outer map over factors: a frozen parameter's update is an empty node there.
  return optax.stateless(
    lambda updates, _: jax.tree.map(
      lambda factor, part: jax.tree.map(lambda x: factor * x, part),
      factors,
      updates,
    )
  )


def _freeze(tx, freeze, params):
  if not freeze:
    return tx
  frozen = trees.select(params, freeze, key="config.optim.freeze")
  trained = jax.tree.map(lambda leaf: not leaf, frozen)
  return optax.chain(
    optax.masked(tx, trained), optax.masked(optax.set_to_zero(), frozen)
  )
