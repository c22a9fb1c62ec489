"""Images per second that the input pipeline delivers, as one JSON line.

    python benchmarks/input.py --source=fake:32,10,1000 --ops='resize(32)'

`decode_limit` in the output, for JPEG folders, is what bare decoding of whole
images reaches on the same cores: no op string can be expected to pass it by
much, whatever surrounds it.
"""

import json
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from absl import app, flags

import input_pipeline

_SOURCE = flags.DEFINE_string("source", "digits:", "As in config.input.source.")
_SPLIT = flags.DEFINE_string("split", "train", "As in config.input.split.")
_DATA_DIR = flags.DEFINE_string("data_dir", "", "As in config.input.data_dir.")
_OPS = flags.DEFINE_string(
  "ops", "decode|resize(10)|random_crop(8)|flip_lr", "As in config.input.ops."
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 128, "Images in a batch.")
_STREAMS = flags.DEFINE_integer("streams", 1, "Logical streams.")
_SECONDS = flags.DEFINE_float("seconds", 5.0, "How long to measure.")
_RESUME_STEP = flags.DEFINE_integer("resume_step", 100_000, "Where to resume.")


def main(argv: list[str]) -> None:
  del argv
  tf.config.set_visible_devices([], "GPU")
  cores = len(os.sched_getaffinity(0))
  begin = time.perf_counter()
  source = input_pipeline.get_source(
    _SOURCE.value, _SPLIT.value, _DATA_DIR.value
  )
  opened = time.perf_counter()
  batches = open_batches(source, start_step=0)
  next(batches)
  first = time.perf_counter()
  rate = measure_rate(batches, _BATCH_SIZE.value, _SECONDS.value)
  batches.close()
  resume = time.perf_counter()
  next(open_batches(source, start_step=_RESUME_STEP.value))
  resumed = time.perf_counter()
  result = {
    "benchmark": "input",
    "source": source.spec,
    "split": source.split,
    "ops": _OPS.value,
    "batch_size": _BATCH_SIZE.value,
    "streams": _STREAMS.value,
    "cores": cores,
    "num_examples": source.num_examples,
    "images_per_second": round(rate, 1),
    "seconds_to_open": round(opened - begin, 3),
    "seconds_to_first_batch": round(first - opened, 3),
    "resume_step": _RESUME_STEP.value,
    "seconds_to_resume": round(resumed - resume, 3),
  }
  limit = measure_decode_limit(source, cores)
  if limit:
    result["decode_limit"] = round(limit, 1)
  print(json.dumps(result))


def open_batches(source: input_pipeline.Source, start_step: int):
  return input_pipeline.train_batches(
    source,
    _OPS.value,
    batch_size=_BATCH_SIZE.value,
    seed=0,
    start_step=start_step,
    streams=_STREAMS.value,
  )


def measure_rate(batches, size: int, seconds: float) -> float:
  """Images per second, once the batches kept ready are used up."""
  for _ in range(4):
    next(batches)
  count, begin = 0, time.perf_counter()
  while time.perf_counter() - begin < seconds:
    next(batches)
    count += size
  return count / (time.perf_counter() - begin)


def measure_decode_limit(source: input_pipeline.Source, cores: int) -> float:
  """Images per second of decoding alone; 0 for sources of other than JPEG."""
  indices = range(min(64, source.num_examples))
  data = [source.parse(tf.constant(i, tf.int64))["image"] for i in indices]
  if not all(x.dtype == tf.string and tf.io.is_jpeg(x) for x in data):
    return 0.0
  dataset = tf.data.Dataset.from_tensor_slices(data).repeat()
  dataset = dataset.map(
    lambda x: tf.io.decode_jpeg(x, channels=3)[0, 0], num_parallel_calls=cores
  )
  return measure_rate(iter(dataset.batch(64)), 64, _SECONDS.value / 2)


if __name__ == "__main__":
  app.run(main)
