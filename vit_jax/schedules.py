"""Durations and learning rates, as functions of the number of updates done."""

import logging
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import ArrayLike, Float, Int

from vit_jax import trees

log = logging.getLogger("vit_jax")

Schedule = Callable[[Int[ArrayLike, ""]], Float[jax.Array, ""]]
SCHEDULES = ("cosine", "linear", "rsqrt", "constant")

_NUMBER = r"(\d+\.?\d*(?:e\d+)?|\.\d+)"
_DURATION = re.compile(rf"{_NUMBER}\s*([kM]?)\s*(ep|ex|%|)")


def to_steps(
  duration: str,
  *,
  batch_size: int,
  num_examples: int,
  total: int = 0,
  key: str = "duration",
) -> int:
  """Converts a duration to a number of updates, rounding down, exactly.

  Args:
    duration: "240", "10k", "1e3" (updates), "300ep" (epochs), "1Mex" (examples)
      or "5%" (of `total`). Zero is off; anything else is at least one update.
    batch_size: examples per update, over all devices.
    num_examples: examples per epoch.
    total: updates of the whole run, for percentages; 0 where there are none.
    key: the config key, for the error.

  Raises:
    ValueError: not a duration, a fraction of an update, or a share of nothing.
  """
  match = _DURATION.fullmatch(str(duration).strip())
  if not match or (match[3] == "%" and not total):
    percent = ', "5%" (of the run)' if total else ""
    raise ValueError(
      f'{key} = {duration!r} is no duration: write "240" or "10k" (updates), '
      f'"300ep" (epochs), "1Mex" (examples){percent}; "0" is off.'
    )
  number = Fraction(match[1]) * {"": 1, "k": 10**3, "M": 10**6}[match[2]]
  steps = (
    number
    * {
      "": Fraction(1),
      "ep": Fraction(num_examples, batch_size),
      "ex": Fraction(1, batch_size),
      "%": Fraction(total, 100),
    }[match[3]]
  )
  if not match[3] and steps.denominator != 1:
    raise ValueError(
      f"{key} = {duration!r}: {float(steps)} updates; use a whole number."
    )
  return max(1, int(steps)) if number else 0


def make_schedule(
  config: Any,
  total: int,
  to_steps: Callable[[str, str], int],
  *,
  shorten: bool = False,
) -> Schedule:
  """Builds the learning rate of a run.

  With t updates done of T, warm-up w, p = clip((t - w) / (T - w), 0, 1):

    cosine    lr (1 + cos(pi p)) / 2
    linear    end_lr + (lr - end_lr) (1 - p)
    rsqrt     lr / sqrt(1 + max(t - w, 0) / timescale)
    constant  lr

  all times min(1, t / w) and, with a cooldown c, times min(1, (T - t) / c).

  Args:
    config: the keys lr, schedule, warmup, cooldown, end_lr and timescale.
    total: T, updates.
    to_steps: turns a duration and its key's name into updates.
    shorten: whether to cut warm-up and cooldown, both in proportion, where they
      are longer than the run; with a warning.

  Returns:
    A traceable function: updates done, int [] -> learning rate, float32 [].

  Raises:
    ValueError: unknown schedule; warm-up and cooldown longer than the run.
  """
  trees.check_choice("config.optim.schedule = ", config.schedule, SCHEDULES)
  warmup = to_steps(config.warmup, "config.optim.warmup")
  cooldown = to_steps(config.cooldown, "config.optim.cooldown")
  timescale = to_steps(config.timescale, "config.optim.timescale")
  if warmup + cooldown > total and shorten:
    asked = warmup, cooldown
    warmup = total * warmup // (warmup + cooldown)
    cooldown = total - warmup if cooldown else 0
    log.warning(
      "A rehearsal of %d updates: warm-up (%d) and cooldown (%d) are shortened "
      "to %d and %d.",
      total,
      *asked,
      warmup,
      cooldown,
    )
  if warmup + cooldown > total:
    raise ValueError(
      f"config.optim.warmup ({warmup} updates) and cooldown ({cooldown}) do "
      f"not fit in the run: config.total is {total} updates."
    )

  def schedule(step):
    t = jnp.asarray(step, jnp.float32)
    progress = jnp.clip((t - warmup) / max(total - warmup, 1), 0, 1)
    match config.schedule:
      case "cosine":
        rate = config.lr * 0.5 * (1 + jnp.cos(jnp.pi * progress))
      case "linear":
        rate = config.end_lr + (config.lr - config.end_lr) * (1 - progress)
      case "rsqrt":
        rate = config.lr * jax.lax.rsqrt(
          1 + jnp.maximum(t - warmup, 0) / max(timescale, 1)
        )
      case _:
        rate = jnp.full_like(t, config.lr)
    if warmup:
      rate *= jnp.minimum(1, t / warmup)
    if cooldown:
      rate *= jnp.clip((total - t) / cooldown, 0, 1)
    return rate

  return schedule
