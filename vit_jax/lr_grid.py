"""Choosing the learning rate on held-out data, then training on all of it.

With `config.lr_grid` a run becomes one run for each rate, trained and judged on
the two parts of the training data that `config.lr_splits` names, and then the
run itself at the best rate. Only that last one meets the other evaluators and
their data. Everything resumes like any run: what is done is not done again.
"""

import json
import logging
import math
from typing import Any

from vit_jax import files, guard, hosts, launch, steps, train

HELD_OUT = "held_out"  # Name of the evaluator that judges.
# What may differ between two starts of one grid: it changes no accuracy.
_NO_MATTER = ("checkpoint", "log_every", "lr_grid", "mesh", "profile")

log = logging.getLogger("vit_jax")


def run(config: Any, workdir: str) -> steps.TrainState | None:
  """Trains a config, after choosing its learning rate where it asks for that.

  The runs of the grid live in `workdir/lr_grid/RATE`. `workdir/lr_grid.json`
  keeps what they came to: the held-out accuracy at each rate, null where
  training was not finite, and the rate chosen, the first of equals. Until one
  is chosen, rates may be added.

  Args:
    config: see `configs/common.py`.
    workdir: of the final run.

  Returns:
    The final state, or None if the final run was finished before.

  Raises:
    launch.Refused: as `train.run`; rates or splits that cannot be; no evaluator
      to judge by; a grid that was begun with other settings, or ended with
      another rate.
    FloatingPointError: at all rates, or in the final run.
    launch.Terminated: SIGTERM came, and the state is saved.
  """
  if not config.lr_grid:
    return train.run(config, workdir)
  with launch.refusal():
    path = launch.make_workdir(workdir)
    trials = _trials(config)
    file = files.join(path, "lr_grid.json")
    record = _record(file, next(iter(trials.values())))
  scores = record["scores"]
  for name, trial in trials.items():
    if name not in scores:
      log.info("Learning rate %s, of %s.", name, ", ".join(trials))
      scores[name] = _score(trial, files.join(path, f"lr_grid/{name}"))
      _write(file, record)
  finite = {name: scores[name] for name in trials if scores[name] is not None}
  if not finite:
    raise FloatingPointError(
      f"Training was finite at none of the rates {', '.join(trials)}."
    )
  best = max(finite, key=lambda name: finite[name])
  if record.setdefault("chosen", best) != best:
    raise launch.Refused(
      f"{file}: the run was begun with the rate {record['chosen']}; of those "
      f"given now {best} is better. Use another --workdir for them."
    )
  _write(file, record)
  log.info(
    "On %s: %s. Training on %s with %s.",
    config.lr_splits[1],
    ", ".join(f"{name} {score:.2%}" for name, score in finite.items()),
    config.input.split,
    best,
  )
  final = config.copy_and_resolve_references()
  final.optim.lr = trials[best].optim.lr
  final.lr_grid = ()
  return train.run(final, workdir)


def _trials(config):
  """Rate as text -> the config of its run; raises what is wrong with them."""
  if len(config.lr_splits) != 2 or not all(config.lr_splits):
    raise ValueError(
      f"config.lr_splits = {config.lr_splits!r}: two parts of the training "
      "data, to train on and to judge by: ('train[:90%]', 'train[90%:]')."
    )
  judges = [
    entry
    for entry in config.evals.values()
    if entry.kind == "classification" and not entry.source
  ]
  if not judges:
    raise ValueError(
      "config.lr_grid needs an evaluator of the kind classification on the "
      "training source: its ops prepare the held-out images as well."
    )
  trials = {}
  for rate in config.lr_grid:
    if not isinstance(rate, (int, float)) or not 0 < rate < math.inf:
      raise ValueError(
        f"config.lr_grid = {config.lr_grid!r}: rates are positive numbers, "
        f"not {rate!r}."
      )
    trial = config.copy_and_resolve_references()
    judge = judges[0].copy_and_resolve_references()
    judge.split, judge.every = config.lr_splits[1], "0"
    with trial.unlocked():
      trial.evals = {HELD_OUT: judge}
    trial.optim.lr, trial.lr_grid = float(rate), ()
    trial.input.split = config.lr_splits[0]
    trial.checkpoint.best = ""
    trials[repr(float(rate))] = trial
  if len(trials) != len(config.lr_grid):
    raise ValueError(
      f"config.lr_grid = {config.lr_grid!r}: a rate comes twice."
    )
  return trials


def _write(file: str, record: dict[str, Any]) -> None:
  if hosts.first():
    files.write(file, json.dumps(record, indent=2) + "\n")


def _record(file: str, trial: Any) -> dict[str, Any]:
  """What is known of the grid already; refuses another one's results."""
  settings = guard.as_json(trial)
  del settings["optim"]["lr"]
  settings = {k: v for k, v in settings.items() if k not in _NO_MATTER}
  text = hosts.from_first("lr_grid.json", lambda: files.read(file))
  if not text:
    return {"scores": {}, "settings": settings}
  record = json.loads(text)
  changes = guard.changes(record["settings"], settings)
  if changes:
    raise ValueError(
      f"{file} was made with other settings:\n  "
      + "\n  ".join(changes)
      + f"\nSet them back, use another --workdir, or remove {file} and the "
      "folder lr_grid beside it."
    )
  return record


def _score(trial: Any, workdir: str) -> float | None:
  """Trains at one rate: the held-out accuracy, None if it was not finite."""
  try:
    train.run(trial, workdir)
  except FloatingPointError as error:
    log.warning("No candidate: %s", error)
    return None
  summary = hosts.from_first(
    "summary.json",
    lambda: json.loads(files.read(files.join(workdir, "summary.json"))),
  )
  return summary["final"][f"{HELD_OUT}/top1"]["value"]
