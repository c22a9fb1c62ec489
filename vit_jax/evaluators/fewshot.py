"""Few-shot linear probe: what frozen features tell from a few labelled images.

Ridge regression in closed form from the features to a target of 1 for an
image's class and -1 for the others (paper, section 4.1), as big_vision's
`fewshot_lsr` does it: features are whitened, a large constant stands for the
bias. The probe's data may be any; the model's own classes and head play no
part. Features are computed on all devices, once in an evaluation; the algebra
is small and runs on the host, in float64.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

import input_pipeline
from vit_jax import evaluators, feed, images, steps, trees
from vit_jax.evaluators import Evaluator

log = logging.getLogger("vit_jax")

REPRESENTATIONS = ("pre_logits", "tokens")

_EPSILON = 1e-5  # Keeps features that never vary finite.
_BIAS = 100.0  # Large, so that the ridge hardly holds back the bias.


def value_names(entry: Any) -> tuple[str, ...]:
  """Returns the names of an entry's values, the same for every evaluation.

  `5shot_top1` is the accuracy after 5 examples of each class, under the first
  of `strengths`. The others have theirs in their name, `5shot_top1_l2_16`. No
  value is the best of several: that would be a choice made on the test split.
  """
  names = [
    _name(shots, strength, entry)
    for shots in entry.shots
    for strength in entry.strengths
  ]
  return (*names, "n")


VALUES = value_names
READS_HEAD = False


def _name(shots, strength, entry):
  suffix = "" if strength == entry.strengths[0] else f"_l2_{strength:g}"
  return f"{shots}shot_top1{suffix}"


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
  """Builds the probe of one data set.

  Examples without a label are left out. The numbers do not depend on batch
  size, devices or processes.

  Args:
    entry: of `config.evals`, made by `common.evaluator(kind="fewshot")`.
    config: the whole config: image size and where data lies.
    source: the split on which the probe is tested.
    classes: of the model; not used.
    objective: gives the features.
    mesh: from `sharding.make_mesh`.
    shardings: of the parameters.

  Returns:
    evaluate(params, stop) -> accuracies, each the mean over `entry.seeds` (see
    `value_names`), and "n", the examples of the test split that have a label;
    or None as soon as `stop()` is true. It raises ValueError for a split in
    which nothing has a label.

  Raises:
    ValueError: a value of the entry that cannot be; two splits of different
      classes, or the same twice; several labels for an image; images of another
      size than the model's.
  """
  del classes
  _check_entry(entry)
  batch_size = evaluators.batch_size(entry, mesh)
  train = input_pipeline.get_source(
    entry.source or config.input.source,
    entry.train_split,
    config.input.data_dir,
  )
  _check_splits(train, source)
  size = images.size_of(config)
  ops = images.sized(entry.ops, size)
  for split in (train, source):
    first = evaluators.look_at(split, ops, size)
    if first["labels"].shape[1] > 1:
      raise ValueError(
        f"{split.spec} gives an image several labels; the probe takes one."
      )
  extract = steps.make_predict_step(
    objective,
    mesh,
    shardings,
    then=lambda outputs, batch: {
      "features": _features(outputs, entry.representation),
      "label": batch["labels"][:, 0],
      "mask": batch["mask"],
      "index": batch["index"],
    },
  )

  def features_of(split, params, stop):
    """Returns features and labels in the split's order; None if stopped."""
    batches, num_batches = input_pipeline.eval_batches(
      split,
      ops,
      batch_size=batch_size,
      shard=jax.process_index(),
      num_shards=jax.process_count(),
      cache=entry.cache,
    )
    # The split's order must survive the way over processes and devices.
    numbered = (
      batch | {"index": batch["id"].astype(np.int32)} for batch in batches
    )
    parts = feed.results(
      lambda batch: extract(params, batch),
      numbered,
      num_batches,
      mesh,
      stop=stop,
    )
    if parts is None:
      return None
    features, labels = _in_order(parts)
    if not len(labels):
      raise ValueError(f"No image of {split.spec} {split.split} has a label.")
    return features, labels

  def evaluate(params, stop):
    fitted_to = features_of(train, params, stop)
    tested_on = fitted_to and features_of(source, params, stop)
    if not tested_on:
      return None
    _warn_of_scarcity(fitted_to[1], train, max(entry.shots))
    return _accuracies(entry, fitted_to, tested_on, train.num_classes, stop)

  return evaluate


def _features(outputs, representation):
  """[n, d]; where each token has its own, their mean over the patches."""
  features = outputs[representation]
  if features.ndim == 3:
    height, width = outputs["grid"]
    features = features[:, -height * width :].mean(axis=1)
  return features


def _in_order(parts):
  rows = {
    name: np.concatenate([part[name] for part in parts]) for name in parts[0]
  }
  kept = np.flatnonzero((rows["mask"] > 0) & (rows["label"] >= 0))
  order = kept[np.argsort(rows["index"][kept])]
  return rows["features"][order].astype(np.float64), rows["label"][order]


