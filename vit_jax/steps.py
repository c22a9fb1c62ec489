"""The training state and the one step that training, plans and benchmarks use.

The step is the only clock: `state.step` counts the updates done, and all
randomness is a function of (seed, step), so a state needs no keys and resuming
is exact. This room knows no files, no config and no data source.
"""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from vit_jax import sharding, trees
from vit_jax.schedules import Schedule

Batch = dict[str, jax.Array]
Metrics = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, weight)


@flax.struct.dataclass
class TrainState:
  """All that a run needs to go on: data only, no functions and no keys.

  Attributes:
    step: int32 [], the number of updates done.
    params: the parameter tree, float32.
    opt_state: optax's state.
    ema: averaged parameters, or {} when off.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  ema: Any


class Objective(NamedTuple):
  """What is trained: the three functions in which tasks differ.

  Attributes:
    init: key -> params.
    loss: (params, batch, key) -> metrics; `metrics["loss"]` is minimised. Every
      metric is a (sum, weight) pair over the batch's real examples.
    predict: (params, batch) -> the model's outputs, without randomness.
  """

  init: Callable[[jax.Array], Any]
  loss: Callable[[Any, Batch, jax.Array], Metrics]
  predict: Callable[[Any, Batch], dict[str, Any]]


def stream(seed: int, name: str) -> jax.Array:
  """Returns the random key of a named use ("init", "step") of the seed."""
  return jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))


def new_state(
  objective: Objective,
  tx: optax.GradientTransformation,
  *,
  seed: int,
  ema: float = 0.0,
  params: Any = None,
) -> TrainState:
  """Returns the state before the first update (traceable).

  Its parameters are `params`, or come from the seed.
  """
  if params is None:
    params = objective.init(stream(seed, "init"))
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=tx.init(params),
    ema=params if ema else {},
  )


def abstract_state(
  objective: Objective, tx: optax.GradientTransformation, *, ema: float = 0.0
) -> TrainState:
  """Returns the state's shapes and dtypes; no memory is spent."""
  return jax.eval_shape(lambda: new_state(objective, tx, seed=0, ema=ema))


def init_state(
  objective: Objective,
  tx: optax.GradientTransformation,
  shardings: TrainState,
  *,
  seed: int,
  ema: float = 0.0,
  params: Any = None,
) -> TrainState:
  """Initialises the state straight into its shardings.

  No device ever holds more than its part, and the values do not depend on the
  mesh.

  Args:
    objective: draws the parameters.
    tx: the optimiser.
    shardings: of the state, leaf by leaf.
    seed: of the parameters.
    ema: as in `make_train_step`.
    params: numpy parameters to start from in place of drawn ones, the same on
      every process.
  """

  def new(params):
    return new_state(objective, tx, seed=seed, ema=ema, params=params)

  if params is not None:
    params = sharding.place(params, shardings.params)
  return jax.jit(new, out_shardings=shardings, donate_argnums=0)(params)


