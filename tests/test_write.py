"""`input_pipeline.write` — the examples of the folder, whatever happens."""

import io
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from input_pipeline import (
  DataError,
  get_source,
  records,
  shards,
  train_batches,
)
from input_pipeline import write as write_module
from input_pipeline.check import check
from input_pipeline.write import write

AWKWARD = pathlib.Path(__file__).parent / "data" / "awkward"
BAD = {"empty.jpg", "not_an_image.jpg", "truncated.jpg"}


def png(value: int, size=(6, 4)) -> bytes:
  file = io.BytesIO()
  Image.new("RGB", size, (value, 255 - value, 7)).save(file, "PNG")
  return file.getvalue()


def make_folder(root, layout: dict[str, int]) -> str:
  """Makes {"train/cat": 3} images, all of them different."""
  value = itertools.count()
  for name, count in layout.items():
    (root / name).mkdir(parents=True)
    for i in range(count):
      (root / name / f"{i}.png").write_bytes(png(next(value)))
  return str(root)


SPLITS = {"train/b": 24, "train/a": 12, "train/c/deep": 4}
SPLITS |= {"test/a": 3, "test/c": 2, "train-clean/a": 1, "notes": 0}


@pytest.fixture
def folder(tmp_path):
  return make_folder(tmp_path / "images", SPLITS)


@pytest.fixture
def out(tmp_path):
  return str(tmp_path / "out")


def contents(out) -> dict[str, bytes]:
  return {p.name: p.read_bytes() for p in pathlib.Path(out).iterdir()}


def examples(spec: str, split: str, folder: str) -> list[tuple]:
  """(name, class, pixels) of a split, in its order."""
  source = get_source(spec, split)
  tickets = [(i,) for i in range(source.num_examples)]
  if not source.addressed:
    tickets = records.read(source.pieces, addressed=False, in_turn=False)
  found = []
  for index, *record in tickets:
    features = source.parse(tf.cast(index, tf.int64), *record)
    name = (
      features["name"].numpy().decode()
      if record
      else (source.name_of(index).removeprefix(f"{folder}/"))
    )
    (label,) = features["labels"].numpy()
    pixels = tf.io.decode_image(features["image"]).numpy().tobytes()
    found.append((name, source.class_names[label], pixels))
  return found


# What is written.


def test_the_examples_are_those_of_the_folder(folder, out):
  written = write(folder, out, shards=4)
  assert written.images == {"test": 5, "train": 40, "train-clean": 1}
  assert written.shards == written.fresh == 4 + 4 + 1
  names = "train", "test", "train-clean", "train[:30%]", "train[25:]+test[:2]"
  for split in names:
    want = examples(f"folder:{folder}", split, folder)
    assert examples(f"tfrecord:{out}", split, folder) == want
  assert not check(f"tfrecord:{out}").bad
  assert "tfrecord:" + out in str(written) and "40 train" in str(written)


def test_every_shard_is_fair_and_training_works(folder, out):
  write(folder, out, shards=4)
  for i in range(4):
    names = shards.names_in(f"{out}/train-0000{i}-of-00004.tfrecord")
    classes = [name.split("/")[1] for name in names]
    assert len(names) == 10
    for name, count in (("b", 6), ("a", 3), ("c", 1)):
      assert abs(classes.count(name) - count) <= 1, classes
  # The name is there for the ops, and the bytes are those of the file.
  source = get_source(f"tfrecord:{out}", "train")
  record = next(iter(tf.data.TFRecordDataset(source.pieces.paths[0])))
  features = source.parse(tf.constant(0, tf.int64), record)
  name = features["name"].numpy().decode()
  assert features["image"].numpy() == pathlib.Path(folder, name).read_bytes()
  batches = train_batches(
    source, "decode_and_random_crop(8)|flip_lr", batch_size=8, seed=0
  )
  epoch = [next(batches) for _ in range(5)]
  assert sorted(np.concatenate([b["id"] for b in epoch])) == list(range(40))