def _accuracies(entry, fitted_to, tested_on, num_classes, stop):
  features, labels = tested_on
  values = dict.fromkeys(value_names(entry), 0.0)
  for seed in entry.seeds:
    for shots in entry.shots:
      if stop():
        return None
      chosen = choose(fitted_to[1], num_classes, shots=shots, seed=seed)
      probe = fit(fitted_to[0][chosen], fitted_to[1][chosen], num_classes)
      for strength in entry.strengths:
        best = scores(probe, features, strength).argmax(axis=1)
        share = float(np.mean(best == labels))
        values[_name(shots, strength, entry)] += share / len(entry.seeds)
  return values | {"n": len(labels)}


def choose(
  labels: Int[np.ndarray, " n"], num_classes: int, *, shots: int, seed: int
) -> Int[np.ndarray, " m"]:
  """Draws `shots` examples of each class; all that there are where fewer are.

  A seed's first examples stay the same when more are drawn.

  Returns:
    Indices into `labels`, class by class.
  """
  rng = np.random.default_rng(seed)
  drawn = [
    rng.permutation(np.flatnonzero(labels == label))[:shots]
    for label in range(num_classes)
  ]
  return np.concatenate(drawn)


class Probe(NamedTuple):
  """A ridge regression, solved but for its strength.

  Attributes:
    mean: [d], of the features.
    deviation: [d], their standard deviation.
    left: [d + 1, r]; see `weights`.
    spectrum: [r], eigenvalues.
    right: [r, c].
  """

  mean: np.ndarray
  deviation: np.ndarray
  left: np.ndarray
  spectrum: np.ndarray
  right: np.ndarray


def fit(
  features: Float[np.ndarray, "n d"],
  labels: Int[np.ndarray, " n"],
  num_classes: int,
) -> Probe:
  """Fits a probe; one eigendecomposition serves all strengths.

  Args:
    features: `[n, d]`, of the examples with a label.
    labels: `[n]`, class indices.
    num_classes: c.
  """
  mean, deviation = features.mean(axis=0), features.std(axis=0) + _EPSILON
  x = _whitened(features, mean, deviation)
  y = 2.0 * np.eye(num_classes)[labels] - 1.0
  solve = primal if len(x) >= x.shape[1] else dual
  return Probe(mean, deviation, *solve(x, y))


def primal(
  x: Float[np.ndarray, "n d"], y: Float[np.ndarray, "n c"]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(XᵀX + s)⁻¹ Xᵀ Y as the last three fields of a `Probe`."""
  spectrum, vectors = np.linalg.eigh(x.T @ x)
  return vectors, spectrum, vectors.T @ (x.T @ y)


def dual(
  x: Float[np.ndarray, "n d"], y: Float[np.ndarray, "n c"]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Xᵀ (XXᵀ + s)⁻¹ Y, which is the same: cheaper for n < d."""
  spectrum, vectors = np.linalg.eigh(x @ x.T)
  return x.T @ vectors, spectrum, vectors.T @ y


def weights(probe: Probe, strength: float) -> Float[np.ndarray, "d c"]:
  """Returns the weights of the whitened features; the last row is the bias's.

  They minimise |X W - Y|² + strength |W|².
  """
  return (probe.left / (probe.spectrum + strength)) @ probe.right


def scores(
  probe: Probe, features: Float[np.ndarray, "n d"], strength: float
) -> Float[np.ndarray, "n c"]:
  """Returns what the probe says of each class: near 1 where it fits."""
  x = _whitened(features, probe.mean, probe.deviation)
  return x @ weights(probe, strength)


def _whitened(features, mean, deviation):
  x = (features - mean) / deviation
  return np.pad(x, ((0, 0), (0, 1)), constant_values=_BIAS)


def _check_entry(entry):
  if "shots" not in entry:
    raise ValueError(
      "the entry has no shots, seeds and strengths: make it by "
      'common.evaluator(kind="fewshot").'
    )
  trees.check_choice("representation = ", entry.representation, REPRESENTATIONS)
  rules: tuple[tuple[str, Callable, str], ...] = (
    ("shots", lambda n: isinstance(n, int) and n > 0, "whole numbers above 0"),
    ("seeds", lambda n: isinstance(n, int) and n >= 0, "whole numbers from 0"),
    ("strengths", lambda s: s > 0, "numbers above 0"),
  )
  for key, fits, words in rules:
    values = tuple(entry[key])
    if (
      not values or len(set(values)) < len(values) or not all(map(fits, values))
    ):
      raise ValueError(
        f"{key} = {values}; give one or several different {words}."
      )


def _check_splits(train, test):
  if train.class_names != test.class_names:
    raise ValueError(
      f"{train.split!r} has {train.num_classes} classes, {test.split!r} has "
      f"{test.num_classes}. They must be the same, in the same order."
    )
  if train.digest and train.digest == test.digest:
    raise ValueError(
      f"train_split and split are both {test.split!r}: the probe would be "
      "tested on what it was fitted to."
    )


def _warn_of_scarcity(labels, train, shots):
  scarce = np.bincount(labels, minlength=train.num_classes) < shots
  if scarce.any():
    names = [train.class_names[i] for i in np.flatnonzero(scarce)[:5]]
    log.warning(
      "%s %s: %d classes have fewer than %d examples (%s, …); the probe is "
      "fitted to all they have.",
      train.spec,
      train.split,
      scarce.sum(),
      shots,
      ", ".join(names),
    )
