"""The table of VTAB's tasks, against another one and against TFDS itself."""

import fnmatch
import re
import socket

import numpy as np
import pytest
import tensorflow_datasets as tfds

from input_pipeline import DataError, eval_batches, get_source, parse_ops, vtab
from tests import vtab_data

# Written from the benchmark's code, not from ours: data set, the 200 examples
# for validation, the test set, classes, and how many examples the authors count
# for training, validation and test.
TABLE = """
caltech101 caltech101 train[2754:2954] test 102 2754/306/6084
cifar100 cifar100 train[45000:45200] test 100 45000/5000/10000
dtd dtd validation[:200] test 47 1880/1880/1880
oxford_flowers102 oxford_flowers102 validation[:200] test 102 1020/1020/6149
oxford_iiit_pet oxford_iiit_pet train[2944:3144] test 37 2944/736/3669
sun397 sun397/tfds validation[:200] test 397 76128/10875/21750
svhn svhn_cropped train[65931:66131] test 10 65931/7326/26032
patch_camelyon patch_camelyon validation[:200] test 2 262144/32768/32768
eurosat eurosat/rgb train[16200:16400] train[21600:] 10 16200/5400/5400
resisc45 resisc45 train[18900:19100] train[25200:] 45 18900/6300/6300
diabetic_retinopathy diabetic_retinopathy_detection/btgraham-300\
 validation[:200] test 5 35126/10906/42670
clevr_count clevr train[63000:63200] validation 8 63000/7000/15000
clevr_distance clevr train[63000:63200] validation 6 63000/7000/15000
dmlab dmlab validation[:200] test 6 65550/22628/22735
dsprites_location dsprites train[589824:590024] train[663552:] 16\
 589824/73728/73728
dsprites_orientation dsprites train[589824:590024] train[663552:] 16\
 589824/73728/73728
kitti_distance kitti validation[:200] test 4 6347/423/711
smallnorb_azimuth smallnorb test[:200] test[50%:] 18 24300/12150/12150
smallnorb_elevation smallnorb test[:200] test[50%:] 9 24300/12150/12150
"""
# All from which nothing may be cut off, and all that must not be mirrored.
UNCROPPED = {
  "clevr_count",
  "clevr_distance",
  "dmlab",
  "kitti_distance",
  "dsprites_location",
}
UNFLIPPED = {"dsprites_orientation", "smallnorb_azimuth", "dsprites_location"}


def builder_name(task: vtab.Task) -> str:
  return task.source.removeprefix("tfds:").partition(":")[0]


def test_the_table():
  rows = [line.split() for line in TABLE.split("\n") if line]
  assert [row[0] for row in rows] == list(vtab.TASKS)
  for name, builder, val200, test, classes, counts in rows:
    task = vtab.TASKS[name]
    train, validation, tested = map(int, counts.split("/"))
    assert builder_name(task) == builder
    assert task.splits == (
      "train[:800]",
      val200,
      f"train[:800]+{val200}",
      test,
    )
    assert task.num_classes == int(classes)
    assert task.num_test == tested
    # What the authors count are parts of the data set's own splits.
    parts = {
      "train": train,
      val200.partition("[")[0]: validation,
      test.partition("[")[0]: tested,
    }
    if test.startswith("train["):
      parts = {"train": train + validation + tested}
    elif val200.startswith("train["):
      parts["train"] = train + validation
    elif val200.startswith("test["):
      parts["test"] = validation + tested
    assert task.sizes == parts, name
  groups = [task.group for task in vtab.TASKS.values()]
  assert [groups.count(group) for group in vtab.GROUPS] == [7, 4, 8]
  assert groups == sorted(groups, key=vtab.GROUPS.index)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """Metadata of all data sets at their real sizes, without a record."""
  root = tmp_path_factory.mktemp("metadata")
  for task in vtab.TASKS.values():
    builder = tfds.builder(builder_name(task), data_dir=root)
    rng = np.random.default_rng(0)
    infos = [
      tfds.core.SplitInfo(
        name=split,
        shard_lengths=_shards(size, rng),
        num_bytes=size,
        filename_template=tfds.core.ShardedFileTemplate(
          dataset_name=builder.name,
          data_dir=builder.data_dir,
          filetype_suffix="tfrecord",
        ),
      )
      for split, size in (task.sizes | {"extra": 99}).items()
    ]
    builder.info.set_splits(tfds.core.splits.SplitDict(infos))
    builder.data_path.mkdir(parents=True, exist_ok=True)
    builder.info.write_to_directory(builder.data_dir)
  return str(root)