def test_a_folder_without_splits(tmp_path, out):
  folder = make_folder(tmp_path / "flat", {"cat": 5, "train": 4})
  assert write(folder, out).images == {"train": 9}
  for split in ("train", "all", "train[:60%]"):
    want = [
      label for _, label, _ in examples(f"folder:{folder}", split, folder)
    ]
    got = [label for _, label, _ in examples(f"tfrecord:{out}", split, folder)]
    assert got == want
  assert check(f"tfrecord:{out}").images == 9


def test_shards_by_size(tmp_path, out):
  root = tmp_path / "noise" / "a"
  root.mkdir(parents=True)
  rng = np.random.default_rng(0)
  for i in range(5):
    pixels = rng.integers(0, 255, (400, 400, 3), np.uint8)
    Image.fromarray(pixels).save(root / f"{i}.png")  # 480 kB, incompressible.
  folder = str(tmp_path / "noise")
  assert write(folder, out, shard_mb=1).shards == 3
  assert write(folder, f"{out}2", shards=9).shards == 5  # As many as images.
  # What they will have when they are shrunk is what counts.
  assert write(folder, f"{out}3", shard_mb=1, max_size=40).shards == 1


def test_in_a_bucket(folder, tmp_path):
  # TensorFlow's memory file system stands in for gs://.
  local = str(tmp_path / "out")
  write(folder, local)
  for split in pathlib.Path(folder).iterdir():
    for path in split.rglob("*.png"):
      name = path.relative_to(folder)
      tf.io.gfile.makedirs(f"ram://write/{name.parent}")
      tf.io.gfile.copy(str(path), f"ram://write/{name}")
  assert write("ram://write", "ram://out/x").images["train"] == 40
  assert write("ram://write", "ram://out/x/").fresh == 0
  for split in ("train", "test"):
    assert examples("tfrecord:ram://out/x", split, folder) == (
      examples(f"tfrecord:{local}", split, folder)
    )


# Shrinking.


def test_shrinking(tmp_path, out):
  root = tmp_path / "images" / "a"
  root.mkdir(parents=True)
  rng = np.random.default_rng(0)
  for name, size in (("long", (90, 64)), ("high", (48, 60)), ("at", (32, 99))):
    smooth = Image.fromarray(rng.integers(0, 255, (4, 4, 3), np.uint8))
    smooth.resize(size, Image.Resampling.BICUBIC).save(root / f"{name}.png")
  shutil.copy(AWKWARD / "rgba_half_transparent.png", root)
  shutil.copy(AWKWARD / "one_pixel.png", root)
  folder = str(tmp_path / "images")
  write(folder, out, max_size=32)
  found = {}
  for record in tf.data.TFRecordDataset(
    f"{out}/train-00000-of-00001.tfrecord"
  ).as_numpy_iterator():
    feature = tf.train.Example.FromString(record).features.feature
    name = feature["name"].bytes_list.value[0].decode()
    found[name.removeprefix("a/")] = feature["image"].bytes_list.value[0]
  # Never larger, and never another file than needs be.
  for name in ("at.png", "one_pixel.png"):
    assert found[name] == (root / name).read_bytes()
  sides = {"long.png": (32, 45), "high.png": (40, 32)}
  sides["rgba_half_transparent.png"] = (32, 43)
  for name, size in sides.items():
    assert found[name].startswith(b"\xff\xd8")
    got = np.asarray(Image.open(io.BytesIO(found[name])), np.float32)
    assert got.shape == (*size, 3)
    # Pillow's box filter is the judge; 4:2:0 JPEG of quality 95 is between.
    with Image.open(root / name) as image:
      want = image.convert("RGB").resize(size[::-1], Image.Resampling.BOX)
    assert np.abs(got - np.asarray(want, np.float32)).mean() < 3
  assert not check(f"tfrecord:{out}").bad


# Going on.


class Killed(BaseException):
  pass


