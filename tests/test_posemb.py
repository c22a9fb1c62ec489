import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import ndimage

from vit_jax.models import posemb

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden/posemb_resize.npz")
CASES = sorted({name.partition("/")[0] for name in GOLDEN.files})


def table(grid, prefix=0):
  """[1, p + h w, c] of an [h, w] or [h, w, c] grid, after rows of nines."""
  grid = np.asarray(grid, np.float32)
  grid = grid.reshape(*grid.shape[:2], -1)
  rows = grid.reshape(-1, grid.shape[2])
  return np.concatenate([np.full((prefix, grid.shape[2]), 9.0), rows])[None]


def noise(*shape):
  return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("method", posemb.RESIZE_METHODS)
@pytest.mark.parametrize("case", CASES)
def test_resized_grids_are_the_golden_ones(case, method):
  grid, expected = GOLDEN[f"{case}/grid"], GOLDEN[f"{case}/{method}"]
  result = posemb.resize_grid(
    table(grid), grid.shape[:2], expected.shape[:2], prefix=0, method=method
  )
  np.testing.assert_allclose(
    result.reshape(expected.shape), expected, atol=1e-5
  )


@pytest.mark.parametrize("new", [(3, 3), (8, 4), (2, 9), (1, 5)])
def test_corners_are_scipys_zoom(new):
  grid = noise(4, 5, 3)
  zoom = (new[0] / 4, new[1] / 5, 1)
  expected = ndimage.zoom(grid, zoom, order=1)
  result = posemb.resize_grid(
    table(grid), (4, 5), new, prefix=0, method="bilinear_corners"
  )
  np.testing.assert_allclose(result[0], expected.reshape(-1, 3), atol=1e-6)


def test_corners_by_hand():
  result = posemb.resize_grid(
    table([[0, 1], [2, 3]], prefix=1),
    (2, 2),
    (4, 4),
    prefix=1,
    method="bilinear_corners",
  )[0, :, 0]
  assert result[0] == 9.0
  rows = result[1:].reshape(4, 4)
  np.testing.assert_allclose(rows[0], [0, 1 / 3, 2 / 3, 1], rtol=1e-6)
  np.testing.assert_allclose(rows[:, 0], [0, 2 / 3, 4 / 3, 2], rtol=1e-6)
  assert rows[3, 3] == 3.0


def test_tables_of_other_types():
  ints = np.arange(4).reshape(1, 4, 1)
  half = ints.astype(jnp.bfloat16)
  for values, dtype in ((ints, np.float32), (half, jnp.bfloat16)):
    result = posemb.resize_grid(
      jnp.asarray(values), (2, 2), (4, 4), prefix=0, method="bilinear_corners"
    )
    assert result.dtype == dtype
    np.testing.assert_allclose(
      result[0, :4, 0].astype(np.float32), [0, 1 / 3, 2 / 3, 1], atol=0.01
    )


def test_height_and_width_are_not_mixed_up():
  i, j = np.meshgrid(np.arange(14), np.arange(14), indexing="ij")
  result = posemb.resize_grid(
    table(np.stack([i, j], -1), prefix=1),
    (14, 14),
    (14, 10),
    prefix=1,
    method="bilinear_corners",
  )
  assert result.shape == (1, 141, 2)
  rows, columns = np.moveaxis(result[0, 1:].reshape(14, 10, 2), -1, 0)
  np.testing.assert_array_equal(rows, np.repeat(np.arange(14)[:, None], 10, 1))
  np.testing.assert_allclose(
    columns, np.tile(13 * np.arange(10) / 9, (14, 1)), rtol=1e-6
  )


