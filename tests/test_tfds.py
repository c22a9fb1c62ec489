"""`tfds:` — data that TensorFlow Datasets prepared, written here by itself."""

import shutil
import socket
import time

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from input_pipeline import eval_batches, get_source, train_batches

LABEL = tfds.features.ClassLabel(names=["cat", "dog"])
FEATURES = tfds.features.FeaturesDict(
  {
    "image": tfds.features.Image(shape=(None, None, 3), encoding_format="png"),
    "label": LABEL,
    "many": tfds.features.Sequence(tfds.features.ClassLabel(num_classes=4)),
    "objects": tfds.features.Sequence({"label": LABEL, "size": np.float32}),
    "number": np.int64,
  }
)


def examples(count: int):
  return [
    (
      k,
      {
        "image": np.full((4, 4, 3), k, np.uint8),
        "label": k % 2,
        "many": list(range(k % 3)),
        "objects": [{"label": 1, "size": 0.5}] * (k % 3),
        "number": 100 + k,
      },
    )
    for k in range(count)
  ]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
  """A data set twice: `toy` in TFRecords, `fast` in ArrayRecords."""
  root = tmp_path_factory.mktemp("tfds")
  tfds.disable_progress_bar()
  for name, file_format in (("toy", "tfrecord"), ("fast", "array_record")):
    tfds.dataset_builders.store_as_tfds_dataset(
      name=name,
      version="1.2.0",
      features=FEATURES,
      split_datasets={"train": examples(20), "test": examples(10)},
      data_dir=root,
      file_format=file_format,
    )
  return root


def read(source, max_labels=2) -> dict[str, np.ndarray]:
  batches, _ = eval_batches(
    source, "decode|resize(4)", batch_size=50, max_labels=max_labels
  )
  (batch,) = batches
  rows = np.argsort(batch["id"])
  rows = rows[batch["mask"][rows] > 0]
  return {key: value[rows] for key, value in batch.items()}


@pytest.mark.parametrize("name", ["toy", "fast"])
@pytest.mark.parametrize(
  "split", ["train", "train[25%:-3]", "train[:80%]+test[:20%]", "test[50%:]"]
)
def test_splits_are_those_of_tfds(name, split, data_dir):
  source = get_source(f"tfds:{name}", split, str(data_dir))
  builder = tfds.builder_from_directory(data_dir / name / "1.2.0")
  if name == "toy":
    examples = tfds.as_numpy(builder.as_dataset(split=split))
  else:
    examples = builder.as_data_source(split=split)
  want = [(x["image"][0, 0, 0], x["label"]) for x in examples]
  got = read(source)
  assert source.class_names == ("cat", "dog")
  assert source.num_examples == len(want) == len(got["id"])
  found = zip(got["image"][:, 0, 0, 0], got["labels"][:, 0])
  assert sorted(found) == sorted(want)
  if name == "toy" and "+" not in split:
    # Positions are those of an unshuffled read, which VTAB counts on.
    np.testing.assert_array_equal(
      got["image"][:, 0, 0, 0], [value for value, _ in want]
    )


def record_of(source):
  index = tf.constant(3, tf.int64)
  if source.addressed:
    return (index,)
  file = tf.data.TFRecordDataset(str(source.pieces.paths[0]))
  return index, next(iter(file.skip(3)))


@pytest.mark.parametrize("name", ["toy", "fast"])
def test_images_stay_encoded_and_features_are_kept(name, data_dir):
  source = get_source(f"tfds:{name}", "train", str(data_dir))
  features = source.parse(*record_of(source))
  assert features["image"].dtype == tf.string
  assert features["labels"].shape == [1]
  value = tf.io.decode_png(features["image"])[0, 0, 0].numpy()
  assert features["number"] == 100 + value
  assert len(features["objects"]["size"]) == value % 3
  assert features["name"].numpy().endswith(b"-00000-of-00001__3")
  assert "record 3" in source.name_of(3)


