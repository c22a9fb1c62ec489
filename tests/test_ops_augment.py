import collections
import colorsys
import itertools
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps
from scipy import ndimage

from input_pipeline import parse_ops
from input_pipeline.ops import augment
from tests.pictures import distance, picture, run

IMAGE = (picture(40, 50) * (1.0, 0.8, 0.5)).astype(np.uint8)
LUMA = IMAGE @ np.array([0.299, 0.587, 0.114])


def outcomes(ops: str, image: np.ndarray, seeds: int) -> list[np.ndarray]:
  op = tf.function(parse_ops(ops), autograph=False)
  image = tf.constant(image)
  return [
    op({"image": image, "seed": tf.constant(seed, tf.int64)})["image"].numpy()
    for seed in range(seeds)
  ]


def test_three_augment_does_one_of_three_equally_often():
  grey = np.rint(LUMA)[..., None].repeat(3, -1)
  solarized = np.asarray(ImageOps.solarize(Image.fromarray(IMAGE)))
  counts, sigmas = {"grey": 0, "solarized": 0}, []
  for got in outcomes("three_augment", IMAGE, 300):
    if np.array_equal(got, solarized):
      counts["solarized"] += 1
    elif np.abs(got - grey).max() <= 1:
      counts["grey"] += 1
    else:
      sigmas.append(blur_of(got))
  for count in (*counts.values(), len(sigmas)):
    assert 70 < count < 130
  assert min(sigmas) < 0.4 and max(sigmas) > 1.8
  assert 0.85 < np.mean(sigmas) < 1.25


def blur_of(got: np.ndarray) -> float:
  """The standard deviation of the Gaussian that made `got`, which must fit."""
  inside = (slice(10, -10), slice(10, -10))

  def blurred(sigma: float) -> np.ndarray:
    return ndimage.gaussian_filter(IMAGE.astype(float), (sigma, sigma, 0))

  low, high = 0.05, 2.1
  for _ in range(12):  # The wider the filter, the less of the noise is left.
    sigma = (low + high) / 2
    too_wide = blurred(sigma)[inside].std() < got[inside].std()
    low, high = (low, sigma) if too_wide else (sigma, high)
  assert distance(blurred(sigma)[inside], got[inside]) < 0.5
  return sigma


def test_blur_keeps_flat_images():
  flat = np.full((9, 12, 3), 77, np.uint8)
  for got in outcomes("three_augment", flat, 30):
    np.testing.assert_array_equal(got, flat)


BASES = {
  "brightness": np.zeros([1, 1, 1]),
  "contrast": np.full([1, 1, 1], LUMA.mean()),
  "saturation": LUMA[..., None],
}


@pytest.mark.parametrize("kind", BASES)
def test_color_jitter_blends_from_its_base(kind):
  base = BASES[kind]
  difference = IMAGE - base
  factors = []
  for got in outcomes(f"color_jitter({kind}=0.4)", IMAGE, 60):
    free = (got > 0) & (got < 255) & (np.abs(difference) > 20)
    factor = np.median((got - base)[free] / difference[free])
    want = np.rint(np.clip(base + factor * difference, 0, 255))
    assert np.abs(got - want).max() <= 1
    factors.append(factor)
  assert 0.6 <= min(factors) < 0.7 and 1.3 < max(factors) <= 1.4


def test_color_jitter_turns_the_hue():
  image = np.full((4, 4, 3), (200, 80, 40), np.uint8)
  hue, saturation, value = colorsys.rgb_to_hsv(200, 80, 40)
  turns = []
  for got in outcomes("color_jitter(hue=0.2)", image, 60):
    h, s, v = colorsys.rgb_to_hsv(*got[0, 0].astype(float))
    assert abs(s - saturation) < 0.02 and abs(v - value) <= 1
    turns.append((h - hue + 0.5) % 1 - 0.5)
  assert -0.2 < min(turns) < -0.15 and 0.15 < max(turns) < 0.21


def test_color_jitter_takes_every_order():
  original, done = augment._adjuster, []

  def adjuster(index, image, shift):
    adjust = original(index, image, shift)
    return lambda: done.append(index) or adjust()

  with mock.patch.object(augment, "_adjuster", adjuster):
    for seed in range(120):
      run("color_jitter(0.3, 0.3, hue=0.1)", IMAGE[:2, :2], seed)
  orders = collections.Counter(zip(done[::3], done[1::3], done[2::3]))
  assert set(orders) == set(itertools.permutations((0, 1, 3)))
  assert min(orders.values()) > 7


def test_color_jitter_of_nothing_is_the_identity():
  np.testing.assert_array_equal(run("color_jitter", IMAGE), IMAGE)


def test_random_erasing_is_a_rectangle_of_the_given_kind():
  image = np.full((60, 80, 3), 200, np.uint8)
  shares, ratios, corners, untouched = [], [], [], 0
  for got in outcomes("random_erasing(0.5, fill=7)", image, 400):
    erased = (got == 7).all(-1)
    if not erased.any():
      untouched += 1
      np.testing.assert_array_equal(got, image)
      continue
    rows, columns = (np.flatnonzero(erased.any(axis)) for axis in (1, 0))
    height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
    assert erased.sum() == height * width  # A full rectangle ...
    assert (got[~erased] == 200).all()  # ... and nothing else.
    shares.append(height * width / erased.size)
    ratios.append(width / height)
    if height < 60 and width < 80:
      corners.append((rows[0] / (60 - height), columns[0] / (80 - width)))
  assert 150 < untouched < 250
  assert 0.015 < min(shares) < 0.04 and 0.28 < max(shares) < 0.36
  assert 0.25 < min(ratios) < 0.45 and 2.2 < max(ratios) < 3.8
  assert abs(np.mean(np.log(ratios))) < 0.15
  assert (np.abs(np.mean(corners, 0) - 0.5) < 0.07).all()


def test_random_erasing_with_noise():
  image = np.full((64, 64, 3), 7, np.uint8)
  ops = "random_erasing(1.0, area_min=0.3)"
  first, second = outcomes(ops, image, 2)
  inside = first[(first != 7).any(-1)]
  assert 0.28 < len(inside) / 64**2 < 0.34
  counts = np.bincount(inside.ravel() // 32, minlength=8)
  assert (np.abs(counts / counts.mean() - 1) < 0.25).all()
  assert not np.array_equal(first, second)


def test_random_erasing_leaves_the_image_when_nothing_fits():
  image = picture(2, 90)
  ops = "random_erasing(1.0, area_min=0.9, area_max=1.0, ratio_max=1.0)"
  np.testing.assert_array_equal(run(ops, image), image)
