"""Stored parameters meet models that they were not made for."""

import re

import hypothesis
import jax
import numpy as np
import pytest
import scipy.ndimage
import tensorflow as tf
from hypothesis import strategies as st

from tests.weight_files import (
  BLOCK,
  GOLDEN,
  POSITIONS,
  assert_same,
  flat,
  golden_model,
  initial,
  npz,
  random_params,
  shapes,
  tiny,
  traced_once,  # noqa: F401
)
from vit_jax import weights
from vit_jax.models import bit
from vit_jax.weights import resizing

TOKEN = str(GOLDEN / "published_token.npz")
REP = str(GOLDEN / "published_token_rep.npz")
MAP = str(GOLDEN / "bv_map_scan.npz")


@pytest.fixture
def stored(tmp_path):
  """Writes a model's random parameters; returns the path and the leaves."""

  def make(model, size=8, **leaves):
    found = {**flat(random_params(model, size)), **leaves}
    return npz(tmp_path / "stored.npz", found), found

  return make


@pytest.fixture
def notes(caplog):
  caplog.set_level("INFO", "vit_jax")
  return lambda: [record.getMessage() for record in caplog.records]


def listed(error):
  """The lines of a refusal that tell of leaves."""
  kinds = ("missing ", "unexpected ", "different ")
  return [
    line.strip()
    for line in str(error.value).splitlines()
    if line.strip().startswith(kinds)
  ]


# Positions.


def table_of(grid, values, width=8, class_row=None):
  """A position table whose channels all are `values [h, w]`."""
  table = np.repeat(np.asarray(values, np.float32).reshape(1, -1, 1), width, 2)
  assert table.shape[1] == grid[0] * grid[1]
  if class_row is None:
    return table
  row = np.full((1, 1, width), class_row, np.float32)
  return np.concatenate([row, table], axis=1)


def test_the_class_row_stays_and_the_corners_too(stored):
  path, _ = stored(
    tiny(), 8, **{POSITIONS: table_of((2, 2), [[0, 1], [2, 3]], class_row=9)}
  )
  found = flat(weights.load(path, tiny(), 16, resize="bilinear_corners"))
  table = found[POSITIONS][0, :, 0]
  assert table[0] == 9
  rows = table[1:].reshape(4, 4)
  np.testing.assert_allclose(rows[0], [0, 1 / 3, 2 / 3, 1], atol=1e-6)
  np.testing.assert_allclose(rows[:, 0], [0, 2 / 3, 4 / 3, 2], atol=1e-6)
  np.testing.assert_allclose(rows[3, 3], 3, atol=1e-6)


def test_a_square_becomes_14x10(stored, notes):
  model, size = tiny(patch_size=16), (224, 160)
  down, across = np.mgrid[:14, :14].astype(np.float32)
  for values, expected in (
    (across, np.tile(13 * np.arange(10) / 9, (14, 1))),
    (down, np.repeat(np.arange(14.0)[:, None], 10, axis=1)),
  ):
    table = table_of((14, 14), values, class_row=0)
    path, _ = stored(model, 224, **{POSITIONS: table})
    found = flat(weights.load(path, model, size, resize="bilinear_corners"))
    assert found[POSITIONS].shape == (1, 141, 8)
    rows = found[POSITIONS][0, 1:, 0].reshape(14, 10)
    np.testing.assert_allclose(rows, expected, atol=1e-5)
  assert any(
    "from the grid 14x14 to 14x10 (bilinear_corners)" in note
    and "needs fine-tuning" in note
    for note in notes()
  )


@pytest.mark.parametrize("method", ["bicubic", "bilinear", "bilinear_corners"])
@pytest.mark.parametrize(
  ("old", "new"), [((7, 7), (12, 12)), ((4, 4), (3, 5)), ((3, 5), (6, 10))]
)
def test_published_resizes_come_through_load(stored, method, old, new):
  golden = np.load(GOLDEN / "posemb_resize.npz")
  name = "{}x{}_to_{}x{}".format(*old, *new)
  pad = ((0, 0), (0, 0), (0, 2))  # Six channels; the model has eight.
  before, after = (
    np.pad(golden[f"{name}/{key}"], pad).reshape(1, -1, 8)
    for key in ("grid", method)
  )
  model = tiny(classifier="gap")
  path, _ = stored(model, tuple(4 * n for n in old), **{POSITIONS: before})
  found = weights.load(
    path, model, tuple(4 * n for n in new), resize=method, grid=old
  )
  np.testing.assert_allclose(flat(found)[POSITIONS], after, atol=1e-5)


