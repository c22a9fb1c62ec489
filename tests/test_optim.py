"""The optimiser chain: decay, factors, freezing, clipping, moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import common
from vit_jax import optim, trees

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
    ({"moment_dtype": "float16"}, "'float16'.*bfloat16"),
    ({"freeze": ("hed/.*",)}, r"config.optim.freeze.*'hed/\.\*'"),
    ({"multipliers": (("kernels", 2.0),)}, "multipliers.*'kernels'"),
  ],
)
def test_errors(changes, message):
  with pytest.raises(ValueError, match=message):
    after(ONES, **changes)
