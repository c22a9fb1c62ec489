import io
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from input_pipeline import parse_ops

AWKWARD = pathlib.Path(__file__).parent / "data" / "awkward"
_Y, _X = np.mgrid[:48, :64]
COLOUR = np.stack([4 * _X, 5 * _Y, 2 * (_X + _Y)], -1).astype(np.uint8)
GREY = np.array(Image.fromarray(COLOUR).convert("L"))[..., None].repeat(3, -1)


def encode(image: Image.Image, kind: str = "PNG", **options) -> bytes:
  buffer = io.BytesIO()
  image.save(buffer, kind, **options)
  return buffer.getvalue()


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, (height, width, 3)).astype(np.uint8)


def run(ops: str, image, seed: int = 0) -> np.ndarray:
  return parse_ops(ops)({"image": tf.constant(image), "seed": seed})[
    "image"
  ].numpy()


# What each file of the folder must look like, and how far it may be off.
LOSSLESS = {
  "rgb.png": COLOUR,
  "rgb.bmp": COLOUR,
  "rgb.webp": COLOUR,
  "rgba_half_transparent.png": COLOUR,
  "png_bytes_named.jpg": COLOUR,
  "grey.png": GREY,
  "grey_alpha.png": COLOUR[..., :1].repeat(3, -1),
  "grey16.png": (1000 * _X // 256).astype(np.uint8)[..., None].repeat(3, -1),
}
LOSSY = {
  "rgb.jpg": COLOUR,
  "UPPER.JPEG": COLOUR,
  "progressive.jpg": COLOUR,
  "exif_rotated_90.jpg": COLOUR,  # the orientation tag is ignored
  "cmyk.jpg": COLOUR,
  "grey.jpg": GREY,
  "palette.png": COLOUR,
  "animated.gif": COLOUR,
}


@pytest.mark.parametrize("name", [*LOSSLESS, *LOSSY])
def test_decode_awkward_files(name):
  got = run("decode", (AWKWARD / name).read_bytes())
  want = LOSSLESS.get(name, LOSSY.get(name))
  assert got.dtype == np.uint8 and got.shape == (48, 64, 3)
  error = np.abs(got.astype(int) - want)
  assert error.max() == 0 if name in LOSSLESS else error.mean() < 8, (
    error.mean()
  )


def test_decode_extreme_shapes():
  assert run("decode", (AWKWARD / "one_pixel.png").read_bytes()).shape == (
    (1, 1, 3)
  )
  wide = (AWKWARD / "very_wide_2x2560.jpg").read_bytes()
  assert run("decode", wide).shape == (2, 2560, 3)
  assert run("decode_and_random_crop(8)", wide).shape == (8, 8, 3)


@pytest.mark.parametrize(
  "name", ["empty.jpg", "not_an_image.jpg", "truncated.jpg"]
)
def test_decode_complains(name):
  with pytest.raises(tf.errors.InvalidArgumentError):
    run("decode", (AWKWARD / name).read_bytes())


def flat(mode: str, value) -> Image.Image:
  return Image.new(mode, (4, 4), value)


PALETTE = flat("P", 0)
PALETTE.putpalette([10, 200, 30] + [0] * 765)
F36 = {
  "grey": (encode(flat("L", 100)), (100, 100, 100)),
  "grey with alpha": (encode(flat("LA", (77, 10))), (77, 77, 77)),
  "alpha": (encode(flat("RGBA", (255, 0, 0, 128))), (255, 0, 0)),
  "palette": (encode(PALETTE), (10, 200, 30)),
  "16 bits": (
    encode(Image.fromarray(np.full((4, 4), 25700, np.uint16))),
    (100, 100, 100),
  ),
  "1 bit": (encode(flat("1", 1)), (255, 255, 255)),
  "bmp": (encode(flat("L", 100), "BMP"), (100, 100, 100)),
}


@pytest.mark.parametrize("kind", F36)
def test_every_mode_becomes_rgb(kind):
  data, want = F36[kind]
  np.testing.assert_array_equal(
    run("decode", data), np.broadcast_to(want, (4, 4, 3))
  )


def test_cmyk_becomes_rgb():
  data = encode(flat("CMYK", (0, 255, 255, 0)), "JPEG")
  error = np.abs(run("decode", data).astype(int) - (255, 0, 0))
  assert error.max() <= 2


def test_decoded_images_pass_through_decode():
  image = picture(5, 6)
  np.testing.assert_array_equal(run("decode", image), image)


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
  encoded = encode(Image.fromarray(picture(*shape)))
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


def test_inception_crop_of_a_jpeg_is_the_crop_of_its_pixels():
  smooth = Image.fromarray(picture(6, 8)).resize((80, 60), Image.BICUBIC)
  data = encode(smooth, "JPEG", quality=95)
  pixels = run("decode", data)
  for seed in range(8):
    fused = run("decode_and_random_crop(16)", data, seed)
    plain = run("decode_and_random_crop(16)", pixels, seed)
    # Chroma at the window's border is upsampled without its neighbours.
    assert np.abs(fused.astype(int) - plain).mean() < 1.5


def test_random_ops_of_one_string_draw_independently():
  image = picture(12, 12)
  ops = parse_ops("random_crop(10)|random_crop(8)")
  places = []
  for seed in range(60):
    small = ops({"image": tf.constant(image), "seed": seed})["image"].numpy()
    places += [
      y
      for y in range(5)
      for x in range(5)
      if np.array_equal(image[y : y + 8, x : x + 8], small)
    ]
  # Each crop moves by 0, 1 or 2: equal draws would only give even sums.
  assert len(places) == 60 and set(places) == {0, 1, 2, 3, 4}


EVERY_OP = [
  "decode",
  "decode|resize(7)",
  "decode|resize(7, method='bicubic', antialias=True)",
  "decode|resize_small(7)",
  "decode|central_crop(9)",
  "decode|random_crop(9)",
  "decode|flip_lr",
  "decode_and_random_crop(7)",
  "decode_and_random_crop(9, area_min=.5)|resize((3,4))|random_crop(2)|flip_lr",
]


@pytest.mark.parametrize("ops", EVERY_OP)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "array"])
def test_eager_equals_tf_data(ops, kind):
  image = picture(20, 30)
  data = image if kind == "array" else encode(Image.fromarray(image), kind)
  function = parse_ops(ops)
  features = {"image": data, "seed": np.int64(5), "labels": np.int32([3])}
  eager = function({k: tf.constant(v) for k, v in features.items()})
  dataset = tf.data.Dataset.from_tensors(features).map(function)
  (graph,) = dataset.as_numpy_iterator()
  assert set(graph) == {"image", "seed", "labels"}
  assert eager["image"].dtype == tf.uint8
  np.testing.assert_array_equal(eager["image"], graph["image"])


