import importlib.util
import logging
import shutil

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from input_pipeline import eval_batches, get_source, splits


@pytest.fixture
def folder(tmp_path):
  """Makes files of text such as "train/cat/0.png" and returns the root."""

  def make(*paths: str):
    for i, path in enumerate(paths):
      file = tmp_path / path
      file.parent.mkdir(parents=True, exist_ok=True)
      if file.suffix.lower() in (".png", ".jpg"):
        Image.new("RGB", (4, 4), (i, i, i)).save(file, "PNG")
      else:
        file.write_bytes(b"")
    return tmp_path

  return make


def names(source) -> list[str]:
  return [source.name_of(i) for i in range(source.num_examples)]


def label(source, index: int) -> int:
  return int(source.parse(tf.constant(index, tf.int64))["labels"][0])


# Split expressions.


@pytest.mark.parametrize(
  "text, want",
  [
    ("train", range(10)),
    ("train[:]", range(10)),
    ("train[2:5]", range(2, 5)),
    ("train[-3:]", range(7, 10)),
    ("train[:-3]", range(7)),
    ("train[:25%]", range(3)),
    ("train[25%:]", range(3, 10)),
    ("train[-20%:]", range(8, 10)),
    ("train[8:]+train[:2]", [8, 9, 0, 1]),
    ("train[:80%] + train[90%:]", [*range(8), 9]),
  ],
)
def test_slices(text, want):
  got = splits.take_slices(splits.parse_split(text)["train"], 10)
  assert got.tolist() == list(want)


@pytest.mark.parametrize("size", [1, 7, 99, 1437])
def test_percent_slices_meet(size):
  for percent in range(0, 100, 7):
    parts = [
      splits.take_slices(splits.parse_split(text)["a"], size).tolist()
      for text in (f"a[:{percent}%]", f"a[{percent}%:]")
      if text != "a[:0%]"
      and round(size * percent / 100 + 1e-9) not in (0, size)
    ]
    if len(parts) == 2:
      assert sum(parts, []) == list(range(size))


@pytest.mark.parametrize(
  "text, words",
  [
    ("train[", "Cannot read the split"),
    ("", "Cannot read the split"),
    ("train[1:2:3]", "Cannot read the split"),
    ("train[a:]", "Cannot read the split"),
    ("train[:11]", "beyond the split"),
    ("train[:101%]", "beyond the split"),
    ("train[5:5]", "selects none of the 10"),
    ("train[:6]+train[5:]", "twice"),
  ],
)
def test_bad_slices(text, words):
  with pytest.raises(ValueError, match=words):
    splits.take_slices(splits.parse_split(text)["train"], 10)


def test_stratified_order():
  rng = np.random.default_rng(0)
  labels = np.sort(rng.choice(5, 400, p=[0.5, 0.2, 0.15, 0.1, 0.05]))
  order = splits.stratified_order(labels, [f"x/{i}" for i in range(400)])
  assert sorted(order) == list(range(400))
  total = np.bincount(labels)
  for start, stop in ((0, 40), (100, 300), (360, 400), (13, 57)):
    share = np.bincount(labels[order[start:stop]], minlength=5)
    assert (np.abs(share - total * (stop - start) / 400) <= 1.01).all()
  # Inside a class neighbours do not stay together, and the order is fixed.
  assert (np.diff(order[labels[order] == 0]) == 1).mean() < 0.1
  assert order[:5].tolist() == GOLDEN_ORDER


GOLDEN_ORDER = [105, 213, 275, 122, 372]


# get_source.


def test_unknown_kinds():
  with pytest.raises(ValueError, match="digits:, fake:, folder:.*'folder:'"):
    get_source("foldr:x", "train")
  with pytest.raises(ValueError, match="colon"):
    get_source("digits", "train")


# digits:


