"""A run before its first update: assembled, checked, refused if it must be."""

import itertools
import json
import logging
from typing import Any, NamedTuple

import jax
from etils import epath

import input_pipeline
from vit_jax import (
  build,
  checkpoints,
  evaluators,
  feed,
  files,
  guard,
  hosts,
  images,
  report,
  sharding,
  steps,
  trees,
)

log = logging.getLogger("vit_jax")


class Run(NamedTuple):
  """A run, checked and ready, before its first compilation.

  Attributes:
    workdir: where its files are.
    mesh: the devices.
    parts: see `build.Parts`.
    state: on the devices, at the step to begin with.
    batches: the global batches from that step on, on the devices.
    evals: name -> (evaluator, updates between evaluations).
    every: "log" and "checkpoint" -> updates between them.
    meta: what every checkpoint says of the run.
    saver: writes the checkpoints.
    profiler: traces the steps asked for.
  """

  workdir: epath.Path
  mesh: jax.sharding.Mesh
  parts: build.Parts
  state: steps.TrainState
  batches: feed.Feed
  evals: dict[str, tuple[evaluators.Evaluator, int]]
  every: dict[str, int]
  meta: guard.Meta
  saver: checkpoints.Checkpoints
  profiler: report.Profiler


def prepare(config: Any, workdir: epath.Path) -> Run:
  """Builds and checks a run; nothing is trained yet.

  Raises:
    ValueError, OSError: what is wrong with config, data or earlier run.
  """
  _check_start(config)
  source = input_pipeline.get_source(
    config.input.source, config.input.split, config.input.data_dir
  )
  hosts.agree(
    "the training data",
    guard.describe(config, source, 0)["guard"],
    guard.changes,
  )
  mesh = sharding.make_mesh(config.mesh)
  _log_shares(config, mesh)
  parts = build.parts(
    config,
    mesh,
    num_classes=source.num_classes,
    num_examples=source.num_examples,
  )
  to_steps = build.durations(config, source.num_examples)
  every = {
    "log": to_steps(config.log_every, "config.log_every"),
    "checkpoint": to_steps(config.checkpoint.every, "config.checkpoint.every"),
  }
  evals = {
    name: (
      evaluate,
      to_steps(config.evals[name].every, f"config.evals.{name}.every"),
    )
    for name, evaluate in evaluators.build_all(
      config,
      classes=source.class_names,
      objective=parts.objective,
      mesh=mesh,
      params=parts.state.params,
      rehearsal=build.is_rehearsal(config),
    ).items()
  }
  _check_best(config.checkpoint.best, evaluators.value_names(config))
  profiler = report.Profiler(config.profile, workdir)

  # A state comes from this run's last good checkpoint, or from another run's,
  # or from weights that are there, or from the seed.
  def check(saved):
    current = guard.describe(config, source, saved["guard"]["streams"])
    guard.check(saved, current, allow=config.checkpoint.allow_change)
    _warn_of_jump(saved, config, parts.schedule, source.num_examples)

  directory = workdir / "checkpoints"
  params = None
  found = checkpoints.restore_latest(directory, parts.state, check)
  branches = not found and config.resume_from
  if found:
    log.info("Resuming at step %d of %d.", found[0].step, parts.total)
  elif branches:
    path = checkpoints.locate(config.resume_from)
    found = checkpoints.restore(path, parts.state), checkpoints.read_meta(path)
    _check_classes(found[1]["guard"]["class_names"], source)
    log.info("Starting from %s, at step %d.", path, found[0].step)
  else:
    log.info("Starting at step 0 of %d.", parts.total)
    if config.init_from:
      params = build.pretrained(config, source.num_classes)
  step = int(found[0].step) if found else 0
  streams = found[1]["guard"]["streams"] if found else jax.process_count()
  if step > parts.total:
    raise ValueError(
      f"The run has done {step} updates already; config.total = "
      f"{config.total!r} is {parts.total}."
    )
  meta = guard.describe(config, source, streams)
  batches = _batches(config, source, mesh, meta["guard"]["streams"], step)
  saver = checkpoints.Checkpoints(
    directory,
    keep=config.checkpoint.keep,
    keep_every=to_steps(
      config.checkpoint.keep_every, "config.checkpoint.keep_every"
    ),
    best=config.checkpoint.best,
  )
  state = (
    found[0]
    if found
    else steps.init_state(
      parts.objective,
      parts.tx,
      parts.shardings,
      seed=config.seed,
      ema=config.ema,
      params=params,
    )
  )
  if branches:
    # From here on this run stands by itself, whatever becomes of the other.
    saver.save(state, meta | {"step": step, "values": {}})
  if hosts.first():
    files.write(
      files.join(workdir, "config.json"),
      json.dumps(guard.as_json(config), indent=2) + "\n",
    )
  return Run(
    workdir, mesh, parts, state, batches, evals, every, meta, saver, profiler
  )


