"""Invented results of a VTAB sweep, with known accuracies."""

import math

from input_pipeline.vtab import TASKS
from vit_jax.vtab.published import PUBLISHED

HYPERS = ({"lr": 0.01, "total": "500"}, {"lr": 0.01, "total": "2500"})
PAPER = "ViT-L/16, I21k"


def result(task: str, correct: int, **changes) -> dict:
  n = changes.get("n", TASKS[task].num_test)
  return {
    "task": task,
    "group": TASKS[task].group,
    "protocol": "augreg",
    "hyper": HYPERS[1],
    "seed": 0,
    "stage": "final",
    "split": TASKS[task].splits.test,
    "accuracy": correct / n,
    "correct": correct,
    "n": n,
    "input_range": "-1,1",
    "image_size": [384],
    "source": TASKS[task].source,
    "source_version": "1.0.0",
    "revision": "abc1234",
    "seconds": 12.0,
  } | changes


def sweep(seeds=(0,), shift=0.0, **changes) -> list[dict]:
  """A whole sweep, each test set so well as the paper's L/16, plus a shift.

  Args:
    seeds: a seed s takes s points off each accuracy.
    shift: points to add.
    **changes: of every result.
  """
  found = []
  for name, task in TASKS.items():
    for seed in seeds:
      percent = PUBLISHED[PAPER][name] + shift - seed
      correct = round(task.num_test * percent / 100)
      found.append(result(name, correct, seed=seed, **changes))
      for hyper, right in zip(HYPERS, (100, 100 + seed * 10 + 20)):
        found.append(
          result(
            name,
            right,
            hyper=hyper,
            seed=seed,
            stage="select",
            split=task.splits.val200,
            n=200,
            **changes,
          )
        )
  return found


def curves() -> dict:
  """Losses of all tasks that fall, and one that leaves the numbers."""
  found = {
    (task, text): [
      (step, 3 * math.exp(-step * rate / total) + 0.1 * math.sin(step))
      for step in range(1, total, 5)
    ]
    for task in TASKS
    for text, rate, total in (
      ("lr=0.01,total=500", 4, 500),
      ("lr=0.01,total=2500", 6, 2500),
    )
  }
  found["svhn", "lr=0.01,total=500"][9] = (46, math.nan)
  return found
