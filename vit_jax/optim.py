"""From `config.optim` to an optax chain.

The chain is, in this order: clip the global norm, first and second moments (or
momentum), decoupled weight decay, factors by path, learning rate. Frozen
parameters stay outside of all of it: they have no moments and do not count in
the norm that is clipped. Where the gradient is taken may be part of an
optimiser too: `make_ascent`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax import trees
from vit_jax.schedules import Schedule

OPTIMIZERS = ("adamw", "sgd", "adafactor")

# Adafactor as in "Scaling Vision Transformers" (arXiv:2106.04560).
_DECAY_EXPONENT = 0.8
_SMALLEST_FACTORED = 32  # A shorter side is not worth a row and a column.
_EPSILON = 1e-30  # Of squared gradients; Adam's `eps` is another.


def make_optimizer(
  config: Any, params: Any, schedule: Schedule
) -> optax.GradientTransformation:
  """Builds the optimiser of a run.

  adamw: u = m / (sqrt(v) + eps) + weight_decay * p (Loshchilov & Hutter), with
  bias-corrected moments; sgd: u = momentum * u + g, then + weight_decay * p.
  adafactor: u = b1 * u + (1 - b1) * g / sqrt(v), then + weight_decay * p, where
  v of a matrix is told by the means of its rows and columns (Shazeer & Stern)
  and decays by min(b2, 1 - t^-0.8) in update t: the form without relative step
  sizes of "Scaling Vision Transformers". In all of them
  p <- p - lr * factor * u. big_vision's decay of 1e-4 at a learning rate of
  1e-3 is 0.1 here.

  Args:
    config: `config.optim`.
    params: the parameter tree; shapes are enough.
    schedule: updates done -> learning rate.

  Raises:
    ValueError: unknown optimiser or dtype; a path regex that fits nothing; a
      negative `sam_rho`.
  """
  trees.check_choice("config.optim.name = ", config.name, OPTIMIZERS)
  if config.moment_dtype not in ("float32", "bfloat16"):
    raise ValueError(
      f"config.optim.moment_dtype = {config.moment_dtype!r}; there are "
      "float32, bfloat16."
    )
  if config.sam_rho < 0:
    raise ValueError(
      f"config.optim.sam_rho = {config.sam_rho}; use 0 (off) or more."
    )
  dtype = jnp.dtype(config.moment_dtype)
  chain = []
  if config.clip:
    chain.append(optax.clip_by_global_norm(config.clip))
  if config.name == "adamw":
    chain.append(
      optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=dtype)
    )
  elif config.name == "adafactor":
    chain.append(_scale_by_adafactor(config.b2, params))
    chain.append(optax.ema(config.b1, debias=False, accumulator_dtype=dtype))
  else:
    chain.append(optax.trace(config.momentum, accumulator_dtype=dtype))
  if config.weight_decay:
    chain += _decay(config, params)
  if config.multipliers:
    chain.append(_scale_by_path(config.multipliers, params))
  chain.append(optax.scale_by_learning_rate(schedule))
  return _freeze(optax.chain(*chain), config.freeze, params)


def make_ascent(config: Any, params: Any) -> Callable[[Any], Any] | None:
  """Builds the first half of sharpness-aware minimisation (arXiv:2010.01412).

  The update is then made with the gradient at p + sam_rho * g / |g|, which is
  where the loss is highest near p, to first order. g is the gradient of the
  whole batch, so neither devices nor accumulation change the result. Frozen
  parameters stay where they are.

  Args:
    config: `config.optim`.
    params: the parameter tree; shapes are enough.

  Returns:
    The gradient at p -> what to add to p; None if `sam_rho` is 0.
  """
  rho = config.sam_rho
  if not rho:
    return None
  frozen = trees.select(params, config.freeze, key="config.optim.freeze")

  def ascent(grads):
    grads = jax.tree.map(
      lambda stays, g: jnp.zeros_like(g) if stays else g, frozen, grads
    )
    factor = rho / (optax.tree.norm(grads) + 1e-12)
    return jax.tree.map(lambda g: factor * g, grads)

  return ascent


def _decay(config, params):
  """Weight decay: one part for each strength in which it comes."""
  decays = trees.select(
    params, config.decay_paths, key="config.optim.decay_paths"
  )
  rules = config.decay_multipliers
  if not rules:
    return [optax.add_decayed_weights(config.weight_decay, decays)]
  trees.select(
    params,
    [regex for regex, _ in rules],
    key="config.optim.decay_multipliers",
  )
  factors = trees.map_with_path(
    lambda path, _: float(trees.first_match(rules, path, 1.0)), params
  )

  def having(factor):
    return jax.tree.map(
      lambda decay, own: decay and own == factor, decays, factors
    )

  return [
    optax.add_decayed_weights(config.weight_decay * factor, having(factor))
    for factor in sorted(set(jax.tree.leaves(factors)))
    if any(jax.tree.leaves(having(factor)))
  ]


def _scale_by_adafactor(cap, params):
  """g / sqrt(v), with v of a matrix as the product of a row and a column."""

  def scale(factored):
    return optax.scale_by_factored_rms(
      factored=factored,
      decay_rate=_DECAY_EXPONENT,
      min_dim_size_to_factor=_SMALLEST_FACTORED,
      epsilon=_EPSILON,
      # Without a cap the second moment would in the end learn nothing new.
      decay_rate_fn=lambda count, exponent: jnp.minimum(
        cap, 1 - (count + 1.0) ** -exponent
      ),
    )

  # Stacked vectors look like a matrix, and the stack like one of its sides.
  # Nothing connects the blocks, and a loop over them has no such matrix: what
  # is factored is told by a block's own shape. (Optax takes the two longest
  # sides; where the stack is one of them, the moment is kept whole.)
  def is_matrix(path, leaf):
    stacked = "encoderblock/" in path
    sides = sorted(leaf.shape[stacked:])
    if len(sides) < 2 or sides[-2] < _SMALLEST_FACTORED:
      return False
    return not stacked or leaf.shape[0] < sides[-2]

  matrices = trees.map_with_path(is_matrix, params)
  vectors = jax.tree.map(lambda matrix: not matrix, matrices)
  return optax.chain(
    optax.masked(_at_full_rank(scale(True)), matrices),
    optax.masked(scale(False), vectors),
  )


class _Shape(NamedTuple):
  """How a moment is kept: as what, and where a parameter's axis was dropped."""

  stored: tuple[int, ...]
  own: tuple[int, ...]


