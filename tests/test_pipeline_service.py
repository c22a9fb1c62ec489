"""A tf.data service of one dispatcher and two workers changes nothing."""

import socket

import numpy as np
import pytest
import tensorflow_datasets as tfds

from input_pipeline import DataError, get_source, serve, service, train_batches
from tests.test_pipeline_choices import make_source

OPS = "decode|resize(6)|random_crop(5)|flip_lr"


def free_port() -> int:
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


@pytest.fixture(scope="module")
def address():
  port, *workers = (free_port() for _ in range(3))
  names = [f"127.0.0.1:{worker}" for worker in workers]
  # Kept alive by the generator.
  running = [serve.start(["dispatcher", str(port), *names])]
  running += [serve.start(["worker", f"127.0.0.1:{port}", w]) for w in names]
  yield f"grpc://127.0.0.1:{port}"
  del running


def take(count, source, ops=OPS, **options) -> dict[str, np.ndarray]:
  options = {"batch_size": 6, "seed": 1, "shuffle_buffer": 6} | options
  batches = train_batches(source, ops, **options)
  taken = [next(batches) for _ in range(count)]
  return {key: np.stack([b[key] for b in taken]) for key in taken[0]}


@pytest.mark.parametrize(
  "kind, options",
  [
    ("folder", {"start_step": 5}),
    ("tfrecord", {"streams": 4, "shard": 1, "num_shards": 2, "batch_size": 8}),
    ("tfrecord", {"on_error": "skip", "max_bad_share": 1.0}),
  ],
)
def test_the_stream_stays(kind, options, address, tmp_path):
  bad = (3, 9) if "on_error" in options else ()
  source = make_source(kind, tmp_path, bad=bad)
  want = take(14, source, **options)
  # A run that starts again starts a stream again.
  for _ in range(2 if kind == "folder" else 1):
    got = take(14, source, service=address, **options)
    assert got.keys() == want.keys()
    for key in want:
      np.testing.assert_array_equal(got[key], want[key], err_msg=key)


def test_a_bad_image_is_named(address, tmp_path):
  source = make_source("folder", tmp_path, bad=(4,))
  with pytest.raises(DataError, match="empty.jpg: Input is empty"):
    take(14, source, service=address)


def test_what_a_service_cannot_do(address, tmp_path):
  source = get_source("digits:", "train[:9]")
  nobody = f"grpc://127.0.0.1:{free_port()}"
  with pytest.raises(ValueError, match=f"No tf.data service .*{nobody}"):
    take(1, source, service=nobody)
  tfds.disable_progress_bar()
  features = {
    "image": tfds.features.Image(shape=(None, None, 3)),
    "label": tfds.features.ClassLabel(num_classes=2),
  }
  tfds.dataset_builders.store_as_tfds_dataset(
    name="fast",
    version="1.0.0",
    features=tfds.features.FeaturesDict(features),
    split_datasets={
      "train": [
        (k, {"image": np.zeros((4, 4, 3), np.uint8), "label": 0})
        for k in range(9)
      ]
    },
    data_dir=tmp_path,
    file_format="array_record",
  )
  source = get_source("tfds:fast", "train", str(tmp_path))
  with pytest.raises(ValueError, match="tfds:fast is read by Python code"):
    take(1, source, service=address)


def test_batches_are_put_in_order_within_a_bound():
  def batches(numbers):
    return iter([{"number": np.array([n, n]), "id": n} for n in numbers])

  got = list(service.in_order(batches([1, 0, 3, 4, 2, 5]), "here"))
  assert [batch["id"] for batch in got] == list(range(6))
  assert "number" not in got[0]
  with pytest.raises(DataError, match="at here.*batch 1, but not that one"):
    list(service.in_order(batches([0, *range(2, 300)]), "here"))


@pytest.mark.parametrize(
  "arguments",
  [[], ["dispatcher", "x"], ["worker", "a:1"], ["worker", "a", "b"]],
)
def test_the_command_says_how_to_use_it(arguments):
  with pytest.raises(SystemExit, match="python -m input_pipeline.serve worker"):
    serve.start(arguments)
