"""Evaluators: one file each, named by `kind` in `config.evals`.

An evaluator module has `build(config, *, source, classes, objective, mesh,
shardings, loss) -> Evaluator`. This room knows no loop and no checkpoint.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from vit_jax import trees

# (params, stop) -> name -> value; None when `stop()` turned true half-way.
Evaluator = Callable[[Any, Callable[[], bool]], dict[str, float] | None]


def build(name: str, config: Any, **context: Any) -> Evaluator:
  """Builds the evaluator called `name` of `config.evals`.

  Raises:
    ValueError: an unknown kind, or what the evaluator refuses, with its name.
  """
  kinds = [module.name for module in pkgutil.iter_modules(__path__)]
  if config.kind not in kinds:
    raise ValueError(
      f"config.evals.{name}.kind = {config.kind!r}; there are "
      f"{', '.join(kinds)}.{trees.nearest(config.kind, kinds)}"
    )
  module = importlib.import_module(f"{__name__}.{config.kind}")
  try:
    return module.build(config, **context)
  except ValueError as error:
    raise ValueError(f"config.evals.{name}: {error}") from error
