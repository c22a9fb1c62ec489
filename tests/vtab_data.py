"""VTAB's 16 data sets in small: the real features, invented examples.

    tasks = make(directory)
    task = tasks["clevr_count"]
    get_source(task.source, task.splits.test, str(directory))

Every task has 24 examples for `train800`, 8 for `val200` and 13 for `test`.
Classes can be told apart by their colour, except where the real images have no
colours: there a brighter or a higher square tells them.
"""

import pathlib
import re

import numpy as np
import tensorflow_datasets as tfds

from input_pipeline import vtab

TRAIN, VALIDATION, TEST = 24, 8, 13
_SIDE = 32  # Pixels.
COLOURS = ((220, 40, 40), (40, 200, 60), (50, 60, 230), (230, 220, 60))
_OBJECT_DEPTHS = (7.5, 8.25, 8.75, 9.25, 9.75, 11.0)  # One of each class.
_VEHICLE_DEPTHS = (4.0, 14.0, 50.0)  # The fourth class has no vehicle.


def scaled(tasks: dict[str, vtab.Task]) -> dict[str, vtab.Task]:
  """Rows whose splits are as many examples as the fabricated data have."""
  return {name: _scaled(task) for name, task in tasks.items()}


def make(directory: str | pathlib.Path) -> dict[str, vtab.Task]:
  """Writes all data sets below `directory` and returns the rows for them.

  The rows of `input_pipeline.vtab.TASKS` with other splits; pass `directory` as
  `data_dir`.
  """
  tfds.disable_progress_bar()
  tasks = scaled(vtab.TASKS)
  for spec in {task.source.partition("?")[0]: None for task in tasks.values()}:
    same = [t for t in tasks.values() if t.source.partition("?")[0] == spec]
    _write(directory, spec, same)
  return tasks


def _scaled(task: vtab.Task) -> vtab.Task:
  name, start = re.fullmatch(r"(\w+)\[(\d*):\d+\]", task.splits.val200).groups()
  first = TRAIN if start else 0
  val200 = f"{name}[{first or ''}:{first + VALIDATION}]"
  test = re.sub(r"\[\d+:\]", f"[{TRAIN + VALIDATION}:]", task.splits.test)
  sizes = {split: 0 for split in task.sizes}
  sizes["train"] = TRAIN
  sizes[name] = max(sizes[name], first + VALIDATION)
  if "%" in test:
    sizes["test"] = 2 * TEST
  elif "[" in test:
    sizes["train"] += TEST
  else:
    sizes[test] = TEST
  splits = vtab.Splits(
    f"train[:{TRAIN}]", val200, f"train[:{TRAIN}]+{val200}", test
  )
  return task._replace(splits=splits, sizes=sizes, num_test=TEST)


def _write(directory, spec: str, tasks: list[vtab.Task]) -> None:
  """Writes one data set, which serves all of `tasks`."""
  name, _, config = spec.split(":")[1].partition("/")
  builder = tfds.builder(spec.split(":")[1], data_dir=directory)
  features = {
    key: _small(feature) for key, feature in builder.info.features.items()
  }
  features = tfds.features.FeaturesDict(features)
  tfds.dataset_builders.store_as_tfds_dataset(
    name=name,
    version=str(builder.version),
    config=config or None,
    features=features,
    split_datasets={
      split: [
        (k, _example(name, features, split, k, tasks)) for k in range(size)
      ]
      for split, size in tasks[0].sizes.items()
    },
    data_dir=directory,
  )


def _small(feature):
  """The feature as it is, except that images are small and quickly written."""
  if isinstance(feature, tfds.features.Image):
    shape = (_SIDE, _SIDE, feature.shape[-1])
    return tfds.features.Image(shape=shape, encoding_format="png")
  return feature


def classes_of(task: vtab.Task) -> tuple[int, ...]:
  """The four classes that occur, first and last among them."""
  last = task.num_classes - 1
  return (0, 1, task.num_classes // 2, last) if last > 2 else (0, last, 0, last)


def _example(name: str, features, split: str, k: int, tasks) -> dict:
  """The k-th example: its two kinds are what can be seen, one for each task."""
  rng = np.random.default_rng([k, *split.encode()])
  kinds = (k % 4, k // 4 % 4)
  labels = [classes_of(task)[kind] for task, kind in zip(tasks, kinds)]
  example = {key: _any_value(feature, rng) for key, feature in features.items()}
  image = _binary_image(kinds) if name == "dsprites" else _image(kinds, rng)
  example["image"] = image[..., : features["image"].shape[-1]]
  if name == "clevr":
    count, depth = labels
    example["objects"] = [
      _any_value(features["objects"].feature, rng)
      | {"pixel_coords": np.float32([9, 9, _OBJECT_DEPTHS[depth] + i])}
      for i in range(3 + count)
    ]
  elif name == "kitti":
    places = [(3, 1.0)]  # A pedestrian, who does not count.
    places += [(k % 3, z) for z in _VEHICLE_DEPTHS[labels[0] : labels[0] + 1]]
    example["objects"] = [
      _any_value(features["objects"].feature, rng)
      | {"type": kind, "location": np.float32([1, 1, z])}
      for kind, z in places
    ]
  elif name == "dsprites":
    location, orientation = labels
    example["label_x_position"] = 2 * location + k % 2
    example["label_orientation"] = int(np.ceil(2.5 * orientation))
  elif name == "smallnorb":
    example["label_azimuth"], example["label_elevation"] = labels
  else:
    example["label"] = labels[0]
  return example


def _image(kinds: tuple[int, int], rng) -> np.ndarray:
  """Two stripes, each in the colour of its kind: uint8 [h, w, 3]."""
  image = rng.integers(-25, 25, (_SIDE, _SIDE, 3))
  image[: _SIDE // 2] += np.array(COLOURS[kinds[0]])
  image[_SIDE // 2 :] += np.array(COLOURS[kinds[1]])
  return np.clip(image, 0, 255).astype(np.uint8)


def _binary_image(kinds: tuple[int, int]) -> np.ndarray:
  """Two squares, each at the place of its kind: 0 and 1, uint8 [h, w, 1]."""
  image = np.zeros((_SIDE, _SIDE, 1), np.uint8)
  for row, kind in enumerate(kinds):
    image[16 * row : 16 * row + 8, 8 * kind : 8 * kind + 8] = 1
  return image


def _any_value(feature, rng):
  """A value that the feature accepts."""
  kinds = tfds.features
  if isinstance(feature, dict | kinds.FeaturesDict):
    return {key: _any_value(part, rng) for key, part in feature.items()}
  if isinstance(feature, kinds.Sequence):
    return [_any_value(feature.feature, rng)]
  if isinstance(feature, kinds.Image):
    return rng.integers(0, 255, feature.shape).astype(np.uint8)
  if isinstance(feature, kinds.ClassLabel):
    return int(rng.integers(feature.num_classes))
  if isinstance(feature, kinds.Text):
    return f"text {rng.integers(1000)}"
  if isinstance(feature, kinds.BBoxFeature):
    return kinds.BBox(0.1, 0.2, 0.6, 0.7)
  return rng.random(feature.shape).astype(feature.np_dtype)
