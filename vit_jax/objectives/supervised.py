"""Classification: images to classes, single-label or multi-label.

Batches come as uint8 images and class indices. Value range, multi-hot targets,
label smoothing, mixup and CutMix are made on the device.
"""

from typing import Any

import jax
import jax.numpy as jnp

from vit_jax import images, losses, models, trees
from vit_jax.objectives import metrics_of
from vit_jax.steps import Objective


def build(config: Any, num_classes: int) -> Objective:
  """Builds model, loss and prediction from a config.

  Args:
    config: the whole config; see `configs/common.py`.
    num_classes: of the training source.

  Raises:
    ValueError: unknown loss, input range or model; a share out of [0, 1).
  """
  _check(config)
  model = models.from_config(config.model, num_classes)
  height, width = images.size_of(config)

  def init(key):
    blank = jnp.zeros((1, height, width, 3))
    return model.init(key, blank, train=False)["params"]

  def loss(params, batch, key):
    mixing, dropout = jax.random.split(key)
    targets = losses.multi_hot(batch["labels"], num_classes)
    if config.loss == "softmax":
      targets = losses.softmax_targets(targets)
    inputs, targets = images.mix(
      images.normalize(batch["image"], config.model.input_range),
      losses.smooth(targets, config.label_smoothing),
      mixing,
      mixup=config.mixup,
      cutmix=config.cutmix,
    )
    outputs = model.apply(
      {"params": params}, inputs, train=True, rngs={"dropout": dropout}
    )
    each = getattr(losses, config.loss)(outputs["logits"], targets)
    return metrics_of(each, batch)

  def predict(params, batch):
    inputs = images.normalize(batch["image"], config.model.input_range)
    return model.apply({"params": params}, inputs, train=False)

  return Objective(init, loss, predict)


def _check(config):
  for key, value, allowed in (
    ("loss", config.loss, losses.LOSSES),
    ("model.input_range", config.model.input_range, images.INPUT_RANGES),
  ):
    trees.check_choice(f"config.{key} = ", value, allowed)
  if config.model.classifier == "none":
    raise ValueError(
      'config.model.classifier = "none" gives no class to an image; there are '
      "token, gap and map."
    )
  if not 0 <= config.label_smoothing < 1:
    raise ValueError(
      f"config.label_smoothing = {config.label_smoothing}; use [0, 1)."
    )
  for key in ("mixup", "cutmix"):
    if config[key] < 0:
      raise ValueError(f"config.{key} = {config[key]}; use 0 (off) or more.")
