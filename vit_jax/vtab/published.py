"""The ViT paper's own VTAB-1k results (arXiv 2010.11929, Table 9), as data."""

from input_pipeline.vtab import GROUPS, TASKS

# Accuracies on the test sets in percent, in the order of `TASKS`.
_TABLE_9 = {
  "ViT-H/14, JFT": (
    "95.3 85.5 75.2 99.7 97.2 65.0 88.9 83.3 96.7 91.4 76.6 "
    "91.7 63.8 53.1 79.4 63.3 84.5 33.2 51.2"
  ),
  "ViT-L/16, JFT": (
    "95.4 81.9 74.3 99.7 96.7 63.5 87.4 83.6 96.5 89.7 77.1 "
    "86.4 63.1 49.7 74.5 60.5 82.2 36.2 51.1"
  ),
  "ViT-L/16, I21k": (
    "90.8 84.1 74.1 99.3 92.7 61.0 80.9 82.5 95.6 85.2 75.3 "
    "70.3 56.1 41.9 74.7 64.9 79.9 30.5 41.7"
  ),
}

# Model and pre-training -> task -> percent.
PUBLISHED: dict[str, dict[str, float]] = {
  model: dict(zip(TASKS, map(float, row.split()), strict=True))
  for model, row in _TABLE_9.items()
}


def published_means(model: str) -> dict[str, float]:
  """Means over each group of tasks, and over all 19 as "mean", in percent."""
  row = PUBLISHED[model]
  parts = {
    group: [row[name] for name, task in TASKS.items() if task.group == group]
    for group in GROUPS
  } | {"mean": list(row.values())}
  return {name: sum(values) / len(values) for name, values in parts.items()}
