"""Fine-tuning of all weights, unit after unit.

The weights that units start from stay on the devices, the images of a task's
training split in memory. A unit that is killed goes on from its last state.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np
from etils import epath

import input_pipeline
from input_pipeline import holding
from vit_jax import (
  build,
  checkpoints,
  evaluators,
  feed,
  images,
  launch,
  sharding,
)
from vit_jax.vtab import programs
from vit_jax.vtab.clock import EVALUATION, TRAINING, Clock
from vit_jax.vtab.record import Measured
from vit_jax.vtab.splits import SELECT, Splits
from vit_jax.vtab.units import Unit

_POINTS = 50  # Of a learning curve.


class Tuner:
  """Measures units by fine-tuning all weights."""

  def __init__(
    self,
    config: Any,
    *,
    num_classes: int,
    longest: int,
    clock: Clock,
    ops: Callable[[str], tuple[str, str]],
    stop: Callable[[], bool],
  ):
    """Compiles, and loads the weights.

    Args:
      config: of the sweep.
      num_classes: of the largest task.
      longest: updates of the longest setting.
      clock: told what time is spent on.
      ops: a task's name -> how its images are prepared for training, and for
        evaluation.
      stop: whether to save and leave.

    Raises:
      ValueError: the config, the devices or the weights forbid it.
    """
    self._config, self._clock = config, clock
    self._ops, self._stop, self._longest = ops, stop, longest
    with clock.spending("compiling"):
      self._programs = programs.compile_all(
        config,
        sharding.make_mesh(config.mesh),
        num_classes=num_classes,
        longest=longest,
      )
    where = jax.tree.map(
      lambda leaf: leaf.sharding, self._programs.state.params
    )
    with clock.spending("weights"):
      self._params = programs.first_weights(
        config, self._programs.init, where, num_classes
      )
    self._held: dict[tuple[str, str], Any] = {}

  def measure(
    self, unit: Unit, splits: Splits, workdir: epath.PathLike
  ) -> Measured:
    """Trains and evaluates one unit, from wherever it stands.

    Raises:
      ValueError, OSError: the data cannot be used.
      FloatingPointError: the final training diverged.
      launch.Terminated: the state is saved.
    """
    source = splits.open(splits.judged)
    with _States(unit, unit.training(workdir), self._clock) as states:
      try:
        state, curve = self._train(unit, splits, states)
      except FloatingPointError as error:
        if unit.stage != SELECT:
          raise
        # Of a setting that is only tried, this is an answer.
        return Measured(0, source, note=str(error))
      correct = self._evaluate(state.params, unit, splits, source)
      if correct is None:
        states.save_and_leave(state, curve)
    return Measured(correct, source, int(state.step), curve)

  def _train(self, unit, splits, states):
    """Returns the trained state and its learning curve."""
    config, clock = unit.setting.config, self._clock
    with clock.spending("data"):
      source, ops = self._training_data(splits)
    batch_size, size = config.input.batch_size, source.num_examples
    schedule, total = build.schedule(config, size)
    every = build.durations(config, size)(
      config.checkpoint.every, "config.checkpoint.every"
    )
    found = states.restore(self._programs.state)
    if found:
      state, points = found
    else:
      rates = np.zeros(self._longest, np.float32)
      rates[:total] = schedule(np.arange(total, dtype=np.int32))
      state, points = self._programs.begin(self._params, rates), []
    curve = _Curve(points, total)
    start = int(state.step)
    clock.plan(-clock.backward * start * batch_size)
    if start == total:
      return state, curve.points
    with clock.spending("data"):
      batches = input_pipeline.train_batches(
        source,
        ops,
        batch_size=batch_size,
        seed=unit.seed,
        start_step=start,
        prefetch=1,
      )
    with (
      clock.spending(TRAINING),
      feed.Feed(
        _labelled(batches, unit, splits),
        self._programs.mesh,
        ahead=max(1, config.input.prefetch),
      ) as ready,
    ):
      for step in range(start, total):
        stop = self._stop()
        if stop or (every and step > start and step % every == 0):
          curve.settle()
          if stop:
            states.save_and_leave(state, curve.points)
          states.save(state, curve.points)
        with clock.spending("waiting for images"):
          batch = next(ready)
        state, metrics = self._programs.step(state, batch)
        curve.settle()  # The previous update's, while this one runs.
        curve.pending = step + 1, metrics["loss"]
        clock.advance(batch_size, training=True)
      curve.settle()
    return state, curve.points

  def _training_data(self, splits):
    """Returns the split in memory and what is left to do with it."""
    key = splits.task, splits.train
    if key not in self._held:
      self._held = {}  # No more than one stage of one task.
      ops = images.sized(
        self._ops(splits.task)[0], images.size_of(self._config)
      )
      source, ops, held = holding.hold(splits.open(splits.train), ops)
      splits.check_labels(held.labels)
      self._held[key] = source, ops
    return self._held[key]

  def _evaluate(self, params, unit, splits, source):
    """Counts the right answers; None if stopped."""
    clock, mesh = self._clock, self._programs.mesh
    batch_size = evaluators.batch_size(self._config.vtab, mesh)
    with clock.spending("data"):
      batches, number = self._judged(splits, source, batch_size)
    with clock.spending(EVALUATION):
      counts = feed.results(
        lambda batch: self._programs.right(params, batch),
        _labelled(batches, unit, splits),
        number,
        mesh,
        stop=self._stop,
        waiting=lambda: clock.spending("waiting for images"),
        done=lambda: clock.advance(batch_size, training=False),
      )
    return None if counts is None else sum(round(float(n)) for n in counts)

  def _judged(self, splits, source, batch_size):
    """Returns the batches of an evaluation and their number.

    The few images of val200 are looked at once for each setting: they stay in
    memory. A test split is read once, and streams.
    """
    ops = images.sized(self._ops(splits.task)[1], images.size_of(self._config))
    if splits.stage != SELECT:
      return input_pipeline.eval_batches(source, ops, batch_size=batch_size)
    key = splits.task, splits.judged
    if key not in self._held:
      self._held[key] = holding.read(source, ops)
    held = self._held[key]
    return _padded(held, batch_size), -(-len(held.images) // batch_size)


class _Curve:
  """Losses of a unit, read one update late so that the device need not wait.

  Attributes:
    points: [update, loss] of about `_POINTS` updates.
    pending: the newest update and its (sum, weight), not read yet.
  """

  def __init__(self, points, total):
    self.points, self.pending = list(points), None
    self._total, self._every = total, max(1, total // _POINTS)

  def settle(self):
    """Reads the newest loss; raises FloatingPointError if it is none."""
    if self.pending is None:
      return
    (step, (value, weight)), self.pending = self.pending, None
    loss = float(value) / float(weight)
    if not math.isfinite(loss):
      raise FloatingPointError(
        f"the loss is {loss} in update {step}; a lower learning rate may help"
      )
    if step % self._every == 0 or step in (1, self._total):
      self.points.append([step, round(loss, 5)])


class _States(contextlib.ExitStack):
  """The states of one unit on disk, of which the newest stays."""

  def __init__(self, unit, directory, clock):
    super().__init__()
    self._unit, self._directory, self._clock = unit, directory, clock
    self._saver: Any = None  # Most units are done before they save anything.

  def restore(self, abstract):
    """Returns state and curve, or None where nothing was saved."""
    if not self._directory.exists():
      return None
    with self._clock.spending("saving"):
      found = checkpoints.restore_latest(
        self._directory, abstract, lambda meta: None
      )
    return found and (found[0], found[1]["curve"])

  def save(self, state, curve):
    """Saves in the background."""
    with self._clock.spending("saving"):
      self._saver = self._saver or self.enter_context(
        checkpoints.Checkpoints(self._directory, keep=1, keep_every=0, best="")
      )
      meta = {"step": int(state.step), "values": {}, "curve": list(curve)}
      self._saver.save(state, meta)

  def save_and_leave(self, state, curve) -> NoReturn:
    """Saves, and raises `launch.Terminated` once that is on disk."""
    self.save(state, curve)
    self._saver.wait()
    raise launch.Terminated(
      f"SIGTERM: step {int(state.step)} of {self._unit} is saved. The same "
      "command goes on from there."
    )


def _labelled(batches: Iterator, unit: Unit, splits: Splits) -> Iterator:
  """Tells each batch which classes there are, and the seed."""
  for batch in batches:
    n = len(batch["mask"])
    yield batch | {
      "classes": np.full(n, splits.num_classes, np.int32),
      "seed": np.full(n, unit.seed, np.int32),
    }


def _padded(held: holding.Held, batch_size: int) -> Iterator:
  """Cuts what is in memory into batches, the last one filled up."""
  for start in range(0, len(held.images), batch_size):
    rows = slice(start, start + batch_size)
    real = len(held.images[rows])
    pad = ((0, batch_size - real), *[(0, 0)] * 3)
    yield {
      "image": np.pad(held.images[rows], pad),
      "labels": np.pad(held.labels[rows], pad[:2], constant_values=-1),
      "mask": np.pad(np.ones(real, np.float32), pad[0]),
    }
