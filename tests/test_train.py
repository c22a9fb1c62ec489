"""The loop: exact resume, honest metrics, refusals before compilation."""

import itertools
import json
import math
import os
import pathlib
import signal

import jax
import numpy as np
import pytest

import input_pipeline
from configs import common
from tests.conftest import tiny_config
from vit_jax import (
  checkpoints,
  evaluate,
  launch,
  sharding,
  start,
  steps,
  train,
  trees,
)


def rows(workdir):
  """Returns metrics.jsonl without what depends on the clock on the wall."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  parsed = [json.loads(line) for line in lines]
  for row in parsed:
    row.pop("train/images_per_second", None)
  return parsed


def final_state(workdir):
  """Returns params and optimiser state of the newest checkpoint, by path."""
  path = checkpoints.locate(str(workdir))
  leaves = {}
  for item in ("params", "opt_state"):
    with checkpoints.ocp.StandardCheckpointer() as checkpointer:
      leaves |= {
        f"{item}/{name}": np.asarray(leaf)
        for name, leaf in trees.flatten(
          checkpointer.restore(path / item)
        ).items()
      }
  return leaves


def assert_same_run(one, other):
  assert rows(one) == rows(other)
  ours, theirs = final_state(one), final_state(other)
  assert ours.keys() == theirs.keys()
  for name, leaf in ours.items():
    np.testing.assert_array_equal(leaf, theirs[name], err_msg=name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The workdir of a run that nobody disturbed."""
  workdir = tmp_path_factory.mktemp("whole")
  train.run(tiny_config(), str(workdir))
  return workdir


class Stop(Exception):
  """Stands for a kill in the middle of a run."""


class Watched:
  """A feed that calls `before(number)` ahead of each of its batches."""

  def __init__(self, feed, before):
    self._feed, self._before = feed, before
    self._numbers = itertools.count()

  def __enter__(self):
    self._feed.__enter__()
    return self

  def __exit__(self, *error):
    self._feed.__exit__(*error)

  def __next__(self):
    self._before(next(self._numbers))
    return next(self._feed)


def dying(step):
  """Returns a stand-in for start._batches that dies when asked for a batch."""
  real = start._batches

  def batches(config, source, mesh, streams, first):
    def before(number):
      if first + number == step:
        raise Stop

    return Watched(real(config, source, mesh, streams, first), before)

  return batches


def run_until(config, workdir, step, monkeypatch):
  """Trains until batch `step` is asked for, then dies."""
  with monkeypatch.context() as patch:
    patch.setattr(start, "_batches", dying(step))
    with pytest.raises(Stop):
      train.run(config, str(workdir))


def test_a_run_writes_what_it_promises(whole):
  names = {path.name for path in whole.iterdir()}
  assert {"config.json", "metrics.jsonl", "summary.json"} <= names
  assert any("tfevents" in name for name in names)
  lines = rows(whole)
  assert [row["step"] for row in lines] == list(range(1, 9))
  assert {"train/loss", "train/lr", "train/grad_norm"} <= lines[0].keys()
  assert {"test/top1", "test/top5", "test/loss", "test/n"} <= lines[3].keys()
  assert "test/n" not in lines[4]
  assert lines[3]["test/n"] == 40
  summary = json.loads((whole / "summary.json").read_text())
  assert summary["status"] == "done"
  assert summary["step"] == 8
  assert summary["final"]["test/top1"]["step"] == 8
  best = max(row["test/top1"] for row in lines if "test/n" in row)
  assert summary["best"]["test/top1"]["value"] == best
  items = {path.name for path in (whole / "checkpoints" / "8").iterdir()}
  assert {"params", "opt_state", "meta"} <= items
  assert "ema" not in items


def test_first_loss_of_a_zero_head_is_log_c(whole):
  assert rows(whole)[0]["train/loss"] == pytest.approx(np.log(3), abs=1e-5)


@pytest.mark.parametrize("step", [1, 5])
def test_resuming_equals_never_stopping(whole, tmp_path, monkeypatch, step):
  run_until(tiny_config(), tmp_path, step, monkeypatch)
  assert not (tmp_path / "summary.json").exists()
  train.run(tiny_config(), str(tmp_path))
  assert_same_run(tmp_path, whole)


