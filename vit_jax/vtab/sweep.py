"""The sweep: task after task, choose on val200, then look at the test split.

For each task every setting is trained on train800 and judged on val200; the
best is trained on train800val200, from as many seeds as asked for, and each of
these runs is evaluated once on the full test split. What is done is on disk and
is never done again. A task that fails is marked, and the others go on.
"""

import functools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from input_pipeline import vtab as table
from vit_jax import build, files, guard, launch, trees
from vit_jax.vtab import probe, record, report, scores, splits, units
from vit_jax.vtab.clock import Clock
from vit_jax.vtab.tuning import Tuner
from vit_jax.vtab.units import Result, Setting, Unit

MODES = ("finetune", "linear")
STAGES = (splits.FINAL, splits.SELECT)
_SIZES = {splits.SELECT: (800, 200), splits.FINAL: (1000, 0)}  # Of the splits.

log = logging.getLogger("vit_jax")


def run(
  config: Any,
  workdir: str,
  *,
  tasks: Sequence[str] = (),
  shard: str = "0/1",
  seeds: int = 1,
  compare: str = "",
  rows: Mapping[str, table.Task] | None = None,
) -> list[Result]:
  """Does what is left of a sweep, and writes its report.

  Args:
    config: see `configs/vtab.py`.
    workdir: made when missing; several machines may share it.
    tasks: names of the tasks to do; all by default.
    shard: "i/n": every n-th of these tasks, from the i-th.
    seeds: runs of the chosen setting, from `config.seed` on.
    compare: workdir of another sweep, to stand beside this one in the report.
    rows: the table of tasks.

  Returns:
    All results of the sweep that there are, this machine's and others'.

  Raises:
    launch.Refused: the config forbids it; or, after all that could be done,
      tasks have failed.
    launch.Terminated: SIGTERM came; nothing is lost.
  """
  rows = dict(table.TASKS if rows is None else rows)
  with launch.Terminator() as terminator, Clock() as clock:
    with launch.refusal():
      for name in tasks:
        trees.check_choice("--tasks: ", name, rows)
      if seeds < 1:
        raise ValueError(f"--seeds={seeds}: use 1 or more.")
      names = [name for name in rows if not tasks or name in tasks]
      index, number = units.parse_shard(shard, len(names))
      ours = names[index::number]
      other = _other(compare)
      sweep = Sweep(config, launch.make_workdir(workdir), rows, seeds, clock)
      sweep.check_earlier(f"{index}-of-{number}")
      ready = sweep.prepare(ours, terminator.came)
    for name in ready:
      sweep.do(name)
  results = sweep.report(other)
  print(clock.summary(), flush=True)
  lacking = {name: sweep.lacks(name) for name in ours}
  failed = {name: reason for name, reason in lacking.items() if reason}
  if failed:
    raise launch.Refused(
      f"{len(failed)} of {len(ours)} tasks failed; the same command tries them "
      "again, and only them:\n"
      + "\n".join(f"  {name}: {reason}" for name, reason in failed.items())
    )
  return results


