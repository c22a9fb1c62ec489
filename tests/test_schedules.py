"""Durations and learning rates against golden values and hand-made numbers."""

import pathlib

import numpy as np
import pytest

from configs import common
from vit_jax import schedules

GOLDEN = pathlib.Path(__file__).parent / "golden"


def make(total, shorten=False, **changes):
  config = common.base().optim
  config.update(changes)

  def to_steps(duration, key):
    return schedules.to_steps(
      duration, batch_size=10, num_examples=100, total=total, key=key
    )

  return schedules.make_schedule(config, total, to_steps, shorten=shorten)


@pytest.mark.parametrize(
  ("text", "steps"),
  [
    ("240", 240),
    ("10k", 10_000),
    ("1e3", 1000),
    ("1.5k", 1500),
    ("300ep", 3000),
    ("0.1ep", 1),
    ("0.001ep", 1),
    ("2kex", 200),
    ("1Mex", 100_000),
    ("5%", 12),
    ("0", 0),
    ("0ep", 0),
  ],
)
def test_durations(text, steps):
  assert (
    schedules.to_steps(text, batch_size=10, num_examples=100, total=250)
    == steps
  )


@pytest.mark.parametrize("text", ["None", "", "-5", "10 epochs", "ep", "0.5"])
def test_what_is_no_duration_is_refused(text):
  with pytest.raises(ValueError, match="config.total"):
    schedules.to_steps(
      text, batch_size=10, num_examples=100, total=250, key="config.total"
    )


def test_a_percentage_needs_a_whole():
  with pytest.raises(ValueError, match="no duration"):
    schedules.to_steps("5%", batch_size=10, num_examples=100)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_published_values(kind):
  golden = np.load(GOLDEN / "schedules.npz")[kind]
  rate = make(100, lr=0.3, schedule=kind, warmup="10", end_lr=1e-5)
  ours = [float(rate(step)) for step in range(0, 101, 5)]
  np.testing.assert_allclose(ours, golden, rtol=1e-5, atol=1e-8)


def test_cosine_points():
  rate = make(10_000, lr=0.03, warmup="500")
  points = {
    0: 0.0,
    250: 0.015,
    500: 0.03,
    2875: 0.0256066,
    5250: 0.015,
    7625: 0.0043934,
    10_000: 0.0,
  }
  for step, value in points.items():
    assert float(rate(step)) == pytest.approx(value, abs=1e-7)


def test_linear_points():
  rate = make(10_000, lr=1e-3, schedule="linear", warmup="500", end_lr=1e-5)
  for step, value in {250: 5e-4, 5250: 5.05e-4, 10_000: 1e-5}.items():
    assert float(rate(step)) == pytest.approx(value, rel=1e-5)


def test_rsqrt_is_smooth_at_the_end_of_warmup_and_cools_down_to_zero():
  rate = make(
    1000,
    lr=1.0,
    schedule="rsqrt",
    warmup="100",
    timescale="100",
    cooldown="20%",
  )
  assert float(rate(100)) == pytest.approx(1.0)
  assert float(rate(400)) == pytest.approx(0.5)
  assert float(rate(900)) == pytest.approx(0.5 / 3)
  assert float(rate(1000)) == 0


def test_constant_with_warmup_and_cooldown():
  rate = make(100, lr=2.0, schedule="constant", warmup="10", cooldown="10")
  assert [float(rate(t)) for t in (5, 10, 90, 95, 100)] == [1, 2, 2, 1, 0]


def test_a_rehearsal_shortens_warmup_and_cooldown(warnings):
  rate = make(10, shorten=True, lr=1.0, schedule="rsqrt", warmup="400")
  assert [float(rate(t)) for t in (0, 5, 10)] == [0, 0.5, 1]
  rate = make(
    10, shorten=True, lr=1.0, schedule="constant", warmup="60", cooldown="40"
  )
  assert [float(rate(t)) for t in (3, 6, 8, 10)] == [0.5, 1, 0.5, 0]
  assert "(60) and cooldown (40) are shortened to 6 and 4" in warnings()[-1]


def test_errors():
  with pytest.raises(ValueError, match="'cosin'.*Did you mean 'cosine'"):
    make(100, schedule="cosin")
  with pytest.raises(ValueError, match=r"warmup \(80 updates\).*100 updates"):
    make(100, warmup="80", cooldown="30")
