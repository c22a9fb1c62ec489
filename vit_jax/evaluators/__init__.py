"""Evaluators: one file each, named by `kind` in `config.evals`.

An evaluator module has `build(entry, *, config, source, classes, objective,
mesh, shardings) -> Evaluator` and `VALUES`, the names of what that returns, "n"
among them, or a function from the entry to them. This room knows no loop and no
checkpoint.
"""

import importlib
import logging
import pkgutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import input_pipeline
from vit_jax import guard, hosts, images, sharding, steps, trees

log = logging.getLogger("vit_jax")

# (params, stop) -> name -> value; None when `stop()` turned true half-way.
Evaluator = Callable[[Any, Callable[[], bool]], dict[str, float] | None]


def value_names(config: Any) -> list[str]:
  """Returns "NAME/VALUE" for all that the config's evaluators will return."""
  return [
    f"{name}/{value}"
    for name, entry in config.evals.items()
    if entry.kind
    for value in _values(_module(name, entry).VALUES, entry)
  ]


def need_head(config: Any) -> bool:
  """Says whether any of the config's evaluators reads the model's head."""
  return any(
    getattr(_module(name, entry), "READS_HEAD", True)
    for name, entry in config.evals.items()
    if entry.kind
  )


def weights_of(entry: Any, state: steps.TrainState) -> Any:
  """Returns what an entry of `config.evals` judges: averages or parameters."""
  return (
    state.params if entry.weights == "params" else state.ema or state.params
  )


def batch_size(entry: Any, mesh: Mesh) -> int:
  """Returns an entry's batch size, rounded up to what devices can share.

  Raises:
    ValueError: it is less than 1.
  """
  if entry.batch_size < 1:
    raise ValueError(f"batch_size = {entry.batch_size}; use 1 or more.")
  unit = np.lcm(sharding.batch_devices(mesh), jax.process_count())
  return int(-(-entry.batch_size // unit) * unit)


def look_at(
  source: input_pipeline.Source, ops: str, size: tuple[int, int]
) -> dict[str, np.ndarray]:
  """Reads the first example of a split, to refuse its images early.

  Args:
    source: the split.
    ops: how its images are prepared.
    size: (h, w) in pixels that the model wants.

  Returns:
    A batch of one.

  Raises:
    ValueError: the images are of another size.
  """
  first = next(input_pipeline.eval_batches(source, ops, batch_size=1)[0])
  images.check_size(first["image"], size, key="ops")
  return first


def _open(name, entry, config, rehearsal):
  """Returns an entry's source, the same in all processes.

  None in a rehearsal on made-up images, when the real ones are not here.
  """
  try:
    source = input_pipeline.get_source(
      entry.source or config.input.source, entry.split, config.input.data_dir
    )
  except input_pipeline.AbsentError as error:
    if not rehearsal:
      raise
    source = None
    log.warning(
      "config.evals.%s is left out of this rehearsal: %s", name, error
    )
  # Of other data one process would come to another number of batches, and the
  # rest would wait for it.
  facts = {}
  if source:
    facts = {
      "num_examples": source.num_examples,
      "class_names": list(source.class_names),
      "digest": source.digest,
    }
  hosts.agree("the data", facts, guard.changes)
  return source


def _values(values, entry):
  return values(entry) if callable(values) else values


def _module(name, entry):
  kinds = [module.name for module in pkgutil.iter_modules(__path__)]
  trees.check_choice(f"config.evals.{name}.kind = ", entry.kind, kinds)
  return importlib.import_module(f"{__name__}.{entry.kind}")


def build_all(
  config: Any,
  *,
  classes: tuple[str, ...],
  objective: steps.Objective,
  mesh: Mesh,
  params: Any,
  rehearsal: bool = False,
) -> dict[str, Evaluator]:
  """Builds all evaluators that `config.evals` switches on.

  Args:
    config: the whole config.
    classes: names of the model's outputs.
    objective: gives the predictions.
    mesh: from `sharding.make_mesh`.
    params: abstract parameters that carry their shardings.
    rehearsal: whether to do without evaluators whose data is not here; each is
      a warning.

  Raises:
    ValueError: an unknown kind, or what an evaluator refuses, with its name.
  """
  shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
  built = {}
  for name, entry in config.evals.items():
    if not entry.kind:
      continue
    module = _module(name, entry)
    trees.check_choice(
      f"config.evals.{name}.weights = ", entry.weights, ("", "params", "ema")
    )
    if entry.weights == "ema" and not config.ema:
      raise ValueError(
        f"config.evals.{name}.weights = 'ema', but config.ema = 0 keeps no "
        "averages."
      )
    try:
      source = _open(name, entry, config, rehearsal)
      if source is None:
        continue
      built[name] = module.build(
        entry,
        config=config,
        source=source,
        classes=classes,
        objective=objective,
        mesh=mesh,
        shardings=shardings,
      )
    except ValueError as error:
      raise ValueError(f"config.evals.{name}: {error}") from error
  return built
