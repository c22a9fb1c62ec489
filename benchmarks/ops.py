"""Images per second of the ops that matter most, as JSON lines.

    python benchmarks/ops.py --peer=PATH_OF_A_BIG_VISION_CHECKOUT

Every line has one op string on JPEGs of one size, and beside it the limit: bare
`tf.io.decode_and_crop_jpeg` of the very same windows, at full scale, result
thrown away. With `--peer` also big_vision's ops for the same result. All run in
turns, as the input pipeline runs them (chunks of 8 in parallel calls), and the
ratios are medians over the turns, so that a busy machine disturbs them little.
`cpu_us` is processor time for one image, which it disturbs least.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from absl import app, flags

from input_pipeline import parse_ops

_PEER = flags.DEFINE_string("peer", "", "Folder with the package big_vision.")
_REPEATS = flags.DEFINE_integer("repeats", 11, "Turns of each.")
_IMAGES = flags.DEFINE_integer("images", 320, "Images in a turn.")
_THREADS = flags.DEFINE_integer("threads", 2, "Parallel calls.")

_CHUNK = 8  # As in input_pipeline.loading.
_FILES = 32
_SIZES = ((375, 500), (750, 1000))
_EVAL = "decode|resize_small(256)|central_crop(224)"
# Ours -> big_vision's.
_STRINGS = {
  "decode_and_random_crop(224)|flip_lr": (
    "decode_jpeg_and_inception_crop(224)|flip_lr"
  ),
  "decode_and_central_crop(224, 256)": _EVAL,
  "decode_and_central_crop(224, 256, 'bilinear')": _EVAL,
  _EVAL: _EVAL,
}

Example = Callable[[tf.Tensor], tf.Tensor]  # number of an image -> result


def main(argv: list[str]) -> None:
  del argv
  tf.config.set_visible_devices([], "GPU")
  for sides in _SIZES:
    files = tf.constant([make_jpeg(*sides, seed) for seed in range(_FILES)])
    for string, peer in _STRINGS.items():
      examples = {"ours": ours(string, files), "bare": bare(string, files)}
      if _PEER.value:
        examples["peer"] = big_vision(peer, files)
      print(json.dumps(result(string, peer, files, sides, measure(examples))))
      sys.stdout.flush()


def make_jpeg(height: int, width: int, seed: int) -> bytes:
  """Smooth fields of four scales and noise: 55 kB for 375x500 pixels."""
  rng = np.random.default_rng(seed)
  image = np.full([height, width, 3], 120.0)
  for side, level in ((3, 60), (9, 35), (40, 20), (120, 10)):
    field = level * rng.normal(size=[side, side, 3])
    field = 0.4 * field + field.mean(-1, keepdims=True)
    image += tf.image.resize(field, [height, width], "bicubic").numpy()
  image += 4 * rng.normal(size=[height, width, 1])
  image = image.clip(0, 255).astype(np.uint8)
  return tf.io.encode_jpeg(image, quality=90).numpy()


def ours(string: str, files: tf.Tensor) -> Example:
  ops = parse_ops(string)

  def example(number: tf.Tensor) -> tf.Tensor:
    return ops({"image": files[number % _FILES], "seed": number})["image"]

  return example


def big_vision(string: str, files: tf.Tensor) -> Example:
  if _PEER.value not in sys.path:
    sys.path.insert(0, _PEER.value)
  from big_vision.pp import builder, ops_general, ops_image

  del ops_general, ops_image  # Imported for what they register.
  ops = builder.get_preprocess_fn(string, log_data=False)

  def example(number: tf.Tensor) -> tf.Tensor:
    image = ops({"image": files[number % _FILES]})["image"]
    return tf.ensure_shape(image, [224, 224, 3])

  return example


def bare(string: str, files: tf.Tensor) -> Example:
  """Decodes the windows that the op string decodes, and nothing else."""
  windows = tf.constant(
    [window_of(string, files, number) for number in range(_IMAGES.value)]
  )

  def example(number: tf.Tensor) -> tf.Tensor:
    data, window = files[number % _FILES], windows[number]
    return tf.io.decode_and_crop_jpeg(data, window, channels=3)[0, 0]

  return example


def window_of(string: str, files: tf.Tensor, number: int) -> np.ndarray:
  """y, x, h, w in pixels of the file: whole image unless a window is cut."""
  data = files[number % _FILES]
  first = string.split("|")[0]
  if first == "decode":
    return np.array([0, 0, *tf.io.extract_jpeg_shape(data).numpy()[:2]])
  decode = mock.Mock(wraps=tf.io.decode_and_crop_jpeg)
  with mock.patch.object(tf.io, "decode_and_crop_jpeg", decode):
    full_scale = parse_ops(first[:-1] + ", reduction=1)")
    full_scale({"image": data, "seed": number})
  return decode.call_args.args[1].numpy()


def measure(examples: dict[str, Example]) -> dict[str, np.ndarray]:
  """Seconds for one image, by the clock and of the processor, [turns, 2]."""
  datasets = {key: in_parallel(example) for key, example in examples.items()}
  times: dict[str, list] = {key: [] for key in datasets}
  for turn in range(_REPEATS.value + 1):
    for key, dataset in datasets.items():
      seconds = time_of(dataset)
      if turn:  # The first one warms up.
        times[key].append(seconds)
  return {key: np.array(values) for key, values in times.items()}


def in_parallel(example: Example) -> tf.data.Dataset:
  number = tf.TensorSpec([], tf.int64)
  traced = tf.function(example, autograph=False).get_concrete_function(number)
  output = traced.structured_outputs
  signature = tf.TensorSpec(output.shape, output.dtype)

  def chunk(numbers: tf.Tensor) -> tf.Tensor:
    return tf.map_fn(
      traced, numbers, fn_output_signature=signature, parallel_iterations=1
    )

  dataset = tf.data.Dataset.range(_IMAGES.value).batch(_CHUNK)
  dataset = dataset.map(chunk, num_parallel_calls=_THREADS.value)
  options = tf.data.Options()
  options.autotune.enabled = False
  options.threading.private_threadpool_size = _THREADS.value
  options.threading.max_intra_op_parallelism = 1
  return dataset.with_options(options)


def time_of(dataset: tf.data.Dataset) -> tuple[float, float]:
  """Seconds for one image once all threads are at work, until the last."""
  iterator = iter(dataset)
  for _ in range(2 * _THREADS.value):
    next(iterator)
  begin, used = time.perf_counter(), time.process_time()
  count = sum(len(images) for images in iterator)
  ended = (time.perf_counter() - begin, time.process_time() - used)
  return ended[0] / count, ended[1] / count


def result(
  string: str,
  peer: str,
  files: tf.Tensor,
  sides: tuple[int, int],
  times: dict[str, np.ndarray],
) -> dict:
  """A line of the output; ratios are of speed, ours over theirs."""
  line = {
    "benchmark": "ops",
    "ops": string,
    "height": sides[0],
    "width": sides[1],
    "kilobytes": round(np.mean([len(x) for x in files.numpy()]) / 1000, 1),
    "threads": _THREADS.value,
  }
  names = {"ours": "", "bare": "bare_", "peer": "peer_"}
  for key, seconds in times.items():
    wall, cpu = np.median(seconds, 0)
    line[names[key] + "images_per_second"] = round(1 / wall, 1)
    line[names[key] + "cpu_us"] = round(1e6 * cpu)
    if key != "ours":
      ratios = np.median(seconds / times["ours"], 0)
      line[f"ratio_to_{key}"] = round(ratios[0], 3)
      line[f"cpu_ratio_to_{key}"] = round(ratios[1], 3)
  if "peer" in times:
    line["peer_ops"] = peer
  return line


if __name__ == "__main__":
  app.run(main)
