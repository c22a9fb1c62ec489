"""Partial decoding against the whole: what is cut, at which scale, how well."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from input_pipeline import parse_ops
from input_pipeline.ops import pixels
from tests.pictures import AWKWARD, distance, encode, picture, run, scene


def decoded_windows(ops: str, data: bytes, seeds=(0,)) -> list[tuple]:
  """(ratio, [y, x, h, w]) of each JPEG window that is decoded."""
  original, seen = tf.io.decode_and_crop_jpeg, []

  def decode(data, window, channels, ratio):
    seen.append((ratio, window.numpy()))
    return original(data, window, channels=channels, ratio=ratio)

  with mock.patch.object(tf.io, "decode_and_crop_jpeg", decode):
    for seed in seeds:
      run(ops, data, seed)
  return seen


def test_inception_crop_windows():
  # In this picture a pixel tells its own place.
  y, x = np.mgrid[:60, :90]
  image = np.stack([y, x, 0 * x], -1).astype(np.uint8)
  op = parse_ops("decode_and_random_crop(40, area_min=0.2, area_max=0.6)")
  shares = []
  for seed in range(60):
    patch = op({"image": tf.constant(image), "seed": seed})["image"].numpy()
    height = (float(patch[-1, 0, 0]) - patch[0, 0, 0]) * 40 / 39
    width = (float(patch[0, -1, 1]) - patch[0, 0, 1]) * 40 / 39
    assert 0.6 < width / height < 1.6
    shares.append(height * width / (60 * 90))
  assert 0.13 < min(shares) < 0.3 < 0.45 < max(shares) < 0.66


def test_a_random_crop_of_a_jpeg_is_the_crop_of_its_pixels():
  data = encode(scene(60, 80), "JPEG", quality=95)
  decoded = run("decode", data)
  for seed in range(8):
    fused = run("decode_and_random_crop(16, reduction=1)", data, seed)
    plain = run("decode_and_random_crop(16)", decoded, seed)
    # Chroma at the window's border is upsampled without its neighbours.
    assert distance(fused, plain) < 1.5


def test_big_visions_names_count_in_percent():
  data = encode(scene(60, 80), "JPEG")
  percent = "(16, 20, 60, ratio_min=0.5, ratio_max=2)"
  share = "(16, 0.2, 0.6, 0.5, 2, reduction=1)"
  for seed in range(4):
    want = run(f"decode_and_random_crop{share}", data, seed)
    for name in ("decode_jpeg_and_inception_crop", "inception_crop"):
      np.testing.assert_array_equal(run(name + percent, data, seed), want)


def test_random_windows_are_decoded_at_the_smallest_sufficient_scale():
  data = encode(scene(300, 400), "JPEG")
  full = decoded_windows(
    "decode_and_random_crop((20, 25), reduction=1)", data, range(40)
  )
  for limit in (4, 8):
    ops = f"decode_and_random_crop((20, 25), reduction={limit})"
    reduced = decoded_windows(ops, data, range(40))
    for (one, window), (ratio, small) in zip(full, reduced, strict=True):
      enough = [r for r in (1, 2, 4, 8) if window[2] >= 20 * r <= 8 * limit * r]
      enough = [r for r in enough if r <= limit and window[3] >= 25 * r]
      assert one == 1 and ratio == max(enough, default=1)
      np.testing.assert_array_equal(small, window // ratio)
    assert {ratio for ratio, _ in reduced} >= {2, 4, limit}


def test_a_random_window_at_a_smaller_scale_shows_the_same():
  data = encode(scene(480, 640), "JPEG", quality=95)
  decoded = run("decode", data)
  ops = "decode_and_random_crop(48)"
  for seed in range(6):
    ((ratio, (y, x, h, w)),) = decoded_windows(ops, data, [seed])
    blocks = decoded.reshape(480 // ratio, ratio, 640 // ratio, ratio, 3)
    small = blocks.mean((1, 3))[y : y + h, x : x + w]
    want = tf.image.resize(small, (48, 48)).numpy()
    assert distance(run(ops, data, seed), want) < 2


SHAPES = {
  (375, 500): 0.5,
  (500, 375): 0.5,
  (256, 256): 0.5,
  (333, 500): 0.5,
  (180, 240): 0.5,
  (100, 120): 0.5,
  (427, 640): 0.5,
  # So close to the scale of the result, no edge nearby meets a whole place.
  (257, 1021): 1.0,
}


@pytest.mark.parametrize("shape, bound", SHAPES.items())
def test_central_crop_of_full_pixels_equals_the_unfused_ops(shape, bound):
  data = encode(scene(*shape), "JPEG", quality=90)
  for method in ("area", "bilinear", "bicubic", "lanczos3"):
    for antialias in (False, True):
      how = f"method={method!r}, antialias={antialias}"
      whole = run(f"decode|resize_small(256, {how})|central_crop(224)", data)
      for source in (data, run("decode", data)):
        fused = run(
          f"decode_and_central_crop(224, 256, reduction=1, {how})", source
        )
        assert distance(fused, whole) < bound


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("method", pixels.REACH)
def test_central_crop_is_exact_where_its_edges_fit(method, antialias):
  # Noise shows at the border what a filter does not see.
  how = f"method={method!r}, antialias={antialias}"
  for shape in ((80, 80), (80, 100), (20, 20), (120, 80)):
    image = picture(*shape)
    whole = run(f"resize_small(40, {how})|central_crop((20, 24))", image)
    fused = run(f"decode_and_central_crop((20, 24), 40, {how})", image)
    assert np.abs(fused.astype(int) - whole).max() <= 1


@pytest.mark.parametrize("shape", [(520, 700), (751, 1001), (1100, 1030)])
def test_central_crop_at_a_smaller_scale_is_close(shape):
  data = encode(scene(*shape, blob=96), "JPEG", quality=90)
  whole = run("decode|resize_small(256)|central_crop((200, 224))", data)
  fused = run("decode_and_central_crop((200, 224), 256)", data)
  assert distance(fused, whole) < 1.5


@pytest.mark.parametrize("shape", [(40, 60), (79, 110), (80, 90), (161, 165)])
def test_central_crop_decodes_what_it_shows(shape):
  data = encode(scene(*shape), "JPEG")
  ((ratio, window),) = decoded_windows("decode_and_central_crop(30, 40)", data)
  assert ratio == max(r for r in (1, 2, 4, 8) if r * 40 <= min(shape))
  shown = 30 / 40 * min(shape) / ratio
  for begin, size, side in zip(window[:2], window[2:], shape):
    assert shown - 1 <= size <= shown + 2 * (8 + 1)
    assert abs(begin + size / 2 - side / ratio / 2) <= 8 + 1


def test_central_crop_of_a_very_long_image_is_cheap():
  wide = (AWKWARD / "very_wide_2x2560.jpg").read_bytes()
  with mock.patch.object(tf.image, "resize", wraps=tf.image.resize) as resize:
    run("decode_and_central_crop(224, 256)", wide)
  assert np.prod(resize.call_args.args[1]) < 2**20
  small = run("decode|resize_small(20)|central_crop(16)", wide)
  fused = run("decode_and_central_crop(16, 20)", wide)
  assert distance(fused, small) < 2


def test_a_truncated_jpeg_is_an_error_even_outside_of_the_window():
  data = encode(scene(200, 200), "JPEG")
  data = data[: len(data) * 9 // 10]
  top = tf.io.decode_and_crop_jpeg(data, [0, 0, 20, 20], channels=3)
  assert top.shape == (20, 20, 3)  # TensorFlow does not notice.
  for seed in range(20):
    with pytest.raises(tf.errors.InvalidArgumentError):
      run("decode_and_random_crop(20, area_max=0.1)", data, seed)
  with pytest.raises(tf.errors.InvalidArgumentError):
    run("decode_and_central_crop(20, 200)", data)


def test_bytes_after_the_end_of_a_jpeg_do_no_harm():
  data = encode(scene(60, 80), "JPEG", quality=95)
  for ops in (
    "decode_and_random_crop(16, reduction=1)",
    "decode_and_central_crop(16, 20, reduction=1)",
  ):
    assert distance(run(ops, data + b"\0" * 99), run(ops, data)) < 1.5