@pytest.mark.parametrize("method", posemb.RESIZE_METHODS)
def test_laws_of_resizing(method):
  def resize(values, old, new, prefix=1):
    return posemb.resize_grid(values, old, new, prefix=prefix, method=method)

  values = table(noise(4, 4, 2), prefix=1)
  assert resize(values, (4, 4), (4, 4)) is values
  # As many tokens, but another grid.
  wide = resize(values, (4, 4), (2, 8))
  assert wide.shape == values.shape and (wide[0, 1:] != values[0, 1:]).any()
  # Axes are independent, constants stay, and mirrored goes to mirrored.
  step = resize(resize(values, (4, 4), (2, 4)), (2, 4), (2, 8))
  np.testing.assert_allclose(step, wide, atol=1e-6)
  np.testing.assert_allclose(
    resize(np.ones((1, 16, 1)), (4, 4), (3, 7), prefix=0), 1, rtol=1e-6
  )
  mirrored = values[0, 1:].reshape(4, 4, 2)[::-1, ::-1]
  np.testing.assert_allclose(
    resize(table(mirrored), (4, 4), (2, 8), prefix=0).reshape(2, 8, 2),
    wide[0, 1:].reshape(2, 8, 2)[::-1, ::-1],
    atol=1e-6,
  )


def test_offsets_follow_the_grid():
  values = noise(2 * 12 - 1, 3)
  assert posemb.resize_relative(values, (3, 4), (3, 4)) is values
  # A table that only knows how far right a key is says the same after.
  w, new_w = 5, 7
  by_right = np.arange(1 - w, w, dtype=np.float32)[:, None]
  result = posemb.resize_relative(
    by_right, (1, w), (1, new_w), method="bilinear_corners"
  )
  expected = np.linspace(1 - w, w - 1, 2 * new_w - 1)[:, None]
  np.testing.assert_allclose(result, expected, atol=1e-6)
  # Mirroring all offsets mirrors the result; the middle stays the middle.
  bigger = posemb.resize_relative(values, (3, 4), (5, 6))
  assert bigger.shape == (2 * 30 - 1, 3)
  np.testing.assert_allclose(
    posemb.resize_relative(values[::-1], (3, 4), (5, 6)),
    bigger[::-1],
    atol=1e-6,
  )


def test_resizing_refusals():
  values = noise(1, 17, 2)
  with pytest.raises(ValueError, match=r"\(1, 17, 2\).*\(4, 4\).*0 rows"):
    posemb.resize_grid(values, (4, 4), (2, 2), prefix=0)
  with pytest.raises(ValueError, match="0 places"):
    posemb.resize_grid(values, (4, 4), (0, 4), prefix=1)
  with pytest.raises(ValueError, match="'nearest'.*bilinear_corners"):
    posemb.resize_grid(values, (4, 4), (2, 2), prefix=1, method="nearest")
  with pytest.raises(ValueError, match=r"\(3, 3\).*\[17, e\]"):
    posemb.resize_relative(values[0, :5], (3, 3), (2, 2))


def test_sincos_positions_tell_rows_from_columns():
  positions = posemb.sincos2d((2, 3), 8)
  assert positions.shape == (6, 8)
  np.testing.assert_allclose(
    positions[4, :2], np.sin([1.0, 1e-4]), rtol=1e-5
  )  # x
  np.testing.assert_allclose(
    positions[5, 6:], np.cos([1.0, 1e-4]), rtol=1e-5
  )  # y


def test_only_a_learned_raster_has_a_row_for_the_class_token():
  x = jnp.zeros((1, 1 + 2 + 6, 8))  # class token, two registers, patches
  for kind, zeros in (("learned_1d", 2), ("learned_2d", 3), ("sincos2d", 3)):
    place = posemb.PositionEmbedding(kind, (2, 3), class_token=True)
    positions, _ = place.init_with_output(jax.random.key(0), x)
    nowhere = ~positions[0].any(axis=1)
    assert positions.shape == (1, 9, 8)
    assert nowhere.tolist()[:3] == [zeros == 3, True, True]
    assert not nowhere[3:].any()


def test_relative_logits_by_hand():
  offsets = np.arange(-3, 4, dtype=np.float32)[:, None]  # four patches
  q = np.ones((1, 6, 2, 1), np.float32)  # after two tokens that stand nowhere
  logits = posemb.relative_logits(jnp.array(offsets), jnp.array(q), 4)
  assert logits.shape == (1, 2, 6, 6)
  assert not logits[:, :, :2].any() and not logits[:, :, :, :2].any()
  place = np.arange(4)
  np.testing.assert_array_equal(logits[0, 1, 2:, 2:], place[:, None] - place)
