"""Images per second of one training step, as one JSON line.

    python benchmarks/step.py --model=S/16 --image_size=224 --batch_size=8

Times the step that training runs (forward, backward, clipped AdamW) on one
fixed batch of noise: uint8 images go in, so the device does what it does in
training, and no input pipeline is waited for. The median says what to expect;
on a machine that others use too, `fastest_seconds` says what the step costs.
"""

import json
import statistics
import time

import jax
import numpy as np
from absl import app, flags

from configs import common
from vit_jax import build, sharding, steps

_MODEL = flags.DEFINE_string("model", "S/16", "As in config.model.name.")
_IMAGE_SIZE = flags.DEFINE_integer("image_size", 224, "Pixels a side.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Over all devices.")
_CLASSES = flags.DEFINE_integer("num_classes", 1000, "Width of the head.")
_DTYPE = flags.DEFINE_string("dtype", "float32", "As in config.model.dtype.")
_SCAN = flags.DEFINE_boolean("scan", False, "As in config.model.scan.")
_REMAT = flags.DEFINE_string("remat", "none", "As in config.model.remat.")
_DROPOUT = flags.DEFINE_float("dropout", 0.0, "As in config.model.dropout.")
_STEPS = flags.DEFINE_integer("steps", 10, "Timed, after one that is not.")


def main(argv: list[str]) -> None:
  del argv
  config = make_config()
  mesh = sharding.make_mesh(config.mesh)
  parts = build.parts(
    config, mesh, num_classes=_CLASSES.value, num_examples=_BATCH_SIZE.value
  )
  batch = make_batch(mesh)
  begin = time.perf_counter()
  step = build.train_step(config, mesh, parts)
  step = step.lower(parts.state, batch).compile()
  compile_seconds = time.perf_counter() - begin
  state = steps.init_state(
    parts.objective, parts.tx, parts.shardings, seed=config.seed
  )
  seconds = []
  for _ in range(1 + _STEPS.value):
    begin = time.perf_counter()
    state, metrics = jax.block_until_ready(step(state, batch))
    seconds.append(time.perf_counter() - begin)
  loss, weight = metrics["loss"]
  median = statistics.median(seconds[1:])
  result = {
    "benchmark": "step",
    "model": _MODEL.value,
    "image_size": _IMAGE_SIZE.value,
    "batch_size": _BATCH_SIZE.value,
    "dtype": _DTYPE.value,
    "scan": _SCAN.value,
    "remat": _REMAT.value,
    "device": jax.devices()[0].device_kind,
    "devices": jax.device_count(),
    "images_per_second": round(_BATCH_SIZE.value / median, 3),
    "median_seconds": round(median, 5),
    "fastest_seconds": round(min(seconds[1:]), 5),
    "compile_seconds": round(compile_seconds, 2),
    "peak_memory_bytes": peak_memory(step),
    "loss": round(float(loss / weight), 5),
  }
  print(json.dumps(result))


def make_config():
  config = common.base()
  config.total = str(1 + _STEPS.value)
  config.image_size = (_IMAGE_SIZE.value,)
  config.model.name = _MODEL.value
  config.model.dtype = _DTYPE.value
  config.model.scan = _SCAN.value
  config.model.remat = _REMAT.value
  config.model.dropout = _DROPOUT.value
  config.input.batch_size = _BATCH_SIZE.value
  config.optim.weight_decay = 0.1
  config.optim.clip = 1.0
  return config


def make_batch(mesh: jax.sharding.Mesh):
  rng = np.random.default_rng(0)
  n, size = _BATCH_SIZE.value, _IMAGE_SIZE.value
  batch = {
    "image": rng.integers(0, 256, (n, size, size, 3), np.uint8),
    "labels": rng.integers(0, _CLASSES.value, (n, 1), np.int32),
    "mask": np.ones(n, np.float32),
  }
  return jax.device_put(batch, sharding.batch_sharding(mesh))


def peak_memory(step: jax.stages.Compiled) -> int:
  """Bytes on the fullest device: counted there, or as the compiler planned."""
  counted = [device.memory_stats() or {} for device in jax.local_devices()]
  peak = max(stats.get("peak_bytes_in_use", 0) for stats in counted)
  plan = step.memory_analysis()
  return peak or (
    plan.argument_size_in_bytes
    + plan.output_size_in_bytes
    - plan.alias_size_in_bytes
    + plan.temp_size_in_bytes
  )


if __name__ == "__main__":
  app.run(main)
