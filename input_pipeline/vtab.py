"""VTAB-1k (arXiv 1910.04867): its 19 tasks as a table, and how images are fed.

A task is a data set, four of its splits and how to make a label of a record.
The positions are those of an unshuffled read of what TensorFlow Datasets
prepared, as in the authors' own code (google-research/task_adaptation); the
name of a task is the one in use there and in later papers. Nothing here knows
how a model is trained on it.

A split's name says what it is for: hyper-parameters are chosen by training on
`train800` and looking at `val200`; then one model is trained on
`train800val200`, and `test`, which is a full test set, is read once.
"""

from collections.abc import Callable
from typing import NamedTuple

from input_pipeline.errors import DataError, suggest
from input_pipeline.sources import get_source

GROUPS = ("natural", "specialized", "structured")
CROP, FLIP = "crop", "flip"


class Splits(NamedTuple):
  """Split expressions of TFDS."""

  train800: str
  val200: str
  train800val200: str
  test: str


class Task(NamedTuple):
  """One row of the table.

  Attributes:
    source: of the pipeline, "tfds:NAME:VERSION"; versions hold stars where all
      of them have the same examples in the same places.
    group: one of `GROUPS`.
    num_classes: labels are 0 … num_classes - 1.
    splits: which examples are for what.
    sizes: examples of each whole split of the data set that the table cuts.
    num_test: examples of `splits.test`, the denominator of the accuracy.
    image_op: op on the decoded image that makes it uint8 in 0..255, or "".
    label_op: op that makes `labels` of other features, or "".
    augment: what leaves the label true: of `CROP` and `FLIP`, those that BiT
      and the ViT paper use (arXiv 1912.11370, appendix).
    by_hand: what has to be downloaded by hand before, or "".
  """

  source: str
  group: str
  num_classes: int
  splits: Splits
  sizes: dict[str, int]
  num_test: int
  image_op: str = ""
  label_op: str = ""
  augment: tuple[str, ...] = (CROP, FLIP)
  by_hand: str = ""


class Preprocessing(NamedTuple):
  """Op strings, with {size} to fill in, and what the model gets to see.

  Attributes:
    train_ops: for batches to train on.
    eval_ops: for validation and test; nothing random.
    input_range: `config.model.input_range`.
  """

  train_ops: str
  eval_ops: str
  input_range: str


def _splits(val200: str, test: str = "test") -> Splits:
  return Splits("train[:800]", val200, f"train[:800]+{val200}", test)


_VALIDATION = _splits("validation[:200]")
_CLEVR = _splits("train[63000:63200]", "validation")
_CLEVR_SIZES = {"train": 70_000, "validation": 15_000}
_DSPRITES = _splits("train[589824:590024]", "train[663552:]")
# The benchmark's text takes the validation examples from the training set; its
# code, and so everybody, from the first half of the test set.
_SMALLNORB = _splits("test[:200]", "test[50%:]")
_SMALLNORB_SIZES = {"train": 24_300, "test": 24_300}