def test_resuming_on_other_devices_and_meshes(whole, tmp_path, monkeypatch):
  """One run, begun on 8 devices, then on 1, 8, 2 and 8 of them."""
  config = tiny_config(**{"checkpoint.every": "1"})
  real = sharding.make_mesh
  for until, shape in (
    (2, (8, 1, 1)),
    (4, (1, 1, 1)),
    (5, (1, 8, 1)),
    (7, (1, 2, 1)),
    (99, (2, 2, 2)),
  ):
    config.mesh.update(dict(zip(sharding.AXES, shape)))
    devices = jax.devices()[: math.prod(shape)]
    with monkeypatch.context() as patch:
      patch.setattr(sharding, "make_mesh", lambda mesh: real(mesh, devices))  # noqa: B023
      if until < 8:
        run_until(config, tmp_path, until, monkeypatch)
      else:
        train.run(config, str(tmp_path))
  ours = [row["train/loss"] for row in rows(tmp_path)]
  theirs = [row["train/loss"] for row in rows(whole)]
  np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_finished_run_is_left_alone(whole):
  before = {
    path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()
  }
  assert train.run(tiny_config(), str(whole)) is None
  assert before == {
    path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()
  }


@pytest.mark.parametrize("where", ["update", "evaluation"])
def test_sigterm_saves_the_last_completed_step(
  whole, tmp_path, monkeypatch, where
):
  def and_sigterm(real):
    def call(*args, **kwargs):
      os.kill(os.getpid(), signal.SIGTERM)
      return real(*args, **kwargs)

    return call

  with monkeypatch.context() as patch:
    if where == "update":
      real = start._batches

      def before(number):
        if number == 4:
          os.kill(os.getpid(), signal.SIGTERM)

      patch.setattr(
        start, "_batches", lambda *args: Watched(real(*args), before)
      )
    else:
      # Building the evaluator reads one batch; SIGTERM comes at the next call.
      count = iter(range(99))
      real = input_pipeline.eval_batches
      patch.setattr(
        input_pipeline,
        "eval_batches",
        lambda *args, **kwargs: (
          and_sigterm(real) if next(count) == 1 else real
        )(*args, **kwargs),
      )
    with pytest.raises(launch.Terminated):
      train.run(tiny_config(), str(tmp_path))
  saved = max(checkpoints.steps_in(tmp_path / "checkpoints"))
  assert saved == {"update": 5, "evaluation": 4}[where]
  train.run(tiny_config(), str(tmp_path))
  assert_same_run(tmp_path, whole)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
  config = tiny_config(**{"optim.lr": 1e30, "optim.clip": 0.0})
  with pytest.raises(
    FloatingPointError, match=r"train/\w+ is \w+ in update \d"
  ):
    train.run(config, str(tmp_path))


def test_nothing_not_finite_is_ever_saved(tmp_path):
  # The loss and the gradient of update 2 are finite; what it makes is not.
  config = tiny_config(
    **{
      "optim.schedule": "constant",
      "optim.weight_decay": 10.0,
      "optim.warmup": "1",
      "optim.lr": 3e38,
      "checkpoint.every": "1",
      "checkpoint.keep": 9,
    }
  )
  with pytest.raises(FloatingPointError, match="Not finite after update 2"):
    train.run(config, str(tmp_path))
  saved = checkpoints.steps_in(tmp_path / "checkpoints")
  assert list(saved) == [1]
  with checkpoints.ocp.StandardCheckpointer() as checkpointer:
    assert steps.nonfinite(checkpointer.restore(saved[1] / "params")) == []


def test_total_can_grow_and_the_jump_in_learning_rate_is_said(
  whole, tmp_path, caplog
):
  config = tiny_config(total="4")
  config.optim.lr = 0.03
  train.run(config, str(tmp_path))
  (tmp_path / "summary.json").unlink()
  longer = tiny_config(total="8")
  longer.optim.lr = 0.03
  train.log.propagate = True
  with caplog.at_level("INFO"):
    train.run(longer, str(tmp_path))
  text = caplog.text
  assert "total: was '4', is '8'" in text
  assert (
    "The learning rate at step 4 was 0 in the saved run and is now 0.015"
    in text
  )


def test_resume_from_continues_another_run(whole, tmp_path, monkeypatch):
  monkeypatch.chdir(whole.parent)
  config = tiny_config(
    **{"total": "10", "resume_from": whole.name, "checkpoint.keep": 9}
  )
  run_until(config, tmp_path, 9, monkeypatch)
  # From its start the run stands by itself.
  before = checkpoints.read_meta(tmp_path / "checkpoints" / "8")["values"]
  assert before
  config.resume_from = "gone"
  train.run(config, str(tmp_path))
  after = checkpoints.read_meta(tmp_path / "checkpoints" / "8")["values"]
  assert after == before
  assert [row["step"] for row in rows(tmp_path)] == [8, 9, 10]
  with pytest.raises(launch.Refused, match="No complete checkpoint"):
    train.run(
      tiny_config(resume_from=str(tmp_path / "nowhere")), str(tmp_path / "x")
    )


