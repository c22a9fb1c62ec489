"""The planner with the TPU's real compiler; `make test-tpu` runs this.

Needs libtpu (`pip install 'jax[tpu]'`) and no TPU. Not named as a test, so that
`make test` passes for those who do not have it.
"""

import pytest

from configs import pretrain
from tests.conftest import tiny_config
from vit_jax.plan import compiling, plan, plan_with_program, sweeping


@pytest.fixture(autouse=True)
def compiler():
  if not compiling.available():
    pytest.fail(compiling.HOW_TO_INSTALL)


def config(**changes):
  """B/16 with two blocks, in bfloat16, 16 images a device of v5e:2x2."""
  return tiny_config(
    **{
      "model.name": "B/16",
      "model.depth": 2,
      "model.dtype": "bfloat16",
      "image_size": (224,),
      "input.batch_size": 64,
    }
    | changes
  )


def test_every_number_is_there_and_adds_up():
  found, program = plan_with_program(config(), "v5e:2x2")
  assert program.startswith("HloModule jit_step")
  assert found.fits
  assert found.peak_hbm_bytes >= found.params_bytes + found.optimizer_bytes
  assert found.temp_bytes > 0
  assert 0.1 < found.mfu < 1
  assert found.estimated_seconds == pytest.approx(
    found.estimated_cycles / 1.5e9
  )
  assert found.hours == pytest.approx(
    found.steps * found.estimated_seconds / 3600
  )
  assert found.core_days == pytest.approx(found.hours / 24 * 4)
  assert len(found.top_ops) == 10
  assert "MlpBlock_3" in found.top_ops[0]["name"]
  # Gradients go both ways, four bytes a parameter at most, a bit less than all.
  kinds = {row["kind"]: row["bytes"] for row in found.collectives}
  assert kinds["all-gather"] == pytest.approx(found.params_bytes, rel=0.2)
  assert sum(kinds.values()) < 2.2 * found.params_bytes


def test_the_step_keeps_what_was_won():
  """docs/tpu.md has what each change gave: 46.0 M cycles, from 50.8 M."""
  recipe = pretrain.get_config("L/16,jft")
  recipe.model.update(depth=3, dtype="bfloat16", representation_size=0)
  recipe.optim.moment_dtype = "bfloat16"
  recipe.input.batch_size = 16 * 64
  assert plan(recipe, "v5e:4x4").estimated_cycles < 47e6


def test_a_loop_counts_as_often_as_it_runs():
  short, long = (
    plan(config(**{"model.scan": True, "model.depth": depth}), "v5e:2x2")
    for depth in (2, 6)
  )
  assert 1.7 < long.estimated_cycles / short.estimated_cycles < 3


@pytest.mark.parametrize(
  "topology", ["v3:4x4", "v4:2x2x1", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
)
def test_other_chips(topology):
  changes = {"model.scan": True, "mesh.fsdp": 2}
  found = plan(config(**changes), topology, effort="low")
  assert found.fits
  assert found.estimated_cycles is None
  assert found.collectives


def test_what_does_not_fit_is_told_with_what_does():
  big = config(**{"input.batch_size": 16_384, "model.scan": True})
  assert not plan(big, "v5e:2x2", effort="low").fits
  assert sweeping.remedy(big, "v5e:2x2").plan.fits