def make_train_step(
  objective: Objective,
  tx: optax.GradientTransformation,
  schedule: Schedule,
  mesh: Mesh,
  shardings: TrainState,
  *,
  seed: int,
  accumulate: int = 1,
  ema: float = 0.0,
  ascent: Callable[[Any], Any] | None = None,
  spread: Any = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
  """Builds the jitted update; the state passed in is donated.

  Args:
    objective: gives the loss.
    tx: the optimiser, learning rate included.
    schedule: updates done -> learning rate; only reported.
    mesh: from `sharding.make_mesh`.
    shardings: of the state, leaf by leaf.
    seed: of dropout, mixup and all else that is random in a step.
    accumulate: cuts the batch into so many parts, one after the other, whose
      gradients add up to the whole batch's: less memory, the same update.
    ema: decay of the averaged parameters, ema <- ema d + params (1 - d).
    ascent: from `optim.make_ascent`: the gradient -> what to add to the
      parameters before the gradient that makes the update is taken.
    spread: shardings of the gradients, where each device is to compute only its
      part of the update (`sharding.spread_over_data`).

  Returns:
    step(state, batch) -> (state, metrics). The metrics are the loss of this
    batch under the state that came in, the learning rate that made the update
    (`lr`) and the global norm of the gradient that made it (`grad_norm`).
  """

  def loss(params, batch, key):
    with sharding.activations_on(mesh):
      metrics = objective.loss(params, batch, key)
    return metrics["loss"][0], metrics

  def mean_loss(params, batch, key):
    total, metrics = loss(params, batch, key)
    return total / metrics["loss"][1], metrics

  def gradient(function, params, batch, key):
    grads, metrics = jax.grad(function, has_aux=True)(params, batch, key)
    if spread is not None:
      # Whole first, and then in parts: the sums over the devices are scattered,
      # while the products that make them stay in one piece.
      grads = jax.lax.with_sharding_constraint(grads, shardings.params)
      grads = jax.lax.with_sharding_constraint(grads, spread)
    return grads, metrics

  def gradients(params, batch, key):
    if accumulate == 1:
      return gradient(mean_loss, params, batch, key)
    # Every accumulate-th example, so that each device cuts its own rows; sums,
    # so that parts with unlike padding add up exactly.
    parts = jax.tree.map(
      lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch
    )
    keys = jax.random.split(key, accumulate)

    def add_part(total, part):
      return jax.tree.map(jnp.add, total, gradient(loss, params, *part)), None

    shapes = jax.eval_shape(
      jax.grad(loss, has_aux=True),
      params,
      jax.tree.map(lambda x: x[0], parts),
      key,
    )
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    if spread is not None:
      zeros = jax.lax.with_sharding_constraint(zeros[0], spread), zeros[1]
    grads, metrics = jax.lax.scan(add_part, zeros, (parts, keys))[0]
    return jax.tree.map(lambda g: g / metrics["loss"][1], grads), metrics

  def step(state, batch):
    key = jax.random.fold_in(stream(seed, "step"), state.step)
    grads, metrics = gradients(state.params, batch, key)
    if ascent:
      # With the same key: dropout and mixup are the same function of params.
      nearby = optax.apply_updates(state.params, ascent(grads))
      grads, _ = gradients(nearby, batch, key)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    one = jnp.ones(())
    metrics |= {
      "lr": (schedule(state.step), one),
      "grad_norm": (optax.tree.norm(grads), one),
    }
    average = state.ema
    if ema:
      average = optax.incremental_update(params, state.ema, 1 - ema)
    return TrainState(state.step + 1, params, opt_state, average), metrics

  return jax.jit(
    step,
    donate_argnums=0,
    in_shardings=(shardings, sharding.batch_sharding(mesh)),
    out_shardings=(shardings, sharding.replicated(mesh)),
  )


def make_predict_step(
  objective: Objective,
  mesh: Mesh,
  shardings: Any,
  *,
  then: Callable[[dict[str, Any], Batch], Any],
) -> Callable[[Any, Batch], Any]:
  """Builds the jitted forward pass and what follows from it.

  Args:
    objective: gives the outputs.
    mesh: from `sharding.make_mesh`.
    shardings: of the parameters.
    then: (outputs, batch) -> what to keep, e.g. metric sums or probabilities;
      computed in the same program and replicated.

  Returns:
    predict(params, batch) -> then(outputs, batch).
  """

  def predict(params, batch):
    with sharding.activations_on(mesh):
      outputs = objective.predict(params, batch)
    return then(outputs, batch)

  return jax.jit(
    predict,
    in_shardings=(shardings, sharding.batch_sharding(mesh)),
    out_shardings=sharding.replicated(mesh),
  )


@jax.jit
def _finite(tree):
  return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), tree)


def nonfinite(tree: Any) -> list[str]:
  """Returns the paths of the leaves that hold a NaN or an infinity."""
  finite = trees.flatten(jax.device_get(_finite(tree)))
  return [path for path, good in finite.items() if not good]
