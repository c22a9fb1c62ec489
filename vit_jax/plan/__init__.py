"""What a run will need and cost on TPUs, before there are any.

`plan(config, topology)` compiles the very step that training runs, with the
real compiler, for TPUs that are not here, and reads from the result what fits,
how long a step takes and what the whole schedule costs. `docs/tpu.md` says what
each number is and how far to trust it.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import input_pipeline
from vit_jax import build, images, sharding, trees
from vit_jax.plan import chips, compiling, flops, hlo

# Classes and training examples of data that need not be here to be planned for.
KNOWN = (
  (r"jft", 18_291, 303_000_000),
  (r"imagenet2012|imagenet1k", 1000, 1_281_167),
  (r"imagenet21k|i21k", 21_843, 14_197_122),
  (r"cifar100", 100, 50_000),
  (r"cifar10", 10, 50_000),
  (r"oxford_iiit_pet", 37, 3680),
  (r"oxford_flowers102", 102, 1020),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """A run on a topology; what only the compiler knows is None without it.

  Bytes are of one device, all else of the whole run. `docs/tpu.md` explains.

  Attributes:
    topology: "v3:16x16".
    chip: "v3".
    devices: JAX devices.
    mesh: axis -> devices along it.
    batch_size: global.
    effort: of the compiler; only at "default" there are cycles.
    params: number of parameters.
    params_bytes: of the parameters.
    optimizer_bytes: of the optimiser's state, and of averages.
    temp_bytes: of all that lives only within a step: activations, gradients.
    peak_hbm_bytes: the most that is in use at once.
    hbm_bytes: that a program may use.
    fits: whether the first is within the second.
    model_flops_per_step: three times the forward pass.
    executed_flops_per_step: with what is computed again.
    estimated_cycles: the compiler's sum, without collectives.
    estimated_seconds: that many cycles of the clock.
    collective_seconds: all collectives, if nothing else ran meanwhile.
    mfu: model FLOPs per estimated second, as a share of the peak.
    images_per_second: at estimated_seconds.
    collectives: what devices send: kind, group, runs, bytes, seconds, module.
    steps: updates of the run.
    hours: steps at estimated_seconds.
    core_days: cores times days, as the paper counts.
    exaflops: model FLOPs of the run, in units of 1e18.
    compile_seconds: that the compiler took.
    top_ops: the ten costliest operations: name, cycles, share, runs.
    assumptions: what was taken for granted about the data.
  """

  topology: str
  chip: str
  devices: int
  mesh: dict[str, int]
  batch_size: int
  effort: str
  params: int
  params_bytes: int
  optimizer_bytes: int
  temp_bytes: int | None
  peak_hbm_bytes: int | None
  hbm_bytes: int
  fits: bool | None
  model_flops_per_step: int
  executed_flops_per_step: int
  estimated_cycles: int | None
  estimated_seconds: float | None
  collective_seconds: float | None
  mfu: float | None
  images_per_second: float | None
  collectives: list[dict[str, Any]] | None
  steps: int
  hours: float | None
  core_days: float | None
  exaflops: float
  compile_seconds: float | None
  top_ops: list[dict[str, Any]] | None
  assumptions: list[str]


def plan(
  config: Any,
  topology: str,
  *,
  num_classes: int = 0,
  num_examples: int = 0,
  effort: str = "default",
  cache: str = "",
) -> Plan:
  """Plans a run of `config` on `topology`.

  Args:
    config: see `configs/common.py`; its data need not be there.
    topology: "v3:16x16", "v3-512", "2*v5e:16x16".
    num_classes: of the data; 0 looks at the source, then at `KNOWN`.
    num_examples: likewise.
    effort: "default", or "low" for memory alone, in a fraction of the time.
    cache: folder of compiled plans; "" keeps none.

  Raises:
    ValueError: an unknown topology or effort; a config that cannot be run; data
      of which nobody knows the size.
  """
  return plan_with_program(
    config,
    topology,
    num_classes=num_classes,
    num_examples=num_examples,
    effort=effort,
    cache=cache,
  )[0]


def plan_with_program(
  config: Any,
  topology: str,
  *,
  num_classes: int = 0,
  num_examples: int = 0,
  effort: str = "default",
  cache: str = "",
) -> tuple[Plan, str]:
  """As `plan`; returns the optimised program's text as well ("" without)."""
  trees.check_choice("--effort=", effort, compiling.EFFORTS)
  where = chips.parse(topology)
  classes, examples, assumptions = data_size(config, num_classes, num_examples)
  here = compiling.available()
  # Without the compiler only shapes are read, and any device will do for them.
  devices = (
    compiling.devices(where)
    if here
    else jax.local_devices(backend="cpu")[:1] * where.devices
  )
  mesh = sharding.make_mesh(config.mesh, devices)
  parts, traced = trace(
    config, mesh, num_classes=classes, num_examples=examples
  )
  analysis = _analysis(config, where, mesh, parts, traced)
  if not here:
    return Plan(
      **analysis, **_UNKNOWN, effort=effort, assumptions=assumptions
    ), ""
  compiled = compiling.compile_step(
    traced.lower(), where, effort=effort, cache=cache
  )
  measured = _measured(compiled, where, analysis, effort)
  return (
    Plan(**analysis, **measured, effort=effort, assumptions=assumptions),
    compiled.hlo,
  )


