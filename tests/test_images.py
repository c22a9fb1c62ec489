"""Pixels on the device: value ranges, sizes, mixup and CutMix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import images

PIXELS = jnp.array([0, 255, 51], jnp.uint8)[None, None, None]  # [1, 1, 1, 3]


@pytest.mark.parametrize(
  ("name", "expected"),
  [
    ("-1,1", [-1, 1, -0.6]),
    ("0,1", [0, 1, 0.2]),
    ("imagenet", [-0.485 / 0.229, (1 - 0.456) / 0.224, (0.2 - 0.406) / 0.225]),
  ],
)
def test_value_ranges(name, expected):
  ours = images.normalize(PIXELS, name)[0, 0, 0]
  np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def batch(n=4, side=8):
  """Each image is its own number everywhere; its target is its own class."""
  numbers = jnp.arange(n, dtype=jnp.float32)[:, None, None, None]
  return jnp.broadcast_to(numbers, (n, side, side, 3)), jnp.eye(n)


def mixed(seed, **strength):
  pictures, targets = batch()
  options = {"mixup": 0.0, "cutmix": 0.0} | strength
  return images.mix(pictures, targets, jax.random.key(seed), **options)


def test_off_changes_nothing():
  pictures, targets = batch()
  ours = mixed(0)
  np.testing.assert_array_equal(ours[0], pictures)
  np.testing.assert_array_equal(ours[1], targets)


@pytest.mark.parametrize("seed", range(5))
def test_mixup_mixes_pixels_and_targets_by_one_share(seed):
  pictures, targets = mixed(seed, mixup=0.5)
  share = float(targets[0, 0])
  assert 0 <= share <= 1
  for i in range(4):
    np.testing.assert_allclose(targets[i].sum(), 1, rtol=1e-5)
    expected = share * i + (1 - share) * ((i - 1) % 4)
    np.testing.assert_allclose(pictures[i], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_cutmix_pastes_one_box_and_counts_its_pixels(seed):
  pictures, targets = mixed(seed, cutmix=1.0)
  pasted = np.array(pictures[2, :, :, 0]) == 1
  assert np.isin(np.array(pictures[2]), [1, 2]).all()
  rows, columns = pasted.any(1), pasted.any(0)
  np.testing.assert_array_equal(pasted, np.outer(rows, columns))
  np.testing.assert_allclose(targets[2, 2], 1 - pasted.mean(), rtol=1e-5)
  np.testing.assert_allclose(targets[2, 1], pasted.mean(), atol=1e-6)


def test_with_both_on_a_coin_decides():
  kinds = set()
  for seed in range(12):
    pictures, _ = mixed(seed, mixup=1.0, cutmix=1.0)
    kinds.add(bool(np.isin(np.array(pictures), [0, 1, 2, 3]).all()))
  assert kinds == {False, True}


def test_size_errors():
  with pytest.raises(ValueError, match="12x8 pixels.*8x8"):
    images.check_size(np.zeros((1, 12, 8, 3), np.uint8), (8, 8), key="ops")
