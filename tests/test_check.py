"""`input_pipeline.check` — every file is looked at, and named if it is bad."""

import dataclasses
import io
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from PIL import Image

from input_pipeline import check as check_module
from input_pipeline import commands, get_source, headers, inspecting, sources
from input_pipeline.check import check
from input_pipeline.errors import DataError
from tests.test_sources_tfrecord import example, write, write_index

AWKWARD = sorted((pathlib.Path(__file__).parent / "data" / "awkward").iterdir())
BAD = {
  "empty.jpg": "the file is empty",
  "not_an_image.jpg": "Unknown image file format",
  "truncated.jpg": "truncated: the end of the JPEG is missing",
}
GOOD = [path for path in AWKWARD if path.name not in BAD]


def encode(kind: str, mode: str = "RGB", size=(40, 30), **options) -> bytes:
  """An image of noise."""
  pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3))
  image = Image.fromarray(pixels.astype(np.uint8)).convert(mode)
  file = io.BytesIO()
  image.save(file, kind, **options)
  return file.getvalue()


@pytest.fixture
def folder(tmp_path):
  """Makes files of {"train/cat/0.png": bytes} and returns the root."""

  def make(files: dict[str, bytes]) -> str:
    for name, data in files.items():
      path = tmp_path / "images" / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(data)
    return str(tmp_path / "images")

  return make


@pytest.fixture(scope="module")
def awkward(tmp_path_factory):
  """All awkward files as one class of `train`, and its report."""
  root = tmp_path_factory.mktemp("awkward")
  shutil.copytree(AWKWARD[0].parent, root / "train" / "all")
  return root, check(f"folder:{root}")


def reasons(report) -> dict[str, str]:
  return {os.path.basename(bad.name): bad.reason for bad in report.bad}


# Headers, with Pillow as the judge.

MODES = {
  "L": "grey",
  "LA": "grey + alpha",
  "RGB": "RGB",
  "RGBA": "RGBA",
  "P": "palette",
  "CMYK": "CMYK",
  "I;16": "16-bit grey",
}


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name)
def test_headers_say_what_pillow_says(path):
  header = headers.read(path.read_bytes())
  with Image.open(path) as image:
    assert header.format == image.format.lower()
    assert header.mode == MODES[image.mode]
    assert header.orientation == image.getexif().get(0x0112, 1)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_colours_of_bmp_and_webp(mode):
  assert headers.read(encode("BMP", mode)).mode == MODES[mode]
  for options in ({"lossless": True}, {"lossless": False}):
    if mode != "L":
      data = encode("WEBP", mode, **options)
      # Pillow drops an alpha that is full everywhere from lossless files.
      assert headers.read(data).mode == Image.open(io.BytesIO(data)).mode


def test_16_bit_colours():
  pixels = np.zeros((4, 4, 3), np.uint16)
  header = headers.read(tf.io.encode_png(pixels).numpy())
  assert header == headers.Header("png", "16-bit RGB")


def test_the_headers_of_a_jpeg():
  exif = Image.Exif()
  exif[0x0112] = 8
  data = encode("JPEG", exif=exif)
  assert headers.read(data) == headers.Header("jpeg", "RGB", 8)
  # Fill bytes may stand in front of any marker.
  filled = data.replace(b"\xff\xc0", b"\xff\xff\xff\xc0", 1)
  assert headers.read(filled) == headers.Header("jpeg", "RGB", 8)


@pytest.mark.parametrize("path", AWKWARD, ids=lambda path: path.name)
def test_no_bytes_are_refused(path):
  data = path.read_bytes()
  rng = np.random.default_rng(0)
  for stop in range(0, min(len(data), 700), 3):
    cut = data[:stop]
    noise = rng.integers(0, 256, 40, np.uint8).tobytes()
    for found in (cut, cut + noise):
      assert 1 <= headers.read(found).orientation <= 8
      headers.complaint(found)


