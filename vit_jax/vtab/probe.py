"""The frozen-feature mode: one forward pass over each split, then a probe.

Features are computed once, on all devices, and kept in the workdir; a probe is
a matter of seconds on the host. `ridge` is the few-shot probe of the paper,
solved for all strengths at once; `logistic` minimises the cross-entropy.
"""

import functools
import hashlib
import io
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import input_pipeline
from vit_jax import (
  build,
  evaluators,
  feed,
  guard,
  images,
  launch,
  sharding,
  steps,
  trees,
)
from vit_jax.evaluators import fewshot
from vit_jax.vtab import programs
from vit_jax.vtab.clock import Clock
from vit_jax.vtab.record import Measured
from vit_jax.vtab.splits import Splits
from vit_jax.vtab.units import Unit

# Of each probe, what its strength is chosen from unless the config says it.
STRENGTHS = {
  "ridge": (1.0, 16.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0),
  "logistic": (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0, 10000.0),
}
_MOST_ITERATIONS = 300
_FLAT = 1e-5  # Norm of the gradient of the mean loss at which a fit is done.


def strengths(config: Any) -> tuple[float, ...]:
  """Returns what each task's probe chooses its strength from.

  Raises:
    ValueError: an unknown probe.
  """
  trees.check_choice("config.vtab.probe = ", config.vtab.probe, STRENGTHS)
  return tuple(config.vtab.strengths) or STRENGTHS[config.vtab.probe]


class Prober:
  """Measures units by a linear probe of features that stay as they are."""

  def __init__(
    self,
    config: Any,
    *,
    clock: Clock,
    ops: Callable[[str], tuple[str, str]],
    stop: Callable[[], bool],
  ):
    """Compiles, and loads the weights.

    Args:
      config: of the sweep.
      clock: told what time is spent on.
      ops: a task's name -> how its images are prepared for training, and for
        evaluation.
      stop: whether to leave.

    Raises:
      ValueError: the config, the devices or the weights forbid it.
    """
    self._config, self._clock = config, clock
    self._ops, self._stop = ops, stop
    self._mesh = sharding.make_mesh(config.mesh)
    objective, abstract = build.inference(config, self._mesh, num_classes=0)
    where = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    with clock.spending("weights"):
      self._params = programs.first_weights(config, objective.init, where, 0)
    self._extract = steps.make_predict_step(
      objective,
      self._mesh,
      where,
      then=lambda outputs, batch: {
        "features": outputs["pre_logits"],
        "label": batch["labels"][:, 0],
        "mask": batch["mask"],
      },
    )
    self._fits: dict[tuple[str, str], Callable] = {}

  def measure(self, unit: Unit, splits: Splits, workdir: Any) -> Measured:
    """Fits and tests the probe of one unit.

    Raises:
      ValueError, OSError: the data cannot be used.
      launch.Terminated: asked to leave.
    """
    key = (unit.task, unit.stage)
    if key not in self._fits:
      x, y = self._features(splits, splits.train, workdir)
      judged = self._features(splits, splits.judged, workdir)
      with self._clock.spending("probes"):
        kind = self._config.vtab.probe
        classify = _classifier(kind, x, y, splits.num_classes)
      self._fits = {
        key: lambda strength: (classify(strength, judged[0]), judged)
      }
    with self._clock.spending("probes"):
      best, (_, labels) = self._fits[key](unit.setting.values["strength"])
    source = splits.open(splits.judged)
    correct = int(np.sum(best == labels))
    return Measured(correct, source)

  def _features(self, splits, split, workdir):
    """Returns features float64 [n, d] and labels [n], kept on disk."""
    source = splits.open(split)
    ops = images.sized(self._ops(splits.task)[1], images.size_of(self._config))
    kept = self._place(splits, split, source, ops, workdir)
    if kept.exists():
      with np.load(io.BytesIO(kept.read_bytes())) as file:
        return file["features"].astype(np.float64), file["labels"]
    features, labels = self._compute(source, ops)
    splits.check_labels(labels)
    written = io.BytesIO()
    np.savez(written, features=features, labels=labels)
    kept.parent.mkdir(parents=True, exist_ok=True)
    other = kept.parent / f"{kept.name}.tmp"
    other.write_bytes(written.getvalue())
    other.replace(kept)
    return features.astype(np.float64), labels

  def _place(self, splits, split, source, ops, workdir):
    """Names a file after all that its features depend on."""
    config = self._config
    what = [source.digest, ops, config.init_from, list(config.image_size)]
    model = guard.as_json(config.model)
    text = json.dumps([*what, model, config.init_resize, config.init_patch])
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    folder = launch.absolute(str(workdir)) / "features" / splits.task
    return folder / f"{split}-{digest}.npz"

  def _compute(self, source, ops):
    clock = self._clock
    batch_size = evaluators.batch_size(self._config.vtab, self._mesh)
    with clock.spending("data"):
      batches, number = input_pipeline.eval_batches(
        source, ops, batch_size=batch_size
      )
    with clock.spending("evaluation"):
      parts = feed.results(
        lambda batch: self._extract(self._params, batch),
        batches,
        number,
        self._mesh,
        stop=self._stop,
        waiting=lambda: clock.spending("waiting for images"),
        done=lambda: clock.advance(batch_size, training=False),
      )
    if parts is None:
      raise launch.Terminated(
        "SIGTERM: what is done is kept. The same command goes on."
      )
    columns = {key: np.concatenate([p[key] for p in parts]) for key in parts[0]}
    real = columns["mask"] > 0
    return columns["features"][real], columns["label"][real]


