"""What the input pipeline delivers, as JSON lines.

    python benchmarks/input.py --source=fake:32,10,1000 --ops="resize(32)"

The first line is speed, in images per second. Beside it stands `decode_limit`,
for JPEGs: what bare decoding of whole images reaches on the same cores. No op
string that decodes whole images can pass it. The other lines say how long it
takes until the first batch of a step is there, one line for each step.
"""

import json
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from absl import app, flags

import input_pipeline
from input_pipeline import order

_SOURCE = flags.DEFINE_string("source", "digits:", "As in config.input.source.")
_SPLIT = flags.DEFINE_string("split", "train", "As in config.input.split.")
_DATA_DIR = flags.DEFINE_string("data_dir", "", "As in config.input.data_dir.")
_OPS = flags.DEFINE_string(
  "ops", "decode|resize(10)|random_crop(8)|flip_lr", "As in config.input.ops."
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 128, "Images in a batch.")
_STREAMS = flags.DEFINE_integer("streams", 1, "Logical streams.")
_SECONDS = flags.DEFINE_float("seconds", 5.0, "How long to measure.")
_SHUFFLE_BUFFER = flags.DEFINE_integer(
  "shuffle_buffer", 50_000, "As in config.input.shuffle_buffer."
)
_CACHE = flags.DEFINE_string("cache", "", "As in config.input.cache.")
_ON_ERROR = flags.DEFINE_string("on_error", "raise", "As in config.input.")
_RESUME_STEPS = flags.DEFINE_list(
  "resume_steps", ["0", "1000", "100000000"], "Steps to start at."
)


def main(argv: list[str]) -> None:
  del argv
  tf.config.set_visible_devices([], "GPU")
  begin = time.perf_counter()
  source = input_pipeline.get_source(
    _SOURCE.value, _SPLIT.value, _DATA_DIR.value
  )
  opened = time.perf_counter() - begin
  about = {
    "benchmark": "input",
    "source": source.spec,
    "split": source.split,
    "num_examples": source.num_examples,
    "ops": _OPS.value,
    "batch_size": _BATCH_SIZE.value,
    "streams": _STREAMS.value,
    "shuffle_buffer": _SHUFFLE_BUFFER.value,
    "cache": _CACHE.value,
    "on_error": _ON_ERROR.value,
    "cores": len(os.sched_getaffinity(0)),
  }
  batches = open_batches(source, start_step=0)
  rate = measure_rate(batches, _BATCH_SIZE.value, _SECONDS.value)
  batches.close()
  result = {
    "images_per_second": round(rate, 1),
    "seconds_to_get_source": round(opened, 3),
  }
  limit = measure_decode_limit(source)
  if limit:
    result["decode_limit"] = round(limit, 1)
  print(json.dumps(about | result), flush=True)
  for step in map(int, _RESUME_STEPS.value):
    begin = time.perf_counter()
    batches = open_batches(source, start_step=step)
    next(batches)
    seconds = round(time.perf_counter() - begin, 3)
    batches.close()
    print(json.dumps(about | {"step": step, "seconds_to_first_batch": seconds}))


def open_batches(source: input_pipeline.Source, start_step: int):
  return input_pipeline.train_batches(
    source,
    _OPS.value,
    batch_size=_BATCH_SIZE.value,
    seed=0,
    start_step=start_step,
    streams=_STREAMS.value,
    shuffle_buffer=_SHUFFLE_BUFFER.value,
    cache=_CACHE.value,
    on_error=_ON_ERROR.value,
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


def measure_decode_limit(source: input_pipeline.Source) -> float:
  """Images per second of decoding alone; 0 for sources of other than JPEG."""
  tickets = order.eval_tickets(source, np.arange(min(64, source.num_examples)))
  data = [source.parse(i, *record)["image"] for i, _, *record in tickets]
  if not all(x.dtype == tf.string and tf.io.is_jpeg(x) for x in data):
    return 0.0
  dataset = tf.data.Dataset.from_tensor_slices(data).repeat()
  dataset = dataset.map(
    lambda x: tf.io.decode_jpeg(x, channels=3)[0, 0],
    num_parallel_calls=len(os.sched_getaffinity(0)),
  )
  return measure_rate(iter(dataset.batch(64)), 64, _SECONDS.value / 2)


if __name__ == "__main__":
  app.run(main)