def test_digits_are_scikit_learns():
  datasets = pytest.importorskip("sklearn.datasets")
  want = datasets.load_digits()
  pixels = np.rint(want.images * 255 / 16).astype(np.uint8)
  seen = []
  for split, size in (("train", 1437), ("test", 360)):
    source = get_source("digits:", split)
    assert source.num_examples == size and source.num_classes == 10
    batches, _ = eval_batches(source, "decode", batch_size=size)
    (batch,) = batches
    row = [int(name.split()[2]) for name in names(source)]
    np.testing.assert_array_equal(batch["image"][..., 1], pixels[row])
    np.testing.assert_array_equal(batch["labels"][:, 0], want.target[row])
    share = np.bincount(batch["labels"][:, 0]) / np.bincount(want.target)
    assert (np.abs(share - size / 1797) < 0.01).all()
    seen += row
  assert sorted(seen) == list(range(1797))


def test_digits_slices_and_digest():
  head = get_source("digits:", "train[:90%]")
  tail = get_source("digits:", "train[90%:]")
  both = get_source("digits:", "train")
  assert names(head) + names(tail) == names(both)
  assert len({s.digest for s in (head, tail, both)}) == 3
  assert get_source("digits:", "train").digest == both.digest
  mixed = get_source("digits:", "test[:5]+train[:5]")
  assert mixed.num_examples == 10


def test_digits_errors(monkeypatch):
  with pytest.raises(ValueError, match="test, train"):
    get_source("digits:", "validation")
  with pytest.raises(ValueError, match="nothing after its colon"):
    get_source("digits:x", "train")
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match=r"pip install 'vit-jax\[quickstart\]'"):
    get_source("digits:", "train")


# fake:


def test_fake_is_a_function_of_split_and_index():
  def load(split, spec="fake:6x5,3,20"):
    source = get_source(spec, split)
    (batch,) = eval_batches(source, "", batch_size=source.num_examples)[0]
    return batch

  train = load("train")
  assert train["image"].shape == (20, 6, 5, 3)
  assert train["labels"][:, 0].tolist() == [i % 3 for i in range(20)]
  np.testing.assert_array_equal(train["image"], load("train")["image"])
  np.testing.assert_array_equal(
    train["image"][7:9], load("train[7:9]")["image"]
  )
  assert (train["image"] != load("test")["image"]).mean() > 0.9
  assert len(np.unique(train["image"].reshape(20, -1), axis=0)) == 20
  assert load("x", "fake:4,3,2")["image"].shape == (2, 4, 4, 3)


@pytest.mark.parametrize(
  "spec", ["fake:", "fake:8", "fake:8,2,0", "fake:a,2,3"]
)
def test_fake_errors(spec):
  with pytest.raises(ValueError, match="fake:SIZE,CLASSES,N"):
    get_source(spec, "train")


# folder:


def test_folder_with_splits_shares_the_classes_of_train(folder, caplog):
  # F33: without b in test, c must keep its index.
  paths = [f"train/{c}/{i}.png" for c in "abc" for i in range(4)]
  paths += [f"test/{c}/{i}.png" for c in "ac" for i in range(4)]
  root = folder(*paths)
  with caplog.at_level(logging.INFO):
    source = get_source(f"folder:{root}", "test")
  assert source.class_names == ("a", "b", "c") and source.num_classes == 3
  assert source.num_examples == 8
  for i, name in enumerate(names(source)):
    assert label(source, i) == "abc".index(name.split("/")[-2])
    known_as = source.parse(tf.constant(i, tf.int64))["name"].numpy().decode()
    assert f"{root}/{known_as}" == name
  assert "Class 'b' has no images" in caplog.text


def test_folder_class_unknown_to_train(folder):
  root = folder("train/cat/0.png", "test/cat/0.png", "test/catt/0.png")
  with pytest.raises(ValueError, match="catt.*did you mean 'cat'"):
    get_source(f"folder:{root}", "test")


def test_folder_without_splits_slices_every_class(folder):
  root = folder(*(f"{c}/{i}.png" for c in "xyz" for i in range(20)))
  head = get_source(f"folder:{root}", "train[:90%]")
  tail = get_source(f"folder:{root}", "all[90%:]")
  for source, count in ((head, 18), (tail, 2)):
    labels = [label(source, i) for i in range(source.num_examples)]
    assert np.bincount(labels).tolist() == [count] * 3
  assert not set(names(head)) & set(names(tail))
  with pytest.raises(ValueError, match=r"x, y, z.*train\[:90%\]"):
    get_source(f"folder:{root}", "test")


