"""Runs the evaluators of a config on weights that are already there.

python -m vit_jax.evaluate --config=configs/digits.py --checkpoint=runs/digits
"""

import json
from typing import Any

from vit_jax import build, checkpoints, evaluators, launch, sharding


def run(
  config: Any, checkpoint: str, *, step: str = "latest", weights: str = ""
) -> dict[str, float]:
  """Evaluates a checkpoint.

  Args:
    config: its model, evals and mesh are used; see `configs/common.py`.
    checkpoint: a workdir, its checkpoints, or one step's directory.
    step: "latest", "best" or a number.
    weights: "params" or "ema"; "" is ema where the run kept it.

  Returns:
    "NAME/top1" and so on -> value.

  Raises:
    ValueError: no such checkpoint, or one that does not fit the config.
  """
  path = checkpoints.locate(checkpoint, step)
  meta = checkpoints.read_meta(path)
  mesh = sharding.make_mesh(config.mesh)
  classes = tuple(meta["guard"]["class_names"])
  objective, abstract = build.weights(config, mesh, num_classes=len(classes))
  evals = evaluators.build_all(
    config, classes=classes, objective=objective, mesh=mesh, params=abstract
  )
  params = checkpoints.restore_weights(path, abstract, weights)
  return {
    f"{name}/{key}": value
    for name, evaluate in evals.items()
    for key, value in (evaluate(params, lambda: False) or {}).items()
  }


def _main(config, checkpoint, step, weights):
  with launch.refusal():
    values = run(config, checkpoint, step=step, weights=weights)
  print(json.dumps(values))


if __name__ == "__main__":
  FLAGS = (launch.config_flag(), *launch.checkpoint_flags())
  launch.start(lambda _: _main(*(flag.value for flag in FLAGS)))