def test_grids_are_compared_and_not_counts(stored, notes):
  path, leaves = stored(tiny(), 16)
  found = flat(weights.load(path, tiny(), (8, 32)))
  assert found[POSITIONS].shape == leaves[POSITIONS].shape
  assert not np.array_equal(found[POSITIONS], leaves[POSITIONS])
  assert any("from the grid 4x4 to 2x8" in note for note in notes())
  # Given, the grid of the same positions is the model's: the same bits.
  found = weights.load(path, tiny(), (8, 32), grid=(2, 8))
  assert_same(found, leaves)


def test_positions_that_are_no_square(stored):
  path, leaves = stored(tiny(), (8, 12))
  assert_same(weights.load(path, tiny(), (8, 12)), leaves)  # As many.
  with pytest.raises(
    ValueError, match=r"6 positions, .*no square.*4x4 has 16\..*grid=\(h, w\)"
  ):
    weights.load(path, tiny(), 16)
  found = weights.load(path, tiny(), 16, grid=(2, 3))
  assert flat(found)[POSITIONS].shape == (1, 17, 8)
  with pytest.raises(ValueError, match="has 6 positions, the grid 2x4 has 8"):
    weights.load(path, tiny(), 16, grid=(2, 4))


def test_positions_of_columns_and_rows(stored):
  model = tiny(posemb="learned_2d")
  path, leaves = stored(model, (8, 16))  # 2 rows, 4 columns.
  found = flat(weights.load(path, model, (16, 8), resize="bilinear_corners"))
  for axis, zoom in (("y", 2), ("x", 0.5)):
    name = f"Transformer/posembed_input/{axis}_embedding"
    expected = scipy.ndimage.zoom(leaves[name][0], (zoom, 1), order=1)
    np.testing.assert_allclose(found[name][0], expected, atol=1e-6)


@pytest.mark.parametrize(
  ("fields", "table", "message"),
  [
    ({}, "pos_embedding", "6 positions, the grid 3x4 has 12"),
    (dict(posemb="relative"), "relative_embedding", "6 .* 3x4 has 12"),
    (dict(posemb="learned_2d"), "y_embedding", "2 .* 3x3 has 3"),
    (dict(posemb="learned_2d"), "x_embedding", "3 .* 2x4 has 4"),
  ],
)
def test_a_grid_that_no_table_is_of(stored, tmp_path, fields, table, message):
  model = tiny(**fields)
  path, leaves = stored(model, (8, 12))  # 2 rows, 3 columns.
  grid = {"y_embedding": (3, 3), "x_embedding": (2, 4)}.get(table, (3, 4))
  with pytest.raises(ValueError, match=f"{table} has {message}") as error:
    weights.load(path, model, (8, 12), grid=grid)
  assert path in str(error.value)
  other = str(tmp_path / "other.npz")
  with pytest.raises(ValueError, match=f"{other}: .*{table} has {message}"):
    weights.save(other, leaves, grid=grid)
  weights.save(other, leaves, grid=(2, 3))
  assert_same(weights.load(other, model, (8, 12)), leaves)


def test_positions_that_cannot_be_placed_hide_nothing(stored):
  model = tiny(posemb="relative", depth=2)
  path, _ = stored(model, (8, 12))
  with pytest.raises(ValueError, match=r"model \(4 leaves\)") as error:
    weights.load(path, model.clone(num_classes=5), 16)
  assert sum("relative_embedding: stored" in x for x in listed(error)) == 2
  assert sum("head/" in line for line in listed(error)) == 2
  assert str(error.value).count("6 positions, which are no square") == 1
  assert "The file's head has 3 classes" in str(error.value)