def test_folder_class_may_be_called_train(folder):
  root = folder("bus/0.png", "train/0.png")
  source = get_source(f"folder:{root}", "train")
  assert source.class_names == ("bus", "train") and source.num_examples == 2


def test_folder_sorts_classes_by_bytes(folder):
  root = folder(*(f"{c}/0.png" for c in ("10", "2", "1", "b", "Z", "é")))
  source = get_source(f"folder:{root}", "all")
  assert source.class_names == ("1", "10", "2", "Z", "b", "é")


def test_folder_extensions_hidden_and_nested_files(folder, caplog):
  good = ["a/0.JPG", "a/1.jpeg", "a/2.Png", "a/3.bmp", "a/4.gif", "a/5.webp"]
  good += ["a/deep/er/6.png"]
  bad = ["a/.7.png", ".b/8.png", "a/note.txt", "a/README", "a/scan.TIFF"]
  root = folder(*good, *bad, "top.png")
  with caplog.at_level(logging.INFO):
    source = get_source(f"folder:{root}", "all")
  assert sorted(names(source)) == sorted(f"{root}/{path}" for path in good)
  assert source.class_names == ("a",)
  assert "7 images" in caplog.text and "2 png" in caplog.text
  assert "4 other files" in caplog.text and "1 txt" in caplog.text
  assert f"{root}/a/scan.TIFF" in caplog.text


def test_folder_digest_knows_names_but_not_the_place(folder, tmp_path):
  root = folder("in/a/0.png", "in/b/1.png", "in/b/2.png") / "in"
  moved = tmp_path / "elsewhere"
  shutil.copytree(root, moved)
  old, new = (get_source(f"folder:{path}", "all") for path in (root, moved))
  assert old.digest == new.digest
  (moved / "b" / "1.png").rename(moved / "b" / "3.png")
  assert get_source(f"folder:{moved}", "all").digest != old.digest
  assert get_source(f"folder:{root}", "all[:2]").digest != old.digest


def test_folder_paths_join_data_dir(folder):
  root = folder("flowers/a/0.png")
  assert get_source("folder:flowers", "all", str(root)).num_examples == 1
  absolute = get_source(f"folder:{root}/flowers", "all", "/nowhere")
  assert absolute.num_examples == 1


def test_folder_in_a_bucket():
  # TensorFlow's memory file system stands in for gs://.
  for path in ("train/a/0.png", "train/b/0.png", "test/b/1.png"):
    tf.io.gfile.makedirs(f"ram://bucket/{path}".rsplit("/", 1)[0])
    with tf.io.gfile.GFile(f"ram://bucket/{path}", "wb") as file:
      image = np.full((2, 2, 3), 9, np.uint8)
      file.write(tf.io.encode_png(image).numpy())
  source = get_source("folder:ram://bucket", "test", "/data")
  (batch,) = eval_batches(source, "decode|resize(2)", batch_size=1)[0]
  assert batch["labels"].tolist() == [[1]] and (batch["image"] == 9).all()


@pytest.mark.parametrize(
  "paths, name, split, words",
  [
    (["train/a/0.png", "test/a/0.png"], "", "tets", "test, train.*'test'"),
    (["train/a/0.png"], "nowhere", "train", "nowhere is not a folder.*train"),
    (["train/a/0.png"], "trian", "all", "did you mean 'train'"),
    (["train/a/0.png"], "x/y", "all", "x does not exist"),
    (["val/a/0.png", "test/a/0.png"], "", "val", "no 'train'.*test, val"),
    (["val/a/0.png", "test/a/0.png"], "", "train", "'test' but no 'train'"),
    (["0.png", "1.png", "x.txt"], "", "train", "no folders.*2 png, 1 txt"),
    (["a/x.txt", "a/y.tif"], "", "train", "no images.*1 txt, 1 tif"),
    (["train/a/0.png", "val/.keep"], "", "val", "val has no images"),
  ],
)
def test_folder_errors(folder, paths, name, split, words):
  root = folder(*paths)
  with pytest.raises(ValueError, match=words) as error:
    get_source(f"folder:{root}/{name}", split)
  assert str(root) in str(error.value)


def test_folder_needs_a_path():
  with pytest.raises(ValueError, match="folder:PATH"):
    get_source("folder:", "train")
