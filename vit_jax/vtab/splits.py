"""The data that a stage may read of a task, and no other.

A stage is handed one `Splits`, which holds the two split expressions it needs:
whatever code chooses hyper-parameters has no way to the test split.
"""

import dataclasses

import numpy as np

import input_pipeline
from input_pipeline import vtab

SELECT, FINAL = "select", "final"
_READS = {SELECT: ("train800", "val200"), FINAL: ("train800val200", "test")}


@dataclasses.dataclass(frozen=True, eq=False)
class Splits:
  """Two splits of a task: one to train on, one to judge by.

  Attributes:
    task: its name.
    stage: "select" or "final".
    source: the task's data set, see `input_pipeline.get_source`.
    data_dir: where prepared data sets lie.
    num_classes: of the task.
    expressions: a split's name -> which examples these are.
    sizes: a split's name -> its examples, where the benchmark fixes them.
  """

  task: str
  stage: str
  source: str
  data_dir: str
  num_classes: int
  expressions: dict[str, str]
  sizes: dict[str, int]
  _opened: dict[str, input_pipeline.Source] = dataclasses.field(
    default_factory=dict, init=False
  )

  @property
  def train(self) -> str:
    """Name of the split to train on."""
    return _READS[self.stage][0]

  @property
  def judged(self) -> str:
    """Name of the split that gives the accuracy."""
    return _READS[self.stage][1]

  def open(self, name: str) -> input_pipeline.Source:
    """Opens a split by its name in the table of tasks, once.

    Raises:
      ValueError: the stage does not read this split, or there is no data.
      input_pipeline.DataError: the split is not the benchmark's.
    """
    if name not in self.expressions:
      raise ValueError(
        f"{self.task}: the stage {self.stage!r} reads "
        f"{' and '.join(self.expressions)}, never {name!r}: hyper-parameters "
        "are chosen without the test split, which only the final stage opens."
      )
    if name not in self._opened:
      self._opened[name] = self._open(name)
    return self._opened[name]

  def _open(self, name):
    source = input_pipeline.get_source(
      self.source, self.expressions[name], self.data_dir
    )
    size = self.sizes.get(name, source.num_examples)
    if source.num_examples != size or source.num_classes != self.num_classes:
      raise input_pipeline.DataError(
        f"{self.task}: {self.source} {source.split} has {source.num_examples} "
        f"examples of {source.num_classes} classes, VTAB {size} of "
        f"{self.num_classes}."
      )
    return source

  def check_labels(self, labels: np.ndarray) -> None:
    """Refuses labels that are none of the task's classes.

    Raises:
      input_pipeline.DataError: says which there are.
    """
    if labels.min() < 0 or labels.max() >= self.num_classes:
      raise input_pipeline.DataError(
        f"{self.task}: {self.source} has the labels {labels.min()} to "
        f"{labels.max()}; they should be 0 to {self.num_classes - 1}."
      )


def for_stage(
  stage: str, name: str, task: vtab.Task, data_dir: str = ""
) -> Splits:
  """Returns what a stage may read: "final" is the only way to the test split.

  Args:
    stage: "select" or "final".
    name: of the task.
    task: its row of the table.
    data_dir: where prepared data sets lie.
  """
  expressions = {split: getattr(task.splits, split) for split in _READS[stage]}
  sizes = {"test": task.num_test} if stage == FINAL else {}
  return Splits(
    name,
    stage,
    task.source,
    data_dir,
    task.num_classes,
    expressions,
    sizes,
  )
