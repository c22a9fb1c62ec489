"""The train step: one clock, one update, whatever the mesh or the parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import tiny_config
from vit_jax import build, sharding, steps, trees


def setup(shape=(8, 1, 1), **changes):
  """Returns mesh, parts and step of a tiny model."""
  config = tiny_config(**changes)
  data, fsdp, model = shape
  config.mesh.update({"data": data, "fsdp": fsdp, "model": model})
  devices = jax.devices()[: data * fsdp * model]
  mesh = sharding.make_mesh(config.mesh, devices)
  parts = build.parts(config, mesh, num_classes=3, num_examples=64)
  state = steps.init_state(
    parts.objective, parts.tx, parts.shardings, seed=config.seed, ema=config.ema
  )
  return mesh, parts, state, build.train_step(config, mesh, parts)


def batch(step, n=8):
  rng = np.random.default_rng(step)
  return {
    "image": rng.integers(0, 256, (n, 16, 16, 3), np.uint8),
    "labels": rng.integers(0, 3, (n, 1)).astype(np.int32),
    "mask": np.ones(n, np.float32),
  }


def losses_of(shape, count=10, n=8, **changes):
  mesh, _, state, step = setup(shape, **changes)
  losses = []
  for i in range(count):
    state, metrics = step(state, sharding.to_device(batch(i, n), mesh))
    total, weight = metrics["loss"]
    losses.append(float(total / weight))
  return np.array(losses), state


def test_mesh_shapes_agree_with_everything_random_on():
  reference, _ = losses_of((8, 1, 1))
  assert reference[0] == pytest.approx(np.log(3), abs=1e-5)
  assert len(set(reference.round(6))) > 5
  for shape in ((1, 8, 1), (2, 2, 2), (1, 1, 1)):
    ours, _ = losses_of(shape)
    np.testing.assert_allclose(ours, reference, atol=1e-5, err_msg=str(shape))


def test_scanned_blocks_are_split_alike():
  changes = {"model.scan": True, "model.depth": 2}
  reference, _ = losses_of((8, 1, 1), count=4, **changes)
  ours, _ = losses_of((2, 2, 2), count=4, **changes)
  np.testing.assert_allclose(ours, reference, atol=1e-5)


def test_weights_are_really_split():
  _, _, state, _ = setup((1, 8, 1))
  kernel = state.params["Transformer"]["encoderblock_0"]["MlpBlock_3"][
    "Dense_0"
  ]
  assert kernel["kernel"].addressable_shards[0].data.shape == (4, 128)
  mu = trees.flatten(state.opt_state)
  shards = [
    leaf.addressable_shards[0].data.shape
    for path, leaf in mu.items()
    if path.endswith("mu/Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel")
  ]
  assert shards == [(4, 128)]


def test_accumulation_gives_the_same_gradient_and_one_schedule_step():
  changes = {
    "mixup": 0.0,
    "model.dropout": 0.0,
    "optim.name": "sgd",
    "optim.momentum": 0.0,
    "optim.lr": 1.0,
    "optim.schedule": "constant",
    "optim.clip": 0.0,
    "optim.weight_decay": 0.0,
  }
  reference = None
  for accumulate in (1, 2, 4):
    # With lr 1 and plain SGD the change of a weight is its gradient.
    _, _, state, step = setup((1, 1, 1), accumulate=accumulate, **changes)
    before = jax.tree.map(np.array, state.params)
    mesh = sharding.make_mesh(
      tiny_config(**{"mesh.data": 1}).mesh, jax.devices()[:1]
    )
    state, metrics = step(state, sharding.to_device(batch(0), mesh))
    gradient = trees.flatten(jax.tree.map(np.subtract, before, state.params))
    counts = [
      int(leaf)
      for path, leaf in trees.flatten(state.opt_state).items()
      if path.endswith("count")
    ]
    assert set(counts) == {1} == {int(state.step)}
    reference = reference or (gradient, metrics)
    for path, value in gradient.items():
      np.testing.assert_allclose(
        value, reference[0][path], atol=1e-6, err_msg=path
      )
    for name in ("loss", "lr", "grad_norm"):
      ours, theirs = (
        np.divide(*map(np.array, m[name])) for m in (metrics, reference[1])
      )
      np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_accumulation_with_padding_weighs_examples_not_parts():
  def gradient_norm(accumulate):
    _, _, state, step = setup(
      (1, 1, 1), accumulate=accumulate, **{"mixup": 0.0, "model.dropout": 0.0}
    )
    mesh = sharding.make_mesh(
      tiny_config(**{"mesh.data": 1}).mesh, jax.devices()[:1]
    )
    rows = batch(0)
    rows["mask"][[1, 3, 5]] = 0  # Uneven over the parts.
    _, metrics = step(state, sharding.to_device(rows, mesh))
    assert float(metrics["loss"][1]) == 5
    return float(metrics["grad_norm"][0])

  assert gradient_norm(2) == pytest.approx(gradient_norm(1), rel=1e-5)


def test_every_counter_follows_the_one_clock():
  _, state = losses_of((8, 1, 1), count=3)
  counters = [
    int(leaf)
    for path, leaf in trees.flatten(state.opt_state).items()
    if path.endswith("count")
  ]
  assert counters
  assert set(counters) == {3}
  assert int(state.step) == 3


def test_logged_learning_rate_is_the_one_applied():
  mesh, parts, state, step = setup(**{"optim.warmup": "4"})
  before = jax.tree.map(np.array, state.params)
  state, metrics = step(state, sharding.to_device(batch(0), mesh))
  assert float(metrics["lr"][0]) == 0 == float(parts.schedule(0))
  for path, leaf in trees.flatten(state.params).items():
    np.testing.assert_array_equal(leaf, trees.flatten(before)[path])


def test_average_follows_its_formula():
  mesh, _, state, step = setup(ema=0.75)
  average = first = jax.tree.map(np.array, state.params)
  for path, leaf in trees.flatten(state.ema).items():
    np.testing.assert_array_equal(leaf, trees.flatten(first)[path])
  for i in range(3):
    state, _ = step(state, sharding.to_device(batch(i), mesh))
    average = jax.tree.map(
      lambda a, p: 0.75 * a + 0.25 * np.array(p), average, state.params
    )
  for path, leaf in trees.flatten(state.ema).items():
    np.testing.assert_allclose(leaf, trees.flatten(average)[path], atol=1e-6)


def test_initial_weights_depend_on_the_seed_alone():
  one, other = setup((8, 1, 1))[2], setup((2, 2, 2))[2]
  for path, leaf in trees.flatten(one.params).items():
    np.testing.assert_array_equal(leaf, trees.flatten(other.params)[path])
  kernel = trees.flatten(setup(seed=1)[2].params)["embedding/kernel"]
  assert not np.allclose(kernel, one.params["embedding"]["kernel"])


def test_nonfinite_names_the_leaf():
  tree = {"a": jnp.ones(2), "b": {"c": jnp.array([1.0, jnp.nan])}}
  assert steps.nonfinite(tree) == ["b/c"]
