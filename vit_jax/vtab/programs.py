"""The two programs of a sweep: one update, and counting right answers.

They are compiled once, for all tasks and settings. What differs between units
comes as data: the images, how many classes there are, the seed, and the
learning rates, which lie in the optimiser's state as a table with one entry for
each update.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from vit_jax import (
  build,
  evaluators,
  images,
  models,
  optim,
  sharding,
  steps,
)
from vit_jax.vtab import masked_head


class Table(NamedTuple):
  """State of `scale_by_table`.

  Attributes:
    done: int32 [], updates.
    scale: float32 [t], what each update is multiplied by.
  """

  done: jax.Array
  scale: jax.Array


def scale_by_table(length: int) -> optax.GradientTransformation:
  """Multiplies update i by entry i of a table that is part of the state.

  The table starts as zeros; whoever makes a state puts the rates in. Past its
  end the last entry holds.

  Args:
    length: t, entries.
  """

  def init(params):
    del params
    return Table(jnp.zeros((), jnp.int32), jnp.zeros((length,), jnp.float32))

  def update(updates, state, params=None):
    del params
    rate = state.scale[state.done]
    updates = jax.tree.map(lambda u: rate.astype(u.dtype) * u, updates)
    return updates, state._replace(done=state.done + 1)

  return optax.GradientTransformation(init, update)


class Programs(NamedTuple):
  """What is compiled for a sweep, all with the same shapes.

  Attributes:
    mesh: the devices.
    init: key -> parameters, as if there were no weights to start from.
    state: the abstract training state.
    begin: (params, rates [t]) -> the state before the first update.
    step: (state, batch) -> (state, metrics); the state is donated.
    right: (params, batch) -> how many of its examples are right.
  """

  mesh: jax.sharding.Mesh
  init: Callable[[jax.Array], Any]
  state: steps.TrainState
  begin: Callable[[Any, ArrayLike], steps.TrainState]
  step: Callable
  right: Callable


def compile_all(
  config: Any, mesh: jax.sharding.Mesh, *, num_classes: int, longest: int
) -> Programs:
  """Builds and compiles.

  Args:
    config: of the sweep.
    mesh: from `sharding.make_mesh`.
    num_classes: of the largest task.
    longest: t, updates of the longest setting.

  Raises:
    ValueError: whatever in the config, or between config and mesh, cannot be.
  """
  sharding.check_batch_size(config.input.batch_size, mesh, config.accumulate)
  objective = masked_head.build(config, num_classes)
  params = jax.eval_shape(objective.init, jax.random.key(0))
  sharding.check_model(params, mesh, models.PARAM_AXES)
  tx = optax.chain(
    optim.make_optimizer(config.optim, params, optax.constant_schedule(1.0)),
    scale_by_table(longest),
  )
  state = steps.abstract_state(objective, tx)
  shardings = sharding.tree_shardings(state, mesh, models.PARAM_AXES)
  state = jax.tree.map(_placed, state, shardings)

  def begin(params, rates):
    fresh = steps.new_state(objective, tx, seed=0, params=params)
    rest, table = fresh.opt_state
    opt_state = rest, table._replace(scale=rates)
    return dataclasses.replace(fresh, opt_state=opt_state)

  step: Any = steps.make_train_step(
    objective,
    tx,
    optax.constant_schedule(0.0),  # What it would report is in the table.
    mesh,
    shardings,
    seed=config.seed,
    accumulate=config.accumulate,
    ascent=optim.make_ascent(config.optim, params),
  )
  right: Any = steps.make_predict_step(
    objective, mesh, shardings.params, then=masked_head.correct
  )
  size = images.size_of(config)

  def batch_of(number):
    return _abstract_batch(number, size, mesh)

  return Programs(
    mesh,
    objective.init,
    state,
    jax.jit(begin, out_shardings=shardings),
    step.lower(state, batch_of(config.input.batch_size)).compile(),
    right.lower(
      state.params, batch_of(evaluators.batch_size(config.vtab, mesh))
    ).compile(),
  )


def first_weights(
  config: Any,
  init: Callable[[jax.Array], Any],
  shardings: Any,
  num_classes: int,
) -> Any:
  """Returns the weights that all units of a sweep start from, on the devices.

  Args:
    config: of the sweep; `init_from` names them, "" draws them from the seed.
    init: draws parameters from a key.
    shardings: of the parameters.
    num_classes: of the head; 0 is none.

  Raises:
    ValueError: the weights do not fit.
  """
  if config.init_from:
    return sharding.place(build.pretrained(config, num_classes), shardings)
  key = steps.stream(config.seed, "init")
  return jax.jit(init, out_shardings=shardings)(key)


def _placed(leaf, where):
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def _abstract_batch(number, size, mesh):
  def rows(dtype, *shape):
    return jax.ShapeDtypeStruct(
      (number, *shape), dtype, sharding=sharding.batch_sharding(mesh)
    )

  return {
    "image": rows(jnp.uint8, *size, 3),
    "labels": rows(jnp.int32, 1),
    "mask": rows(jnp.float32),
    "classes": rows(jnp.int32),
    "seed": rows(jnp.int32),
  }
