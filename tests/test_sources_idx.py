"""idx: the files of MNIST's format, as published and as they should not be."""

import gzip
import pathlib
import struct

import numpy as np
import pytest
import tensorflow as tf

from input_pipeline import get_source, train_batches

RNG = np.random.default_rng(0)
IMAGES = {
  "train": RNG.integers(0, 256, [30, 4, 6], np.uint8),
  "t10k": RNG.integers(0, 256, [10, 4, 6], np.uint8),
}
LABELS = {"train": np.arange(30) % 3, "t10k": np.arange(10) % 3}


def idx(array):
  """The bytes that Yann LeCun's page describes."""
  head = struct.pack(">HBB", 0, 8, array.ndim)
  head += b"".join(struct.pack(">I", side) for side in array.shape)
  return head + array.astype(np.uint8).tobytes()


@pytest.fixture
def folder(tmp_path):
  for name, images in IMAGES.items():
    (tmp_path / f"{name}-images-idx3-ubyte.gz").write_bytes(
      gzip.compress(idx(images))
    )
    (tmp_path / f"{name}-labels-idx1-ubyte").write_bytes(idx(LABELS[name]))
  return tmp_path


def test_values_slices_and_names(folder):
  source = get_source(f"idx:{folder}?names=a,b,c", "test[5:]+train[:2]")
  assert source.class_names == ("a", "b", "c")
  want = np.concatenate([IMAGES["t10k"][5:], IMAGES["train"][:2]])
  for index, image in enumerate(want):
    features = source.parse(tf.constant(index, tf.int64))
    np.testing.assert_array_equal(
      features["image"], image[..., None][..., [0] * 3]
    )
  assert source.parse(tf.constant(1, tf.int64))["labels"].numpy() == [
    0
  ]  # 6 % 3
  assert [source.name_of(i).split(": ")[1] for i in (0, 6)] == [
    "test image 5",
    "train image 1",
  ]
  train = get_source(f"idx:{folder}", "train")
  assert (train.num_examples, train.class_names) == (30, ("0", "1", "2"))
  assert train.digest != source.digest
  batch = next(train_batches(train, "flip_lr", batch_size=8, seed=0))
  assert batch["image"].shape == (8, 4, 6, 3)


def test_it_reads_through_tensorflows_file_systems(folder):
  for path in folder.iterdir():
    tf.io.gfile.copy(str(path), f"ram://idx/{path.name}", overwrite=True)
  want = get_source(f"idx:{folder}", "test").digest
  assert get_source("idx:ram://idx", "test").digest == want
  assert get_source("idx:idx", "test", "ram://").digest == want


def spoil(folder, name, change):
  path = pathlib.Path(folder / name)
  path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
  ("name", "change", "words"),
  [
    ("train-labels-idx1-ubyte", lambda d: d[:-1], "29 bytes.*says 30"),
    ("train-images-idx3-ubyte.gz", lambda d: d[:-20], "images.*is damaged"),
    (
      "train-images-idx3-ubyte.gz",
      lambda d: d[:40] + bytes(40) + d[80:],
      "images.*is damaged",
    ),
    ("train-labels-idx1-ubyte", lambda d: d[:6], "ends within its header"),
    ("train-labels-idx1-ubyte", lambda d: b"<htm" + d, "begins with 3c 68"),
    ("train-labels-idx1-ubyte", lambda d: idx(np.zeros(29)), "30 train .* 29"),
  ],
)
def test_damaged_files_are_named(folder, name, change, words):
  spoil(folder, name, change)
  with pytest.raises(ValueError, match=words) as error:
    get_source(f"idx:{folder}", "train")
  assert str(folder) in str(error.value)


def test_what_is_missing_or_unknown(folder):
  with pytest.raises(ValueError, match="/none/train-labels.*apt install"):
    get_source("idx:/none", "train")
  with pytest.raises(ValueError, match="no split 'validation'.*test"):
    get_source(f"idx:{folder}", "validation")
  with pytest.raises(ValueError, match="names 2 classes.*go up to 2"):
    get_source(f"idx:{folder}?names=a,b", "train")
  with pytest.raises(ValueError, match="'classes'.*names"):
    get_source(f"idx:{folder}?classes=3", "train")
  with pytest.raises(ValueError, match="idx:DIR"):
    get_source("idx:", "train")