def _classifier(probe, x, y, num_classes):
  """Fits; returns (strength, features) -> class of each row."""
  if probe == "ridge":
    fitted = fewshot.fit(x, y, num_classes)
    return lambda strength, features: fewshot.scores(
      fitted, features, strength
    ).argmax(axis=1)
  mean, deviation = x.mean(axis=0), x.std(axis=0) + 1e-5

  def classify(strength, features):
    weights, bias = logistic(
      (x - mean) / deviation, y, num_classes, strength=strength
    )
    return ((features - mean) / deviation @ weights + bias).argmax(axis=1)

  return classify


def logistic(
  x: np.ndarray, y: np.ndarray, num_classes: int, *, strength: float
) -> tuple[np.ndarray, np.ndarray]:
  """Fits a multinomial logistic regression by L-BFGS.

  It minimises sum_i -log softmax(x_i W + b)[y_i] + strength / 2 |W|², which is
  scikit-learn's with C = 1 / strength; the bias is free.

  Args:
    x: `[n, d]`, best with mean 0 and deviation 1.
    y: `[n]`, class indices.
    num_classes: c.
    strength: of the penalty.

  Returns:
    W `[d, c]` and b `[c]`.
  """
  weights = _minimize(
    jnp.asarray(x, jnp.float32),
    jnp.asarray(y, jnp.int32),
    jnp.float32(strength),
    num_classes,
  )
  weights, bias = jax.device_get(weights)
  return weights.astype(np.float64), bias.astype(np.float64)


@functools.partial(jax.jit, static_argnums=3)
def _minimize(x, y, strength, num_classes):
  def loss(params):
    weights, bias = params
    each = optax.softmax_cross_entropy_with_integer_labels(
      x @ weights + bias[None], y
    )
    return each.mean() + strength / (2 * len(x)) * jnp.sum(weights**2)

  solver = optax.lbfgs()
  value_and_grad = optax.value_and_grad_from_state(loss)

  def improve(carry):
    params, state = carry
    value, grad = value_and_grad(params, state=state)
    updates, state = solver.update(
      grad, state, params, value=value, grad=grad, value_fn=loss
    )
    return optax.apply_updates(params, updates), state

  def goes_on(carry):
    count = optax.tree.get(carry[1], "count")
    slope = optax.tree.norm(optax.tree.get(carry[1], "grad"))
    return (count == 0) | ((count < _MOST_ITERATIONS) & (slope > _FLAT))

  start = (jnp.zeros((x.shape[1], num_classes)), jnp.zeros((num_classes,)))
  return jax.lax.while_loop(goes_on, improve, (start, solver.init(start)))[0]