def test_a_relative_workdir_stays_where_the_user_was(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  config = tiny_config(total="1")
  train.run(config, "out/run1")
  assert (tmp_path / "out" / "run1" / "summary.json").exists()


def test_average_is_saved_and_evaluated(tmp_path):
  config = tiny_config(total="2", ema=0.5)
  with config.evals.unlocked():
    config.evals.plain = common.evaluator(batch_size=16, weights="params")
  state = train.run(config, str(tmp_path))
  assert (tmp_path / "checkpoints" / "2" / "ema").exists()
  restored = checkpoints.restore_item(
    tmp_path / "checkpoints" / "2",
    "ema",
    jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      state.ema,
    ),
  )
  for path, leaf in trees.flatten(restored).items():
    np.testing.assert_array_equal(leaf, trees.flatten(state.ema)[path])
  # Averages are what is judged, and the parameters themselves where asked for.
  values = json.loads((tmp_path / "summary.json").read_text())["final"]
  losses = {name: values[f"{name}/loss"]["value"] for name in config.evals}
  assert losses["test"] != losses["plain"]
  for weights in ("ema", "params"):
    with config.unlocked():
      config.evals.plain.weights = weights
    again = evaluate.run(config, str(tmp_path))
    name = "test" if weights == "ema" else "plain"
    assert again["test/loss"] == losses["test"]
    assert again["plain/loss"] == losses[name]
  assert evaluate.run(config, str(tmp_path), weights="params") == (
    again
    | {
      name.replace("plain", "test"): value
      for name, value in again.items()
      if name.startswith("plain")
    }
  )


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"image_size": (18,)}, r"18.*patch.*4.*16.*20"),
    ({"image_size": (8, 8, 3)}, r"config.image_size = \(8, 8, 3\)"),
    ({"image_size": (3.5,)}, r"config.image_size = \(3.5,\)"),
    ({"input.batch_size": 12}, "12 does not divide by 8.*Use 8 or 16"),
    ({"input.source": "fakes:16,3,40"}, "fakes.*fake:"),
    ({"evals.test.weights": "ema"}, "test.weights = 'ema'.*config.ema = 0"),
    ({"evals.test.weights": "emma"}, "test.weights = .*'emma'.*ema"),
    ({"input.ops": "decode|resise({size})"}, "resise.*resize"),
    ({"input.ops": "decode|value_range(-1,1)"}, "config.model.input_range"),
    ({"input.ops": "decode|onehot(3)"}, "onehot.*config.loss"),
    ({"input.ops": "decode|keep('image')"}, "keep"),
    ({"input.ops": "decode|resize(12)"}, "12x12 pixels.*16x16"),
    ({"evals.test.ops": "decode|resize(12)"}, "config.evals.test: ops.*12x12"),
    ({"evals.test.kind": "clasification"}, "Did you mean 'classification'"),
    ({"evals.test.source": "fake:16,4,9"}, "config.evals.test: .*4 classes"),
    ({"evals.test.batch_size": 0}, "config.evals.test: batch_size = 0"),
    ({"model.name": "BB/16"}, "BB"),
    ({"model.name": "B"}, "'B'.*B/16"),
    ({"model.classifier": "tokens"}, "tokens.*token"),
    ({"model.input_range": "-1,2"}, "config.model.input_range = '-1,2'"),
    ({"model.num_heads": 3}, "3"),
    ({"loss": "softmaxx"}, "config.loss.*Did you mean 'softmax'"),
    ({"label_smoothing": 1.0}, "config.label_smoothing = 1.0"),
    ({"mixup": -1.0}, "config.mixup = -1.0"),
    ({"ema": 1.0}, "config.ema = 1.0"),
    ({"total": "0"}, "config.total = '0'"),
    ({"total": "0.5"}, "config.total = '0.5'"),
    ({"total": "None"}, "config.total = 'None'"),
    ({"log_every": "often"}, "config.log_every = 'often'"),
    ({"optim.name": "adam"}, "config.optim.name"),
    ({"optim.schedule": "cosin"}, "config.optim.schedule"),
    ({"accumulate": 3}, "accumulate = 3"),
    ({"mesh.data": 3}, "does not make 8 devices"),
    ({"mesh.model": 8}, "config.mesh.model = 8 does not divide"),
    (
      {"checkpoint.best": "test/top_1"},
      "'test/top_1'.*Did you mean 'test/top1'",
    ),
    ({"optim.freeze": ("hed/.*",)}, "config.optim.freeze"),
    ({"checkpoint.keep": 0}, "config.checkpoint.keep = 0"),
    ({"profile": "5"}, "config.profile = '5'"),
    ({"input.source": "folder:/nowhere"}, "/nowhere"),
    ({"input.source": ""}, "source"),
  ],
)
def test_refused_before_anything_is_compiled(
  tmp_path, monkeypatch, changes, message
):
  def compiled(*_, **__):
    raise AssertionError("compiled")

  monkeypatch.setattr(steps, "init_state", compiled)
  with pytest.raises(launch.Refused, match=message):
    train.run(tiny_config(**changes), str(tmp_path / "run"))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"seed": 1}, "seed: was 0, is 1"),
    ({"input.batch_size": 16}, "batch_size: was 8, is 16"),
    ({"input.source": "fake:16,3,48"}, "num_examples: was 40, is 48"),
    ({"input.streams": 2}, "streams: was 1, is 2"),
    ({"model.depth": 2}, "model.depth: was 0, is 2"),
    ({"model.scan": True}, "model.scan: was False, is True"),
    ({"ema": 0.5}, "ema: was 0.0, is 0.5"),
    ({"ema": 0.5, "checkpoint.allow_change": True}, "ema: missing"),
    ({"loss": "sigmoid"}, "loss: was 'softmax', is 'sigmoid'"),
    ({"optim.name": "sgd"}, "does not fit"),
    ({"optim.moment_dtype": "bfloat16"}, "bfloat16"),
  ],
)
def test_a_run_under_another_clock_or_model_is_refused(
  whole, tmp_path, changes, message
):
  # A finished run is left alone; so this one pretends not to be.
  (tmp_path / "checkpoints").symlink_to(whole / "checkpoints")
  with pytest.raises(launch.Refused, match=message):
    train.run(tiny_config(**changes), str(tmp_path))