# What is found.


def test_awkward_files(awkward):
  root, report = awkward
  assert report.images == len(AWKWARD)
  found = reasons(report)
  assert found.keys() == BAD.keys()
  assert all(words in found[name] for name, words in BAD.items())
  assert all(bad.name.startswith(f"{root}/train/all/") for bad in report.bad)
  assert report.classes == {"train": {"all": len(GOOD)}}
  counts = report.counts
  assert counts["orientation"] == {6: 1}
  assert counts["misnamed"] == {"jpg with png in it": 1}
  assert counts["extensions"]["jpeg"] == 1  # UPPER.JPEG
  assert sum(counts["extensions"].values()) == len(GOOD)
  # Pillow is the judge of formats, colours and sizes.
  for name in ("contents", "colours", "height", "width", "shorter side"):
    want = []
    for path in GOOD:
      with Image.open(path) as image:
        want.append(
          {
            "contents": image.format.lower(),
            "colours": MODES[image.mode],
            "height": image.height,
            "width": image.width,
            "shorter side": min(image.size),
          }[name]
        )
    assert sorted(counts[name].elements()) == sorted(want), name
  text = str(report)
  assert "height        1 to 48 pixels, median 48" in text
  assert "1 jpg with png in it: decoded all the same" in text
  assert "6 in 1 images, by EXIF: ignored" in text


CUTS = [
  (kind, cut)
  for kind in ("BMP", "GIF", "JPEG", "PNG", "WEBP")
  for cut in (2, 0.3, 0.8)
]


def test_whatever_is_truncated_is_bad(folder):
  files = {}
  for kind, cut in CUTS:
    data = encode(kind)
    size = cut if cut > 1 else int(cut * len(data))
    files[f"a/{kind}-{cut}.{kind.lower()}"] = data[:-size]
    files[f"a/whole.{kind.lower()}"] = data
  data = encode("JPEG", progressive=True)
  files |= {f"a/{i}.jpg": data[:-i] for i in (1, 2, 300)}
  # Some cameras and programs leave something behind the end.
  files |= {"a/whole-and-more.jpg": data + b"\0" * 16}
  report = check(f"folder:{folder(files)}")
  names = {os.path.basename(name) for name in files}
  assert reasons(report).keys() == {n for n in names if "whole" not in n}
  assert "end of the JPEG is missing" in reasons(report)["1.jpg"]
  assert "end of the PNG is missing" in reasons(report)["PNG-0.8.png"]


def test_reasons(folder):
  tiff = encode("TIFF")
  root = folder(
    {
      "a/0.png": encode("PNG"),
      "a/page.jpg": b"\n<!DOCTYPE HTML><title>Quota exceeded</title>",
      "a/tiff.jpg": tiff,
      "a/heic.jpg": b"\0\0\0\x20ftypheic" + bytes(40),
      "a/scan.TIFF": tiff,
      "a/deep/photo.heic": b"",
      "a/note.txt": b"",
    }
  )
  os.symlink("/nowhere/at/all.png", f"{root}/a/link.png")
  os.mkdir(f"{root}/a/folder.png")
  report = check(f"folder:{root}")
  found = reasons(report)
  assert found.pop("page.jpg") == "it holds an HTML page, no image"
  assert "it holds TIFF, not supported: convert" in found.pop("tiff.jpg")
  assert "it holds HEIC, not supported" in found.pop("heic.jpg")
  assert "No such file" in found.pop("link.png")
  assert "directory" in found.pop("folder.png") and not found
  # F39: they are never read, so they are not bad, but named.
  want = [f"{root}/a/deep/photo.heic", f"{root}/a/scan.TIFF"]
  assert sorted(report.unsupported) == want
  assert f"  unsupported   {root}/a/scan.TIFF\n" in str(report)


