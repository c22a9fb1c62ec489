"""Checkpoints: saved whole or not at all, and refused where they do not fit.

A step is a directory `checkpoints/STEP` with the items params, opt_state, ema
(when on) and meta, written by Orbax. Items restore alone. `meta` says what the
run was: the guard compares it before a run goes on. This room knows states and
files, not models, data or the loop.
"""

import itertools
import json
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from vit_jax import files, hosts, launch, report, trees
from vit_jax.guard import Meta
from vit_jax.steps import TrainState

log = logging.getLogger("vit_jax")

_ARRAYS = ("params", "opt_state", "ema")
_ASIDE = ".incomplete"  # Ends the new name of a directory that is set aside.


class Checkpoints:
  """The checkpoints of one run, written in the background.

  The newest `keep` steps stay, those that divide by `keep_every`, and the one
  with the best value of `best`, each by its own rule.
  """

  def __init__(
    self, directory: epath.PathLike, *, keep: int, keep_every: int, best: str
  ):
    """Opens `directory`, which may be empty.

    Args:
      directory: absolute; made when missing.
      keep: how many of the newest steps stay, at least 1.
      keep_every: updates; 0 keeps none for good.
      best: name of an evaluation value, or "".
    """
    if keep < 1:
      raise ValueError(f"config.checkpoint.keep = {keep}; use 1 or more.")
    self._directory = epath.Path(directory)
    self._best = best
    self._scores = dict(
      hosts.from_first(
        "scores",
        lambda: [
          (step, step_score(read_meta(path), best))
          for step, path in _sort_out(self._directory)[0].items()
        ],
      )
    )
    rules = [policies.LatestN(keep), _KeepBest(self._scores)]
    if keep_every:
      rules.append(policies.EveryNSteps(keep_every))
    self._manager = _Manager(
      directory,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(rules),
        cleanup_tmp_directories=True,
        temporary_path_class=_commit_by(self._directory),
      ),
    )

  def save(self, state: TrainState, meta: Meta) -> None:
    """Saves the state under its step; returns once the arrays are copied.

    Args:
      state: may be donated to the next update as soon as this returns.
      meta: JSON values; "values" holds the step's evaluation, if any.

    Raises:
      RuntimeError: Orbax did not save.
    """
    step = int(state.step)
    self._scores[step] = step_score(meta, self._best)
    if step in self._manager.all_steps():
      # Resumed here, so the state is the same; its evaluation may be news.
      self.wait()  # A branch's first save may still be on its way.
      if hosts.first():
        path = _meta_path(self._directory / str(step))
        files.write(path, json.dumps(meta))
      return
    items = {name: getattr(state, name) for name in _ARRAYS}
    arrays = {
      name: ocp.args.StandardSave(tree)
      for name, tree in items.items()
      if jax.tree.leaves(tree)
    }
    args = ocp.args.Composite(meta=ocp.args.JsonSave(meta), **arrays)
    if not self._manager.save(step, args=args, force=True):
      raise RuntimeError(f"The checkpoint of step {step} was not saved.")

  def wait(self) -> None:
    """Blocks until all saves are complete on disk; raises what failed."""
    self._manager.wait_until_finished()

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *_) -> None:
    self._manager.close()


class _Manager(ocp.CheckpointManager):
  """Orbax's own, but for asking whether the machine is to be taken away.

  The loop asks, once for each poll by its number; a second one who asks under
  other numbers could make the processes miss the poll at which all stop.
  """

  def reached_preemption(self, step: int) -> bool:
    del step
    return False


def _commit_by(path):
  """How Orbax is to mark a directory complete; None is by its name."""
  if files.is_remote(path):
    return ocp.path.atomicity.CommitFileTemporaryPath
  return None


class _KeepBest(policies.PreservationPolicy):
  """Keeps the step with the highest score; steps without one do not count."""

  def __init__(self, scores):
    self._scores = scores

  def should_preserve(self, checkpoints, *, context):
    steps = [info.step for info in checkpoints]
    best = highest({step: self._scores[step] for step in steps})
    return [step == best for step in steps]


def step_score(meta: Meta, name: str) -> float:
  """Returns how good a step is by its evaluation value `name`."""
  return report.score(name, meta["values"].get(name, math.nan))


