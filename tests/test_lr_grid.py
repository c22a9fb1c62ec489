"""The learning-rate grid: chosen on held-out data, then trained on all."""

import json

import pytest

import input_pipeline
from tests.conftest import tiny_config
from vit_jax import launch, lr_grid, train

RATES = (1e-9, 0.02, 1e30)  # Learns nothing, learns, is soon not finite.


def grid_config(**changes):
  config = tiny_config(
    total="12",
    mixup=0.0,
    lr_grid=RATES,
    lr_splits=("train[:24]", "train[24:]"),
    **{
      "input.source": "fake:16,3,96",
      "model.dropout": 0.0,
      "checkpoint.every": "0",
      "checkpoint.best": "test/top1",
      "optim.clip": 0.0,
    },
  )
  config.update_from_flattened_dict(changes)
  return config


def final(workdir):
  return json.loads((workdir / "summary.json").read_text())["final"]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
  """A workdir after a whole grid, and what was opened by which of its runs."""
  workdir = tmp_path_factory.mktemp("grid") / "run"
  opened, original = [], input_pipeline.get_source

  def get_source(spec, split, data_dir=""):
    opened.append(split)
    return original(spec, split, data_dir)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(input_pipeline, "get_source", get_source)
    state = lr_grid.run(grid_config(), str(workdir))
  return workdir, opened, state


def test_the_best_rate_trains_on_all(done):
  workdir, opened, state = done
  scores = json.loads((workdir / "lr_grid.json").read_text())["scores"]
  assert list(scores) == ["1e-09", "0.02", "1e+30"]
  assert scores["1e+30"] is None
  assert scores["0.02"] > scores["1e-09"]
  for name in ("1e-09", "0.02"):
    values = final(workdir / "lr_grid" / name)
    assert values["held_out/top1"]["value"] == scores[name]
    assert values.keys() == {f"held_out/{v}" for v in ("top1", "top5", "loss")}
    rows = (workdir / "lr_grid" / name / "metrics.jsonl").read_text()
    assert json.loads(rows.splitlines()[-1])["held_out/n"] == 72
  config = json.loads((workdir / "config.json").read_text())
  assert (config["optim"]["lr"], config["input"]["split"]) == (0.02, "train")
  assert config["lr_grid"] == []
  assert "test/top1" in final(workdir)
  assert int(state.step) == 12
  # The test data is not opened before the rates are known.
  assert "test" not in opened[: opened.index("train")]
  assert "test" in opened


def test_the_same_command_again_does_nothing(done, monkeypatch):
  workdir, *_ = done
  monkeypatch.setattr(train, "loop", None)
  assert lr_grid.run(grid_config(), str(workdir)) is None


def test_what_is_known_is_not_trained_again(done, monkeypatch, tmp_path):
  workdir, *_ = done
  record = json.loads((workdir / "lr_grid.json").read_text())
  assert record.pop("chosen") == "0.02"
  (tmp_path / "lr_grid.json").write_text(json.dumps(record))
  runs = []
  monkeypatch.setattr(train, "run", lambda config, path: runs.append(config))
  lr_grid.run(grid_config(lr_grid=(1e-9, 0.02)), str(tmp_path))
  assert [run.optim.lr for run in runs] == [0.02]
  assert runs[0].checkpoint.best == "test/top1"


def test_what_has_begun_keeps_its_rate(done):
  workdir, *_ = done
  with pytest.raises(
    launch.Refused, match="begun with the rate 0.02; .* 1e-09"
  ):
    lr_grid.run(grid_config(lr_grid=(1e-9,)), str(workdir))


def test_a_grid_of_other_settings_is_refused(done):
  workdir, *_ = done
  with pytest.raises(launch.Refused, match="total: was '12', is '13'"):
    lr_grid.run(grid_config(total="13"), str(workdir))
  with pytest.raises(launch.Refused, match=r"train\[:24\]', is 'train\[:30\]"):
    splits = ("train[:30]", "train[30:]")
    lr_grid.run(grid_config(lr_splits=splits), str(workdir))


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"lr_grid": (0.1, -0.1)}, "positive numbers, not -0.1"),
    ({"lr_grid": (0.1, "a")}, "positive numbers, not 'a'"),
    ({"lr_grid": (0.1, 0.2, 0.1)}, "a rate comes twice"),
    ({"lr_splits": ("train",)}, "two parts of the training data"),
    ({"evals.test.kind": ""}, "evaluator of the kind classification"),
    ({"evals.test.source": "fake:16,3,8"}, "on the training source"),
  ],
)
def test_what_cannot_be_is_refused(changes, words, tmp_path):
  with pytest.raises(launch.Refused, match=words):
    lr_grid.run(grid_config(**changes), str(tmp_path))


def test_no_rate_left(tmp_path):
  config = grid_config(lr_grid=(1e30,), total="2")
  with pytest.raises(FloatingPointError, match="none of the rates 1e\\+30"):
    lr_grid.run(config, str(tmp_path))
