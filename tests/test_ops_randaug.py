"""The 16 transforms against PIL and numpy, quirks included."""

import math
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps

from input_pipeline import parse_ops
from input_pipeline.ops import randaug
from tests.pictures import picture, run, scene

MAGNITUDES = (0, 10, 15, 20)
SHAPES = ((30, 44), (224, 224), (280, 300))
DRAWS = (0.9, 0.3, 0.6)  # Sign +, and the centre of the cutout.


def transform(name: str, image: np.ndarray, magnitude: int, draws=DRAWS):
  function = randaug.TRANSFORMS[name]
  return function(
    tf.constant(image), magnitude / 10, tf.constant(draws)
  ).numpy()


def pil(function, image: np.ndarray, *args) -> np.ndarray:
  image = Image.fromarray(image.astype(np.uint8))
  return np.asarray(function(image, *args))


def blend(base, image, s):
  return np.clip(base + (1.8 * s + 0.1) * (image - base), 0, 255)


def smooth(image):
  """The mean of 3x3 pixels, the middle one five times."""
  h, w, _ = image.shape
  total = 4.0 * image[1:-1, 1:-1]
  for dy in range(3):
    for dx in range(3):
      total += image[dy : h - 2 + dy, dx : w - 2 + dx]
  return total / 13


def sharpness(image, s):
  result = image.astype(float)
  inner = image[1:-1, 1:-1]
  result[1:-1, 1:-1] = blend(np.floor(smooth(image) + 1e-4), inner, s)
  return result


def grey(image):
  return np.floor(image @ [0.2989, 0.587, 0.114] * 255.5 / 255)[..., None]


def flat(image):
  return min(image.shape[0] * image.shape[1] // 256, 255)


def stretch(image):
  low, high = image.min((0, 1)), image.max((0, 1))
  return (image - low) * 255 / (high - low)


# name -> (image as int, s) -> what it must be, before truncation.
EXACT = {
  "invert": lambda x, s: 255 - x,
  "equalize": lambda x, s: pil(ImageOps.equalize, x),
  "posterize": lambda x, s: (
    pil(ImageOps.posterize, x, int(4 * s)) if s else x // 128 * 128
  ),
  "solarize": lambda x, s: pil(
    ImageOps.solarize, x, {0: 0, 10: 0, 15: 128, 20: 0}[round(10 * s)]
  ),
  "solarize_add": lambda x, s: np.where(
    x < 128, np.minimum(x + int(110 * s), 255), x
  ),
}
CLOSE = {
  "autocontrast": lambda x, s: stretch(x),
  "color": lambda x, s: blend(grey(x), x, s),
  "contrast": lambda x, s: blend(flat(x), x, s),
  "brightness": lambda x, s: blend(0, x, s),
  "sharpness": sharpness,
}


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("name", [*EXACT, *CLOSE])
def test_colours(name, magnitude):
  for shape in SHAPES:
    image = scene(*shape) // 4 * 3 + 20
    wanted = (EXACT | CLOSE)[name](image.astype(int), magnitude / 10)
    error = np.abs(transform(name, image, magnitude) - np.floor(wanted + 1e-4))
    if name in EXACT:
      assert error.max() == 0
    else:  # float32 and float64 may truncate to different sides.
      assert error.max() <= 4 and (error > 0).mean() < 0.05


@pytest.mark.parametrize("name", ["autocontrast", "equalize"])
def test_flat_channels_stay(name):
  image = np.full((8, 8, 3), (0, 90, 255), np.uint8)
  np.testing.assert_array_equal(transform(name, image, 10), image)


def sources(name, shape, s):
  """y, x from which each pixel comes, float64 [h, w] each."""
  y, x = np.mgrid[: shape[0], : shape[1]].astype(float)
  if name == "rotate":
    my, mx = (shape[0] - 1) / 2, (shape[1] - 1) / 2
    angle = math.radians(30 * s)
    sine, cosine = math.sin(angle), math.cos(angle)
    return (
      my + sine * (x - mx) + cosine * (y - my),
      mx + cosine * (x - mx) - sine * (y - my),
    )
  return {
    "shear_x": (y, x + 0.3 * s * y),
    "shear_y": (y + 0.3 * s * x, x),
    "translate_x": (y, x + 100 * s),
    "translate_y": (y + 100 * s, x),
  }[name]


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
  "name", ["rotate", "shear_x", "shear_y", "translate_x", "translate_y"]
)
def test_moves(name, sign, magnitude):
  draws = (0.9 if sign == 1 else 0.1, 0, 0)
  for shape in SHAPES:
    image = picture(*shape)
    y, x = sources(name, shape, sign * magnitude / 10)
    iy, ix = np.rint(y).astype(int), np.rint(x).astype(int)
    inside = (iy >= 0) & (iy < shape[0]) & (ix >= 0) & (ix < shape[1])
    want = np.full_like(image, 128)
    want[inside] = image[iy[inside], ix[inside]]
    # Between two pixels either may be taken.
    clear = (np.abs(y - np.floor(y) - 0.5) > 1e-3) & (
      np.abs(x - np.floor(x) - 0.5) > 1e-3
    )
    assert clear.mean() > 0.85
    got = transform(name, image, magnitude, draws)
    np.testing.assert_array_equal(got[clear], want[clear])


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("centre", [(0, 0), (0.3, 0.6), (0.999, 0.999)])
def test_cutout(centre, magnitude):
  half = int(magnitude * 4)
  for shape in SHAPES:
    image = picture(*shape)
    y, x = int(centre[0] * shape[0]), int(centre[1] * shape[1])
    want = image.copy()
    want[max(y - half, 0) : y + half, max(x - half, 0) : x + half] = 128
    got = transform("cutout", image, magnitude, (0.9, *centre))
    np.testing.assert_array_equal(got, want)


def test_each_layer_draws_one_of_sixteen():
  names = list(randaug.TRANSFORMS)
  assert len(names) == len(EXACT) + len(CLOSE) + 6 == 16

  # Each pushes its number into the channels: the last layer's is the first.
  def mark(number):
    def transform(image, s, draws):
      del s, draws
      blank = tf.fill(tf.shape(image[..., :1]), tf.constant(number, tf.uint8))
      return tf.concat([blank, image[..., :2]], -1)

    return transform

  marks = {name: mark(number) for number, name in enumerate(names)}
  image = tf.fill([2, 2, 3], tf.constant(255, tf.uint8))
  with mock.patch.dict(randaug.TRANSFORMS, marks):
    op = tf.function(parse_ops("randaug"), autograph=False)
    pairs = [
      tuple(op({"image": image, "seed": seed})["image"].numpy()[0, 0, :2])
      for seed in tf.range(640, dtype=tf.int64)
    ]
    assert run("randaug(0)", image).min() == 255
  for layer in (0, 1):
    counts = np.bincount([pair[layer] for pair in pairs], minlength=16)
    assert len(counts) == 16 and (np.abs(counts - 40) < 25).all()
  assert 15 < sum(first == second for first, second in pairs) < 65


def test_layers_are_applied_one_by_one():
  image = scene(20, 30)
  for seed in range(12):
    key = tf.constant([seed, 0], tf.int64)
    want = tf.constant(image)
    for layer in tf.random.stateless_uniform([2, 4], key).numpy():
      name = list(randaug.TRANSFORMS)[int(layer[0] * 16)]
      want = randaug.TRANSFORMS[name](want, 0.1, tf.constant(layer[1:]))
    np.testing.assert_array_equal(run("randaug(2, 1)", image, seed), want)