class Sweep:
  """A sweep over some tasks, on this machine.

  Attributes:
    workdir: where its results are.
    settings: among which each task chooses.
  """

  def __init__(
    self,
    config: Any,
    workdir: epath.Path,
    rows: Mapping[str, table.Task],
    seeds: int,
    clock: Clock,
  ):
    """Checks the config; nothing is read or compiled.

    Args:
      config: of the sweep.
      workdir: of the sweep.
      rows: the table of tasks.
      seeds: runs of a chosen setting.
      clock: told what time is spent on.

    Raises:
      ValueError: names the key.
    """
    trees.check_choice("config.mode = ", config.mode, MODES)
    trees.check_choice("config.vtab.stage = ", config.vtab.stage, STAGES)
    build.check_given(config)
    if config.lr_grid:
      raise ValueError(
        "A sweep takes its learning rates from config.vtab.lrs, not from "
        "config.lr_grid."
      )
    self.workdir = workdir
    self._config, self._rows, self._clock = config, rows, clock
    self._linear = config.mode == "linear"
    self._preset = table.get_preset(config.vtab.preset)
    self.settings = units.settings(
      config, probe.strengths(config) if self._linear else ()
    )
    self._steps = {
      setting.name: 0 if self._linear else _steps(setting)
      for setting in self.settings
    }
    # A probe draws nothing: all its runs would be the same.
    runs = 1 if self._linear else seeds
    self._seeds = range(config.seed, config.seed + runs)
    usual = {self._preset(row).input_range for row in rows.values()}
    if config.model.input_range not in usual:
      log.warning(
        "The preset %s is known for images in the range %s; these weights get "
        "%s, as config.model.input_range says.",
        config.vtab.preset,
        " and ".join(usual),
        config.model.input_range,
      )

  def check_earlier(self, shard: str) -> None:
    """Refuses to mix results of other weights or another recipe with ours.

    Args:
      shard: a name for this one of the machines that share the workdir.

    Raises:
      ValueError: lists what differs, then and now.
    """
    config = self._config
    ours = {
      "guard": record.identity(config, [one.name for one in self.settings]),
      "config": guard.as_json(config),
    }
    folder = self.workdir / "started"
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.glob("*.json")):
      guard.check(
        json.loads(path.read_text()),
        ours,
        allow=config.checkpoint.allow_change,
      )
    # A file for each: machines that start together do not write the same one.
    files.write(folder / f"{shard}.json", json.dumps(ours, indent=2) + "\n")

  def prepare(
    self, names: Sequence[str], stop: Callable[[], bool]
  ) -> list[str]:
    """Looks what there is to do; compiles and loads for it.

    Args:
      names: of the tasks.
      stop: whether to save and leave.

    Returns:
      The tasks that are not done and whose data are there. The others are
      marked.

    Raises:
      ValueError: config, devices or weights forbid it.
    """
    self._stop = stop
    ready = []
    for name in names:
      left = self._left(self._units(name))
      if left and self._has_data(name):
        ready.append(name)
        self._clock.plan(sum(map(self._work, left)))
    if not ready:
      return []
    shared: dict[str, Any] = dict(
      clock=self._clock, ops=functools.cache(self._ops), stop=stop
    )
    if self._linear:
      self._worker: Any = probe.Prober(self._config, **shared)
    else:
      self._worker = Tuner(
        self._config,
        num_classes=max(task.num_classes for task in self._rows.values()),
        longest=max(self._steps.values()),
        **shared,
      )
    return ready

  def _left(self, planned):
    return [unit for unit in planned if not unit.result(self.workdir)]

  def _has_data(self, name):
    """Marks the task as failed where its data are not the benchmark's."""
    try:
      table.check_data(self._rows[name], self._config.input.data_dir)
    except (ValueError, OSError) as error:
      self._failed(name, error)
      return False
    return True

  def _failed(self, name, error):
    log.debug("%s failed here:", name, exc_info=True)
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    self._failure(name).write(f"{kind}{error}")
    self._clock.line(f"{name} failed: {kind}{error}")

  def _ops(self, name):
    """Returns how a task's images are prepared, to train and to judge."""
    prepared = self._preset(self._rows[name])
    return prepared.train_ops, prepared.eval_ops

  def _work(self, unit):
    """Returns how much a unit takes, in images that are judged."""
    train, judged = _SIZES[unit.stage]
    judged = judged or self._rows[unit.task].num_test
    if self._linear:  # All settings of a stage share what is computed.
      first = unit.stage == splits.FINAL or unit.setting == self.settings[0]
      return (train + judged) * first
    steps = self._steps[unit.setting.name]
    return self._clock.backward * steps * self._config.input.batch_size + judged

  def _units(self, name: str) -> list[Unit]:
    """Lists a task's units, as far as can be told before its choice is made."""
    seed = self._config.seed
    tried = [Unit(name, splits.SELECT, one, seed) for one in self.settings]
    if self._config.vtab.stage == splits.SELECT:
      return tried
    if len(tried) == 1:
      tried = []  # There is nothing to choose.
    chosen = units.choose(self.workdir, name, self.settings, seed)
    # Until it is known the longest stands for it.
    chosen = chosen or max(self.settings, key=lambda s: self._steps[s.name])
    return tried + [Unit(name, splits.FINAL, chosen, s) for s in self._seeds]

  def _failure(self, name):
    return units.Failure(self.workdir / "units" / name / "failure.json")

  def lacks(self, name: str) -> str:
    """Returns why a task is not done, or ""."""
    if not self._left(self._units(name)):
      return ""
    return self._failure(name).read() or "not run yet"

  def do(self, name: str) -> None:
    """Does what is left of a task; what goes wrong is written down.

    Raises:
      launch.Terminated: SIGTERM came, and the state is saved.
    """
    try:
      planned = self._units(name)
      self._do_all(name, splits.SELECT, planned)
      known = self._units(name)  # Now that the choice is made.
      self._clock.plan(
        sum(map(self._work, known)) - sum(map(self._work, planned))
      )
      self._do_all(name, splits.FINAL, known)
      self._failure(name).clear()
    except launch.Terminated:
      raise
    except Exception as error:  # Data fail in all kinds of ways.
      self._failed(name, error)

  def _do_all(self, name, stage, planned):
    """Does what is left of a stage."""
    left = self._left(unit for unit in planned if unit.stage == stage)
    task = self._rows[name]
    readable = splits.for_stage(stage, name, task, self._config.input.data_dir)
    for unit in left:
      if self._stop():
        raise launch.Terminated("SIGTERM: the same command goes on from here.")
      self._clock.doing(str(unit))
      self._do(unit, task, readable)

  def _do(self, unit, task, readable):
    began = time.perf_counter()
    measured = self._worker.measure(unit, readable, self.workdir)
    seconds = time.perf_counter() - began
    result = record.result(self._config, task, unit, readable, measured)
    with self._clock.spending("saving"):
      unit.write(self.workdir, result | {"seconds": round(seconds, 2)})
      unit.clear_training(self.workdir)
    self._clock.line(
      f"{unit}: {result['accuracy']:.2%} of {result['n']} ({seconds:.0f} s)"
      + (measured.note and f": {measured.note}")
    )

  def report(self, other: report.Other | None) -> list[Result]:
    """Writes the report of all that is there, and prints its table.

    Args:
      other: another sweep to stand beside.

    Returns:
      The results that there are.
    """
    found, lacking = [], []
    for name in self._rows:
      results = [unit.result(self.workdir) for unit in self._units(name)]
      found += [result for result in results if result]
      if None in results:
        lacking.append({"task": name, "reason": self.lacks(name)})
    print(report.text([*found, *lacking]))
    try:
      report.write(
        self.workdir,
        [*found, *lacking],
        curves=record.curves(found, scores.hyper_text),
        compare=other,
      )
      print(f"In {self.workdir}: report.html, report.md, report.csv")
    except OSError as error:  # Another machine may write it at this moment.
      log.warning("The report could not be written: %s", error)
    return found


def _steps(setting: Setting) -> int:
  """Returns the most updates that a setting may take."""
  return max(build.schedule(setting.config, n)[1] for n, _ in _SIZES.values())


def _other(workdir: str) -> report.Other | None:
  """Reads the results of another sweep.

  Raises:
    ValueError: there are none.
  """
  if not workdir:
    return None
  root = launch.absolute(workdir)
  paths = sorted(root.glob("units/*/*/*/*/result.json"))
  if not paths:
    raise ValueError(f"--compare={workdir}: there are no results of a sweep.")
  return report.Other(root.name, [json.loads(p.read_text()) for p in paths])
