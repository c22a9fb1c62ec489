"""Losses against published values and hand-made numbers."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import losses

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "losses.npz")


def test_published_values():
  logits = jnp.asarray(GOLDEN["logits"])
  ours = losses.sigmoid(logits, jnp.asarray(GOLDEN["multi_hot"]))
  np.testing.assert_allclose(ours, GOLDEN["sigmoid"], rtol=1e-5)
  ours = losses.softmax(logits, jnp.asarray(GOLDEN["soft"]))
  np.testing.assert_allclose(ours, GOLDEN["softmax"], rtol=1e-5)


def test_sigmoid_sums_over_classes():
  logits = jnp.array([[2.0, -1.0, 0.0]])
  targets = jnp.array([[1.0, 1.0, 0.0]])
  assert losses.sigmoid(logits, targets)[0] == pytest.approx(2.133337, abs=1e-6)


def test_smoothing_gives_every_class_its_share():
  hot = jnp.array([[0.0, 1.0, 0.0, 0.0]])
  logits = jnp.array([[2.0, 0.0, -1.0, 1.0]])
  targets = losses.smooth(hot, 0.1)
  np.testing.assert_allclose(
    targets[0], [0.025, 0.925, 0.025, 0.025], rtol=1e-6
  )
  assert losses.softmax(logits, targets)[0] == pytest.approx(2.390190, abs=1e-6)
  assert losses.softmax(logits, hot)[0] == pytest.approx(2.440190, abs=1e-6)


@pytest.mark.parametrize("classes", [10, 1000, 21843])
def test_first_losses_of_a_zero_head(classes):
  hot = losses.multi_hot(jnp.array([[1]]), classes)
  zeros = jnp.zeros((1, classes))
  assert losses.softmax(zeros, hot)[0] == pytest.approx(np.log(classes))
  expected = {10: 10.000454, 1000: 10.045399, 21843: 10.991648}[classes]
  assert losses.sigmoid(zeros - 10, hot)[0] == pytest.approx(expected, abs=1e-5)


def test_multi_hot_ignores_padding_and_repetition():
  hot = losses.multi_hot(jnp.array([[1, 2, 1], [0, -1, -1], [-1, -1, -1]]), 3)
  np.testing.assert_array_equal(hot, [[0, 1, 1], [1, 0, 0], [0, 0, 0]])


def test_top_k_hits_any_of_the_labels():
  logits = jnp.array([[0.0, 3.0, 2.0, 1.0]] * 2)
  hot = jnp.array([[1.0, 0, 1, 0], [1.0, 0, 0, 0]])
  np.testing.assert_array_equal(losses.top_k_hit(logits, hot, 1), [0, 0])
  np.testing.assert_array_equal(losses.top_k_hit(logits, hot, 2), [1, 0])
  np.testing.assert_array_equal(losses.top_k_hit(logits, hot, 9), [1, 1])