@pytest.mark.parametrize("scan", [False, True])
def test_tables_in_every_layer(stored, notes, caplog, scan):
  for where, kind in (
    (dict(posemb_at="layers"), "pos_embedding"),
    (dict(posemb="relative"), "relative_embedding"),
  ):
    model = tiny(depth=2, **where)
    path, leaves = stored(model, 8)
    assert_same(weights.load(path, model, 8), leaves)
    found = weights.load(path, model.clone(scan=scan), (8, 12))
    wanted = flat(shapes(model.clone(scan=scan), (8, 12)))
    assert {n: leaf.shape for n, leaf in flat(found).items()} == {
      n: leaf.shape for n, leaf in wanted.items()
    }
    grids = [note for note in notes() if "from the grid 2x2 to 2x3" in note]
    assert len(grids) == 1 and kind in grids[0]
    caplog.clear()


@pytest.mark.parametrize(
  "fields",
  [
    dict(posemb="sincos2d"),
    dict(posemb="none"),
    dict(posemb="learned_2d"),
    dict(posemb_at="layers"),
  ],
)
def test_positions_of_another_kind_are_refused(stored, fields):
  path, _ = stored(tiny())
  with pytest.raises(ValueError, match="another posemb or posemb_at") as error:
    weights.load(path, tiny(**fields), 8)
  assert f"unexpected  {POSITIONS}: (1, 5, 8) float32" in listed(error)


# The class token.


def test_gap_to_token_starts_at_zero(stored, notes):
  path, leaves = stored(tiny(classifier="gap"))
  found = flat(weights.load(path, tiny(), 8))
  assert found["cls"].shape == (1, 1, 8) and not found["cls"].any()
  assert not found[POSITIONS][0, 0].any()
  np.testing.assert_array_equal(found[POSITIONS][:, 1:], leaves[POSITIONS])
  assert any("class token starts as zeros" in note for note in notes())
  assert any(
    f"1 reshaped ({POSITIONS}); 0 dropped; 1 fresh (cls)" in note
    for note in notes()
  )


@pytest.mark.parametrize("classifier", ["gap", "none"])
def test_token_to_others_drops_it(stored, notes, classifier):
  path, leaves = stored(tiny())
  found = flat(weights.load(path, tiny(classifier=classifier), 8))
  assert "cls" not in found
  np.testing.assert_array_equal(found[POSITIONS], leaves[POSITIONS][:, 1:])
  assert any("class token dropped" in note for note in notes())


def test_counts_alone_make_no_class_token(stored):
  # Ten positions are 2x5, not a class token and 3x3.
  model = tiny(classifier="gap")
  path, leaves = stored(model, (8, 20))
  assert_same(weights.load(path, model, (8, 20)), leaves)
  with pytest.raises(ValueError, match="10 positions, which are no square"):
    weights.load(path, model, 12)
  # With the grid known, a row more than it has is a class token's.
  found = weights.load(path, model, 12, grid=(3, 3))
  np.testing.assert_array_equal(
    flat(found)[POSITIONS], leaves[POSITIONS][:, 1:]
  )


# The head.


def test_another_number_of_classes_is_refused(stored):
  path, _ = stored(tiny())
  with pytest.raises(ValueError) as error:
    weights.load(path, tiny(num_classes=5), 8)
  assert listed(error) == [
    "different   head/bias: stored (3,) float32, expected (5,) float32",
    "different   head/kernel: stored (8, 3) float32, expected (8, 5) float32",
  ]
  assert "head has 3 classes, the model's has 5" in str(error.value)
  assert 'head="reset"' in str(error.value)


def test_a_reset_head_is_the_models_own(stored, notes):
  path, leaves = stored(tiny())
  model = tiny(num_classes=5, head_bias=-10.0)
  found = flat(weights.load(path, model, 8, head="reset"))
  assert not found["head/kernel"].any() and found["head/kernel"].shape == (8, 5)
  assert (found["head/bias"] == -10).all()
  rest = {n: x for n, x in leaves.items() if not n.startswith("head/")}
  assert_same({n: found[n] for n in rest}, rest)
  both = "(head/bias, head/kernel)"
  counts = f"{len(rest)} leaves matched; 0 reshaped; 2 dropped {both}; 2 fresh"
  assert any(f"{counts} {both}" in note for note in notes())


