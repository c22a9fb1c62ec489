"""One head for tasks of many sizes: the classes that a task lacks are masked.

A task with c classes uses the first c outputs of a head made for the largest.
The others are -inf before the softmax, which gives them probability 0 and their
weights a gradient of exactly 0. So one compiled program serves all tasks; which
classes there are comes with the batch.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax import images, models, trees
from vit_jax.objectives import metrics_of
from vit_jax.steps import Batch, Objective


def build(config: Any, num_classes: int) -> Objective:
  """Builds model, loss and prediction.

  Beside the usual, batches have `classes` int32 [n], how many classes the task
  has, and `seed` int32 [n], the unit's seed; each says the same in all rows.

  Args:
    config: the whole config; see `configs/common.py`.
    num_classes: of the largest task.

  Raises:
    ValueError: keys that mean nothing here; an unknown model or input range.
  """
  _check(config)
  model = models.from_config(config.model, num_classes)
  height, width = images.size_of(config)

  def outputs_of(params, batch, **options):
    inputs = images.normalize(batch["image"], config.model.input_range)
    outputs = model.apply({"params": params}, inputs, **options)
    return outputs | {"logits": mask(outputs["logits"], batch["classes"])}

  def init(key):
    blank = jnp.zeros((1, height, width, 3))
    return model.init(key, blank, train=False)["params"]

  def loss(params, batch, key):
    # What is random differs between seeds, without a program for each.
    key = jax.random.fold_in(key, batch["seed"][0])
    outputs = outputs_of(params, batch, train=True, rngs={"dropout": key})
    each = optax.softmax_cross_entropy_with_integer_labels(
      outputs["logits"], batch["labels"][:, 0]
    )
    return metrics_of(each, batch)

  def predict(params, batch):
    return outputs_of(params, batch, train=False)

  return Objective(init, loss, predict)


def mask(logits: jax.Array, classes: jax.Array) -> jax.Array:
  """Puts -inf where a task has no class.

  Args:
    logits: `[n, c]`.
    classes: `[n]`, how many of the first columns are meant.
  """
  there = jnp.arange(logits.shape[-1])[None] < classes[:, None]
  return jnp.where(there, logits, -jnp.inf)


def correct(outputs: dict[str, Any], batch: Batch) -> jax.Array:
  """Returns how many of a batch's real examples are classified rightly."""
  hit = outputs["logits"].argmax(axis=-1) == batch["labels"][:, 0]
  return (hit * batch["mask"]).sum()


def _check(config):
  trees.check_choice(
    "config.model.input_range = ", config.model.input_range, images.INPUT_RANGES
  )
  for key, value, only in (
    ("objective", config.objective, "supervised"),
    ("loss", config.loss, "softmax"),
    ("label_smoothing", config.label_smoothing, 0.0),
    ("mixup", config.mixup, 0.0),
    ("cutmix", config.cutmix, 0.0),
    ("ema", config.ema, 0.0),
    ("model.classifier", config.model.classifier == "none", False),
  ):
    if value != only:
      raise ValueError(
        f"config.{key} = {value!r}: VTAB's tasks are tuned with {only!r} here."
      )
