"""What a unit leaves behind: all that its number depends on, as JSON.

Numbers on VTAB differ between papers for reasons that are seldom stated: the
images' range and size, what was trained on, what was counted. Here each result
says it.
"""

import functools
import pathlib
import re
import subprocess
from collections.abc import Mapping
from typing import Any, NamedTuple

import input_pipeline
from input_pipeline import vtab
from vit_jax import guard
from vit_jax.vtab.splits import Splits
from vit_jax.vtab.units import Result, Unit


class Measured(NamedTuple):
  """What the measuring of a unit gave.

  Attributes:
    correct: examples classified rightly.
    source: the split that was judged; all of its examples count.
    steps: updates made.
    curve: [update, loss] now and then.
    note: why a setting that was tried has not trained, or "".
  """

  correct: int
  source: input_pipeline.Source
  steps: int = 0
  curve: list[list[float]] = []
  note: str = ""


def protocol(config: Any) -> str:
  """Returns what results call the way in which tasks are learned."""
  if config.mode == "linear":
    return f"linear, {config.vtab.probe}"
  return config.vtab.protocol


def result(
  config: Any, task: vtab.Task, unit: Unit, readable: Splits, measured: Measured
) -> Result:
  """Returns a unit's result; see `scores.RESULT` for what reports need of it.

  Args:
    config: of the sweep.
    task: the row of the table.
    unit: what was measured.
    readable: the splits that it read.
    measured: what came out.
  """
  n = measured.source.num_examples
  return {
    "task": unit.task,
    "group": task.group,
    "protocol": protocol(config),
    "hyper": dict(unit.setting.values),
    "seed": unit.seed,
    "stage": unit.stage,
    "split": readable.judged,
    "trained_on": readable.train,
    "examples": dict(readable.expressions),
    "accuracy": measured.correct / n,
    "correct": measured.correct,
    "n": n,
    "steps": measured.steps,
    "preset": config.vtab.preset,
    "input_range": config.model.input_range,
    "image_size": list(config.image_size),
    "model": config.model.name,
    "init_from": config.init_from,
    "source": readable.source,
    "source_version": _version_of(measured.source),
    "revision": _revision(),
    "note": measured.note,
    "curve": measured.curve,
  }


def curves(
  results: list[Result], name: Any
) -> Mapping[tuple[str, str], list[tuple[int, float]]]:
  """Returns the learning curves of a sweep, of the final stage where it ran.

  Args:
    results: of the units.
    name: hyper-parameters -> what they are called.
  """
  found = {}
  for one in sorted(results, key=lambda r: (r["stage"] == "final", -r["seed"])):
    if one["curve"]:
      points = [(int(step), loss) for step, loss in one["curve"]]
      found[one["task"], name(one["hyper"])] = points
  return found


def identity(config: Any, settings: list[str]) -> dict[str, Any]:
  """Returns what all results of one sweep have in common, as JSON.

  That includes the settings to choose from: to try one after the other, each
  with its own look at the test split, would be a choice made there.
  """
  model, optim = guard.as_json(config.model), guard.as_json(config.optim)
  # They change no number, or are part of each setting's name.
  del model["remat"], optim["lr"]
  return {
    "protocol": protocol(config),
    "preset": config.vtab.preset,
    "settings": settings,
    "seed": config.seed,
    "image_size": list(config.image_size),
    "batch_size": config.input.batch_size,
    "init_from": config.init_from,
    "init_head": config.init_head,
    "init_resize": config.init_resize,
    "init_patch": config.init_patch,
    "model": model,
    "optim": optim,
  }


def _version_of(source: input_pipeline.Source) -> str:
  """Returns the version of the prepared data that a source reads."""
  found = re.search(r"/(\d+\.\d+\.\d+)/", source.name_of(0))
  return found[1] if found else ""


@functools.cache
def _revision() -> str:
  """Returns the git revision of this code; "" where it is not from a clone."""

  def git(*words):
    command = ["git", "-C", str(here.parent), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return done.stdout.strip() if done.returncode == 0 else ""

  here = pathlib.Path(__file__)
  try:
    # An installed copy may lie in a clone of something else.
    ours = git("ls-files", here.name)
    return git("describe", "--always", "--dirty") if ours else ""
  except (OSError, subprocess.TimeoutExpired):
    return ""