@pytest.mark.parametrize(
  ("size", "word"), [(24, "kept"), (16, "dropped and fresh"), (0, "dropped")]
)
def test_pre_logits_when_the_head_is_reset(notes, size, word):
  model = golden_model(num_classes=3, representation_size=size)
  key = jax.random.key(5)
  found = flat(weights.load(REP, model, 32, head="reset", rng=key))
  kernel = found.get("pre_logits/kernel")
  if size == 24:
    np.testing.assert_array_equal(kernel, np.load(REP)["pre_logits/kernel"])
  elif size:
    init = initial(model, 32, key, "pre_logits")
    np.testing.assert_array_equal(kernel, init["kernel"])
  else:
    assert kernel is None
  assert f"{REP}: pre_logits {word}." in notes()


def test_pre_logits_are_not_passed_over_in_silence():
  with pytest.raises(ValueError, match="representation_size=24 keeps") as error:
    weights.load(REP, golden_model(), 32)
  assert 'head="reset"' in str(error.value)
  assert sum("pre_logits/" in line for line in listed(error)) == 2
  with pytest.raises(ValueError, match="another representation_size"):
    weights.load(TOKEN, golden_model(representation_size=24), 32)


def test_what_starts_at_random_needs_a_key():
  model = golden_model(num_classes=3, representation_size=16)
  with pytest.raises(ValueError, match=f"{REP} has no pre_logits/kernel.*rng="):
    weights.load(REP, model, 32, head="reset")
  one, other = (
    weights.load(REP, model, 32, head="reset", rng=jax.random.key(seed))
    for seed in (1, 2)
  )
  kernels = [tree["pre_logits"]["kernel"] for tree in (one, other)]
  assert not np.array_equal(*kernels)
  kernels[0][0] = 0  # Ours to write to.


def test_a_map_head_when_the_head_is_reset():
  gap = weights.load(MAP, golden_model(classifier="gap"), 32, head="reset")
  assert "MAPHead_0" not in gap
  kept = weights.load(MAP, golden_model(classifier="map"), 32, head="reset")
  np.testing.assert_array_equal(
    kept["MAPHead_0"]["probe"], np.load(MAP)["params/MAPHead_0/probe"]
  )
  model = golden_model(classifier="map")
  key = jax.random.key(0)
  fresh = weights.load(TOKEN, model, 32, head="reset", rng=key)
  assert_same(fresh["MAPHead_0"], initial(model, 32, key, "MAPHead_0"))
  with pytest.raises(ValueError, match="another classifier"):
    weights.load(MAP, golden_model(classifier="gap"), 32)


@pytest.mark.parametrize("path", [TOKEN, REP, MAP], ids=["token", "rep", "map"])
@pytest.mark.parametrize("head", ["keep", "reset"])
def test_a_model_without_head_takes_any_file(path, head):
  classifier = "gap" if path == MAP else "token"
  model = golden_model(num_classes=0, classifier=classifier)
  found = weights.load(path, model, 32, head=head)
  assert flat(found).keys() == flat(shapes(model, 32)).keys()


def test_what_an_objective_has_beside_its_model_is_a_head(tmp_path, notes):
  """As a run of masked patch prediction keeps it."""
  leaves = flat(random_params(tiny(num_classes=0), 8))
  leaves = {f"params/{name}": leaf for name, leaf in leaves.items()}
  others = ("masked_patch/head/kernel", "masked_patch/mask_token")
  beside = {name: np.ones((1, 1, 8)) for name in others}
  path = npz(tmp_path / "a.npz", leaves | beside)
  found = flat(weights.load(path, tiny(), 8, head="reset"))
  assert found.keys() == flat(shapes(tiny(), 8)).keys()
  assert any(f"2 dropped ({', '.join(others)})" in note for note in notes())
  bare = weights.load(path, tiny(num_classes=0), 8)
  assert_same({f"params/{n}": leaf for n, leaf in flat(bare).items()}, leaves)
  with pytest.raises(
    ValueError, match="unexpected  masked_patch/mask"
  ) as error:
    weights.load(path, tiny(), 8)
  assert 'head="reset"' in str(error.value)