def highest(scores: Mapping[int, float]) -> int | None:
  """Returns the step with the highest score, the earliest of equals."""
  scored = sorted(step for step in scores if scores[step] > -math.inf)
  return max(scored, key=scores.__getitem__, default=None)


def steps_in(directory: epath.PathLike) -> dict[int, epath.Path]:
  """Returns the complete steps of a directory, newest first.

  Warns once for each directory that is no complete checkpoint.
  """
  complete, incomplete = _sort_out(epath.Path(directory))
  for path in incomplete:
    log.warning("Ignoring %s: not a complete checkpoint.", path)
  return complete


def _sort_out(directory):
  """Returns step -> path of the complete steps, and the other paths."""
  complete, incomplete = {}, []
  for path in directory.iterdir() if directory.exists() else ():
    if path.name.isdecimal() and _is_complete(path):
      complete[int(path.name)] = path
    elif _ASIDE not in path.name:
      incomplete.append(path)
  return dict(sorted(complete.items(), reverse=True)), sorted(incomplete)


def _is_complete(path):
  """Whether Orbax finished this step: its own mark, and a readable meta."""
  if not ocp.utils.is_checkpoint_finalized(
    path, temporary_path_cls=_commit_by(path)
  ):
    return False
  try:
    read_meta(path)
  except (FileNotFoundError, NotADirectoryError, ValueError):
    return False
  return (path / "params").exists() and (path / "opt_state").exists()


def _meta_path(path):
  return epath.Path(path) / "meta" / "metadata"


def read_meta(path: epath.PathLike) -> Meta:
  """Returns what a step directory says of its run."""
  return json.loads(_meta_path(path).read_text())


def locate(path: str, step: str = "latest") -> epath.Path:
  """Finds a step directory.

  Args:
    path: a workdir, its `checkpoints`, or a step directory itself.
    step: "latest", "best" (by the run's `config.checkpoint.best`) or a number.

  Raises:
    ValueError: nothing there, or not that step; says what there is.
  """
  root = launch.absolute(path)
  if (root / "meta").exists():
    return root
  if (root / "checkpoints").exists():
    root = root / "checkpoints"
  steps = steps_in(root)
  if not steps:
    raise ValueError(
      f"No complete checkpoint in {root}. Give a workdir of a run, its "
      "checkpoints directory or one step's directory."
    )
  if step == "latest":
    return steps[max(steps)]
  if step == "best":
    return steps[_best_step(steps)]
  if not step.isdecimal() or int(step) not in steps:
    raise ValueError(
      f"No step {step} in {root}; there are latest, best, "
      f"{', '.join(str(number) for number in sorted(steps))}."
    )
  return steps[int(step)]


def _best_step(steps):
  metas = {step: read_meta(path) for step, path in steps.items()}
  name = metas[max(steps)]["config"]["checkpoint"]["best"]
  scores = {step: step_score(meta, name) for step, meta in metas.items()}
  best = highest(scores)
  if best is None:
    raise ValueError(
      f"No step was evaluated with config.checkpoint.best = {name!r}, so none "
      "is the best; ask for latest or a number."
    )
  return best


def misfits(path: epath.PathLike, item: str, abstract: Any) -> list[str]:
  """Compares a stored item with what is wanted, before reading any of it.

  Orbax drops leaves and casts dtypes in silence; that is for people to decide.

  Returns:
    One line per leaf that is missing, unexpected or different.
  """
  path = epath.Path(path) / item
  stored = {}
  if path.exists():
    stored = ocp.StandardCheckpointHandler().metadata(path).tree
  return [f"{item}: {line}" for line in trees.differences(stored, abstract)]


def restore_item(path: epath.PathLike, item: str, abstract: Any) -> Any:
  """Restores one item of a step onto the shardings that `abstract` carries.

  Args:
    path: a step directory.
    item: "params", "opt_state" or "ema".
    abstract: leaves are `jax.ShapeDtypeStruct` with a sharding.
  """
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(epath.Path(path) / item, abstract)


def restore_weights(
  path: epath.PathLike, abstract: Any, weights: str = ""
) -> Any:
  """Restores the parameters of a step, or their average, for use.

  Args:
    path: a step directory.
    abstract: the parameters; leaves carry shardings.
    weights: "params" or "ema"; "" is ema where the run kept it.

  Raises:
    ValueError: no such weights; they are not the model's, with every leaf.
  """
  kept = [
    item for item in ("ema", "params") if (epath.Path(path) / item).exists()
  ]
  item = weights or kept[0]
  if item not in kept:
    raise ValueError(
      f"{path} holds no {item!r} weights, but {', '.join(kept)}."
    )
  _check_fit(path, {item: abstract})
  return restore_item(path, item, abstract)


