import json
import threading
import time

import jax
import numpy as np
import pytest
import tensorflow as tf
from ml_collections import ConfigDict

import input_pipeline
from tests.conftest import tiny_config
from vit_jax import sharding, train
from vit_jax.feed import Feed, results


@pytest.fixture(scope="module")
def mesh():
  return sharding.make_mesh(
    ConfigDict({"data": -1, "fsdp": 2, "model": 1, "dcn": 1})
  )


def numbered(count, seen=None):
  for i in range(count):
    if seen is not None:
      seen.append(i)
    yield {
      "image": np.full((8, 2, 2, 3), i, np.uint8),
      "labels": np.full((8, 1), i, np.int32),
      "mask": np.ones(8, np.float32),
      "id": np.arange(8),
    }


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_come_in_order_on_the_devices(mesh, ahead):
  with Feed(numbered(5), mesh, ahead=ahead) as feed:
    batches = list(feed)
    with pytest.raises(StopIteration):
      next(feed)
  assert [int(batch["labels"][0, 0]) for batch in batches] == list(range(5))
  for name, kind in (("image", np.uint8), ("labels", np.int32)):
    array = batches[0][name]
    assert array.dtype == kind
    assert array.sharding == sharding.batch_sharding(mesh)
  assert "id" not in batches[0]


@pytest.mark.parametrize("ahead", [0, 2])
def test_so_many_are_fetched_ahead_and_no_more(mesh, ahead):
  seen = []
  with Feed(numbered(100, seen), mesh, ahead=ahead) as feed:
    next(feed)
    deadline = time.monotonic() + 5
    while len(seen) < 1 + ahead and time.monotonic() < deadline:
      time.sleep(0.01)
    time.sleep(0.2)
    # One more waits in the thread's hand for room.
    assert 1 + ahead <= len(seen) <= 1 + ahead + bool(ahead)


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_comes_in_the_place_of_its_batch(mesh, ahead):
  def broken():
    yield from numbered(2)
    raise input_pipeline.DataError("x.jpg: bad")

  with Feed(broken(), mesh, ahead=ahead) as feed:
    next(feed), next(feed)
    with pytest.raises(input_pipeline.DataError, match=r"x\.jpg"):
      next(feed)


def test_leaving_stops_the_thread(mesh):
  before = threading.active_count()
  with Feed(numbered(10**9), mesh, ahead=2) as feed:
    next(feed)
  assert threading.active_count() == before


def test_the_loop_copies_nothing_in_secret(tmp_path, monkeypatch):
  loop = train.loop

  def guarded(*args):
    with jax.transfer_guard("disallow"):
      with pytest.raises(Exception, match="Disallowed host-to-device"):
        jax.jit(lambda x: x)(np.zeros(3))
      return loop(*args)

  monkeypatch.setattr(train, "loop", guarded)
  # With evaluations and saves.
  assert int(train.run(tiny_config(), str(tmp_path)).step) == 8


def test_skipped_images_are_counted(tmp_path):
  folder = tmp_path / "data"
  ops = "decode|resize({size})"
  for name in ("a", "b"):
    (folder / name).mkdir(parents=True)
    for i in range(8):
      image = np.full((4, 4, 3), 16 * i, np.uint8)
      data = tf.io.encode_png(image).numpy()
      (folder / name / f"{i}.png").write_bytes(data)
  (folder / "a" / "0.png").write_bytes(b"no picture")
  changes = {
    "input.source": f"folder:{folder}",
    "input.ops": ops,
    "input.max_labels": 2,
    "evals.test.kind": "",
    "mixup": 0.0,
    "total": "2ep",
  }
  with pytest.raises(ValueError, match=r"a/0\.png"):
    train.run(tiny_config(**changes), str(tmp_path / "raise"))
  skip = {"input.on_error": "skip", "input.max_bad_share": 0.1}
  train.run(tiny_config(**changes, **skip), str(tmp_path / "skip"))
  lines = (tmp_path / "skip" / "metrics.jsonl").read_text().splitlines()
  shares = [json.loads(line)["train/skipped"] for line in lines]
  assert sum(shares) * 8 == pytest.approx(2)  # one image, two epochs
  with pytest.raises(ValueError, match="max_bad_share = 0.01"):
    skip["input.max_bad_share"] = 0.01
    train.run(tiny_config(**changes, **skip), str(tmp_path / "few"))


def test_results_come_in_order_on_the_host(mesh):
  began, done = [], []

  def compute(batch):
    began.append(batch)
    return batch["labels"].sum()

  sums = results(
    compute,
    numbered(12),
    9,
    mesh,
    stop=lambda: False,
    done=lambda: done.append(len(began)),
  )
  assert sums == [8 * i for i in range(9)]
  assert all(isinstance(value, np.ndarray) for value in sums)
  assert done == list(range(1, 10))


def test_results_end_when_told(mesh):
  began = []

  def compute(batch):
    began.append(batch)
    return batch["labels"]

  stopped = results(compute, numbered(9), 9, mesh, stop=lambda: len(began) == 3)
  assert stopped is None
  assert len(began) == 3
