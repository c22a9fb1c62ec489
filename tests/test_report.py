"""Metrics files and the progress display."""

import json

import pytest

from vit_jax import report


def lines(path):
  return [
    json.loads(x) for x in (path / "metrics.jsonl").read_text().split("\n") if x
  ]


def test_values_of_one_step_share_a_line_whenever_they_come(tmp_path):
  metrics = report.Metrics(tmp_path, 0)
  metrics.write(1, {"train/loss": 2.0})
  metrics.write(2, {"train/loss": 1.0})
  metrics.write(2, {"test/top1": 0.5, "test/n": 4})
  assert lines(tmp_path) == [
    {"step": 1, "train/loss": 2.0},
    {"step": 2, "train/loss": 1.0, "test/top1": 0.5, "test/n": 4},
  ]
  assert metrics.at(2)["test/n"] == 4
  assert metrics.at(3) == {}


def test_resuming_cuts_the_lost_future_and_half_a_line(tmp_path):
  metrics = report.Metrics(tmp_path, 0)
  for step in (1, 2, 3):
    metrics.write(step, {"train/loss": 1.0 / step, "test/top1": step / 10})
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 4, "train/lo')
  metrics = report.Metrics(tmp_path, 2)
  assert [row["step"] for row in lines(tmp_path)] == [1, 2]
  assert metrics.at(2)["test/top1"] == 0.2
  assert metrics.best["test/top1"] == {"value": 0.2, "step": 2}


def test_best_and_final_each_with_their_step(tmp_path):
  metrics = report.Metrics(tmp_path, 0)
  for step, (top1, loss) in enumerate([(0.5, 1.0), (0.9, 0.3), (0.7, 0.4)], 1):
    metrics.write(step, {"test/top1": top1, "test/loss": loss, "test/n": 9})
  assert metrics.final["test/top1"] == {"value": 0.7, "step": 3}
  assert metrics.best == {
    "test/top1": {"value": 0.9, "step": 2},
    "test/loss": {"value": 0.3, "step": 2},
  }


def test_a_value_that_is_not_finite_is_never_the_best(tmp_path):
  metrics = report.Metrics(tmp_path, 0)
  for step, loss in enumerate([float("nan"), 0.5, float("nan")], 1):
    metrics.write(step, {"test/loss": loss})
  assert metrics.best["test/loss"] == {"value": 0.5, "step": 2}


def test_lines_where_there_is_no_terminal(capsys):
  with report.Progress(0, 10, 8) as progress:
    progress.updated(1, 2.0)
    progress.evaluated({"test/top1": 0.5, "test/n": 3})
    progress.updated(2, 1.5)
    assert progress.rate() > 0
    progress.line(1.5)
  out = capsys.readouterr().out
  assert "step 2/10  loss 1.5000  test/top1 50.00%" in out
  assert "images/s" in out
  assert "eta 0:" in out


def test_rate_counts_neither_evaluation_nor_the_first_update(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(report.time, "perf_counter", lambda: now[0])
  progress = report.Progress(0, 100, 10)
  now[0] = 60.0  # The first update compiles.
  progress.updated(1, 1.0)
  now[0] = 61.0
  with progress.aside():
    now[0] = 91.0
  now[0] = 92.0
  progress.updated(5, 1.0)
  assert progress.rate() == pytest.approx(4 * 10 / 2)


def test_profiler_window(tmp_path):
  with pytest.raises(ValueError, match='"START:STOP"'):
    report.Profiler("9:3", tmp_path)
  profiler = report.Profiler("1:2", tmp_path)
  for step in range(4):
    profiler.before(step)
  assert list(tmp_path.rglob("*.xplane.pb"))
