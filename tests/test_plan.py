"""The planner: its step is training's, its sums are right; without libtpu."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import tiny_config
from vit_jax import build, launch, models, sharding, start
from vit_jax import plan as planning
from vit_jax.plan import chips, compiling, flops, hlo, printing, sweeping

# The fields that scripts read; see docs/tpu.md.
FIELDS = [
  "devices",
  "chip",
  "params",
  "params_bytes",
  "optimizer_bytes",
  "temp_bytes",
  "peak_hbm_bytes",
  "hbm_bytes",
  "fits",
  "model_flops_per_step",
  "executed_flops_per_step",
  "estimated_cycles",
  "estimated_seconds",
  "mfu",
  "images_per_second",
  "collectives",
  "steps",
  "hours",
  "core_days",
  "exaflops",
  "compile_seconds",
  "top_ops",
]


def test_the_planned_step_is_the_step_of_training(tmp_path):
  config = tiny_config(**{"mesh.fsdp": 2, "input.max_labels": 2})
  run = start.prepare(config, launch.make_workdir(str(tmp_path)))
  with run.batches, run.saver:
    ours = build.train_step(config, run.mesh, run.parts).lower(
      run.state, next(run.batches)
    )
  _, traced = planning.trace(
    config, sharding.make_mesh(config.mesh), num_classes=3, num_examples=40
  )
  assert traced.lower().as_text() == ours.as_text()


# Model, epochs of JFT-300M, exaFLOPs: Table 6 of the paper.
TABLE_6 = [
  ("B/32", 7, 55),
  ("B/16", 7, 224),
  ("L/32", 7, 196),
  ("L/16", 7, 783),
  ("L/16", 14, 1567),
  ("H/14", 14, 4262),
  ("R50x1", 7, 50),
  ("R50x2", 7, 199),
  ("R101x1", 7, 96),
  ("R152x1", 7, 141),
  ("R152x2", 7, 563),
  ("R152x2", 14, 1126),
  ("R200x3", 14, 3306),
  ("R50+B/32", 7, 106),
  ("R50+B/16", 7, 274),
  ("R50+L/32", 7, 246),
  ("R50+L/16", 7, 859),
  ("R50+L/16", 14, 1668),
]
FAST = ("B/16", "R50+B/32", "R50x1")


@pytest.mark.parametrize(
  ("name", "epochs", "theirs"),
  [
    row if row[0] in FAST else pytest.param(*row, marks=pytest.mark.slow)
    for row in TABLE_6
  ],
)
def test_exaflops_of_the_papers_table_6(name, epochs, theirs):
  resnet = "x" in name
  model = models.create(
    name, num_classes=18_291, **({} if resnet else {"scan": True})
  )
  image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), image)
  forward = flops.count(model.apply, params, image)
  ours = 3 * forward * epochs * 303_000_000 / 1e18
  assert ours == pytest.approx(theirs, rel=0.05 if resnet else 0.03)


def test_products_are_counted_where_they_run():
  a, b = jnp.zeros((3, 5)), jnp.zeros((5, 7))
  once = 2 * 3 * 5 * 7
  assert flops.count(jnp.matmul, a, b) == once
  assert flops.count(lambda a, b: jax.jit(jnp.matmul)(a, b), a, b) == once

  def loop(a, b):
    return jax.lax.scan(lambda x, _: (x @ b @ b.T, None), a, length=4)[0]

  assert flops.count(loop, a, b) == 4 * 2 * once

  def branches(a, b):
    return jax.lax.cond(
      True, lambda: a @ b, lambda: jnp.zeros((3, 7)) + (a @ b @ b.T @ b)
    )

  assert flops.count(branches, a, b) == 3 * once


def test_recomputation_is_executed_but_not_the_models():
  a, b = jnp.zeros((3, 5)), jnp.zeros((5, 5))

  def layers(a, b):
    return jnp.sin(jnp.sin(a @ b) @ b).sum()

  again = jax.checkpoint(layers)
  once = 2 * 3 * 5 * 5
  assert flops.count(layers, a, b) == 2 * once
  both = jax.value_and_grad(layers, argnums=(0, 1))
  assert flops.count(both, a, b) == 6 * once
  both = jax.value_and_grad(again, argnums=(0, 1))
  assert flops.count(both, a, b) == 8 * once


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_costs_as_much_on_each_way_back(stride):
  x, k = jnp.zeros((2, 8, 8, 4)), jnp.zeros((2, 2, 4, 6))

  def conv(x, k):
    return jax.lax.conv_general_dilated(
      x, k, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )

  once = flops.count(conv, x, k)
  assert once == 2 * 2 * (8 // stride) ** 2 * 6 * (2 * 2 * 4)
  grads = jax.grad(lambda *args: conv(*args).sum(), argnums=(0, 1))
  assert flops.count(grads, x, k) == pytest.approx(3 * once)


# As the TPU compiler writes: a program that no compiler has seen.
HLO = """
HloModule jit_step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (input: f32[8,16]) -> f32[2,16] {
  %input = f32[8,16]{1,0} parameter(0)
  %all-reduce.9 = f32[8,16]{1,0} all-reduce(%input), replica_groups=[2,4]<=[8], to_apply=%sum
  ROOT %slice = f32[2,16]{1,0} dynamic-slice(%all-reduce.9)
}