TASKS: dict[str, Task] = {
  "caltech101": Task(
    "tfds:caltech101:3.*.*",
    "natural",
    102,  # With the background.
    _splits("train[2754:2954]"),
    {"train": 3060, "test": 6084},
    6084,
  ),
  "cifar100": Task(
    "tfds:cifar100:3.*.*",
    "natural",
    100,
    _splits("train[45000:45200]"),
    {"train": 50_000, "test": 10_000},
    10_000,
  ),
  "dtd": Task(
    "tfds:dtd:3.*.*",
    "natural",
    47,
    _VALIDATION,
    {"train": 1880, "validation": 1880, "test": 1880},
    1880,
  ),
  "oxford_flowers102": Task(
    "tfds:oxford_flowers102:2.*.*",
    "natural",
    102,
    _VALIDATION,
    {"train": 1020, "validation": 1020, "test": 6149},
    6149,
  ),
  # VTAB began with 3.*.*, which cannot be prepared any more; 4.0.0 repaired
  # broken files and added boxes, with the same number of images.
  "oxford_iiit_pet": Task(
    "tfds:oxford_iiit_pet:4.*.*",
    "natural",
    37,
    _splits("train[2944:3144]"),
    {"train": 3680, "test": 3669},
    3669,
  ),
  "sun397": Task(
    "tfds:sun397/tfds:4.*.*",
    "natural",
    397,
    _VALIDATION,
    {"train": 76_128, "validation": 10_875, "test": 21_750},
    21_750,
  ),
  "svhn": Task(
    "tfds:svhn_cropped:3.*.*",
    "natural",
    10,
    _splits("train[65931:66131]"),
    {"train": 73_257, "test": 26_032},
    26_032,
  ),
  "patch_camelyon": Task(
    "tfds:patch_camelyon:2.*.*",
    "specialized",
    2,
    _VALIDATION,
    {"train": 262_144, "validation": 32_768, "test": 32_768},
    32_768,
  ),
  "eurosat": Task(
    "tfds:eurosat/rgb:2.*.*",
    "specialized",
    10,
    _splits("train[16200:16400]", "train[21600:]"),
    {"train": 27_000},
    5400,
  ),
  "resisc45": Task(
    "tfds:resisc45:3.*.*",
    "specialized",
    45,
    _splits("train[18900:19100]", "train[25200:]"),
    {"train": 31_500},
    6300,
    by_hand="the unpacked NWPU-RESISC45.rar, to which the page of resisc45 in "
    "the catalogue of TensorFlow Datasets has the link",
  ),
  "diabetic_retinopathy": Task(
    "tfds:diabetic_retinopathy_detection/btgraham-300:3.*.*",
    "specialized",
    5,
    _VALIDATION,
    {"train": 35_126, "validation": 10_906, "test": 42_670},
    42_670,
    by_hand="trainLabels.csv and the folders train, test and sample of "
    "Kaggle's competition 'diabetic-retinopathy-detection', whose rules have "
    "to be accepted; preparing it takes OpenCV (pip install "
    "opencv-python-headless)",
  ),
  "clevr_count": Task(
    "tfds:clevr:3.*.*?classes=8",
    "structured",
    8,
    _CLEVR,
    _CLEVR_SIZES,
    15_000,
    label_op="clevr_count",
    augment=(FLIP,),
  ),
  "clevr_distance": Task(
    "tfds:clevr:3.*.*?classes=6",
    "structured",
    6,
    _CLEVR,
    _CLEVR_SIZES,
    15_000,
    label_op="clevr_distance",
    augment=(FLIP,),
  ),
  "dmlab": Task(
    "tfds:dmlab:2.*.*",
    "structured",
    6,
    _VALIDATION,
    {"train": 65_550, "validation": 22_628, "test": 22_735},
    22_735,
    augment=(FLIP,),
  ),
  "dsprites_location": Task(
    "tfds:dsprites:2.*.*?classes=16",
    "structured",
    16,
    _DSPRITES,
    {"train": 737_280},
    73_728,
    image_op="binary_to_grey",
    label_op="dsprites_location",
    augment=(),
  ),
  "dsprites_orientation": Task(
    "tfds:dsprites:2.*.*?classes=16",
    "structured",
    16,
    _DSPRITES,
    {"train": 737_280},
    73_728,
    image_op="binary_to_grey",
    label_op="dsprites_orientation",
    augment=(CROP,),
  ),
  # VTAB began with 3.1.0; 3.2.0 and 3.3.0 changed the description of objects.
  "kitti_distance": Task(
    "tfds:kitti:3.*.*?classes=4",
    "structured",
    4,
    _VALIDATION,
    {"train": 6347, "validation": 423, "test": 711},
    711,
    label_op="kitti_distance",
    augment=(FLIP,),
  ),
  "smallnorb_azimuth": Task(
    "tfds:smallnorb:2.*.*?classes=18",
    "structured",
    18,
    _SMALLNORB,
    _SMALLNORB_SIZES,
    12_150,
    label_op="smallnorb_azimuth",
    augment=(CROP,),
  ),
  "smallnorb_elevation": Task(
    "tfds:smallnorb:2.*.*?classes=9",
    "structured",
    9,
    _SMALLNORB,
    _SMALLNORB_SIZES,
    12_150,
    label_op="smallnorb_elevation",
  ),
}


def get_task(name: str) -> Task:
  """Returns a row of the table.

  Raises:
    ValueError: an unknown name, with the list and the nearest.
  """
  if name not in TASKS:
    raise ValueError(
      f"There is no VTAB task {name!r}. " + suggest(name, TASKS, "Tasks")
    )
  return TASKS[name]


def check_data(task: Task, data_dir: str = "") -> None:
  """Refuses data that are not there, or in which positions mean other images.

  Args:
    task: a row of the table.
    data_dir: where prepared data sets lie.

  Raises:
    ValueError: nothing is prepared there; says how to, and what to get by hand.
    DataError: a split has another number of examples than the benchmark's.
  """
  for split, size in task.sizes.items():
    try:
      found = get_source(task.source, split, data_dir).num_examples
    except ValueError as error:
      by_hand = f" By hand, for this one: {task.by_hand}." * bool(task.by_hand)
      raise type(error)(f"{error}{by_hand}") from None
    if found != size:
      raise DataError(
        f"{task.source} has {found} examples in {split!r}, VTAB has {size}: "
        "its positions would mean other images. Prepare the data again, "
        "completely, in a version that fits."
      )


def bit_vit(task: Task) -> Preprocessing:
  """As BiT and the ViT paper: 448 → a random 384, flipped, in [-1, 1].

  What would change the label is left out, task by task. The other sizes scale
  in the same proportion, 7/6.
  """
  ops = ["resize({size})"]
  if CROP in task.augment:
    ops = ["resize({size*7/6})", "random_crop({size})"]
  if FLIP in task.augment:
    ops.append("flip_lr")
  return _preprocessing(task, ops, "-1,1")


def task_adaptation(task: Task) -> Preprocessing:
  """As the benchmark's own script: squashed to the size, in [0, 1]."""
  return _preprocessing(task, ["resize({size})"], "0,1")


PRESETS: dict[str, Callable[[Task], Preprocessing]] = {
  "bit_vit": bit_vit,
  "task_adaptation": task_adaptation,
}


def get_preset(name: str) -> Callable[[Task], Preprocessing]:
  """Returns a preset: from a task to its `Preprocessing`.

  Raises:
    ValueError: an unknown name, with the list and the nearest.
  """
  if name not in PRESETS:
    raise ValueError(
      f"There is no VTAB preprocessing {name!r}. " + suggest(name, PRESETS)
    )
  return PRESETS[name]


def _preprocessing(
  task: Task, train: list[str], input_range: str
) -> Preprocessing:
  # All that is random comes last, so that what is before may be kept.
  known = ["decode", *filter(None, [task.image_op, task.label_op])]
  return Preprocessing(
    "|".join([*known, *train]),
    "|".join([*known, "resize({size})"]),
    input_range,
  )