def test_a_class_that_train_lacks_is_refused(tmp_path):
  from PIL import Image

  for place in ("train/a", "train/b", "test/a", "test/c"):
    folder = tmp_path / "data" / place
    folder.mkdir(parents=True)
    for i in range(8):
      Image.new("RGB", (16, 16), (i, 0, 0)).save(folder / f"{i}.png")
  config = tiny_config(**{"input.source": f"folder:{tmp_path / 'data'}"})
  with pytest.raises(launch.Refused, match="'?c'?"):
    train.run(config, str(tmp_path / "run"))


def test_every_config_is_json_and_comes_back(whole):
  from configs import rerun

  again = rerun.get_config(str(whole / "config.json"))
  assert again.to_dict() == tiny_config().to_dict()
  assert isinstance(again.image_size, tuple)
  assert again.to_json() == tiny_config().to_json()
  assert common.base().is_locked and again.is_locked


def test_the_best_step_survives_a_stop_in_its_evaluation(tmp_path, monkeypatch):
  """The score of a step that was saved before it was evaluated is kept."""
  config = tiny_config(
    **{"checkpoint.best": "test/loss", "checkpoint.keep": 1, "optim.lr": 1e-4}
  )
  real = input_pipeline.eval_batches
  count = iter(range(99))

  def stopped(*args, **kwargs):
    if next(count) == 1:
      os.kill(os.getpid(), signal.SIGTERM)
    return real(*args, **kwargs)

  with monkeypatch.context() as patch:
    patch.setattr(input_pipeline, "eval_batches", stopped)
    with pytest.raises(launch.Terminated):
      train.run(config, str(tmp_path))
  train.run(config, str(tmp_path))
  summary = json.loads((tmp_path / "summary.json").read_text())
  best = summary["best"]["test/loss"]["step"]
  assert checkpoints.locate(str(tmp_path), "best").name == str(best)
  for step, path in checkpoints.steps_in(tmp_path / "checkpoints").items():
    assert f"{step}" == path.name
    assert "test/loss" in checkpoints.read_meta(path)["values"]


def test_a_folder_trains_evaluates_and_warns(tmp_path, caplog, monkeypatch):
  from PIL import Image

  for split, count in (("train", 12), ("test", 5)):
    for name, colour in (("red", (250, 0, 0)), ("blue", (0, 0, 250))):
      folder = tmp_path / "data" / split / name
      folder.mkdir(parents=True)
      for i in range(count):
        Image.new("RGB", (20 + i, 18), colour).save(folder / f"{i}.JPG")
  (tmp_path / "data" / "train" / "red" / "scan.tiff").write_bytes(b"")
  config = tiny_config(
    **{
      "input.source": "folder:data",
      "input.data_dir": str(tmp_path),
      "optim.lr": 3e-3,
      "total": "12",
    }
  )
  input_pipeline.sources.folder.log.propagate = True
  train.run(config, str(tmp_path / "run"))
  assert rows(tmp_path / "run")[-1]["test/n"] == 10
  assert rows(tmp_path / "run")[-1]["test/top1"] == 1.0
  assert "scan.tiff" in caplog.text
  bad = tmp_path / "data" / "test" / "red" / "4.JPG"
  bad.write_bytes(bad.read_bytes()[:50])
  with pytest.raises(input_pipeline.DataError, match="4.JPG"):
    train.run(config, str(tmp_path / "again"))


def test_no_pmap_anywhere():
  root = pathlib.Path(__file__).parent.parent
  for folder in ("vit_jax", "input_pipeline", "benchmarks", "configs"):
    for path in (root / folder).rglob("*.py"):
      assert "pmap" not in path.read_text(), path