def test_classes_of_all_splits(folder):
  # F33: b is empty in test.
  image = encode("PNG")
  files = {f"train/{c}/{i}.png": image for c in "abc" for i in range(4)}
  files |= {f"test/{c}/{i}.png": image for c in "ac" for i in range(2)}
  root = folder(files | {"notes/read.txt": b""})
  report = check(f"folder:{root}")
  assert report.classes == {
    "test": {"a": 2, "b": 0, "c": 2},
    "train": {"a": 4, "b": 4, "c": 4},
  }
  assert "test          4 in 3 classes: a 2, b 0, c 2\n    empty       b" in (
    str(report)
  )
  part = check("folder:images", split="train[:3]", data_dir=str(root)[:-7])
  assert part.images == 3 and part.classes.keys() == {"train[:3]"}
  many = report._replace(classes={"x": {str(i): i for i in range(200)}})
  assert "19900 in 200 classes: 0 to 199 in a class" in str(many)


def test_sources_with_pixels():
  report = check("digits:")
  assert report.images == 1797 and not report.bad
  assert report.counts["height"] == {8: 1797}
  assert {k: sum(v.values()) for k, v in report.classes.items()} == {
    "train": 1437,
    "test": 360,
  }
  assert not report.counts["contents"] and not report.counts["extensions"]
  assert check("fake:6x5,3,20").counts["width"] == {5: 20}


def test_in_a_bucket():
  # TensorFlow's memory file system stands in for gs://.
  for name, data in (("0.png", encode("PNG")), ("1.jpg", b"?"), ("2.tif", b"")):
    tf.io.gfile.makedirs("ram://check/a")
    with tf.io.gfile.GFile(f"ram://check/a/{name}", "wb") as file:
      file.write(data)
  report = check("folder:ram://check")
  assert reasons(report).keys() == {"1.jpg"}
  assert report.unsupported == ("ram://check/a/2.tif",)


# Records in files.


def records(root, *, labels=1, counts=(40, 30, 50)) -> str:
  """TFRecords whose records 45 and 80 are bad: pixels, and label."""

  def make(k):
    image = b"?" if k == 45 else encode("PNG", size=(8, 6))
    label = [9] if k == 80 else [k % 3, 0][:labels]
    return example(image=image, labels=label, name=f"x/{k}.JPG")

  return write(root, counts=counts, make=make)


