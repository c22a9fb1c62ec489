"""Several processes on loopback: one run, one writer, one end."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest

from tests import tiny_recipe
from tests.test_train import rows
from vit_jax import checkpoints, hosts, sharding, train

ROOT = pathlib.Path(__file__).parent.parent
CHANGES = {
  "input.streams": 4,
  "optim.schedule": "constant",
  "model.depth": 1,
  "evals.test.every": "10",
  "checkpoint.every": "10",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
  """What the processes share: one device each, and compiled programs."""
  return os.environ | {
    "PYTHONPATH": str(ROOT),
    "JAX_NUM_CPU_DEVICES": "1",
    "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
  }


class Processes:
  """The processes of one run."""

  def __init__(self, environment, workdirs, flags=(), own=(), folders=()):
    """Starts one for each workdir; `own` adds flags to the last of them.

    They start in the folders, if given, else all in the root.
    """
    with socket.socket() as probe:
      probe.bind(("127.0.0.1", 0))
      port = probe.getsockname()[1]
    joining = [
      f"--coordinator_address=127.0.0.1:{port}",
      f"--num_processes={len(workdirs)}",
    ]
    changes = [f"--config.{key}={value}" for key, value in CHANGES.items()]
    self.all = [
      subprocess.Popen(
        [
          sys.executable,
          "-m",
          "vit_jax.main",
          f"--config={ROOT}/tests/tiny_recipe.py",
          f"--workdir={workdir}",
          *joining,
          f"--process_id={index}",
          *changes,
          *flags,
          *(own if index == len(workdirs) - 1 else ()),
        ],
        cwd=folders[index] if folders else ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
      for index, workdir in enumerate(workdirs)
    ]

  def await_row(self, workdir, step):
    """Waits until the run has written the row of a step."""
    path = pathlib.Path(workdir) / "metrics.jsonl"
    self.wait_for(
      lambda: path.exists() and path.read_text().count("\n") >= step
    )

  def wait_for(self, condition):
    """Waits until a condition is true, or one of them has ended."""
    deadline = time.monotonic() + 240
    while all(process.poll() is None for process in self.all):
      if condition() or time.monotonic() > deadline:
        return
      time.sleep(0.005)

  def end(self, timeout=240):
    """Returns the exit statuses, and what each wrote to stdout and stderr."""
    try:
      said = [process.communicate(timeout=timeout) for process in self.all]
    finally:
      for process in self.all:
        process.kill()
    return [process.returncode for process in self.all], said


def alone(workdir, total, monkeypatch, devices=2):
  """The same run in this process."""
  config = tiny_recipe.get_config()
  config.update_from_flattened_dict(CHANGES | {"total": str(total)})
  real = sharding.make_mesh
  with monkeypatch.context() as patch:
    patch.setattr(
      sharding, "make_mesh", lambda mesh: real(mesh, jax.devices()[:devices])
    )
    train.run(config, str(workdir))
  return rows(workdir)


def assert_close(ours, theirs):
  assert len(ours) == len(theirs)
  for one, other in zip(ours, theirs):
    assert one.keys() == other.keys()
    for name, value in one.items():
      assert value == pytest.approx(other[name], abs=1e-6), (one["step"], name)


def steps_of(workdir):
  return sorted(checkpoints.steps_in(workdir / "checkpoints"))


def test_two_processes_stop_together_and_are_one(
  environment, tmp_path, monkeypatch
):
  """SIGTERM comes to the one that does not write; then both go on."""
  shared = tmp_path / "two"
  run = Processes(environment, [shared] * 2, ["--config.total=2000"])
  run.await_row(shared, 4)
  run.all[1].send_signal(signal.SIGTERM)
  statuses, said = run.end()
  assert statuses == [143, 143], said
  saved = max(steps_of(shared))
  for _, errors in said:
    assert f"SIGTERM: step {saved} is saved" in errors
  total = saved + 3
  run = Processes(environment, [shared] * 2, [f"--config.total={total}"])
  statuses, said = run.end()
  assert statuses == [0, 0], said
  assert_close(rows(shared), alone(tmp_path / "one", total, monkeypatch))
  # One writer, which alone speaks.
  assert f"Resuming at step {saved} of {total}." in said[0][1]
  assert "2 processes, 2 devices (cpu), mesh data=2 x" in said[0][1]
  assert f"Done: {total} updates" in said[0][0]
  assert "step" not in said[1][0] + said[1][1]
  assert {path.name for path in shared.iterdir() if path.is_file()} == {
    "config.json",
    "metrics.jsonl",
    "summary.json",
    *(path.name for path in shared.glob("events*")),
  }
  assert len(list(shared.glob("events*"))) == 2  # One for each start.


@pytest.mark.slow
def test_two_go_on_with_what_four_began(environment, tmp_path, monkeypatch):
  shared = tmp_path / "four"
  statuses, said = Processes(
    environment, [shared] * 4, ["--config.total=7"]
  ).end()
  assert statuses == [0] * 4, said
  (shared / "summary.json").unlink()
  fsdp = environment | {"JAX_NUM_CPU_DEVICES": "2"}
  statuses, said = Processes(
    fsdp, [shared] * 2, ["--config.total=12", "--config.mesh.fsdp=4"]
  ).end()
  assert statuses == [0] * 2, said
  alone(tmp_path / "one", 7, monkeypatch, devices=4)
  (tmp_path / "one" / "summary.json").unlink()
  assert_close(
    rows(shared), alone(tmp_path / "one", 12, monkeypatch, devices=4)
  )


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_and_all_go_on(
  environment, tmp_path, monkeypatch, victim
):
  shared = tmp_path / "two"
  run = Processes(environment, [shared] * 2, ["--config.total=2000"])
  run.wait_for((shared / "checkpoints" / "10").exists)
  run.all[victim].kill()
  began = time.monotonic()
  statuses, said = run.end()
  assert time.monotonic() - began < 60
  other = 1 - victim
  assert statuses[other] == hosts.LOST, said[other]
  gone = f"process {victim} ({socket.gethostname()}) is gone"
  assert gone in said[other][1]
  total = max(steps_of(shared)) + 5
  run = Processes(environment, [shared] * 2, [f"--config.total={total}"])
  statuses, said = run.end()
  assert statuses == [0, 0], said
  assert_close(rows(shared), alone(tmp_path / "one", total, monkeypatch))


@pytest.mark.slow
def test_a_workdir_that_is_not_shared_is_refused(environment, tmp_path):
  places = [tmp_path / "a", tmp_path / "b"]
  statuses, said = Processes(environment, places).end()
  assert statuses == [2, 2], said
  for _, errors in said:
    assert "is not shared" in errors
    assert str(places[0]) in errors
    assert str(places[1]) in errors
  assert not any(list(place.iterdir()) for place in places[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
  ("own", "message"),
  [
    ("--config.seed=5", "do not agree on the config.*seed: was 0, is 5"),
    ("--config.optim.name=nonsense", "process 1.*(agree|nonsense)"),
  ],
)
def test_a_process_of_another_mind_is_refused(
  environment, tmp_path, own, message
):
  statuses, said = Processes(environment, [tmp_path / "a"] * 2, own=[own]).end()
  assert statuses == [2, 2], said
  for _, errors in said:
    assert re.search(message, errors, re.DOTALL), errors


def folder(path, images=12, broken=()):
  from PIL import Image

  for split in ("train", "test"):
    for i in range(images):
      where = path / split / "ab"[i % 2]
      where.mkdir(parents=True, exist_ok=True)
      Image.new("RGB", (16, 16), (i, 0, 0)).save(where / f"{i}.png")
      if i in broken:
        (where / f"{i}.png").write_bytes(b"no picture")
  return path


@pytest.mark.slow
def test_other_data_is_refused(environment, tmp_path):
  """The same name in the config, but other files behind it."""
  for number, images in ((0, 12), (1, 14)):
    folder(tmp_path / f"{number}" / "data", images)
  statuses, said = Processes(
    environment,
    [tmp_path / "run"] * 2,
    ["--config.input.source=folder:data"],
    folders=[tmp_path / "0", tmp_path / "1"],
  ).end()
  assert statuses == [2, 2], said
  for _, errors in said:
    assert "do not agree on the training data" in errors
    assert "num_examples: was 12, is 14" in errors


@pytest.mark.slow
def test_an_image_that_one_process_cannot_read_ends_both(environment, tmp_path):
  data = folder(tmp_path / "data", broken=(11,))
  statuses, said = Processes(
    environment,
    [tmp_path / "run"] * 2,
    [f"--config.input.source=folder:{data}", "--config.evals.test.kind="],
  ).end()
  assert statuses == [2, 2], said
  assert all("11.png" in errors for _, errors in said)