def test_grammar():
  image = picture(10, 10)
  np.testing.assert_array_equal(run("", image), image)
  one = run("resize((6, 4))|central_crop(2)", image)
  np.testing.assert_array_equal(
    one,
    run(" resize(size=[6,4],method='bilinear')\n | central_crop(2) ", image),
  )
  assert parse_ops("flip_lr").text == "flip_lr"
  np.testing.assert_array_equal(run("flip_lr()", image), run("flip_lr", image))
  # A bar inside quotes is no separator.
  with pytest.raises(ValueError, match=r"unknown method 'a\|b'"):
    parse_ops("resize(2, method='a|b')")


@pytest.mark.parametrize(
  "ops, words",
  [
    ("decode|resiz(3)", ["'resiz'", "decode, ", "did you mean 'resize'"]),
    ("decode||flip_lr", ["decode||flip_lr", "single bars"]),
    ("resize(3", ["resize(3"]),
    ("resize()", ["resize(size, method='bilinear', antialias=False)", "size"]),
    ("resize(3, sise=4)", ["sise"]),
    ("resize(n)", ["n is not a number"]),
    ("resize(0)", ["positive", "0"]),
    ("resize((1,2,3))", ["(1, 2, 3)"]),
    ("resize(True)", ["True"]),
    ("resize(3, method='biliner')", ["did you mean 'bilinear'"]),
    ("decode_and_random_crop(3, area_max=100)", ["0..1"]),
    ("decode + flip_lr", ["decode + flip_lr"]),
    ("decode|value_range(-1, 1)", ["config.model.input_range"]),
    ("decode|vgg_value_range", ["config.model.input_range"]),
    ("onehot(10)", ["config.loss"]),
    ("keep('image')", ["image, labels, mask and id"]),
  ],
)
def test_parse_errors_teach(ops, words):
  with pytest.raises(ValueError) as error:
    parse_ops(ops)
  for word in words:
    assert word in str(error.value)


def test_misuse_of_ops_is_explained():
  image = picture(6, 6)
  with pytest.raises(ValueError, match="flip_lr draws random numbers.*'seed'"):
    parse_ops("flip_lr")({"image": tf.constant(image)})
  with pytest.raises(ValueError, match="put decode before"):
    run("resize(3)", b"bytes")
  for ops in ("central_crop(7)", "random_crop(7)"):
    with pytest.raises(ValueError, match="larger image than 6x6"):
      run(ops, image)
