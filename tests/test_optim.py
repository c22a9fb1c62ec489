"""The optimiser chain: decay, factors, freezing, clipping, moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import common
from tests.conftest import tiny_config
from vit_jax import build, optim, sharding, steps, trees

PARAMS = {
  "cls": jnp.ones((1, 1, 2)),
  "head": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
  "norm": {"scale": jnp.ones(2)},
}
ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)
ONES = jax.tree.map(jnp.ones_like, PARAMS)


def after(grads, steps=1, **changes):
  """Returns the parameters after some updates with constant gradients."""
  config = common.base().optim
  config.update(changes)
  tx = optim.make_optimizer(config, PARAMS, lambda step: jnp.float32(config.lr))
  params, state = PARAMS, tx.init(PARAMS)
  for _ in range(steps):
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  return trees.flatten(params), state


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_decay_touches_kernels_only_and_is_times_the_learning_rate(name):
  params, _ = after(ZEROS, name=name, lr=0.1, weight_decay=0.1)
  np.testing.assert_allclose(params.pop("head/kernel"), 0.99, rtol=1e-6)
  for value in params.values():
    np.testing.assert_array_equal(value, 1.0)


def test_decay_can_reach_other_paths():
  params, _ = after(ZEROS, lr=0.1, weight_decay=0.1, decay_paths=("cls",))
  np.testing.assert_allclose(params["cls"], 0.99, rtol=1e-6)
  np.testing.assert_array_equal(params["head/kernel"], 1.0)


def test_decay_can_be_stronger_in_places_first_match_wins():
  params, _ = after(
    ZEROS,
    lr=0.1,
    weight_decay=0.1,
    decay_multipliers=(("head/kernel", 5.0), (".*kernel", 2.0), ("cls", 3.0)),
  )
  np.testing.assert_allclose(params.pop("head/kernel"), 0.95, rtol=1e-6)
  for value in params.values():  # What does not decay has nothing to multiply.
    np.testing.assert_array_equal(value, 1.0)
  params, _ = after(
    ZEROS,
    lr=0.1,
    weight_decay=0.1,
    decay_paths=(".*",),
    decay_multipliers=(("head/.*", 5.0), ("cls", 0.0)),
    freeze=("norm/scale",),
  )
  for path, value in {
    "head/kernel": 0.95,
    "head/bias": 0.95,
    "cls": 1.0,
    "norm/scale": 1.0,
  }.items():
    np.testing.assert_allclose(params[path], value, rtol=1e-6, err_msg=path)


def test_adam_against_the_formula():
  params, _ = after(ONES, steps=3, lr=0.1, b1=0.8, b2=0.9, eps=0.5)
  # Constant gradients g = 1: bias-corrected moments are exactly 1.
  np.testing.assert_allclose(params["cls"], 1 - 3 * 0.1 / 1.5, rtol=1e-5)


def test_sgd_against_the_formula():
  params, _ = after(ONES, steps=3, name="sgd", lr=0.1, momentum=0.5)
  np.testing.assert_allclose(
    params["cls"], 1 - 0.1 * (1 + 1.5 + 1.75), rtol=1e-6
  )


def test_clip_bounds_the_global_norm():
  count = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
  params, _ = after(ONES, name="sgd", lr=1.0, clip=1.0)
  np.testing.assert_allclose(params["cls"], 1 - count**-0.5, rtol=1e-6)


def test_multipliers_by_path_first_match_wins():
  rules = (("head/.*", 0.5), (".*bias", 0.25))
  params, _ = after(ONES, name="sgd", lr=0.1, multipliers=rules)
  np.testing.assert_allclose(params["head/bias"], 0.95, rtol=1e-6)
  np.testing.assert_allclose(params["cls"], 0.9, rtol=1e-6)


def test_frozen_parameters_stay_and_cost_no_moments():
  params, state = after(
    ONES, lr=0.1, weight_decay=0.1, freeze=("head/.*", "cls")
  )
  np.testing.assert_array_equal(params["head/kernel"], 1.0)
  np.testing.assert_array_equal(params["cls"], 1.0)
  assert not np.allclose(params["norm/scale"], 1.0)
  assert [path for path in trees.flatten(state) if "head" in path] == []


def test_factors_beside_frozen_parameters():
  params, _ = after(
    ONES,
    name="sgd",
    lr=0.1,
    freeze=("cls",),
    multipliers=(("head/kernel", 0.5),),
  )
  np.testing.assert_array_equal(params["cls"], 1.0)
  np.testing.assert_allclose(params["head/kernel"], 0.95, rtol=1e-6)
  np.testing.assert_allclose(params["head/bias"], 0.9, rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_moment_has_the_dtype_asked_for(name, dtype):
  _, state = after(ONES, name=name, moment_dtype=dtype)
  moments = [
    leaf for path, leaf in trees.flatten(state).items() if "nu" not in path
  ]
  assert dtype in {str(leaf.dtype) for leaf in moments if leaf.ndim}


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"name": "adam"}, "'adam'.*adamw, sgd.*Did you mean 'adamw'"),
    ({"name": "adafacto"}, "Did you mean 'adafactor'"),
    ({"moment_dtype": "float16"}, "'float16'.*bfloat16"),
    ({"freeze": ("hed/.*",)}, r"config.optim.freeze.*'hed/\.\*'"),
    ({"multipliers": (("kernels", 2.0),)}, "multipliers.*'kernels'"),
    (
      {"weight_decay": 0.1, "decay_multipliers": (("hed/kernel", 2.0),)},
      "decay_multipliers.*'hed/kernel'.*'head/kernel'",
    ),
    ({"sam_rho": -0.1}, "sam_rho = -0.1"),
  ],
)
def test_errors(changes, message):
  with pytest.raises(ValueError, match=message):
    after(ONES, **changes)


# Adafactor


def blocks_of(depth):
  """Returns shapes of parameters."""
  block = {
    "out": {"kernel": (4, 40, 33)},  # Factored along its two longest axes.
    "norm": {"bias": (64,)},
    "query": {"bias": (16, 48)},  # Factored neither here nor in a stack.
  }
  return {
    "Transformer": {f"encoderblock_{i}": block for i in range(depth)},
    "head": {"kernel": (64, 10)},  # Too narrow to be factored.
  }


def random_like(shapes, seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda shape: rng.normal(size=shape).astype(np.float32),
    shapes,
    is_leaf=lambda shape: isinstance(shape, tuple),
  )


def adafactor_by_hand(grads, cap=0.999, b1=0.9):
  """Returns the updates of one parameter, in numpy and float64."""
  row = column = full = momentum = 0.0
  for t, g in enumerate(grads, start=1):
    g = g.astype(np.float64)
    decay = min(cap, 1 - t**-0.8)
    square = g**2 + 1e-30
    if sorted((1, *g.shape))[-2] >= 32:
      longest, second = np.argsort(g.shape)[[-1, -2]]
      mean = square.mean(axis=longest, keepdims=True)
      row = decay * row + (1 - decay) * mean
      mean = square.mean(axis=second, keepdims=True)
      column = decay * column + (1 - decay) * mean
      second_moment = row * column / row.mean(axis=second, keepdims=True)
    else:
      full = decay * full + (1 - decay) * square
      second_moment = full
    momentum = b1 * momentum + (1 - b1) * g / np.sqrt(second_moment)
    yield momentum


def adafactor(params, grads, **changes):
  """Returns the updates after each of some gradients, and the last state."""
  config = common.base().optim
  config.update({"name": "adafactor", "lr": 1.0, **changes})
  tx = optim.make_optimizer(config, params, lambda step: jnp.float32(1.0))
  update, state, found = jax.jit(tx.update), tx.init(params), []
  for grad in grads:
    updates, state = update(grad, state, params)
    found.append(jax.tree.map(np.negative, updates))
  return found, state


def test_adafactor_against_numpy():
  params = random_like(blocks_of(1), 0)
  grads = [random_like(blocks_of(1), 1 + i) for i in range(3)]
  found, state = adafactor(params, grads, b2=0.5)  # A cap that is reached.
  expected = jax.tree.map(
    lambda *leaves: list(adafactor_by_hand(leaves, cap=0.5)), *grads
  )
  for i in range(3):
    jax.tree.map(
      lambda ours, theirs, i=i: np.testing.assert_allclose(
        ours, theirs[i], rtol=2e-5, atol=1e-6
      ),
      found[i],
      expected,
    )
  sizes = {
    path.partition("/v_")[2]: leaf.shape
    for path, leaf in trees.flatten(state).items()
    if "/v_" in path and "encoderblock_0/out" in path
  }
  assert sizes == {  # All but the longest axis, all but the second longest.
    "row/Transformer/encoderblock_0/out/kernel": (4, 1, 33),
    "col/Transformer/encoderblock_0/out/kernel": (4, 40, 1),
  }


def test_adafactor_knows_stacked_blocks():
  """32 blocks of 64 numbers each are no matrix, nor are they a side of one."""
  depth = 32

  def stack(tree):
    blocks = (tree["Transformer"][f"encoderblock_{i}"] for i in range(depth))
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)
    return {
      "Transformer": {"encoderblock": stacked},
      "head": tree["head"],
    }

  params = random_like(blocks_of(depth), 0)
  grads = [random_like(blocks_of(depth), 1)] * 2
  loop, _ = adafactor(params, grads)
  scan, _ = adafactor(stack(params), [stack(grad) for grad in grads])
  jax.tree.map(
    lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-5),
    scan[1],
    stack(loop[1]),
  )


def test_adafactor_is_placed_by_the_rules_of_the_parameters():
  changes = {"optim.name": "adafactor", "model.depth": 2, "model.scan": True}
  config = tiny_config(**changes, **{"mesh.fsdp": 2, "mesh.model": 2})
  config.optim.freeze, config.optim.moment_dtype = ("cls",), "bfloat16"
  mesh = sharding.make_mesh(config.mesh)
  state = build.parts(config, mesh, num_classes=3, num_examples=64).state
  moments = {
    path: (leaf.shape, tuple(leaf.sharding.spec))
    for path, leaf in trees.flatten(state.opt_state).items()
    if path.endswith("encoderblock/MlpBlock_3/Dense_0/kernel")
  }
  assert sorted(moments.values()) == [
    ((1, 1, 1), (None, None, None)),  # The full moment, which is not kept.
    ((2, 1, 128), (None, None, "model")),
    ((2, 32, 1), (None, "fsdp", None)),
    ((2, 32, 128), (None, "fsdp", "model")),  # The momentum.
  ]


# Sharpness-aware steps


def least_squares(shape=(1, 1, 1), accumulate=1, ema=0.0, **changes):
  """Returns state, step and mesh for plain descent in three weights."""

  def loss(params, batch, key):
    del key
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    total = (batch["mask"] * error**2).sum() / 2
    return {"loss": (total, batch["mask"].sum())}

  def init(key):
    del key
    return {"w": jnp.array([0.5, -1.0]), "b": jnp.array([0.25])}

  config = common.base()
  config.optim.update({"name": "sgd", "momentum": 0.0, **changes})
  config.mesh.update(dict(zip(("data", "fsdp", "model"), shape)))
  mesh = sharding.make_mesh(config.mesh, jax.devices()[: np.prod(shape)])
  objective = steps.Objective(init, loss, lambda params, batch: {})
  schedule = lambda step: jnp.float32(config.optim.lr)  # noqa: E731
  params = jax.eval_shape(init, jax.random.key(0))
  tx = optim.make_optimizer(config.optim, params, schedule)
  shardings = jax.tree.map(
    lambda _: sharding.replicated(mesh),
    steps.abstract_state(objective, tx, ema=ema),
  )
  step = steps.make_train_step(
    objective,
    tx,
    schedule,
    mesh,
    shardings,
    seed=0,
    accumulate=accumulate,
    ema=ema,
    ascent=optim.make_ascent(config.optim, params),
  )
  state = steps.init_state(objective, tx, shardings, seed=0, ema=ema)
  return state, step, mesh


@pytest.mark.parametrize(
  ("shape", "accumulate", "freeze"),
  [((1, 1, 1), 1, ()), ((4, 2, 1), 1, ("b",)), ((2, 1, 1), 4, ())],
)
def test_sharpness_aware_steps_by_hand(shape, accumulate, freeze):
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(16, 2)), rng.normal(size=16)
  mask = (rng.random(16) < 0.7).astype(np.float64)
  rho, lr = 0.3, 0.1

  def gradient(w, b):
    error = mask * (x @ w + b - y) / mask.sum()
    return error @ x, error.sum(keepdims=True) * (not freeze)

  w, b = np.array([0.5, -1.0]), np.array([0.25])
  losses, norms = [], []
  for _ in range(2):
    losses.append((mask * (x @ w + b - y) ** 2).sum() / 2 / mask.sum())
    up_w, up_b = gradient(w, b)
    norm = np.sqrt((up_w**2).sum() + (up_b**2).sum())
    g_w, g_b = gradient(w + rho * up_w / norm, b + rho * up_b / norm)
    norms.append(np.sqrt((g_w**2).sum() + (g_b**2).sum()))
    w, b = w - lr * g_w, b - lr * g_b

  state, step, mesh = least_squares(
    shape, accumulate, lr=lr, sam_rho=rho, freeze=freeze
  )
  rows = {"x": x, "y": y, "mask": mask}
  rows = {key: value.astype(np.float32) for key, value in rows.items()}
  batch = sharding.to_device(rows, mesh)
  for loss, norm in zip(losses, norms):
    state, metrics = step(state, batch)
    total, weight = metrics["loss"]
    assert float(total / weight) == pytest.approx(loss, rel=1e-5)
    if not freeze:  # The norm that is reported counts all parameters.
      assert float(metrics["grad_norm"][0]) == pytest.approx(norm, rel=1e-5)
  np.testing.assert_allclose(state.params["w"], w, rtol=1e-5)
  np.testing.assert_allclose(state.params["b"], b, rtol=1e-5)


def test_the_average_of_constant_parameters_is_what_they_are():
  state, step, mesh = least_squares(lr=0.0, ema=0.9)
  rows = np.ones((4, 2), np.float32)
  batch = {"x": rows, "y": rows[:, 0], "mask": rows[:, 0]}
  batch = sharding.to_device(batch, mesh)
  for _ in range(3):
    state, _ = step(state, batch)
  np.testing.assert_allclose(state.ema["w"], [0.5, -1.0], rtol=1e-6)
  np.testing.assert_allclose(state.ema["b"], [0.25], rtol=1e-6)
