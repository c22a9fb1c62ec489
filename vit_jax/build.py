"""From a config to the parts of a run: shapes first, no arrays yet.

Training, evaluation, planning and prediction all assemble their parts here, so
that they cannot differ. Nothing is compiled and no memory is spent.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from vit_jax import (
  images,
  models,
  objectives,
  optim,
  schedules,
  sharding,
  steps,
  weights,
)


class Parts(NamedTuple):
  """What a run is made of.

  Attributes:
    objective: init, loss and predict.
    total: updates of the whole run.
    schedule: updates done -> learning rate.
    tx: the optimiser.
    state: the state's shapes, dtypes and shardings (`jax.ShapeDtypeStruct`).
    shardings: the state's shardings alone.
  """

  objective: steps.Objective
  total: int
  schedule: schedules.Schedule
  tx: optax.GradientTransformation
  state: steps.TrainState
  shardings: steps.TrainState


def durations(config: Any, num_examples: int) -> Callable[[str, str], int]:
  """Returns `to_steps(duration, key)` for this run, percentages included."""
  context = {
    "batch_size": config.input.batch_size,
    "num_examples": num_examples,
  }
  total = schedules.to_steps(config.total, key="config.total", **context)
  if not total:
    raise ValueError(f"config.total = {config.total!r}: nothing to train.")

  def to_steps(duration, key):
    return schedules.to_steps(duration, key=key, total=total, **context)

  return to_steps


def is_rehearsal(config: Any) -> bool:
  """Says whether a run trains on made-up images, to try a recipe out.

  Recipes are rehearsed as they are, on machines without their data, for a short
  while: such a run does without evaluators whose data is not here, and shortens
  a warm-up that is longer than itself. On real data both are refused.
  """
  return config.input.source.startswith("fake:")


def schedule(config: Any, num_examples: int) -> tuple[schedules.Schedule, int]:
  """Returns the learning rate of a run and the run's length in updates."""
  to_steps = durations(config, num_examples)
  total = to_steps("100%", "config.total")
  rate = schedules.make_schedule(
    config.optim, total, to_steps, shorten=is_rehearsal(config)
  )
  return rate, total


def inference(
  config: Any, mesh: Mesh, *, num_classes: int
) -> tuple[steps.Objective, Any]:
  """Assembles what using a model takes: its objective and abstract parameters.

  Args:
    config: see `configs/common.py`.
    mesh: from `sharding.make_mesh`.
    num_classes: outputs of the model.

  Returns:
    The objective, and the parameters' shapes, dtypes and shardings.

  Raises:
    ValueError: a model that cannot be, or that the mesh cannot split.
  """
  objective = objectives.build(config, num_classes)
  params = jax.eval_shape(objective.init, jax.random.key(0))
  sharding.check_model(params, mesh, models.PARAM_AXES)
  sharding.check_spread(params, mesh, models.PARAM_AXES)
  where = sharding.tree_shardings(params, mesh, models.PARAM_AXES)
  return objective, _placed(params, where)


def parts(
  config: Any, mesh: Mesh, *, num_classes: int, num_examples: int
) -> Parts:
  """Assembles and checks everything that needs neither data nor memory.

  Args:
    config: see `configs/common.py`.
    mesh: from `sharding.make_mesh`.
    num_classes: of the training source.
    num_examples: of the training split.

  Raises:
    ValueError: whatever in the config, or between config and mesh, cannot be.
  """
  sharding.check_batch_size(config.input.batch_size, mesh, config.accumulate)
  if not 0 <= config.ema < 1:
    raise ValueError(f"config.ema = {config.ema}: the decay is in [0, 1).")
  objective, params = inference(config, mesh, num_classes=num_classes)
  rate, total = schedule(config, num_examples)
  tx = optim.make_optimizer(config.optim, params, rate)
  state = steps.abstract_state(objective, tx, ema=config.ema)
  state = _placed(state, _shardings(config, state, params))
  jax.eval_shape(tx.update, state.params, state.opt_state, state.params)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
  return Parts(objective, total, rate, tx, state, shardings)


def check_given(config: Any) -> None:
  """Refuses a recipe that starts from weights where none are named."""
  if config.init_from == "?":
    raise ValueError(
      "This recipe starts from weights. Say which: --config.init_from=PATH of "
      "an .npz, a .safetensors or a run's workdir."
    )


def pretrained(config: Any, num_classes: int) -> Any:
  """Loads the weights that `config.init_from` names, fitted to the model.

  Returns:
    The parameters, numpy on the host; what only the model has is drawn from
    the seed as it would be from scratch.

  Raises:
    ValueError: see `weights.load`; the images had another range of values.
  """
  check_input_range(weights.open(config.init_from), config)
  return weights.load(
    config.init_from,
    models.from_config(config.model, num_classes),
    images.size_of(config),
    head=config.init_head,
    resize=config.init_resize,
    patch=config.init_patch,
    rng=steps.stream(config.seed, "init"),
  )


def check_input_range(stored: weights.Stored, config: Any) -> None:
  """Refuses weights that say they were trained on images in another range."""
  ours = config.model.input_range
  theirs = stored.about.get("input_range", ours)
  if theirs != ours:
    raise ValueError(
      f"{stored.path} was trained on images in the range {theirs!r}; set "
      f"--config.model.input_range={theirs} (it is {ours!r})."
    )


def _shardings(config, state, params):
  """Says where each leaf of a state lies, given placed parameters."""
  where = jax.tree.map(lambda leaf: leaf.sharding, params)
  moments = _gradient_shardings(config, params) or where
  whole: Any = sharding.replicated(jax.tree.leaves(where)[0].mesh)
  return steps.TrainState(
    step=whole,
    params=where,
    opt_state=sharding.moment_shardings(state.opt_state, params, moments),
    ema=where if state.ema else {},
  )


def _gradient_shardings(config, params):
  """Says in which parts an update is computed; None: as the parameters lie."""
  if not config.optim.zero:
    return None
  where = jax.tree.map(lambda leaf: leaf.sharding, params)
  return sharding.spread_over_data(params, where)


def _placed(abstract, shardings):
  """Gives each abstract leaf its sharding."""
  return jax.tree.map(
    lambda leaf, where: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=where
    ),
    abstract,
    shardings,
  )


def train_step(config: Any, mesh: Mesh, parts: Parts) -> Callable:
  """Builds the jitted update that training runs and planning compiles."""
  return steps.make_train_step(
    parts.objective,
    parts.tx,
    parts.schedule,
    mesh,
    parts.shardings,
    seed=config.seed,
    accumulate=config.accumulate,
    ema=config.ema,
    ascent=optim.make_ascent(config.optim, parts.state.params),
    spread=_gradient_shardings(config, parts.state.params),
  )