def _at_full_rank(tx):
  """Keeps the factored moments at their parameter's rank, dropped axes as 1.

  So they are placed on a mesh by the rule of their parameter.
  """

  def shape(moment, param):
    dropped = [
      axis
      for axis in range(param.ndim)
      if np.delete(param.shape, axis).tolist() == list(moment.shape)
    ]
    stored = list(param.shape)
    if dropped:
      stored[dropped[0]] = 1
    elif moment.shape != param.shape:  # Stands for a moment that is not kept.
      stored = [1] * param.ndim
    return _Shape(tuple(stored), moment.shape)

  def moments(state):
    return state.v_row, state.v_col, state.v

  def reshape(state, shapes, way):
    v_row, v_col, v = (
      jax.tree.map(
        lambda moment, shape: moment.reshape(getattr(shape, way)), tree, how
      )
      for tree, how in zip(moments(state), shapes)
    )
    return state._replace(v_row=v_row, v_col=v_col, v=v)

  def shapes_of(params):
    state = jax.eval_shape(tx.init, params)
    return tuple(jax.tree.map(shape, tree, params) for tree in moments(state))

  def init(params):
    return reshape(tx.init(params), shapes_of(params), "stored")

  def update(updates, state, params):
    shapes = shapes_of(params)
    state = reshape(state, shapes, "own")
    updates, state = tx.update(updates, state, params)
    return updates, reshape(state, shapes, "stored")

  return optax.GradientTransformation(init, update)


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
