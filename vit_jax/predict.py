"""Names what is on images, with a model that was trained here.

python -m vit_jax.predict --checkpoint=runs/digits IMAGE …
"""

import os
import sys
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

import input_pipeline
from vit_jax import build, checkpoints, images, launch, sharding, steps

_BATCH = 32


def run(
  checkpoint: str,
  paths: Sequence[str],
  *,
  step: str = "latest",
  weights: str = "",
) -> Iterator[tuple[str, dict[str, float] | ValueError]]:
  """Yields each image's path with its classes and their probabilities.

  The run's own config says how images are prepared: as in its evaluation.

  Args:
    checkpoint: a workdir, its checkpoints, or one step's directory.
    paths: image files.
    step: "latest", "best" or a number.
    weights: "params" or "ema"; "" is ema where the run kept it.

  Yields:
    The path, and class name -> probability, most probable first; or the reason
    why this image cannot be read. With the sigmoid loss classes do not exclude
    each other and each has its own probability.

  Raises:
    ValueError: no such checkpoint.
  """
  if os.path.isfile(checkpoint):
    raise ValueError(
      f"{checkpoint} is a file of weights, which has no class names: give a "
      "run's workdir, or start a run from it (config.init_from)."
    )
  where = checkpoints.locate(checkpoint, step)
  meta = checkpoints.read_meta(where)
  config = ConfigDict(meta["config"])
  if config.objective != "supervised":
    raise ValueError(
      f"{where} was trained without classes (config.objective = "
      f"{config.objective!r}): fine-tune it first, by config.init_from."
    )
  classes = meta["guard"]["class_names"]
  mesh = sharding.make_mesh(
    ConfigDict({"data": -1, "fsdp": 1, "model": 1, "dcn": 1})
  )
  objective, abstract = build.inference(config, mesh, num_classes=len(classes))
  params = checkpoints.restore_weights(where, abstract, weights)
  probabilities = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}
  predict = steps.make_predict_step(
    objective,
    mesh,
    jax.tree.map(lambda leaf: leaf.sharding, abstract),
    then=lambda outputs, _: probabilities[config.loss](outputs["logits"]),
  )
  ops = input_pipeline.parse_ops(_ops(config))
  unit = sharding.batch_devices(mesh)
  size = -(-min(_BATCH, len(paths)) // unit) * unit
  for start in range(0, len(paths), size):
    chunk = paths[start : start + size]
    read = [_read(path, ops) for path in chunk]
    batch = np.zeros((size, *images.size_of(config), 3), np.uint8)
    for row, image in enumerate(read):
      if isinstance(image, np.ndarray):
        batch[row] = image
    rows = jax.device_get(
      predict(params, sharding.to_device({"image": batch}, mesh))
    )
    for path, image, row in zip(chunk, read, rows):
      if isinstance(image, ValueError):
        yield path, image
      else:
        order = np.argsort(-row, kind="stable")
        yield path, {classes[i]: float(row[i]) for i in order}


def _ops(config):
  """How the run's first evaluation prepares its images."""
  texts = [entry.ops for entry in config.evals.values() if entry.kind]
  text = texts[0] if texts else "decode|resize({size})"
  return images.sized(text, images.size_of(config))


def _read(path, ops):
  try:
    return input_pipeline.load_image(path, ops)
  except input_pipeline.DataError as error:
    return error


def _main(paths, top, checkpoint, step, weights):
  with launch.refusal():
    bad = 0
    for path, outcome in run(checkpoint, paths, step=step, weights=weights):
      if isinstance(outcome, ValueError):
        bad += 1
        print(outcome, file=sys.stderr)
        continue
      best = list(outcome.items())[:top]
      print(path, *(f"{name} {share:.1%}" for name, share in best), sep="  ")
    if bad:
      raise ValueError(f"{bad} of {len(paths)} images could not be read.")


if __name__ == "__main__":
  FLAGS = (
    flags.DEFINE_integer("top", 5, "Classes to name.", lower_bound=1),
    *launch.checkpoint_flags(),
  )
  launch.start(
    lambda paths: _main(paths, *(flag.value for flag in FLAGS)),
    words="IMAGE …",
  )