def test_a_run_goes_on_where_it_was(folder, out, monkeypatch):
  write(folder, f"{out}-whole", shards=4)
  real, written = shards.serialize, itertools.count()

  def serialize(seen, name):
    if next(written) == 29:  # In the third of the train shards.
      raise Killed
    return real(seen, name)

  monkeypatch.setattr(shards, "serialize", serialize)
  with pytest.raises(Killed):
    write(folder, out, shards=4)
  assert "index.json" not in contents(out)
  there = {p: p.stat() for p in pathlib.Path(out).glob("train-*")}
  assert len(there) == 2
  monkeypatch.setattr(shards, "serialize", real)
  assert write(folder, out, shards=4).fresh == 3  # Four of test were there.
  assert all(p.stat() == before for p, before in there.items())
  assert contents(out) == contents(f"{out}-whole")
  # And then there is nothing to do.
  before = {p: p.stat() for p in pathlib.Path(out).iterdir()}
  again = write(folder, out, shards=4)
  assert again.fresh == 0 and again.images["train"] == 40
  assert before == {p: p.stat() for p in pathlib.Path(out).iterdir()}
  assert "nothing was left to do" in str(again)


def test_a_killed_program(tmp_path, out):
  folder = make_folder(tmp_path / "images", {"a": 120, "b": 120})
  slow = (
    "import sys, time; from input_pipeline import shards, write; "
    "real = shards.serialize; "
    "shards.serialize = lambda *x: time.sleep(0.01) or real(*x); "
    "write.write(sys.argv[1], sys.argv[2], shards=12)"
  )
  process = subprocess.Popen(
    [sys.executable, "-c", slow, folder, out], stderr=subprocess.DEVNULL
  )
  while len(list(pathlib.Path(out).glob("train-*"))) < 3:
    assert process.poll() is None
    time.sleep(0.01)
  process.send_signal(signal.SIGKILL)
  process.wait()
  assert "index.json" not in contents(out)
  assert 0 < write(folder, out, shards=12).fresh <= 9
  write(folder, f"{out}-whole", shards=12)
  assert contents(out) == contents(f"{out}-whole")


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "foreign", "more"])
def test_a_damaged_shard_is_written_again(damage, folder, out):
  write(folder, out, shards=4)
  whole = contents(out)
  path = pathlib.Path(out, "train-00002-of-00004.tfrecord")
  data = bytearray(path.read_bytes())
  if damage == "flip":
    data[len(data) // 2] ^= 255
  path.write_bytes(data[: len(data) // 2] if damage == "cut" else data)
  other = str(path).replace("00002-of", "00001-of")
  if damage == "foreign":
    shutil.copy(other, path)
  if damage == "more":
    path.write_bytes(data + pathlib.Path(other).read_bytes())
  if damage == "remove":
    path.unlink()
  else:
    os.remove(f"{out}/index.json")
  assert write(folder, out, shards=4).fresh == 1
  assert contents(out) == whole


def test_a_shard_is_read_before_it_gets_its_name(folder, out, monkeypatch):
  monkeypatch.setattr(shards, "names_in", lambda path: ["another"])
  with pytest.raises(ValueError, match="is not the same when it is read"):
    write(folder, out)
  assert not list(pathlib.Path(out).glob("t*"))


# Bad images.


def test_bad_images_are_all_listed(tmp_path, out):
  root = make_folder(tmp_path / "images", {"b": 30})
  shutil.copytree(AWKWARD, f"{root}/a")
  with pytest.raises(DataError, match="3 of 51 images are bad") as error:
    write(root, out, shards=10)
  text = str(error.value)
  assert all(f"  {root}/a/{name}: " in text for name in BAD)
  assert "the end of the JPEG is missing" in text and "--skip_bad" in text
  assert len(contents(out)) == 10 + 1  # All is there but the index.
  assert "index.json" not in contents(out)

  written = write(root, out, shards=10, skip_bad=True)
  assert written.fresh == 0 and written.images == {"train": 48}
  assert {os.path.basename(bad.name) for bad in written.skipped} == BAD
  assert f"left out: {root}/a/truncated.jpg: it is truncated" in str(written)
  report = check(f"tfrecord:{out}")
  assert not report.bad and report.classes["train"] == {"a": 18, "b": 30}

  # A finished one stays as it is, with or without them.
  whole = contents(out)
  assert write(root, out, shards=10).images == {"train": 48}
  assert contents(out) == whole
  # If a good image is missing, that is another matter.
  names = [name for name in whole if name.startswith("train")]
  path = max((pathlib.Path(out, name) for name in names), key=os.path.getsize)
  *kept, _ = tf.data.TFRecordDataset(str(path)).as_numpy_iterator()
  with tf.io.TFRecordWriter(str(path)) as writer:
    for record in kept:
      writer.write(record)
  os.remove(f"{out}/index.json")
  assert write(root, out, shards=10, skip_bad=True).fresh == 1
  assert contents(out) == whole
  os.remove(f"{out}/index.json")
  with pytest.raises(DataError, match="3 of 51"):
    write(root, out, shards=10)


# What is refused.


@pytest.mark.parametrize(
  "change, words",
  [
    ("max_size", "max_size: 0 then, 3 now"),
    ("shards", "train: 2 shards then, 3 now"),
    ("add", "train/a: 12 images then, 13 now"),
    ("remove", "train/b: 24 images then, 23 now"),
    ("move", r"test/a: 3 images then, 2 now\n  test/c: 2 images then, 3 now"),
    ("rename", "test: files were changed, at last test/a/new.png"),
    ("edit", "test: files were changed, at last test/c/1.png"),
    ("split", "splits: test, train, train-clean then, test, train now"),
  ],
)
def test_changes_are_refused(change, words, folder, out):
  write(folder, out, shards=2)
  options = {"shards": 3 if change == "shards" else 2}
  options["max_size"] = 3 if change == "max_size" else 0
  root, before = pathlib.Path(folder), contents(out)
  if change == "add":
    (root / "train/a/new.png").write_bytes(png(0))
  if change == "remove":
    (root / "train/b/7.png").unlink()
  if change == "move":
    (root / "test/a/0.png").rename(root / "test/c/new.png")
  if change == "rename":
    later = time.time() + 9  # TensorFlow tells whole seconds.
    os.utime(root / "test/a/0.png", (later, later))
    (root / "test/a/0.png").rename(root / "test/a/new.png")
  if change == "edit":
    data = (root / "test/c/1.png").read_bytes()
    (root / "test/c/1.png").write_bytes(data)
    later = time.time() + 9  # TensorFlow tells whole seconds.
    os.utime(root / "test/c/1.png", (later, later))
  if change == "split":
    shutil.rmtree(root / "train-clean")
  with pytest.raises(ValueError, match=words) as error:
    write(folder, out, **options)
  assert "Name another folder, or remove that one" in str(error.value)
  assert contents(out) == before


def test_a_folder_may_be_moved(folder, out, tmp_path):
  write(folder, out)
  shutil.move(folder, tmp_path / "elsewhere")
  assert write(str(tmp_path / "elsewhere"), out).fresh == 0


def test_other_refusals(folder, out, monkeypatch, tmp_path):
  with pytest.raises(ValueError, match="/nowhere is not a folder"):
    write("/nowhere", out)
  for inside in (folder, f"{folder}/out"):
    with pytest.raises(ValueError, match="it would become a class there"):
      write(folder, inside)
  full = tmp_path / "full"
  full.mkdir()
  (full / "mine.txt").write_text("")
  with pytest.raises(ValueError, match="not empty.*In it: mine.txt"):
    write(folder, str(full))
  for options in ({"max_size": -1}, {"shards": 100_000}, {"shard_mb": 0}):
    with pytest.raises(ValueError, match=r"but must be in \d..\d+"):
      write(folder, out, **options)
  usage = shutil.disk_usage("/")._replace(free=1000)
  monkeypatch.setattr(write_module.shutil, "disk_usage", lambda path: usage)
  with pytest.raises(ValueError, match="has 1.0 kB left, but about 3.* kB"):
    write(folder, out)
  monkeypatch.undo()
  assert write(folder, out).images["train"] == 40
