"""What a run trains: a config becomes an Objective."""

from typing import Any

from vit_jax.objectives import supervised
from vit_jax.steps import Objective


def build(config: Any, num_classes: int) -> Objective:
  """Builds the objective that `config` describes for `num_classes` classes.

  Raises:
    ValueError: an unknown model, loss or input range, or values out of range.
  """
  return supervised.build(config, num_classes)
