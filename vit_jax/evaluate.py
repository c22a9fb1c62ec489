"""Runs the evaluators of a config on weights that are already there.

python -m vit_jax.evaluate --config=configs/digits.py --checkpoint=runs/digits

The checkpoint is a run of this package or a file of weights (`.npz`,
`.safetensors`), whose head must be for the classes of `config.input.source`.
Where all evaluators read features alone, as few-shot probes do, it may have any
head, or none.
"""

import functools
import json
import os
from typing import Any

import jax
import tensorflow as tf

import input_pipeline
from vit_jax import (
  build,
  checkpoints,
  evaluators,
  hosts,
  images,
  launch,
  models,
  sharding,
)
from vit_jax import weights as storage


def run(
  config: Any, checkpoint: str, *, step: str = "latest", weights: str = ""
) -> dict[str, float]:
  """Evaluates a checkpoint.

  Args:
    config: its model, evals and mesh are used; see `configs/common.py`.
    checkpoint: a workdir, its checkpoints, or one step's directory; or a file.
    step: of a run: "latest", "best" or a number.
    weights: of a run: "params" or "ema"; "" is what each evaluator's key says
      and else ema where the run kept it.

  Returns:
    "NAME/top1" and so on -> value.

  Raises:
    ValueError: no such checkpoint, or one that does not fit the config.
  """
  mesh = sharding.make_mesh(config.mesh)
  # Features are the same with any head.
  supervised = config.objective == "supervised"
  headless = supervised and not evaluators.need_head(config)
  is_run = tf.io.gfile.isdir(os.path.expanduser(checkpoint))
  as_trained = is_run and not headless
  classes: tuple[str, ...] = ()
  if as_trained:
    path = checkpoints.locate(checkpoint, step)
    classes = tuple(checkpoints.read_meta(path)["guard"]["class_names"])
  else:
    stored = storage.open(checkpoint, step=step, weights=weights)
    build.check_input_range(stored, config)
    if not headless:
      classes = input_pipeline.get_source(
        config.input.source, config.input.split, config.input.data_dir
      ).class_names
  objective, abstract = build.inference(config, mesh, num_classes=len(classes))
  evals = evaluators.build_all(
    config,
    classes=classes,
    objective=objective,
    mesh=mesh,
    params=abstract,
    rehearsal=build.is_rehearsal(config),
  )

  @functools.cache
  def load(weights):
    if as_trained:
      return checkpoints.restore_weights(path, abstract, weights)
    params = storage.load(
      stored.path,
      models.from_config(config.model, len(classes)),
      images.size_of(config),
      weights=weights,
    )
    where = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return sharding.place(params, where)

  return {
    f"{name}/{key}": value
    for name, evaluate in evals.items()
    for key, value in (
      evaluate(load(weights or config.evals[name].weights), lambda: False) or {}
    ).items()
  }


def _main(config, checkpoint, step, weights):
  with launch.refusal():
    values = run(config, checkpoint, step=step, weights=weights)
  if hosts.first():
    print(json.dumps(values))


if __name__ == "__main__":
  FLAGS = (launch.config_flag(), *launch.checkpoint_flags())
  launch.start(
    lambda _: _main(*(flag.value for flag in FLAGS)), many_hosts=True
  )
