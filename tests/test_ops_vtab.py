"""VTAB's labels on invented records; the values are worked out by hand."""

import numpy as np
import pytest
import tensorflow as tf

from input_pipeline import parse_ops

REFUSED = tf.errors.InvalidArgumentError


def label(op: str, **features) -> int:
  """The label that `op` makes; one, int32, whatever was there."""
  features = {"labels": np.int32([-1])} | features
  labels = parse_ops(op)(features)["labels"]
  assert labels.shape == [1] and labels.dtype == tf.int32
  return int(labels[0])


def scene(*depths):
  coords = np.float32([[7, 99, depth] for depth in depths]).reshape(-1, 3)
  return {"pixel_coords": tf.constant(coords)}


def street(*objects):
  """Objects as (type, metres): car, van, truck, pedestrian, …"""
  types, depths = zip(*objects) if objects else ((), ())
  places = np.float32([[0, 0, depth] for depth in depths]).reshape(-1, 3)
  return {
    "type": tf.constant(types, tf.int64),
    "location": tf.constant(places),
  }


def test_clevr_count():
  for count in range(3, 11):
    objects = scene(*[9.0] * count)
    assert label("clevr_count", objects=objects) == count - 3
  for count in (0, 2, 11):
    with pytest.raises(REFUSED, match=f"clevr_count has no class for {count}"):
      label("clevr_count", objects=scene(*[9.0] * count))


CLEVR = (
  "0.1 0|7.99 0|8.0 0|8.01 1|8.5 1|8.51 2|8.6 2|9.0 2|9.01 3|9.5 3|9.51 4"
  "|9.9 4|10.0 4|10.1 5|100.0 5"
)


def test_clevr_distance():
  for text in CLEVR.split("|"):
    depth, want = text.split()
    objects = scene(float(depth), 100.0, float(depth) + 5)
    assert label("clevr_distance", objects=objects) == int(want), depth
  # The nearest counts, wherever it stands in the list.
  assert label("clevr_distance", objects=scene(12, 9.2, 8.2, 30)) == 1
  for depths in ((0.0, 9.0), (100.5,), ()):
    with pytest.raises(REFUSED, match="clevr_distance has no class for"):
      label("clevr_distance", objects=scene(*depths))


@pytest.mark.parametrize(
  "objects, want",
  [
    ([(0, 1)], 0),
    ([(0, 8)], 0),
    ([(0, 8.01)], 1),
    ([(0, 10)], 1),
    ([(2, 20)], 1),
    ([(2, 20.01)], 2),
    ([(0, 30)], 2),
    ([(1, 999)], 2),
    ([(0, 999.5)], 3),
    ([], 3),
    # Only cars, vans and trucks are looked at: nobody who walks or sits (3, 4),
    # no bicycle, tram, or something else.
    ([(kind, 1) for kind in range(3, 8)], 3),
    ([(3, 1), (2, 15)], 1),
    ([(0, 30), (1, 1)], 0),
    ([(0, -2)], 0),
  ],
)
def test_kitti_distance(objects, want):
  assert label("kitti_distance", objects=street(*objects)) == want


def test_kitti_distance_errors():
  with pytest.raises(REFUSED, match="kitti_distance has no class for -100"):
    label("kitti_distance", objects=street((0, -100)))


def test_dsprites():
  location, orientation = "dsprites_location", "dsprites_orientation"
  wanted = {0: 0, 1: 0, 2: 1, 3: 1, 15: 7, 16: 8, 29: 14, 30: 15, 31: 15}
  for step, want in wanted.items():
    assert label(location, label_x_position=np.int64(step)) == want
  wanted = {0: 0, 2: 0, 3: 1, 4: 1, 5: 2, 7: 2, 8: 3, 37: 14, 38: 15, 39: 15}
  for step, want in wanted.items():
    assert label(orientation, label_orientation=np.int64(step)) == want
  for step in (-1, 32):
    with pytest.raises(REFUSED, match=f"{location} has no class for {step}"):
      label(location, label_x_position=np.int64(step))
  with pytest.raises(REFUSED, match=f"{orientation} has no class for 40"):
    label(orientation, label_orientation=np.int64(40))


def test_smallnorb():
  # Each looks at its own feature.
  both = {"label_azimuth": np.int64(17), "label_elevation": np.int64(8)}
  assert label("smallnorb_azimuth", **both) == 17
  assert label("smallnorb_elevation", **both) == 8


def png(image: np.ndarray) -> tf.Tensor:
  return tf.io.encode_png(image.astype(np.uint8))


def test_binary_to_grey():
  image = np.arange(12).reshape(3, 4, 1) % 2
  got = parse_ops("decode|binary_to_grey")({"image": png(image)})["image"]
  assert got.dtype == tf.uint8
  np.testing.assert_array_equal(got, np.tile(255 * image, (1, 1, 3)))
  with pytest.raises(REFUSED, match="0 and 1, but the brightest is 255"):
    parse_ops("decode|binary_to_grey")({"image": png(255 * image)})
  with pytest.raises(ValueError, match="put decode before it"):
    parse_ops("binary_to_grey")({"image": png(image)})


def test_what_is_missing_is_named():
  with pytest.raises(ValueError, match="clevr_count.*needs.*'objects'"):
    label("clevr_count")
  with pytest.raises(ValueError, match="'objects' with 'location' in them"):
    label("kitti_distance", objects=scene(3.0))


def test_ops_in_a_graph():
  """As the pipeline runs them: numbers of objects that are not known before."""
  dataset = tf.data.Dataset.from_generator(
    lambda: ([[1, 2, z]] * count for z, count in ((8.2, 3), (9.7, 9))),
    output_signature=tf.TensorSpec([None, 3]),
  )
  features = dataset.map(
    lambda coords: {
      "labels": tf.constant([-1]),
      "objects": {"pixel_coords": coords},
    }
  )
  for op, want in (("clevr_count", [[0], [6]]), ("clevr_distance", [[1], [4]])):
    got = [x["labels"].numpy().tolist() for x in features.map(parse_ops(op))]
    assert got == want
