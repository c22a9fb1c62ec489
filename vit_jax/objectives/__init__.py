"""What a run trains: a config becomes an Objective.

An objective is a module of this room, named by `config.objective`, that has
`build(config, num_classes) -> Objective`.
"""

import importlib
import pkgutil
from typing import Any

import jax

from vit_jax import trees
from vit_jax.steps import Batch, Metrics, Objective


def build(config: Any, num_classes: int) -> Objective:
  """Builds the objective that `config` describes for `num_classes` classes.

  Raises:
    ValueError: an unknown objective, model, loss or input range, or values out
      of range.
  """
  kinds = [module.name for module in pkgutil.iter_modules(__path__)]
  trees.check_choice("config.objective = ", config.objective, kinds)
  module = importlib.import_module(f"{__name__}.{config.objective}")
  return module.build(config, num_classes)


def metrics_of(each: jax.Array, batch: Batch) -> Metrics:
  """Sums the losses of a batch's real examples.

  Args:
    each: [n], the loss of each example.
    batch: its `mask` says which are real.

  Returns:
    "loss" and, where the batch tells it, "skipped": the share of images that
    others stand in for.
  """
  weight = batch["mask"].sum()
  metrics = {"loss": ((each * batch["mask"]).sum(), weight)}
  if "skipped" in batch:
    metrics["skipped"] = (batch["skipped"].sum(), weight)
  return metrics
