import json

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies
from PIL import Image

from input_pipeline import parse_ops
from input_pipeline.ops.exif import exif_orientation
from tests.pictures import AWKWARD, encode, picture

REAL = [[1, 2], [2], [], [0, 3]]


@pytest.fixture
def write(tmp_path):
  """Writes a file and gives its name as an op string quotes it."""

  def write(name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return repr(str(path))

  return write


def label(ops: str, **features):
  """The labels that eager execution gives, which tf.data must give too."""
  features = {k: tf.constant(v) for k, v in features.items()}
  eager = parse_ops(ops)(features)["labels"]
  dataset = tf.data.Dataset.from_tensors(features).map(parse_ops(ops))
  # Batches need one static length.
  assert dataset.element_spec["labels"].shape == eager.shape
  np.testing.assert_array_equal(next(iter(dataset))["labels"], eager)
  assert eager.dtype == tf.int32
  return eager.numpy().tolist()


def test_real_labels_by_position(write):
  ops = f"real_labels({write('real.json', json.dumps(REAL))})"
  for place, entry in enumerate(REAL):
    name = f"val/ILSVRC2012_val_{place + 1:08d}.JPEG"
    got = label(ops, labels=np.int32([7]), name=name)
    assert got == entry + [-1] * (2 - len(entry))


def test_real_labels_by_name(write):
  entries = {"a.jpg": [3], "b.c.png": [0, 1], "folder/d": []}
  ops = f"real_labels({write('real.json', json.dumps(entries))})"
  for name, want in {
    "a": [3, -1],
    "x/y/a.JPEG": [3, -1],
    "b.c.jpg": [0, 1],
    "other/d.jpg": [-1, -1],
  }.items():
    assert label(ops, labels=np.int32([7]), name=name) == want


def test_real_labels_errors(write):
  ops = f"real_labels({write('real.json', json.dumps(REAL))})"
  name = "ILSVRC2012_val_00000005.JPEG"
  with pytest.raises(
    tf.errors.InvalidArgumentError, match="val_00000005 not found in .*real"
  ):
    label(ops, labels=np.int32([7]), name=name)
  with pytest.raises(ValueError, match="needs the feature 'name'.*labels"):
    label(ops, labels=np.int32([7]))
  for text in ("3", "[]"):
    with pytest.raises(ValueError, match="neither a list nor an object"):
      parse_ops(f"real_labels({write('other.json', text)})")
  twice = write(
    "twice.json", json.dumps({"a.jpg": [1], "x/a.png": [2], "b": []})
  )
  with pytest.raises(ValueError, match=r"more than once: \['a'\]"):
    parse_ops(f"real_labels({twice})")


def test_names(write):
  # A bar in the quotes ends no op.
  file = write("the|names.txt", "tabby cat\ndog\n\nwolf\r\n")
  ops = f"names({file})|pad_labels(2)"
  assert label(ops, labels="wolf") == [2, -1]
  assert label(ops, labels=["dog", "tabby cat"]) == [1, 0]
  with pytest.raises(tf.errors.InvalidArgumentError, match="dog, Wolf not fou"):
    label(ops, labels=["dog", "Wolf"])
  with pytest.raises(ValueError, match="empty.txt is empty"):
    parse_ops(f"names({write('empty.txt', '')})")
  with pytest.raises(ValueError, match="labels of this source are int32"):
    label(ops, labels=np.int32([3]))


def test_pad_labels():
  assert label("pad_labels(3)", labels=np.int64([5, 6])) == [5, 6, -1]
  assert label("pad_labels(2)", labels=np.int32([5, 6])) == [5, 6]
  assert label("pad_labels(2)", labels=np.int32(4)) == [4, -1]
  assert label("pad_labels(1)", labels=np.zeros([0], np.int32)) == [-1]
  with pytest.raises(
    tf.errors.InvalidArgumentError, match="3 labels.*allows 2"
  ):
    label("pad_labels(2)", labels=np.int32([1, 2, 3]))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation, order):
  exif = Image.Exif()
  exif.endian = order
  exif[0x010F] = "a camera"
  exif[0x0112] = orientation
  data = encode(picture(8, 8), "JPEG", exif=exif)
  assert exif_orientation(data) == orientation
  # The op ignores it.
  plain = encode(picture(8, 8), "JPEG")
  np.testing.assert_array_equal(
    parse_ops("decode")({"image": tf.constant(data)})["image"],
    parse_ops("decode")({"image": tf.constant(plain)})["image"],
  )


def test_exif_orientation_of_the_awkward_files():
  turned = {
    path.name
    for path in AWKWARD.iterdir()
    if exif_orientation(path.read_bytes()) != 1
  }
  assert turned == {"exif_rotated_90.jpg"}


EXIF = (AWKWARD / "exif_rotated_90.jpg").read_bytes()


@hypothesis.given(strategies.binary(max_size=60), strategies.integers(0, 200))
def test_exif_orientation_survives_anything(data, place):
  for damaged in (data, EXIF[:place] + data + EXIF[place + len(data) :]):
    assert 1 <= exif_orientation(damaged) <= 8
    assert 1 <= exif_orientation(damaged[:place]) <= 8