def test_bad_records(tmp_path):
  root = records(tmp_path, labels=2)
  report = check(f"tfrecord:{root}?classes=3&name=name")
  assert [bad.name.removeprefix(root) for bad in report.bad] == [
    "/train-00001-of-00003, record 5",
    "/train-00002-of-00003, record 10",
  ]
  assert "Unknown image" in report.bad[0].reason
  assert report.bad[1].reason == (
    "a label is outside of 0..2, the classes known"
  )
  # Each label of an example counts: all have a 0, and 39 have it twice.
  assert report.classes["train"]["0"] == 118 + 39
  assert report.counts["misnamed"] == {"jpg with png in it": 118}


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "fewer"])
def test_broken_files(damage, tmp_path):
  root = records(tmp_path)
  path = tmp_path / "train-00001-of-00003"
  data = bytearray(path.read_bytes())
  files = {f"train-0000{i}-of-00003": n for i, n in enumerate((40, 30, 50))}
  if damage == "fewer":
    files[path.name] = 31
  write_index(root, files=files, num_classes=3)
  if damage == "flip":
    data[len(data) // 2] ^= 255
  path.write_bytes(data[: len(data) // 2] if damage == "cut" else data)
  if damage == "remove":
    path.unlink()
  report = check(f"tfrecord:{root}")
  (broken,) = (bad for bad in report.bad if "record " not in bad.name)
  assert broken.name == str(path)
  words = {
    "flip": "corrupted record",
    "cut": "truncated record",
    "remove": "30 records are lost: .*No such file",
    "fewer": "1 records are lost: the file holds fewer records than its index",
  }
  assert re.search(words[damage], broken.reason)
  # What the other files hold is looked at all the same.
  others = [bad.name for bad in report.bad]
  assert f"{root}/train-00002-of-00003, record 10" in others


def test_tfds(tmp_path):
  features = tfds.features.FeaturesDict(
    {
      "image": tfds.features.Image(shape=(None, None, 3)),
      "label": tfds.features.ClassLabel(num_classes=2),
    }
  )
  pixels = np.zeros((4, 4, 3), np.uint8)
  rows = [(k, {"image": pixels, "label": k % 2}) for k in range(6)]
  tfds.disable_progress_bar()
  tfds.dataset_builders.store_as_tfds_dataset(
    name="toy",
    version="1.0.0",
    features=features,
    split_datasets={"train": rows, "test": rows[:3]},
    data_dir=tmp_path,
  )
  report = check("tfds:toy", data_dir=str(tmp_path))
  assert not report.bad
  assert report.classes == {"train": {"0": 3, "1": 3}, "test": {"0": 2, "1": 1}}
  # What no source checks is checked here.
  report = check("tfds:toy?classes=1", split="test", data_dir=str(tmp_path))
  assert [bad.reason for bad in report.bad] == ["a label is outside of 0..0"]


def test_split_names(tmp_path, folder):
  image = encode("PNG")
  assert sources.split_names("fake:8,2,9") == ("train",)
  assert sources.split_names("digits:") == ("train", "test")
  flat = folder({"cat/0.png": image, "dog/0.png": image})
  assert sources.split_names(f"folder:{flat}") == ("train",)
  assert sources.split_names("folder:/nowhere") == ("train",)
  root = records(tmp_path / "records")
  spec = f"tfrecord:{root}"
  assert sources.split_names(spec) == ("train",)
  files = {f"train-0000{i}-of-00003": n for i, n in enumerate((40, 30, 50))}
  globs = {"train": "*-0000[01]-*", "all": "*-0000[01]-*", "test": "*-00002-*"}
  write_index(root, files=files, splits=globs, num_classes=3)
  assert sources.split_names(spec) == ("train", "test")
  assert sources.split_names(f"{spec}/*-00002-*") == ("test",)


# How it is done.


def test_examples_come_in_order_and_few_at_a_time():
  source = get_source("fake:4,3,5000", "train")
  read: list[int] = []

  def parse(index):
    def note(number):
      read.append(int(number))
      return np.zeros([4, 4, 3], np.uint8)

    image = tf.numpy_function(note, [index], tf.uint8)
    labels = tf.zeros([1], tf.int32)
    return {"image": tf.ensure_shape(image, [4, 4, 3]), "labels": labels}

  counted = dataclasses.replace(source, parse=parse)
  tickets = tf.data.Dataset.range(5000).map(lambda index: (index,))
  seen = inspecting.inspect(counted, tickets)
  assert next(seen).id == 0
  time.sleep(0.3)
  assert len(read) <= 16 * (2 * os.cpu_count() + 2)
  assert [one.id for one in seen] == list(range(1, 5000))


def test_what_is_refused(folder):
  with pytest.raises(ValueError, match="Unknown kind of source in 'foldr:x'"):
    check("foldr:x")
  with pytest.raises(ValueError, match="/nowhere is not a folder"):
    check("folder:/nowhere")
  image = encode("PNG")
  root = folder({"train/a/0.png": image, "test/b/0.png": image})
  with pytest.raises(ValueError, match="classes that .*train does not have: b"):
    check(f"folder:{root}")


def test_progress_in_lines(capsys, monkeypatch):
  clock = iter(range(0, 1000, 4))
  monkeypatch.setattr(commands.time, "perf_counter", lambda: next(clock))
  with commands.Progress(20, show=True) as shown:
    for _ in range(5):
      shown.advance(2)
  lines = capsys.readouterr().err.splitlines()
  assert lines[0] == "6/20  0 images/s  eta 0:00:37"
  with commands.Progress(20, show=False) as shown:
    for _ in range(9):
      shown.advance()
  assert capsys.readouterr().err == ""


# The command.


def test_the_program(folder, tmp_path):
  image = encode("JPEG")
  root = folder({"a/0.jpg": image, "a/1.jpg": image[:-9], "a/ 2.jpg": b""})
  fix = tmp_path / "bad.txt"
  found = subprocess.run(
    [sys.executable, "-m", "input_pipeline.check", "folder:images"]
    + [f"--data-dir={tmp_path}", f"--fix-list={fix}"],
    capture_output=True,
    text=True,
  )
  assert found.returncode == 1
  assert f"  bad           {root}/a/1.jpg: it is truncated" in found.stdout
  # What the decoders say of it themselves is kept from the user.
  assert "jpeg" not in found.stderr and "Traceback" not in found.stderr
  bad = [f"{root}/a/ 2.jpg", f"{root}/a/1.jpg"]
  assert sorted(fix.read_text().splitlines()) == bad


@pytest.fixture
def start(monkeypatch, capsys):
  """Runs `commands.start` here: (exit status, what went to stderr)."""
  ours = logging.getLogger("input_pipeline")
  monkeypatch.setattr(ours, "handlers", ours.handlers)
  monkeypatch.setattr(ours, "propagate", ours.propagate)
  monkeypatch.setattr(commands, "_silence_native_code", lambda: None)

  def start(command, *argv):
    monkeypatch.setattr(sys, "argv", ["program", *argv])
    with pytest.raises(SystemExit) as ended:
      commands.start(command, words=["SOURCE", "OUT"])
    return ended.value.code, capsys.readouterr().err.strip()

  return start


def test_exit_status(start):
  def fail(error):
    def command(*_):
      raise error

    return command

  came = []
  status = start(lambda *words: came.append(words) or 0, "a-b", "c", "--v=-1")
  assert status == (0, "") and came == [("a-b", "c")]
  assert start(lambda *_: commands.BAD, "a", "b") == (1, "")
  assert start(fail(DataError("x.jpg: bad")), "a", "b") == (1, "x.jpg: bad")
  lost = tf.errors.ResourceExhaustedError(None, None, "no space")
  for error in (ValueError("no"), OSError("no"), lost):
    status, text = start(fail(error), "a", "b")
    assert status == 2 and "no" in text


@pytest.mark.parametrize(
  "argv, words",
  [
    ([], "Say SOURCE OUT and nothing else beside --flags, not: nothing"),
    (["a", "b", "c"], "not: a b c"),
    (["a", "b", "--fix-lost=x"], "Unknown command line flag 'fix_lost'"),
  ],
)
def test_a_command_line_that_cannot_be(argv, words, start):
  status, text = start(lambda *_: 0, *argv)
  assert status == 2 and words in text


def test_a_fix_list_of_records(tmp_path, monkeypatch):
  ours = logging.getLogger("input_pipeline")
  monkeypatch.setattr(ours, "level", ours.level)
  root = records(tmp_path)
  files = {f"train-0000{i}-of-00003": n for i, n in enumerate((40, 30, 50))}
  write_index(root, files=files, num_classes=3)
  (tmp_path / "train-00000-of-00003").unlink()
  (tmp_path / "train-00000-of-00003").symlink_to("train-00001-of-00003")
  fix = tmp_path / "bad.txt"
  assert check_module._main(f"tfrecord:{root}", "", "", str(fix)) == 1
  assert fix.read_text().splitlines() == [
    f"{root}/train-00000-of-00003 5",
    f"{root}/train-00001-of-00003 5",
    f"{root}/train-00002-of-00003 10",
    f"{root}/train-00000-of-00003",
  ]
  with pytest.raises(tf.errors.NotFoundError):
    check_module._main("digits:", "", "", "/nowhere/bad.txt")
