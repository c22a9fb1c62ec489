import inspect
import io
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from input_pipeline import parse_ops
from input_pipeline.ops import OPS
from tests.pictures import AWKWARD, encode, picture, run, scene

_Y, _X = np.mgrid[:48, :64]
COLOUR = np.stack([4 * _X, 5 * _Y, 2 * (_X + _Y)], -1).astype(np.uint8)
GREY = np.array(Image.fromarray(COLOUR).convert("L"))[..., None].repeat(3, -1)


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


def check_awkward(got: np.ndarray, name: str, columns=slice(64)) -> None:
  want = LOSSLESS.get(name, LOSSY.get(name))[:, columns]
  assert got.dtype == np.uint8 and got.shape == want.shape
  error = np.abs(got.astype(int) - want)
  assert error.max() == 0 if name in LOSSLESS else error.mean() < 8, (
    error.mean()
  )


@pytest.mark.parametrize("name", [*LOSSLESS, *LOSSY])
def test_decode_awkward_files(name):
  data = (AWKWARD / name).read_bytes()
  check_awkward(run("decode", data), name)
  check_awkward(run("decode(precise=True)", data), name)
  # The window is the whole image.
  check_awkward(
    run("decode_and_random_crop((48, 64), area_min=0.999)", data), name
  )
  middle = run("decode_and_central_crop(48, 48)", data)
  check_awkward(middle, name, slice(8, 56))


def test_decode_extreme_shapes():
  pixel = (AWKWARD / "one_pixel.png").read_bytes()
  assert run("decode", pixel).shape == (1, 1, 3)
  wide = (AWKWARD / "very_wide_2x2560.jpg").read_bytes()
  assert run("decode", wide).shape == (2, 2560, 3)
  for data in (pixel, wide):
    assert run("decode_and_random_crop(8)", data).shape == (8, 8, 3)
    assert run("decode_and_central_crop(8, 9)", data).shape == (8, 8, 3)


@pytest.mark.parametrize(
  "name", ["empty.jpg", "not_an_image.jpg", "truncated.jpg"]
)
def test_decode_complains(name):
  for ops in (
    "decode",
    "decode(precise=True)",
    "decode_and_random_crop(8)",
    "decode_and_central_crop(8, 8)",
  ):
    with pytest.raises(tf.errors.InvalidArgumentError):
      run(ops, (AWKWARD / name).read_bytes())


def test_precise_decoding_is_that_of_pil():
  image = scene(96, 128)
  data = encode(image, "JPEG", subsampling=0)
  exact = np.asarray(Image.open(io.BytesIO(data)))
  assert (
    np.abs(run("decode(precise=True)", data) - exact.astype(int)).max() <= 1
  )
  assert np.abs(run("decode", data) - exact.astype(int)).max() > 1


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
    encode(np.full((4, 4), 25700, np.uint16)),
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
  "decode(precise=True)",
  "decode|resize(7)",
  "decode|resize(7, method='bicubic', antialias=True)",
  "decode|resize_small(7)",
  "decode|resize_long(7)",
  "decode|central_crop(9)|pad(2)",
  "decode|random_crop(9)",
  "decode|flip_lr",
  "decode|three_augment|color_jitter(0.3, 0.3, 0.3, 0.1)",
  "decode|random_erasing(1.0)",
  "decode|randaug(3, 15)",
  "decode_and_central_crop(7, 8)",
  "decode_and_random_crop(7)",
  "decode_and_random_crop(9, area_min=.5)|resize((3,4))|random_crop(2)|flip_lr",
  "decode_jpeg_and_inception_crop(7)",
  "inception_crop(7)",
]


def test_every_op_on_images_is_tried_below():
  tried = set(re.findall(r"[a-z]\w+(?=[(|]|$)", "|".join(EVERY_OP)))
  elsewhere = {"binary_to_grey"}  # No picture has such pixels: test_ops_vtab.
  assert tried | elsewhere == {
    name for name, entry in OPS.items() if entry.on == "image"
  }


@pytest.mark.parametrize("ops", EVERY_OP)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "array"])
def test_eager_equals_tf_data(ops, kind):
  image = picture(20, 30)
  data = image if kind == "array" else encode(image, kind)
  function = parse_ops(ops)
  features = {"image": tf.constant(data), "labels": tf.constant([3])}
  seeds = tf.constant([5, 6, 5], tf.int64)
  eager = [function(features | {"seed": seed}) for seed in seeds]
  dataset = tf.data.Dataset.from_tensor_slices(seeds)
  dataset = dataset.map(lambda seed: function(features | {"seed": seed}))
  for one, graph in zip(eager, dataset.as_numpy_iterator(), strict=True):
    assert set(graph) == {"image", "seed", "labels"}
    assert one["image"].dtype == tf.uint8
    np.testing.assert_array_equal(one["image"], graph["image"])
  np.testing.assert_array_equal(eager[0]["image"], eager[2]["image"])
  is_random = any(
    OPS[o].random for o in re.findall(r"[a-z]\w+", ops) if o in OPS
  )
  assert is_random != np.array_equal(eager[0]["image"], eager[1]["image"])


def test_every_op_is_documented():
  docs = pathlib.Path(__file__).parents[1] / "docs" / "ops.md"
  rows = docs.read_text(encoding="utf-8").splitlines()
  for name, entry in OPS.items():
    (row,) = [row for row in rows if row.startswith(f"| `{name}`")]
    for parameter in inspect.signature(entry.factory).parameters:
      assert parameter in row, (name, parameter)
      assert f"{parameter}: " in entry.factory.__doc__, (name, parameter)


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
    ("clip_value_range", ["config.model.input_range"]),
    ("keep('image')", ["image, labels, mask and id"]),
    ("decode_and_random_crop(3, reduction=3)", ["(1, 2, 4, 8)", "3"]),
    ("decode_and_central_crop(224, 200)", ["200", "224"]),
    ("pad(0)", ["positive"]),
    ("pad(2, 'edge')", ["constant, reflect, symmetric"]),
    ("color_jitter(1.5)", ["brightness", "0..1", "1.5"]),
    ("color_jitter(contrast=-1)", ["contrast", "-1"]),
    ("color_jitter(saturation='a')", ["saturation", "'a'"]),
    ("color_jitter(hue=0.6)", ["hue", "0..0.5"]),
    ("random_erasing(2)", ["probability", "0..1"]),
    ("random_erasing(area_max=2)", ["0..1"]),
    ("random_erasing(fill=256)", ["fill", "-1..255"]),
    ("randaug(2, 21)", ["magnitude", "0..20", "21"]),
    ("randaug(2.5)", ["layers", "2.5"]),
    ("pad_labels(0)", ["positive", "0"]),
    ("names('nowhere.txt')", ["nowhere.txt"]),
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
  for ops in EVERY_OP:
    if ops.startswith("decode|"):
      with pytest.raises(ValueError, match="put decode before"):
        run(ops.removeprefix("decode|"), b"bytes")
  with pytest.raises(ValueError, match="'labels'.*source gives only: image"):
    parse_ops("pad_labels(2)")({"image": tf.constant(image)})
  for ops in ("central_crop(7)", "random_crop(7)"):
    with pytest.raises(ValueError, match="larger image than 6x6"):
      run(ops, image)