def test_labels_may_be_any_feature(data_dir):
  source = get_source("tfds:toy:1.*.*?labels=many", "train", str(data_dir))
  assert source.class_names == ("0", "1", "2", "3")
  got = read(source)
  for value, labels in zip(got["image"][:, 0, 0, 0], got["labels"]):
    assert [x for x in labels if x >= 0] == list(range(value % 3))
  # Several objects of one class are one label.
  source = get_source("tfds:toy?labels=objects/label", "test", str(data_dir))
  got = read(source, max_labels=1)
  assert source.class_names == ("cat", "dog")
  for value, labels in zip(got["image"][:, 0, 0, 0], got["labels"]):
    assert labels.tolist() == ([1] if value % 3 else [-1])
  source = get_source(
    "tfds:toy?labels=number&classes=130", "test", str(data_dir)
  )
  assert source.num_classes == 130
  assert (read(source, 1)["labels"][:, 0] >= 100).all()


@pytest.mark.parametrize("name", ["toy", "fast"])
def test_resume_is_exact(name, data_dir):
  source = get_source(f"tfds:{name}", "train", str(data_dir))
  options = {"batch_size": 8, "seed": 1, "streams": 2, "shuffle_buffer": 6}
  ops = "decode|resize(4)|random_crop(3)|flip_lr"
  batches = train_batches(source, ops, **options)
  whole = [next(batches) for _ in range(11)]  # epochs of 2.5 steps
  for step in (1, 3, 9):
    got = next(train_batches(source, ops, start_step=step, **options))
    for key, value in got.items():
      np.testing.assert_array_equal(value, whole[step][key], err_msg=key)


@pytest.fixture
def offline(monkeypatch):
  def refuse(*_, **__):
    raise AssertionError("asked the network")

  monkeypatch.setattr(socket.socket, "connect", refuse)
  monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_missing_data_is_said_at_once(data_dir, offline, monkeypatch):
  begin = time.perf_counter()
  with pytest.raises(ValueError) as error:
    get_source("tfds:eurosat/rgb:2.0.0", "train", str(data_dir))
  assert time.perf_counter() - begin < 10
  for words in (
    f"{data_dir}/eurosat/rgb/2.0.0",
    f"data sets in {data_dir}: fast, toy",
    f"tfds.builder('eurosat/rgb:2.0.0', data_dir='{data_dir}').download_and_",
    f"{data_dir}/downloads/manual",
  ):
    assert words in str(error.value)
  with pytest.raises(ValueError, match=r"versions there: 1\.2\.0"):
    get_source("tfds:toy:2.*.*", "train", str(data_dir))
  # Without a folder it is where TFDS keeps its data.
  monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(data_dir / "x"))
  with pytest.raises(ValueError, match=f"{data_dir}/x/toy/VERSION"):
    get_source("tfds:toy", "train")
  monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(data_dir))
  assert get_source("tfds:toy", "train").num_examples == 20


def test_the_newest_version_and_the_only_config(data_dir, tmp_path):
  for place in (
    "a/1.9.0",
    "a/1.10.0",
    "b/plain/1.2.0",
    "c/x/1.2.0",
    "c/y/1.2.0",
  ):
    shutil.copytree(data_dir / "toy" / "1.2.0", tmp_path / place)
  for spec, place in (
    ("a", "a/1.10.0"),
    ("a:1.9.0", "a/1.9.0"),
    ("b", "b/plain/1.2.0"),
    ("c/y", "c/y/1.2.0"),
  ):
    source = get_source(f"tfds:{spec}", "train", str(tmp_path))
    assert f"{tmp_path}/{place}/" in source.name_of(0)
  with pytest.raises(ValueError, match="several configs.*tfds:c/x, tfds:c/y"):
    get_source("tfds:c", "train", str(tmp_path))


@pytest.mark.parametrize(
  "spec, split, words",
  [
    ("", "train", r"tfds:NAME\[/CONFIG\]\[:VERSION\]"),
    ("toy", "tain", "toy/1.2.0.*'tain'.*test, train; did you mean 'train'"),
    ("toy", "train[90:]", "20 examples"),
    ("toy", "train[5:5]", "selects no example"),
    ("toy?label=x", "train", "Unknown option 'label'.*'labels'"),
    ("toy?labels=lable", "train", "no feature 'lable'.*did you mean 'label'"),
    ("toy?labels=number", "train", "'number' does not tell its classes"),
    ("toy?image=label", "train", "'label' is no image"),
    ("toy?classes=x", "train", "classes=x must be a number"),
  ],
)
def test_what_is_refused(spec, split, words, data_dir):
  with pytest.raises(ValueError, match=words):
    get_source(f"tfds:{spec}", split, str(data_dir))