%condition (state: (s32[], f32[8,16])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12)
  ROOT %less = pred[] compare(%counter, %limit), direction=LT
}

%body (state: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %fusion.2 = f32[8,16] fusion(%x), calls=%inside, metadata={op_name="jit(step)/transpose(jvp(ViT))/Transformer/while/body/checkpoint/rematted_computation/encoderblock/MlpBlock_3/Dense_0/dot_general"}, backend_config={"window_config":{"estimated_cycles":"500"}}
  %all-gather.3 = bf16[64,16]{1,0} all-gather(%y), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, metadata={op_name="jit(step)/jvp(ViT)/head/dot_general"}
}

ENTRY %main (p0: f32[8,16], /*index=1*/p1: f32[8,16]) -> f32[2,16] {
  %fusion.1 = f32[8,16] fusion(%p0), calls=%inside, metadata={op_name="jit(step)/jvp(ViT)/Transformer/Transformer._unrolled/encoderblock_3/MlpBlock_3/Dense_0/dot_general"}, backend_config={"window_config":{"estimated_cycles":"1000"}}
  %fusion.5 = f32[8,16] fusion(%p0), calls=%inside, metadata={op_name="jit(step)/jvp(ViT)/Transformer/Transformer._unrolled/encoderblock_4/MlpBlock_3/Dense_0/dot_general"}, backend_config={"window_config":{"estimated_cycles":"1000"}}
  %while.1 = (s32[], f32[8,16]) while(%init), condition=%condition, body=%body
  %fusion.6 = f32[2,16] fusion(%p1), kind=kCustom, calls=%all-reduce-scatter.1
  %all-reduce-start.1 = (bf16[32]{0}, bf16[32]{0}) all-reduce-start(%z), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum, channel_id=3
  %all-reduce-start.2 = (bf16[32]{0}, bf16[32]{0}) all-reduce-start(%z), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum, channel_id=3
  %all-reduce-done.1 = bf16[32]{0} all-reduce-done(%all-reduce-start.1)
  %all-gather.7 = f32[8]{0} all-gather(%p1), replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}
  %all-gather.8 = f32[8]{0} all-gather(%p1), replica_groups={{0},{1}}
  %copy.1 = f32[8,16]{0,1} copy(%p1), backend_config={"window_config":{"estimated_cycles":"7"}}
}
"""  # noqa: E501


def test_cycles_are_summed_over_loops():
  program = hlo.parse(HLO)
  assert hlo.cycles(program) == 2 * 1000 + 12 * 500 + 7
  first, second, third = hlo.costliest(program, 10)
  assert first == (
    "again ViT/Transformer/encoderblock/MlpBlock_3/Dense_0/dot_general",
    6000,
    12,
  )
  assert second == (
    "forward ViT/Transformer/encoderblock/MlpBlock_3/Dense_0/dot_general",
    2000,
    2,
  )
  assert third == ("(copy)", 7, 1)
  noted = HLO.replace(
    "body=%body", 'body=%body, x={"known_trip_count":{"n":"3"}}'
  )
  assert hlo.cycles(hlo.parse(noted)) == 2 * 1000 + 3 * 500 + 7
  with pytest.raises(ValueError, match="no ENTRY"):
    hlo.parse("HloModule nothing")


def test_collectives_are_counted_with_their_bytes():
  rows = {row[:4] for row in hlo.collectives(hlo.parse(HLO))}
  assert rows == {
    ("all-gather", 4, 13, 12 * 64 * 16 * 2 + 8 * 4),
    ("reduce-scatter", 4, 1, 8 * 16 * 4),
    ("all-reduce", 8, 1, 32 * 2),
  }


def test_collectives_take_as_long_as_their_bytes():
  where = chips.parse("v5e:4x4")
  row = hlo.Collective("all-reduce", 16, 1, 16_000_000, "")
  # 15/16 of 16 MB, there and back, at 200 GB/s.
  assert planning.collective_seconds(row, where) == pytest.approx(150e-6)
  row = row._replace(kind="all-gather", group=4)
  assert planning.collective_seconds(row, where) == pytest.approx(120e-6)


@pytest.mark.parametrize(
  ("text", "name", "devices"),
  [
    ("v3:16x16", "v3:16x16", 512),
    ("v3-512", "v3:16x16", 512),
    ("v4-128", "v4:4x4x4", 64),
    ("v5litepod-8", "v5e:2x4", 8),
    ("V5E-256", "v5e:16x16", 256),
    ("v5p-8", "v5p:1x2x2", 4),
    ("tpu7x:2x2x1", "tpu7x:2x2x1", 8),
    ("2*v6e:16x16", "v6e:16x16", 512),
  ],
)
def test_topologies_by_shape_and_by_name(text, name, devices):
  where = chips.parse(text)
  assert (where.name, where.devices) == (name, devices)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("h100", "write chips along each side"),
    ("v33:2x2", "Did you mean 'v3'"),
    ("v3:4x4x4", "torus of 2 dimensions, for example v3:4x4"),
    ("v3-500", "nearest are v3-256 and v3-512"),
  ],
)
def test_topologies_that_there_are_not(text, message):
  with pytest.raises(ValueError, match=message):
    chips.parse(text)


def test_peaks_are_those_that_are_published():
  teraflops = {
    name: round(chip.devices * chip.peak_flops / 1e12)
    for name, chip in chips.CHIPS.items()
  }
  assert teraflops == {
    "v2": 46,
    "v3": 123,
    "v4": 275,
    "v5e": 197,
    "v5p": 459,
    "v6e": 918,
    "tpu7x": 2307,
  }


def test_the_size_of_data_that_is_here_known_or_told(tmp_path):
  config = tiny_config()
  assert planning.data_size(config)[:2] == (3, 40)
  assert planning.data_size(config, num_examples=7)[:2] == (3, 7)
  config.input.data_dir = str(tmp_path)
  config.input.source = "tfrecord:jft/train-*?classes=17"
  classes, examples, notes = planning.data_size(config)
  assert (classes, examples) == (17, 303_000_000)
  assert "assumed 303,000,000 examples of 17 classes" in notes[0]
  config.input.source = "tfrecord:mine/train-*?classes=17"
  assert planning.data_size(config, num_examples=5)[:2] == (17, 5)
  with pytest.raises(ValueError, match="give --num_examples"):
    planning.data_size(config)


def test_shapes_alone_tell_what_they_can(monkeypatch):
  monkeypatch.setattr(compiling, "available", lambda: False)
  config = tiny_config(**{"input.batch_size": 64, "mesh.fsdp": 2})
  found = planning.plan(config, "v3:4x4")
  values = json.loads(json.dumps(dataclasses.asdict(found)))
  assert set(FIELDS) <= values.keys()
  assert (found.devices, found.chip, found.steps) == (32, "v3", 8)
  assert found.mesh == {"data": 16, "fsdp": 2, "model": 1}
  # Kernels in two parts, the rest whole; Adam has two moments, in float32.
  assert found.params_bytes < 4 * found.params < 2 * found.params_bytes
  assert 2 * found.params_bytes == pytest.approx(found.optimizer_bytes, abs=32)
  assert found.fits is found.estimated_cycles is found.hours is None
  assert found.exaflops == 8 * found.model_flops_per_step / 1e18
  assert found.executed_flops_per_step == pytest.approx(
    found.model_flops_per_step, rel=0.2
  )
  assert "updates                    8" in printing.describe(found)
  with pytest.raises(ValueError, match="--effort='high'.*default, low"):
    planning.plan(config, "v3:4x4", effort="high")


def made_up(**changes):
  """A plan as the compiler might have made it."""
  values = dict.fromkeys(
    (field.name for field in dataclasses.fields(planning.Plan)), 1
  )
  return planning.Plan(
    **values
    | {"mesh": {"data": 1}, "assumptions": [], "top_ops": [], "fits": True}
    | {"topology": "v3:4x4", "collectives": []}
    | changes
  )


def test_a_sweep_is_sorted_by_cost_with_collectives(monkeypatch):
  def plan(config, topology, **options):
    if config.mesh.model == 2:
      raise ValueError("heads\nmore")
    few = config.mesh.fsdp == 1
    return made_up(
      core_days=5.0 if few else 4.0,
      estimated_seconds=1.0,
      collective_seconds=0.1 if few else 1.0,
      fits=config.mesh.fsdp != 32,
    )

  monkeypatch.setattr(planning, "plan", plan)
  rows = sweeping.sweep(tiny_config(), "v3:4x4", ["mesh"])
  assert [row.changes["mesh.fsdp"] for row in rows] == [1, 8, 32, 1]
  assert sweeping.total_core_days(rows[0].plan) == pytest.approx(5.5)
  lines = printing.table(rows).splitlines()
  assert "--config.mesh.fsdp=8" in lines[2]
  assert "does not fit" in lines[3]
  assert "refused" in lines[4]
  assert "heads" in lines[4]
  with pytest.raises(ValueError, match="'meshes'.*Did you mean 'mesh'"):
    sweeping.sweep(tiny_config(), "v3:4x4", ["meshes"])


def test_a_remedy_is_the_first_change_that_fits(monkeypatch):
  tried = []

  def plan(config, topology, **options):
    tried.append((config.model.remat, config.accumulate, config.mesh.fsdp))
    assert options["effort"] == "low"
    return made_up(fits=config.accumulate > 1)

  monkeypatch.setattr(planning, "plan", plan)
  config = tiny_config(**{"model.depth": 2})
  found = sweeping.remedy(config, "v3:4x4", effort="default")
  assert found.changes["accumulate"] == 4
  assert tried[:2] == [("full:1", 1, 1), ("full", 1, 1)]
  monkeypatch.setattr(planning, "plan", lambda *a, **k: made_up(fits=False))
  assert sweeping.remedy(tiny_config(), "v3:4x4") is None


def test_what_is_compiled_once_is_kept(monkeypatch, tmp_path):
  count = []

  def once(lowered, effort):
    count.append(effort)
    return compiling.Compiled(HLO, 1, 2, 3, True, 4.5)

  monkeypatch.setattr(compiling, "_compile", once)
  monkeypatch.setattr(
    compiling.importlib.metadata, "version", lambda name: "1.0"
  )
  where, cache = chips.parse("v3:4x4"), str(tmp_path)

  def ask(size, effort="default"):
    lowered = jax.jit(jnp.sin).lower(np.zeros(size, np.float32))
    return compiling.compile_step(lowered, where, effort=effort, cache=cache)

  assert ask(3) == ask(3) == compiling.Compiled(HLO, 1, 2, 3, True, 4.5)
  assert count == ["default"]
  ask(4)
  ask(3, "low")
  assert count == ["default", "default", "low"]


def test_out_of_memory_is_an_answer():
  message = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required "
    "for HLO temporaries (146.48G) exceeds available HBM (7.48G)."
  )
  assert compiling.out_of_memory(message) == int(146.48 * 2**30)
  message = "RESOURCE_EXHAUSTED: … Used 20.5G of 15.75G hbm. Exceeded by …"
  assert compiling.out_of_memory(message) == int(20.5 * 2**30)
  assert compiling.out_of_memory("INVALID_ARGUMENT: (3G) exceeds") is None
