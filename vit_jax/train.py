"""The training loop: one command trains, and the same command resumes.

The order within a step is sacred. At step i the state has done i updates:
whatever is due is evaluated, then saved under the name i, and only then is
batch i taken and the update made. Data order, dropout and mixup are functions
of (seed, step), so a state restored at step i meets the very same future.
"""

import json
import logging
import math
import time
from typing import Any

import jax

from vit_jax import (
  build,
  evaluators,
  files,
  guard,
  hosts,
  launch,
  report,
  start,
  steps,
)

log = logging.getLogger("vit_jax")


def run(config: Any, workdir: str) -> steps.TrainState | None:
  """Trains to the end, from wherever the run in `workdir` stands.

  Args:
    config: see `configs/common.py`.
    workdir: made when missing.

  Returns:
    The final state, or None if the run was finished before.

  Raises:
    launch.Refused: the config, the data or what is in `workdir` forbid it.
    input_pipeline.DataError: an image cannot be read; names the file.
    FloatingPointError: a loss, a gradient or a weight is not finite.
    launch.Terminated: SIGTERM came, and the state is saved.
  """
  began = time.perf_counter()
  with launch.Terminator() as terminator:
    with launch.refusal():
      path = launch.make_workdir(workdir)
      hosts.agree("the config", guard.as_json(config), guard.changes)
      summary = files.join(path, "summary.json")
      if hosts.from_first("summary.json", lambda: files.exists(summary)):
        guard.log_changes(
          json.loads(files.read(files.join(path, "config.json"))),
          guard.as_json(config),
        )
        log.info(
          "%s is finished: see summary.json there. (Without that file the run "
          "goes on, should config.total be longer now.)",
          path,
        )
        return None
      prepared = start.prepare(config, path)
    step = int(prepared.state.step)
    metrics = report.Metrics(path, step)
    progress = report.Progress(
      step, prepared.parts.total, config.input.batch_size
    )
    with (
      prepared.saver,
      prepared.batches,
      metrics,
      progress,
      prepared.profiler,
    ):
      state = loop(config, prepared, metrics, progress, terminator)
  report.finish(
    path, prepared.parts.total, metrics, time.perf_counter() - began
  )
  return state


def loop(
  config: Any,
  run: start.Run,
  metrics: report.Metrics,
  progress: report.Progress,
  terminator: launch.Terminator,
) -> steps.TrainState:
  """Evaluates, saves and updates, step by step; see the module's docstring."""
  train_step = build.train_step(config, run.mesh, run.parts)
  state, total = run.state, run.parts.total
  start = int(state.step)
  pending: tuple[int, steps.Metrics] | None = None

  def settle():
    """Reads the newest update's metrics, which waits for the device."""
    nonlocal pending
    if pending is None:
      return
    (step, sums), pending = pending, None
    values = {
      f"train/{name}": float(value / weight)
      for name, (value, weight) in jax.device_get(sums).items()
    }
    for name, value in values.items():
      if not math.isfinite(value):
        raise FloatingPointError(
          f"{name} is {value} in update {step}. No checkpoint holds it. "
          "Resuming meets it again unless something changes: a lower "
          "config.optim.lr, a longer warmup, config.optim.clip=1."
        )
    progress.updated(step, values["train/loss"])
    if _due(step, run.every["log"]) or step == total or due_evals(step):
      values["train/images_per_second"] = progress.rate()
      metrics.write(step, values)
      progress.line(values["train/loss"])

  def due_evals(step):
    return [
      name
      for name, (_, every) in run.evals.items()
      if _due(step, every) or step == total
    ]

  for step in range(start, total + 1):
    evaluate = [
      name for name in due_evals(step) if f"{name}/n" not in metrics.at(step)
    ]
    save = step == total or _due(step, run.every["checkpoint"])
    stop = terminator.came()
    if evaluate or save or stop:
      settle()
      with progress.aside():
        for name in evaluate:
          values = run.evals[name][0](
            evaluators.weights_of(config.evals[name], state), terminator.came
          )
          if values is None:
            break
          values = {f"{name}/{key}": value for key, value in values.items()}
          metrics.write(step, values)
          progress.evaluated(values)
        stop = terminator.came()
        best = metrics.best.get(config.checkpoint.best, {"step": -1})["step"]
        # Where the run resumed is saved, but perhaps without its evaluation.
        again = step == start and bool(evaluate)
        if step and (save or stop or best == step or again):
          _save(run, state, step, metrics)
    if stop:
      run.saver.wait()
      raise launch.Terminated(
        f"SIGTERM: step {step} is saved. The same command goes on from there."
        if step
        else "SIGTERM before the first update: there is nothing to save."
      )
    if step == total:
      break
    batch = next(run.batches)
    run.profiler.before(step)
    with jax.profiler.StepTraceAnnotation("train", step_num=step):
      state, sums = train_step(state, batch)
    settle()  # The previous update's, while this one runs.
    pending = (step + 1, sums)
  run.saver.wait()
  return state


def _due(step, every):
  """Whether something that happens every so many updates happens at `step`."""
  return every > 0 and step > 0 and step % every == 0


def _save(run, state, step, metrics):
  bad = steps.nonfinite(state)
  if bad:
    raise FloatingPointError(
      f"Not finite after update {step}, so not saved: {', '.join(bad[:5])}."
    )
  values = {
    name: value
    for name, value in metrics.at(step).items()
    if name != "step" and not name.startswith("train/")
  }
  metrics.sync()  # The row is not to be younger than its checkpoint.
  run.saver.save(state, run.meta | {"step": step, "values": values})