def test_without_head_the_output_is_what_the_head_read():
  images = np.load(GOLDEN / "published_token_rep.io.npz")["images"]
  outputs = {}
  for classes in (7, 0):
    model = golden_model(num_classes=classes, representation_size=24)
    params = weights.load(REP, model, 32)
    outputs[classes] = jax.jit(model.apply)({"params": params}, images)
  np.testing.assert_array_equal(outputs[0]["logits"], outputs[7]["pre_logits"])
  np.testing.assert_array_equal(outputs[0]["logits"], outputs[0]["pre_logits"])


def test_a_head_of_zeros_is_told(stored, warnings):
  zeros = {"head/kernel": np.zeros((8, 3)), "head/bias": np.zeros(3)}
  path, _ = stored(tiny(), **zeros)
  weights.load(path, tiny(), 8, head="reset")
  assert not warnings()
  weights.load(path, tiny(), 8)
  (warning,) = warnings()
  assert path in warning and "head is all zeros" in warning


# What does not fit.


def test_more_blocks_than_the_model_has(stored):
  path, _ = stored(tiny(depth=2))
  with pytest.raises(ValueError, match="another depth") as error:
    weights.load(path, tiny(depth=1), 8)
  lines = listed(error)
  assert len(lines) == 16
  for line in lines:
    assert re.match(r"unexpected  Transformer/encoderblock_1/.*: \(", line)
  first = str(error.value).splitlines()[0]
  assert first == f"{path} does not fit the model (16 leaves):"


def test_fewer_blocks_than_the_model_has(stored):
  path, _ = stored(tiny(depth=1))
  with pytest.raises(ValueError, match="16 leaves") as error:
    weights.load(path, tiny(depth=2, scan=True), 8)
  assert all(
    "missing     Transformer/encoderblock_1/" in x for x in listed(error)
  )


def test_another_width_lists_every_leaf(stored):
  path, leaves = stored(tiny(width=8))
  # The grid is another one, too: the shapes shown are the file's all the same.
  with pytest.raises(ValueError) as error:
    weights.load(path, tiny(width=16), 16)
  lines = listed(error)
  wanted = flat(shapes(tiny(width=16), 16))
  expected = [
    f"different   {name}: stored {leaf.shape} float32, expected "
    f"{wanted[name].shape} float32"
    for name, leaf in sorted(leaves.items())
    if leaf.shape != wanted[name].shape
  ]
  assert lines == expected
  assert f"different   {POSITIONS}: stored (1, 5, 8) float32, expected " in (
    "\n".join(lines)
  )


def test_another_number_of_heads(stored):
  path, _ = stored(tiny(num_heads=2))
  with pytest.raises(ValueError) as error:
    weights.load(path, tiny(num_heads=4), 8)
  assert len(listed(error)) == 7
  name = f"{BLOCK}MultiHeadDotProductAttention_1/query/kernel"
  assert (
    f"different   {name}: stored (8, 2, 4) float32, expected (8, 4, 2) float32"
    in listed(error)
  )


@pytest.mark.parametrize(
  ("fields", "count"), [(dict(registers=2), 1), (dict(layer_scale=0.1), 2)]
)
def test_parts_that_one_side_has_are_refused(stored, fields, count):
  (field,) = fields
  for old, new in ((tiny(), tiny(**fields)), (tiny(**fields), tiny())):
    path, leaves = stored(old)
    with pytest.raises(ValueError, match=f"another {field}") as error:
      weights.load(path, new, 8)
    assert len(listed(error)) == count
    assert_same(weights.load(path, old, 8), leaves)


def test_a_resnet_is_no_vit(stored):
  path, _ = stored(tiny())
  model = bit.BiT(num_classes=3, blocks=(1,), width_factor=0.5)
  with pytest.raises(ValueError, match="another ResNet"):
    weights.load(path, model, 32)
  path, leaves = stored(model, 32)
  assert_same(weights.load(path, model, 64), leaves)
  found = weights.load(path, model.clone(num_classes=9), 64, head="reset")
  assert found["conv_head"]["kernel"].shape == (128, 9)
  with pytest.raises(ValueError, match="head has 3 classes, the model's has 9"):
    weights.load(path, model.clone(num_classes=9), 64)


