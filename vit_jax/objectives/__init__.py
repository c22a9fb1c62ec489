"""What a run trains: a config becomes an Objective.

An objective is a module of this room, named by `config.objective`, that has
`build(config, num_classes) -> Objective`.
"""

import importlib
import pkgutil
from typing import Any

from vit_jax import trees
from vit_jax.steps import Objective


def build(config: Any, num_classes: int) -> Objective:
  """Builds the objective that `config` describes for `num_classes` classes.

  Raises:
    ValueError: an unknown objective, model, loss or input range, or values out
      of range.
  """
  kinds = [module.name for module in pkgutil.iter_modules(__path__)]
  if config.objective not in kinds:
    raise ValueError(
      f"config.objective = {config.objective!r}; there are {', '.join(kinds)}."
      + trees.nearest(config.objective, kinds)
    )
  module = importlib.import_module(f"{__name__}.{config.objective}")
  return module.build(config, num_classes)
