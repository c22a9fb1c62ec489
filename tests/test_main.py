"""The command itself: kills, signals, exit statuses, flags. Real processes."""

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.test_train import assert_same_run, rows

ROOT = pathlib.Path(__file__).parent.parent
RECIPE = "tests/tiny_recipe.py"


def command(workdir, *flags, config=RECIPE, python=()):
  return [
    sys.executable,
    *python,
    "-m",
    "vit_jax.main",
    f"--config={config}",
    f"--workdir={workdir}",
    *flags,
  ]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
  """One device, and a cache of programs that all these processes share."""
  cache = tmp_path_factory.mktemp("cache")
  return os.environ | {
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "XDG_CACHE_HOME": str(cache),
  }


@pytest.fixture(scope="module")
def whole(tmp_path_factory, environment):
  """The workdir of a run that nobody disturbed."""
  workdir = tmp_path_factory.mktemp("whole")
  subprocess.run(command(workdir), cwd=ROOT, env=environment, check=True)
  return workdir


def rows_so_far(workdir):
  path = pathlib.Path(workdir) / "metrics.jsonl"
  return path.read_text().count("\n") if path.exists() else 0


def kill_at_random(workdir, environment, number, dice):
  """Starts the run and kills it a random while after a few of its updates."""
  metrics = workdir / "metrics.jsonl"
  before = metrics.stat().st_mtime_ns if metrics.exists() else 0
  process = subprocess.Popen(
    command(workdir),
    cwd=ROOT,
    env=environment,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )

  def wait(condition):
    while process.poll() is None and not condition():
      time.sleep(0.002)

  # A start first cuts the rows after the step that it restored.
  wait(lambda: metrics.exists() and metrics.stat().st_mtime_ns != before)
  wanted = rows_so_far(workdir) + dice.randint(0, 5)
  wait(lambda: rows_so_far(workdir) >= wanted)
  time.sleep(dice.uniform(0, 0.1))
  process.send_signal(number)
  return process.wait(timeout=120)


def survive(workdir, environment, kills, seed):
  dice = random.Random(seed)
  died = [
    kill_at_random(workdir, environment, signal.SIGKILL, dice)
    for _ in range(kills)
  ]
  done = subprocess.run(
    command(workdir),
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return died


def test_killed_at_random_moments_the_run_is_the_same(
  whole, environment, tmp_path
):
  survive(tmp_path, environment, kills=2, seed=0)
  assert_same_run(tmp_path, whole)


@pytest.mark.slow
def test_twenty_random_kills(whole, environment, tmp_path):
  died = survive(tmp_path, environment, kills=20, seed=1)
  assert died.count(-signal.SIGKILL) >= 5
  assert_same_run(tmp_path, whole)


def test_sigterm_saves_and_says_143(whole, environment, tmp_path):
  ours = command(tmp_path, "--config.checkpoint.every=20")
  process = subprocess.Popen(
    ours, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
  )
  while process.poll() is None and rows_so_far(tmp_path) < 8:
    time.sleep(0.002)
  process.terminate()
  _, errors = process.communicate(timeout=120)
  assert process.returncode == 143, errors
  (saved,) = [
    int(path.name)
    for path in (tmp_path / "checkpoints").iterdir()
    if path.name.isdecimal()
  ]
  assert 8 <= saved < 20  # No periodic save was due before 20.
  assert f"step {saved} is saved" in errors
  subprocess.run(ours, cwd=ROOT, env=environment, check=True)
  assert_same_run(tmp_path, whole)


def test_a_finished_run_exits_0_and_touches_nothing(whole, environment):
  def times():
    return {path: path.stat().st_mtime_ns for path in whole.rglob("*")}

  before = times()
  subprocess.run(command(whole), cwd=ROOT, env=environment, check=True)
  assert times() == before


@pytest.mark.parametrize(
  ("flags", "status", "message"),
  [
    (["--config.optim.lr=1e30"], 3, r"train/\w+ is \w+ in update \d+"),
    (
      ["--config.modle.name=S/16"],
      2,
      "no such config key.*modle[^$]*Did you mean .model",
    ),
    (["--config.seed=three"], 2, "config.seed.*three"),
    (["--wrokdir=x"], 2, "wrokdir"),
  ],
)
def test_exit_status_and_message(environment, tmp_path, flags, status, message):
  result = subprocess.run(
    command(tmp_path, *flags),
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert result.returncode == status, result.stderr
  assert re.search(message, result.stderr), result.stderr
  assert "Traceback" not in result.stderr


def test_no_deprecated_calls_and_a_rerun_from_the_saved_config(
  whole, environment, tmp_path
):
  subprocess.run(
    command(
      tmp_path,
      "--config.total=2",
      "--config.optim.warmup=0",
      config=f"configs/rerun.py:{whole}/config.json",
      python=["-W", "error::DeprecationWarning"],
    ),
    cwd=ROOT,
    env=environment,
    check=True,
  )
  assert rows(tmp_path)[0]["train/loss"] == rows(whole)[0]["train/loss"]
  config = json.loads((tmp_path / "config.json").read_text())
  assert config["total"] == "2"