def _check_fit(path, items):
  lines = [
    line for name, tree in items.items() for line in misfits(path, name, tree)
  ]
  if lines:
    raise Misfit(
      f"{path} does not fit ({len(lines)} leaves):\n  " + "\n  ".join(lines)
    )


def restore(path: epath.PathLike, abstract: TrainState) -> TrainState:
  """Restores a whole state onto the shardings that `abstract` carries.

  Raises:
    Misfit: names, shapes or dtypes differ; lists every leaf that does.
  """
  items = {
    name: getattr(abstract, name)
    for name in _ARRAYS
    if jax.tree.leaves(getattr(abstract, name))
  }
  _check_fit(path, items)
  restored = {
    name: restore_item(path, name, tree) for name, tree in items.items()
  }
  step = np.asarray(read_meta(path)["step"], abstract.step.dtype)
  return TrainState(
    step=jax.device_put(step, abstract.step.sharding),
    **({"ema": {}} | restored),
  )


class Misfit(ValueError):
  """A checkpoint that can be read and holds another tree than asked for."""


def restore_latest(
  directory: epath.PathLike, abstract: TrainState, check: Callable[[Meta], None]
) -> tuple[TrainState, Meta] | None:
  """Restores the newest step of a run that is complete.

  Args:
    directory: the run's checkpoints.
    abstract: the state's shapes, dtypes and shardings.
    check: refuses, by ValueError, a meta that the run must not continue.

  Returns:
    The state and its meta, or None where there is no checkpoint. A newer
    directory that cannot be read is renamed, never deleted, with a warning.

  Raises:
    ValueError: `check` refuses; the tree is another one; none can be read, or
      one only by some of the processes.
  """
  complete, unreadable = _seen_by_first(epath.Path(directory))
  reasons = {path: "not a complete checkpoint" for path in unreadable}
  found = None
  for path in complete:
    meta = read_meta(path)
    check(meta)
    reason = ""
    try:
      found = restore(path, abstract), meta
    except Misfit:
      raise
    except Exception as error:  # Storage fails in all kinds of ways.
      reason = (str(error) or type(error).__name__).splitlines()[0]
    answers = hosts.gather(f"whether {path} can be read", reason)
    if not any(answers):
      break
    found, reasons[path] = None, next(filter(None, answers))
    if not all(answers):
      index = answers.index(reasons[path])
      raise ValueError(
        f"{path} cannot be read by {hosts.name(index)}, but by others: "
        f"{reasons[path]}"
      )
  # An empty directory holds nothing to lose, nor does a save cut short;
  # anything else might be repaired.
  if not found and (complete or any(map(_has_files, unreadable))):
    raise ValueError(
      "None of these checkpoints can be read:\n  "
      + "\n  ".join(f"{path}: {reason}" for path, reason in reasons.items())
    )
  # Only now: with no older step to go on from, nothing may be touched.
  for path, reason in reasons.items():
    if hosts.first():
      log.warning("Ignoring %s: %s.", path, reason)
      # The run will want to save this step again.
      if path.name.isdecimal() and not _is_orbaxs(path):
        names = (f"{path.name}{_ASIDE}{n or ''}" for n in itertools.count())
        free = (path.parent / name for name in names)
        files.move_tree(path, next(x for x in free if not x.exists()))
  hosts.barrier("the checkpoints")
  return found


def _seen_by_first(directory):
  """The paths of `_sort_out`, as process 0 sees them."""

  def look():
    complete, incomplete = _sort_out(directory)
    return (
      [path.name for path in complete.values()],
      [path.name for path in incomplete],
    )

  return (
    [directory / name for name in names]
    for names in hosts.from_first("the checkpoints", look)
  )


def _is_orbaxs(path):
  """Whether Orbax itself clears a directory away: a save cut short.

  In a bucket it has the name of its step from the start.
  """
  commit_by = _commit_by(path)
  return commit_by is not None and ocp.utils.is_tmp_checkpoint(
    path, temporary_path_cls=commit_by
  )


def _has_files(path):
  return path.name.isdecimal() and any(path.iterdir()) and not _is_orbaxs(path)
