"""Workdirs in buckets, which have neither appending nor renaming."""

import builtins
import json
import os
import pathlib
import sys
import types

import pytest
import tensorflow as tf
from etils import epath

from tests.conftest import tiny_config
from tests.test_checkpoints import abstract, accept, save, state_at
from tests.test_train import assert_same_run, run_until
from vit_jax import checkpoints, files, launch, report, train


def rows(workdir):
  return [
    json.loads(line)
    for line in files.read(files.join(workdir, "metrics.jsonl")).splitlines()
  ]


@pytest.fixture
def bucket(monkeypatch):
  """An empty directory of an object store."""
  real = tf.io.gfile.GFile

  def overwriting(path, mode="r"):
    # Objects are replaced; TensorFlow's ram:// adds to what is there.
    if mode == "w" and tf.io.gfile.exists(path):
      tf.io.gfile.remove(path)
    return real(path, mode)

  monkeypatch.setattr(tf.io.gfile, "GFile", overwriting)
  path = f"ram://{os.urandom(4).hex()}"
  tf.io.gfile.makedirs(path)
  return path


def test_metrics_are_written_cut_and_joined(bucket):
  with report.Metrics(bucket, 0) as metrics:
    for step in (1, 2, 3):
      metrics.write(step, {"train/loss": 1 / step})
    metrics.write(3, {"test/top1": 0.5})
    assert rows(bucket) == []  # Not with every row: a bucket takes them whole.
    metrics.sync()
    assert rows(bucket)[-1] == {
      "step": 3,
      "train/loss": 1 / 3,
      "test/top1": 0.5,
    }
    metrics.write(4, {"train/loss": 0.25})
  assert [row["step"] for row in rows(bucket)] == [1, 2, 3, 4]
  with report.Metrics(bucket, 3) as metrics:
    assert metrics.at(3)["test/top1"] == 0.5
    assert metrics.best["test/top1"] == {"value": 0.5, "step": 3}
    metrics.write(3, {"test/top5": 0.9})
    metrics.write(4, {"train/loss": 7.0})
  assert [row["step"] for row in rows(bucket)] == [1, 2, 3, 4]
  assert rows(bucket)[2].keys() == {
    "step",
    "train/loss",
    "test/top1",
    "test/top5",
  }
  report.finish(bucket, 4, metrics, 1.0)
  summary = json.loads(files.read(files.join(bucket, "summary.json")))
  assert summary["final"]["test/top5"] == {"value": 0.9, "step": 3}
  assert any("tfevents" in name for name in tf.io.gfile.listdir(bucket))


def test_rows_reach_a_bucket_now_and_then(bucket, monkeypatch):
  now = [0.0]
  monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
  metrics = report.Metrics(bucket, 0)
  for step in range(1, 100):
    now[0] += 1
    metrics.write(step, {"train/loss": 1.0})
  assert 60 < len(rows(bucket)) < 99


def test_a_trace_is_copied_to_a_bucket(bucket):
  profiler = report.Profiler("1:2", bucket)
  for step in range(3):
    profiler.before(step)
  found = [name for *_, names in tf.io.gfile.walk(bucket) for name in names]
  assert any(name.endswith(".xplane.pb") for name in found)


def test_a_directory_of_a_bucket_is_moved(bucket):
  tf.io.gfile.makedirs(f"{bucket}/a/b")
  files.write(f"{bucket}/a/b/c", "text")
  files.move_tree(f"{bucket}/a", f"{bucket}/d")
  assert files.read(f"{bucket}/d/b/c") == "text"
  assert not files.exists(f"{bucket}/a/b/c")


def test_a_bucket_that_cannot_be_used_is_refused(monkeypatch):
  monkeypatch.setitem(sys.modules, "google.cloud.storage", None)
  with pytest.raises(launch.Refused, match=r"gs://b/run: .*vit-jax\[gcs\]"):
    train.run(tiny_config(), "gs://b/run")

  def forbidden(*_, **__):
    raise tf.errors.PermissionDeniedError(None, None, "not yours")

  for name in ("storage", "storage_control_v2"):
    module = types.ModuleType(f"google.cloud.{name}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
  monkeypatch.setattr(type(epath.Path("gs://b")), "mkdir", forbidden)
  with pytest.raises(launch.Refused, match="--workdir=gs://b/run: not yours"):
    train.run(tiny_config(), "gs://b/run")


@pytest.fixture
def strict(tmp_path, monkeypatch):
  """A directory that passes for a bucket: what a bucket cannot, it refuses."""
  workdir = tmp_path / "bucket"

  def is_here(path):
    return str(path).startswith(str(workdir))

  def refusing(real, forbidden=lambda *_: True):
    def call(path, *args, **kwargs):
      if is_here(path) and forbidden(*args):
        raise OSError(f"A bucket does not do that: {path} {args}")
      return real(path, *args, **kwargs)

    return call

  def appends(mode="r", *_):
    return "a" in mode or "+" in mode

  monkeypatch.setattr(files, "is_remote", is_here)
  for room, names in (
    (os, ("rename", "replace", "link", "symlink")),
    (pathlib.Path, ("rename", "replace")),
    (tf.io.gfile, ("rename",)),
  ):
    for name in names:
      monkeypatch.setattr(room, name, refusing(getattr(room, name)))
  monkeypatch.setattr(builtins, "open", refusing(open, appends))
  monkeypatch.setattr(
    pathlib.Path, "open", refusing(pathlib.Path.open, appends)
  )
  return workdir


def test_a_killed_run_in_a_bucket_is_the_run_on_a_disk(
  strict, tmp_path, monkeypatch, warnings
):
  train.run(tiny_config(), str(tmp_path / "disk"))
  run_until(tiny_config(), strict, 5, monkeypatch)
  (saved,) = (strict / "checkpoints").iterdir()
  assert (saved / "commit_success.txt").exists()
  # A save that was cut short has its final name, but no such mark.
  for victim in ("params", "meta", "opt_state"):
    files.copy_tree(saved / victim, strict / "checkpoints" / "6" / victim)
  train.run(tiny_config(), str(strict))
  assert any("6: not a complete checkpoint" in text for text in warnings())
  assert_same_run(strict, tmp_path / "disk")
  assert list(checkpoints.steps_in(strict / "checkpoints")) == [8, 6]


def test_a_first_save_that_was_cut_short_is_made_again(strict, warnings):
  (strict / "10" / "params").mkdir(parents=True)
  (strict / "10" / "params" / "manifest.ocdbt").write_bytes(b"part of it")
  assert not checkpoints.restore_latest(strict, abstract(state_at(0)), accept)
  assert warnings() == [f"Ignoring {strict}/10: not a complete checkpoint."]
  save(strict, {10: 0.5})
  state, _ = checkpoints.restore_latest(strict, abstract(state_at(0)), accept)
  assert int(state.step) == 10


def test_what_a_bucket_holds_unreadable_is_set_aside(strict, warnings):
  save(strict, {10: 0.5, 20: 0.5})
  (strict / "20" / "params" / "manifest.ocdbt").write_bytes(b"")
  _, meta = checkpoints.restore_latest(strict, abstract(state_at(0)), accept)
  assert meta["step"] == 10
  assert len(warnings()) == 1
  assert (strict / "20.incomplete" / "commit_success.txt").exists()
  assert not (strict / "20").exists()
