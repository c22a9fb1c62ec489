"""One run, however it is spread: meshes, ZeRO, scanned blocks, parts."""

import jax
import numpy as np
import pytest

from tests.conftest import tiny_config
from tests.test_steps import batch
from vit_jax import build, sharding, steps, trees

# Eight heads, so that `model` may be 8, and weights large enough to be split.
MODEL = {
  "model.width": 64,
  "model.num_heads": 8,
  "model.depth": 2,
  "model.dropout": 0.0,
  "mixup": 0.0,
  "input.batch_size": 32,
}


@pytest.fixture(autouse=True)
def small_leaves_count_as_large(monkeypatch):
  monkeypatch.setattr(sharding, "LARGE", 64)


def build_run(shape=(8, 1, 1), **changes):
  """Returns config, mesh and parts; nothing is compiled."""
  config = tiny_config(**MODEL, **changes)
  config.mesh.update(dict(zip(sharding.AXES, shape)))
  mesh = sharding.make_mesh(config.mesh)
  parts = build.parts(config, mesh, num_classes=3, num_examples=64)
  return config, mesh, parts


def run(shape, updates=10, **changes):
  """Returns losses and gradient norms, [updates, 2]."""
  config, mesh, parts = build_run(shape, **changes)
  step = build.train_step(config, mesh, parts)
  state = steps.init_state(
    parts.objective, parts.tx, parts.shardings, seed=config.seed
  )
  rows = []
  for i in range(updates):
    state, metrics = step(state, sharding.to_device(batch(i, n=32), mesh))
    rows.append(
      [float(np.divide(*metrics[name])) for name in ("loss", "grad_norm")]
    )
  return np.array(rows)


@pytest.fixture(scope="module")
def reference():
  return run((8, 1, 1), **{"optim.zero": False})


WAYS = {
  "FSDP, scanned": ((1, 8, 1), {"model.scan": True}),
  "tensor parallel, in parts": ((1, 1, 8), {"accumulate": 4}),
  "all axes, scanned, ZeRO": ((2, 2, 2), {"model.scan": True}),
  "ZeRO, in parts": ((8, 1, 1), {"accumulate": 4}),
}


@pytest.mark.parametrize("way", WAYS)
def test_ten_updates_are_the_same(way, reference):
  shape, changes = WAYS[way]
  np.testing.assert_allclose(run(shape, **changes), reference, atol=1e-5)


def test_sharpness_aware_updates_are_the_same():
  sam = {"optim.sam_rho": 0.1, "model.scan": True}
  one = run((8, 1, 1), 3, **sam)
  np.testing.assert_allclose(run((2, 2, 2), 3, **sam), one, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(
  "shape", [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 2, 1)]
)
def test_all_combinations_are_the_same(
  shape, accumulate, scan, zero, reference
):
  ours = run(
    shape,
    accumulate=accumulate,
    **{"model.scan": scan, "optim.zero": zero},
  )
  np.testing.assert_allclose(ours, reference, atol=1e-5)


def test_zero_splits_moments_and_leaves_parameters_whole():
  _, _, parts = build_run((4, 2, 1))
  kernel = "Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel"
  for path, leaf in trees.flatten(parts.state).items():
    if path.endswith(kernel):
      split = leaf.sharding.shard_shape(leaf.shape)
      # [64, 128]: over fsdp alone, or over data as well, where there is most.
      assert split == ((32, 128) if path.startswith("params") else (32, 32))
  whole = build_run((4, 2, 1), **{"optim.zero": False})[2].shardings
  assert str(whole.params) == str(parts.shardings.params)
  assert str(whole.opt_state) != str(parts.shardings.opt_state)


def test_activations_stay_with_their_examples(monkeypatch):
  config, mesh, parts = build_run((2, 2, 2))
  rows = {
    name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    for name, leaf in batch(0, n=32).items()
  }

  def constraints():
    step = build.train_step(config, mesh, parts)
    text = step.lower(parts.state, rows).as_text()
    return text.count("@Sharding") + text.count("sdy.sharding_constraint")

  kept = constraints()
  monkeypatch.setattr(sharding, "by_example", lambda x: x)
  # Before the blocks and after each of the two; and on the way back.
  assert kept - constraints() == 2 * 3