def trace(
  config: Any, mesh: Mesh, *, num_classes: int, num_examples: int
) -> tuple[build.Parts, jax.stages.Traced]:
  """Traces the step that training would run on a mesh; nothing is compiled.

  Args:
    config: see `configs/common.py`.
    mesh: its devices need not be here.
    num_classes: of the training source.
    num_examples: of the training split.
  """
  parts = build.parts(
    config, mesh, num_classes=num_classes, num_examples=num_examples
  )
  step: Any = build.train_step(config, mesh, parts)
  return parts, step.trace(parts.state, batch_shapes(config, mesh))


def data_size(
  config: Any, num_classes: int = 0, num_examples: int = 0
) -> tuple[int, int, list[str]]:
  """Says how many classes and training examples a config's data has.

  Args:
    config: see `configs/common.py`.
    num_classes: what is told; 0 is found out.
    num_examples: likewise.

  Returns:
    Both numbers, and a sentence for each that rests on `KNOWN`.

  Raises:
    ValueError: nothing is told, there or known; says what to give.
  """
  if num_classes and num_examples:
    return num_classes, num_examples, []
  spec = config.input.source
  try:
    source = input_pipeline.get_source(
      spec, config.input.split, config.input.data_dir
    )
    found, notes = (source.num_classes, source.num_examples), []
  except (ValueError, OSError, ImportError) as error:
    known = [row[1:] for row in KNOWN if re.search(row[0], spec.lower())]
    told = re.search(r"classes=(\d+)", spec)
    classes = int(told[1]) if told else num_classes
    if not known and not (classes and num_examples):
      raise ValueError(
        f"The data {spec!r} is not here, and its size is not known: give "
        "--num_examples and --num_classes."
      ) from error
    found = known[0] if known else (classes, num_examples)
    found = (classes or found[0], found[1])
    notes = [
      f"The data {spec!r} is not here: assumed {found[1]:,} examples of "
      f"{found[0]:,} classes (--num_examples, --num_classes)."
    ]
  return num_classes or found[0], num_examples or found[1], notes


def batch_shapes(config: Any, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes and shardings of the global batches of a run."""
  n = config.input.batch_size
  height, width = images.size_of(config)
  rows = {
    "image": ((n, height, width, 3), np.uint8),
    "labels": ((n, config.input.max_labels), np.int32),
    "mask": ((n,), np.float32),
  }
  if config.input.on_error == "skip":
    rows["skipped"] = ((n,), np.int32)
  where = sharding.batch_sharding(mesh)
  return {
    name: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    for name, (shape, dtype) in rows.items()
  }


def _analysis(config, where, mesh, parts, traced):
  """What shapes alone say."""
  state, batch = parts.state, batch_shapes(config, mesh)
  forward = flops.count(parts.objective.predict, state.params, batch)
  return {
    "topology": where.name
    if where.slices == 1
    else f"{where.slices}*{where.name}",
    "chip": where.chip.name,
    "devices": where.devices,
    "mesh": dict(mesh.shape),
    "batch_size": config.input.batch_size,
    "params": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
    "params_bytes": _bytes(state.params),
    "optimizer_bytes": _bytes((state.opt_state, state.ema)),
    "hbm_bytes": where.chip.hbm_bytes,
    "model_flops_per_step": 3 * forward,
    "executed_flops_per_step": flops.count_jaxpr(traced.jaxpr.jaxpr),
    "steps": parts.total,
    "exaflops": 3 * forward * parts.total / 1e18,
  }


def _bytes(tree):
  """Of one device."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


_UNKNOWN: dict[str, Any] = dict.fromkeys(
  (
    "temp_bytes",
    "peak_hbm_bytes",
    "fits",
    "estimated_cycles",
    "estimated_seconds",
    "collective_seconds",
    "mfu",
    "images_per_second",
    "collectives",
    "hours",
    "core_days",
    "compile_seconds",
    "top_ops",
  )
)


def _measured(compiled, where, analysis, effort):
  """What the compiler says."""
  chip = where.chip
  found = _UNKNOWN | {
    "peak_hbm_bytes": compiled.peak,
    "fits": compiled.fits and compiled.peak <= chip.hbm_bytes,
    "compile_seconds": compiled.seconds,
  }
  if not compiled.hlo:
    return found
  program = hlo.parse(compiled.hlo)
  sent = [
    row._asdict() | {"seconds": collective_seconds(row, where)}
    for row in hlo.collectives(program)
  ]
  found |= {
    "temp_bytes": compiled.temporaries,
    "collectives": sent,
    "collective_seconds": sum(row["seconds"] for row in sent),
  }
  if effort != "default":
    return found
  cycles = hlo.cycles(program)
  seconds = cycles / chip.clock
  days = analysis["steps"] * seconds / 86_400
  peak = chip.peak_flops * where.devices
  return found | {
    "estimated_cycles": cycles,
    "estimated_seconds": seconds,
    "mfu": analysis["model_flops_per_step"] / seconds / peak,
    "images_per_second": analysis["batch_size"] / seconds,
    "hours": 24 * days,
    "core_days": days * where.devices * chip.cores,
    "top_ops": [
      row._asdict() | {"share": row.cycles / cycles}
      for row in hlo.costliest(program, 10)
    ],
  }


def collective_seconds(row: hlo.Collective, where: chips.Topology) -> float:
  """Says how long a collective takes if bandwidth is all that counts.

  A ring over g devices sends each (g - 1) / g of the array, twice for a sum
  that all get. One that spans a slice uses all links of a chip, a smaller one
  those along one dimension of the torus.
  """
  chip = where.chip
  bandwidth = chip.ici_bandwidth
  if row.group < where.devices // where.slices:
    bandwidth /= chip.dimensions
  share = (row.group - 1) / row.group if row.group > 1 else 1
  rounds = 2 if row.kind == "all-reduce" else 1
  return rounds * share * row.bytes / bandwidth
