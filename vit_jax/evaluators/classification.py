"""Top-1, top-5 and loss over a whole split, every example counted once."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import input_pipeline
from vit_jax import evaluators, feed, images, losses, steps
from vit_jax.evaluators import Evaluator

VALUES = ("top1", "top5", "loss", "n")


def build(
  entry: Any,
  *,
  config: Any,
  source: input_pipeline.Source,
  classes: tuple[str, ...],
  objective: steps.Objective,
  mesh: Mesh,
  shardings: Any,
) -> Evaluator:
  """Builds the evaluator of one labelled split.

  An example counts as right if the prediction is one of its labels; examples
  without a label are left out (the ImageNet-ReaL rule; with one label each it
  is plain accuracy). The batch is padded to what the devices divide, so any
  batch size and any device count give the same numbers.

  Args:
    entry: of `config.evals`.
    config: the whole config: image size, and loss without label smoothing.
    source: the split to evaluate.
    classes: names of the model's outputs.
    objective: gives the predictions.
    mesh: from `sharding.make_mesh`.
    shardings: of the parameters.

  Returns:
    evaluate(params, stop) -> {"top1", "top5", "loss" (means), "n" (examples)},
    or None as soon as `stop()` is true.

  Raises:
    ValueError: the split's classes are not the model's; a bad batch size;
      images of another size than the model's.
  """
  if source.class_names != classes:
    raise ValueError(
      f"the split has {source.num_classes} classes "
      f"({_listing(source.class_names)}), the model {len(classes)} "
      f"({_listing(classes)}). They must be the same, in the same order."
    )
  batch_size = evaluators.batch_size(entry, mesh)
  size = images.size_of(config)
  ops = images.sized(entry.ops, size)
  evaluators.look_at(source, ops, size)
  summarize = steps.make_predict_step(
    objective,
    mesh,
    shardings,
    then=lambda outputs, batch: _sums(outputs["logits"], batch, config.loss),
  )

  def evaluate(params, stop):
    batches, num_batches = input_pipeline.eval_batches(
      source,
      ops,
      batch_size=batch_size,
      shard=jax.process_index(),
      num_shards=jax.process_count(),
      max_labels=config.input.max_labels,
      cache=entry.cache,
    )
    sums = feed.results(
      lambda batch: summarize(params, batch),
      batches,
      num_batches,
      mesh,
      stop=stop,
    )
    return None if sums is None else _means(sums)

  return evaluate


def _sums(logits, batch, loss):
  hot = losses.multi_hot(batch["labels"], logits.shape[-1])
  weight = batch["mask"] * hot.max(axis=-1)
  targets = losses.softmax_targets(hot) if loss == "softmax" else hot
  values = {
    "top1": losses.top_k_hit(logits, hot, 1),
    "top5": losses.top_k_hit(logits, hot, 5),
    "loss": getattr(losses, loss)(logits, targets),
    "n": weight,
  }
  return {name: (value * weight).sum() for name, value in values.items()}


def _means(sums):
  total = {
    name: float(np.sum([part[name] for part in sums], dtype=np.float64))
    for name in VALUES
  }
  n = total.pop("n")
  means = {name: value / max(n, 1) for name, value in total.items()}
  return means | {"n": int(n)}


def _listing(names, most=5):
  more = ", …" if len(names) > most else ""
  return ", ".join(names[:most]) + more