def _log_shares(config, mesh):
  """Says how a batch is split, where that is not plain to see."""
  if not hosts.several():
    return
  processes, size = jax.process_count(), config.input.batch_size
  log.info(
    "%d processes, %d devices (%s), mesh %s. Batch %d: %d images from each "
    "process, %g for each device along data and fsdp.",
    processes,
    mesh.size,
    mesh.devices.flat[0].device_kind,
    " x ".join(f"{axis}={mesh.shape[axis]}" for axis in mesh.axis_names),
    size,
    size // processes,
    size / sharding.batch_devices(mesh),
  )


def _check_start(config):
  if not config.resume_from:
    build.check_given(config)
  if config.resume_from and config.init_from not in ("", "?"):
    raise ValueError(
      "config.resume_from takes another run's whole state, config.init_from "
      "its weights only: set one of them."
    )


def _check_classes(theirs, source):
  ours = list(source.class_names)
  if theirs != ours:
    raise ValueError(
      f"config.resume_from was trained on the classes {', '.join(theirs)}; "
      f"{source.spec} has {', '.join(ours)}."
    )


def _batches(config, source, mesh, streams, step):
  """Opens the stream at `step` and looks at its first batch."""
  batches = input_pipeline.train_batches(
    source,
    images.sized(config.input.ops, images.size_of(config)),
    batch_size=config.input.batch_size,
    seed=config.seed,
    start_step=step,
    shard=jax.process_index(),
    num_shards=jax.process_count(),
    streams=streams,
    shuffle_buffer=config.input.shuffle_buffer,
    on_error=config.input.on_error,
    max_bad_share=config.input.max_bad_share,
    max_labels=config.input.max_labels,
    cache=config.input.cache,
    service=config.input.service,
    prefetch=1,
  )
  first = next(batches)
  images.check_size(
    first["image"], images.size_of(config), key="config.input.ops"
  )
  return feed.Feed(
    itertools.chain([first], batches), mesh, ahead=config.input.prefetch
  )


def _check_best(best, names):
  if best and best not in names:
    raise ValueError(
      f"config.checkpoint.best = {best!r} is no evaluation value; there are "
      f"{', '.join(names)}.{trees.nearest(best, names)}"
    )


def _warn_of_jump(saved, config, schedule, num_examples):
  """Says so when a changed config changes the learning rate at this step."""
  step = saved["step"]
  before, _ = build.schedule(_overlaid(config, saved["config"]), num_examples)
  old, new = float(before(step)), float(schedule(step))
  if old != new:
    log.warning(
      "The learning rate at step %d was %g in the saved run and is now %g.",
      step,
      old,
      new,
    )


def _overlaid(config, saved):
  """Returns a config as saved; keys that are younger than it as they are."""
  known = config.copy_and_resolve_references()
  for part, values in (("optim", saved["optim"]), ("input", saved["input"])):
    known[part].update({k: v for k, v in values.items() if k in known[part]})
  known.total = saved["total"]
  return known