def test_nothing_is_read_before_all_fits(stored):
  path, _ = stored(tiny())
  found = weights.open(path)
  read = []

  def watch(name, leaf):
    return leaf._replace(read=lambda: read.append(name) or leaf.read())

  watched = found._replace(
    leaves={name: watch(name, leaf) for name, leaf in found.leaves.items()}
  )
  with pytest.raises(ValueError, match="does not fit"):
    weights.plan(watched, tiny(depth=2), 16)
  report = weights.plan(watched, tiny(num_classes=9), 16, head="reset")
  assert not read
  assert report.reshaped == [POSITIONS]
  assert report.fresh == report.dropped == ["head/bias", "head/kernel"]
  assert len(report.matched) + 3 == len(report.leaves)
  for leaf in report.leaves.values():
    assert leaf.read().shape == leaf.shape
  assert sorted(read) == sorted({*report.matched, *report.reshaped})


@pytest.mark.parametrize(
  ("choice", "hint"),
  [
    (dict(head="rest"), "Did you mean 'reset'"),
    (dict(resize="bicubik"), "Did you mean 'bicubic'"),
    (dict(patch="rezise"), "Did you mean 'resize'"),
    (dict(grid=(2, 0)), r"grid=\(2, 0\) must be a positive int"),
  ],
)
def test_unknown_choices(stored, choice, hint):
  path, _ = stored(tiny())
  with pytest.raises(ValueError, match=hint):
    weights.load(path, tiny(), 8, **choice)


def test_image_sizes_that_no_grid_has(stored):
  path, _ = stored(tiny())
  with pytest.raises(ValueError, match="nearest legal"):
    weights.load(path, tiny(), 10)


# Patches.


def test_other_patches_only_on_demand(stored, notes):
  path, leaves = stored(tiny())
  model = tiny(patch_size=(8, 6))
  with pytest.raises(ValueError, match='patch="resize"') as error:
    weights.load(path, model, (16, 12))
  assert listed(error) == [
    "different   embedding/kernel: stored (4, 4, 3, 8) float32, "
    "expected (8, 6, 3, 8) float32"
  ]
  found = flat(weights.load(path, model, (16, 12), patch="resize"))
  np.testing.assert_array_equal(
    found["embedding/kernel"],
    resizing.resize_patch(leaves["embedding/kernel"], (8, 6)),
  )
  assert any("patches resized from 4x4 to 8x6" in note for note in notes())
  # Other channels are no matter of size.
  stem = tiny(patch_size=8, stem_width=0.5)
  with pytest.raises(ValueError, match="does not fit"):
    weights.load(path, stem, 32, patch="resize")


sides = st.integers(1, 6)


@hypothesis.given(sides, sides, sides, sides)
@hypothesis.settings(deadline=None, max_examples=20)
def test_enlarged_patches_give_the_same_products(h, w, down, across):
  rng = np.random.default_rng(h + 10 * w)
  size = (h + down - 1, w + across - 1)
  kernel = rng.normal(size=(h, w, 3, 5)).astype(np.float32)
  images = rng.normal(size=(4, h, w, 3)).astype(np.float32)
  enlarged = tf.image.resize(images, size, "bilinear", antialias=False).numpy()
  resized = resizing.resize_patch(kernel, size)
  product = "nhwc,hwcd->nd"
  np.testing.assert_allclose(
    np.einsum(product, enlarged, resized),
    np.einsum(product, images, kernel),
    atol=1e-4,
  )


def test_shrunk_patches_are_the_nearest_in_least_squares():
  kernel = np.random.default_rng(0).normal(size=(8, 6, 1, 2))
  basis = np.eye(48).reshape(48, 8, 6, 1)
  shrunk = tf.image.resize(basis, (3, 4), "bilinear", antialias=False).numpy()
  expected = np.linalg.lstsq(
    shrunk.reshape(48, 12), kernel.reshape(48, 2), rcond=None
  )[0]
  resized = resizing.resize_patch(kernel, (3, 4))
  np.testing.assert_allclose(resized.reshape(12, 2), expected, atol=1e-5)


def test_equal_patches_are_the_same_bits():
  kernel = np.random.default_rng(0).normal(size=(3, 5, 2, 2))
  assert resizing.resize_patch(kernel, (3, 5)) is kernel
