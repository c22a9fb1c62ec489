"""`digits:` — scikit-learn's 1797 real handwritten digits, 8x8, ten classes.

Splits: `train` (1437) and `test` (360), cut once and for all from a stratified
order; slices of either work.
"""

import gzip
import importlib.util
import pathlib

import numpy as np

from input_pipeline import splits, tables
from input_pipeline.sources import Source

_NUM_TRAIN = 1437


def make(argument: str, split: str, data_dir: str) -> Source:
  """Builds the source; `argument` must be empty, `data_dir` plays no part."""
  del data_dir
  if argument:
    raise ValueError(
      f"digits: takes nothing after its colon, not {argument!r}."
    )
  images, labels = _load()
  order = splits.stratified_order(labels, [str(i) for i in range(len(labels))])
  rows_of = {"train": order[:_NUM_TRAIN], "test": order[_NUM_TRAIN:]}
  sizes = {name: len(rows) for name, rows in rows_of.items()}
  chosen = tables.select_rows("digits:", split, sizes)
  rows = np.concatenate([rows_of[name][at] for name, at in chosen.items()])
  return tables.make_source(
    images[rows],
    labels[rows],
    spec="digits:",
    split=split,
    class_names=tuple("0123456789"),
    name_of=lambda index: f"digits: image {rows[index]} of scikit-learn's list",
  )


def split_names(argument: str, data_dir: str) -> tuple[str, ...]:
  """Both splits, whatever the arguments."""
  del argument, data_dir
  return ("train", "test")


def _load() -> tuple[np.ndarray, np.ndarray]:
  """All digits: uint8 [1797, 8, 8, 1] and int32 [1797]."""
  package = importlib.util.find_spec("sklearn")
  if package is None or not package.submodule_search_locations:
    raise ValueError(
      "The source digits: comes with scikit-learn, which is not installed. "
      "Type: pip install 'vit-jax[quickstart]'"
    )
  # Importing scikit-learn costs a second or two of start-up, its table 50 ms.
  root = pathlib.Path(package.submodule_search_locations[0])
  table = root / "datasets" / "data" / "digits.csv.gz"
  if table.exists():
    text = gzip.decompress(table.read_bytes()).decode()
    rows = np.array(text.replace("\n", ",").rstrip(",").split(","), np.float64)
    rows = rows.reshape(-1, 65)
    pixels, labels = rows[:, :64], rows[:, 64]
  else:
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
  images = np.rint(pixels * 255 / 16).astype(np.uint8).reshape(-1, 8, 8, 1)
  return images, labels.astype(np.int32)
