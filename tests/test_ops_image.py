import numpy as np
import pytest
import tensorflow as tf

from input_pipeline import parse_ops
from tests.pictures import encode, picture, run


def test_resize_is_bilinear_without_antialias_and_rounds_half_to_even():
  image = np.arange(16, dtype=np.uint8).reshape(4, 4, 1).repeat(3, -1)
  # Unrounded: 2.5, 4.5, 10.5, 12.5.
  np.testing.assert_array_equal(
    run("resize(2)", image)[..., 0], [[2, 4], [10, 12]]
  )
  # Antialiased: 3.571, 5.143, 9.857, 11.429; truncating would give 3, 5, 9, 11.
  got = run("resize(2, antialias=True)", image)[..., 0]
  np.testing.assert_array_equal(got, [[4, 5], [10, 11]])


def test_overshoot_is_clipped():
  image = 255 * (picture(6, 6) // 128)
  for size in ((5, 4), (7, 5), (9, 7)):
    exact = tf.image.resize(image, size, "bicubic").numpy()
    got = run(f"resize({size}, method='bicubic')", image)
    assert exact.min() < -5 and exact.max() > 260
    np.testing.assert_array_equal(got, np.rint(exact.clip(0, 255)))


def test_resize_against_numpy():
  image = picture(9, 7)
  got = run("resize((4, 12))", image)
  y = (np.arange(4) + 0.5) * 9 / 4 - 0.5
  x = (np.arange(12) + 0.5) * 7 / 12 - 0.5
  rows = np.stack(
    [
      np.interp(y, np.arange(9), image[:, j, c])
      for j in range(7)
      for c in range(3)
    ]
  ).reshape(7, 3, 4)
  want = np.stack(
    [
      np.interp(x, np.arange(7), rows[:, c, i])
      for i in range(4)
      for c in range(3)
    ]
  ).reshape(4, 3, 12)
  np.testing.assert_allclose(got, want.transpose(0, 2, 1), atol=0.501)


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (8, 8)])
def test_resize_small_keeps_the_aspect(shape):
  got = run("resize_small(8)", picture(*shape)).shape
  assert got == tuple(round(s * 8 / min(shape)) for s in shape) + (3,)
  encoded = encode(picture(*shape))
  assert run("decode|resize_small(8)", encoded).shape == got


def test_resize_small_rounds_half_to_even():
  # 25 * 2 / 20 = 2.5 -> 2 and 35 * 2 / 20 = 3.5 -> 4, traced or not.
  for side, want in ((25, 2), (35, 4)):
    image = picture(20, side)
    assert run("resize_small(2)", image).shape == (2, want, 3)
    dynamic = tf.function(
      parse_ops("resize_small(2)"),
      input_signature=[
        {"image": tf.TensorSpec([None, None, 3], tf.uint8)},
      ],
    )
    assert dynamic({"image": image})["image"].shape == (2, want, 3)


def test_central_crop_offsets_round_down():
  image = picture(9, 8)
  np.testing.assert_array_equal(run("central_crop(4)", image), image[2:6, 2:6])
  np.testing.assert_array_equal(
    run("central_crop((3, 5))", image), image[3:6, 1:6]
  )


def test_random_crop_and_flip_reach_every_place_equally():
  image = np.arange(12, dtype=np.uint8).reshape(3, 4, 1).repeat(3, -1)
  crop = parse_ops("random_crop((2, 2))")
  flip = parse_ops("flip_lr")
  corners, flips = [], 0
  for seed in range(600):
    features = {"image": tf.constant(image), "seed": seed}
    patch = crop(features)["image"].numpy()
    corner = int(patch[0, 0, 0])
    y, x = divmod(corner, 4)
    np.testing.assert_array_equal(patch, image[y : y + 2, x : x + 2])
    corners.append(corner)
    mirrored = flip(features)["image"].numpy()
    is_flipped = mirrored[0, 0, 0] == 3
    np.testing.assert_array_equal(
      mirrored, image[:, ::-1] if is_flipped else image
    )
    flips += is_flipped
  counts = np.bincount(corners, minlength=7)[[0, 1, 2, 4, 5, 6]]
  assert counts.sum() == 600 and (np.abs(counts - 100) < 40).all()
  assert 240 < flips < 360


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (8, 8), (1, 100)])
def test_resize_long_keeps_the_aspect(shape):
  got = run("resize_long(10)", picture(*shape)).shape
  assert got == tuple(max(round(s * 10 / max(shape)), 1) for s in shape) + (3,)


def test_resize_small_refuses_to_fill_the_memory():
  image = np.zeros((2, 2560, 3), np.uint8)
  with pytest.raises(ValueError, match="decode_and_central_crop.*256x327680"):
    run("resize_small(256)", image)
  dataset = tf.data.Dataset.from_tensors({"image": encode(image)})
  dataset = dataset.map(parse_ops("decode|resize_small(256)"))
  with pytest.raises(tf.errors.InvalidArgumentError, match="very long image"):
    next(iter(dataset))


def test_the_largest_central_square():
  image = picture(9, 6)
  np.testing.assert_array_equal(run("central_crop", image), image[1:7])
  np.testing.assert_array_equal(
    run("decode|central_crop", encode(image)), image[1:7]
  )


@pytest.mark.parametrize("mode", ["reflect", "symmetric", "constant"])
def test_pad(mode):
  image = picture(5, 4)
  np.testing.assert_array_equal(
    run(f"pad(2, {mode!r})", image),
    np.pad(image, [(2, 2), (2, 2), (0, 0)], mode),
  )