def _shards(size: int, rng) -> list[int]:
  """Files of unequal lengths."""
  cuts = np.sort(rng.choice(np.arange(1, size), min(size // 50, 12), False))
  return np.diff([0, *cuts, size]).tolist()


def positions(source, shard_starts) -> set[tuple[str, int]]:
  """(whole split, place in it) of all examples, no two of which may agree."""
  found = []
  for path, skip, take, _ in zip(*source.pieces):
    split, shard = re.search(r"-(\w+)\.tfrecord-(\d+)-of", path).groups()
    first = shard_starts[split][int(shard)] + skip
    found += [(split, first + i) for i in range(take)]
  assert len(found) == len(set(found)) == source.num_examples
  return set(found)


@pytest.mark.parametrize("name", vtab.TASKS)
def test_positions_in_the_real_data(name, whole):
  task = vtab.TASKS[name]
  vtab.check_data(task, whole)
  sources = [get_source(task.source, split, whole) for split in task.splits]
  version = re.search(r"/(\d+\.\d+\.\d+)/", sources[0].name_of(0)).group(1)
  folder = f"{whole}/{builder_name(task)}/{version}"
  splits = tfds.builder_from_directory(folder).info.splits
  starts = {
    split: np.cumsum([0, *splits[split].shard_lengths]) for split in task.sizes
  }
  train800, val200, both, test = (positions(s, starts) for s in sources)
  assert train800 == {("train", i) for i in range(800)}
  assert len(val200) == 200
  assert both == train800 | val200
  assert len(both) == 1000
  assert not both & test
  assert len(test) == task.num_test
  assert all(source.num_classes == task.num_classes for source in sources)


@pytest.mark.parametrize("name", vtab.TASKS)
def test_what_the_installed_tfds_prepares_fits(name):
  task = vtab.TASKS[name]
  builder = tfds.builder(builder_name(task))
  pattern = task.source.partition("?")[0].split(":")[2]
  for version in (builder.version, *builder.supported_versions):
    assert fnmatch.fnmatchcase(str(version), pattern)
  by_hand = bool(getattr(builder, "MANUAL_DOWNLOAD_INSTRUCTIONS", None))
  assert by_hand == bool(task.by_hand)


def test_presets():
  tasks = vtab.TASKS
  for name, task in tasks.items():
    train, evaluate, input_range = vtab.get_preset("bit_vit")(task)
    assert input_range == "-1,1"
    known = "|".join(filter(None, ["decode", task.image_op, task.label_op]))
    crop = "resize({size*7/6})|random_crop({size})"
    want = "resize({size})" if name in UNCROPPED else crop
    want += "" if name in UNFLIPPED else "|flip_lr"
    assert train == f"{known}|{want}", name
    assert evaluate == f"{known}|resize({{size}})"
    plain = vtab.get_preset("task_adaptation")(task)
    assert plain == (evaluate, evaluate, "0,1")
  assert (
    "binary_to_grey|dsprites_location"
    in vtab.bit_vit(tasks["dsprites_location"]).eval_ops
  )
  with pytest.raises(ValueError, match="'bitvit'.*did you mean 'bit_vit'"):
    vtab.get_preset("bitvit")
  with pytest.raises(ValueError, match="'cifar10'.*did you mean 'cifar100'"):
    vtab.get_task("cifar10")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
  """Small data, and the rows of the table for them."""
  root = tmp_path_factory.mktemp("vtab")
  return vtab_data.make(root), str(root)


def seen_kinds(name: str, images: np.ndarray) -> np.ndarray:
  """What one sees in the fabricated images: [n, 2] of 0..3."""
  halves = np.stack([images[:, :16], images[:, 16:]], 1)  # [n, 2, 16, 32, 3]
  if name.startswith("dsprites"):
    return halves.max((2, 4)).argmax(-1) // 8
  colours = np.array(vtab_data.COLOURS)
  if name.startswith("smallnorb"):
    halves, colours = halves[..., :1], colours[:, :1]
  means = halves.mean((2, 3))[:, :, None]  # [n, 2, 1, c]
  return np.abs(means - colours).sum(-1).argmin(-1)


@pytest.mark.parametrize("name", vtab.TASKS)
def test_labels_of_small_data(name, small):
  tasks, root = small
  task = tasks[name]
  vtab.check_data(task, root)
  source = get_source(task.source, task.splits.test, root)
  ops = vtab.task_adaptation(task).eval_ops.replace("{size}", "32")
  batches, _ = eval_batches(source, ops, batch_size=8)
  batches = list(batches)
  real = np.concatenate([batch["mask"] for batch in batches]) > 0
  assert real.sum() == source.num_examples == task.num_test == 13
  images = np.concatenate([batch["image"] for batch in batches])[real]
  labels = np.concatenate([batch["labels"] for batch in batches])[real]
  # Of two tasks on one data set the second is told by the lower stripe.
  second = name in (
    "clevr_distance",
    "dsprites_orientation",
    "smallnorb_elevation",
  )
  kinds = seen_kinds(name, images)[:, int(second)]
  want = np.array(vtab_data.classes_of(task))[kinds]
  np.testing.assert_array_equal(labels[:, 0], want)
  assert len(set(kinds)) == 4
  for text in vtab.bit_vit(task)[:2]:
    parse_ops(re.sub(r"\{size.*?\}", "32", text))


def test_small_data_are_like_the_real_ones(small):
  tasks, root = small
  for task in tasks.values():
    builder = tfds.builder(builder_name(task), data_dir=root)
    folder = tfds.builder_from_directory(builder.data_dir)
    real, ours = builder.info.features, folder.info.features
    assert set(ours) == set(real)
    for key, feature in real.items():
      if isinstance(feature, tfds.features.Image):
        assert ours[key].shape[-1] == feature.shape[-1]
      else:
        assert repr(ours[key]) == repr(feature)


def test_other_data_are_refused(small, monkeypatch):
  tasks, root = small

  def refuse(*_, **__):
    raise AssertionError("asked the network")

  monkeypatch.setattr(socket.socket, "connect", refuse)
  with pytest.raises(DataError, match="32 examples in 'train', VTAB has 3680"):
    vtab.check_data(vtab.TASKS["oxford_iiit_pet"], root)
  with pytest.raises(ValueError, match=r"/x/downloads/manual before\.$"):
    vtab.check_data(vtab.TASKS["kitti_distance"], "/x")
  for name, words in (
    (
      "resisc45",
      "/x/downloads/manual before. By hand.*the unpacked NWPU-RESISC45",
    ),
    (
      "diabetic_retinopathy",
      "By hand, for this one: trainLabels.csv .* Kaggle",
    ),
  ):
    with pytest.raises(ValueError, match=f"(?s){words}"):
      vtab.check_data(vtab.TASKS[name], "/x")
