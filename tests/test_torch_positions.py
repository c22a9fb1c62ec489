"""Positions come back as they were saved, or not at all; never others.

A square and one more can be a class token before a square, or a grid that is no
square: 3x8 + 1 = 5x5. Every dialect is tried on grids of that kind.
"""

import itertools

import numpy as np
import pytest
import safetensors.numpy

from tests.weight_files import (
  GOLDEN,
  POSITIONS,
  assert_same,
  flat,
  golden_model,
  npz,
  random_params,
  tiny,
  traced_once,  # noqa: F401
)
from vit_jax import weights
from vit_jax.weights import resizing, torch
from vit_jax.weights.leaf import in_memory

SIZES = [(4, 12), (8, 16), (12, 20), (16, 24), (12, 32), (12, 12)]


def as_saved(suffix):
  def write(path, params):
    path = f"{path}{suffix}"
    weights.save(path, params)
    return path

  return write


def as_linen(path, params):
  return npz(f"{path}.npz", params, lambda name: name.replace("_2/", "_1/"))


def as_big_vision(name):
  def write(path, params):
    """Without the class token's row, which is zeros."""
    params = {**params, name: params[POSITIONS][:, "cls" in params :]}
    del params[POSITIONS]
    return npz(f"{path}.npz", params)

  return write


def as_older(path, params):
  """The name that files with and without a class token's row have."""
  name = "Transformer/pos_embedding"
  return npz(f"{path}.npz", params, lambda n: n.replace(POSITIONS, name))


def timm(params):
  leaves = torch.to_timm({n: in_memory(x) for n, x in params.items()})
  return {name: np.ascontiguousarray(x.read()) for name, x in leaves.items()}


def foreign(path, arrays):
  safetensors.numpy.save_file(arrays, f"{path}.safetensors")
  return f"{path}.safetensors"


def as_timm(path, params):
  return foreign(path, timm(params))


def as_timm_without_rows(path, params):
  """timm's `no_embed_class=True`: positions for the patches alone."""
  patches = params[POSITIONS][:, "cls" in params :]
  return foreign(path, timm(params) | {"pos_embed": patches.copy()})


def as_hugging_face(path, params):
  names = {
    "cls_token": "embeddings.cls_token",
    "reg_token": "embeddings.register_tokens",
    "pos_embed": "embeddings.position_embeddings",
  }
  arrays = timm(params) | {"pos_embed": params[POSITIONS]}
  return foreign(path, {names.get(n, n): x for n, x in arrays.items()})


OURS = {suffix: as_saved(suffix) for suffix in (".npz", ".safetensors")}
CERTAIN = {"linen": as_linen, "hugging_face": as_hugging_face}
WITHOUT_ROW = {
  "big_vision": as_big_vision("pos_embedding"),
  "older_without": as_big_vision("Transformer/pos_embedding"),
  "timm_without": as_timm_without_rows,
}
WITH_ROW = {"older": as_older, "timm": as_timm}
DIALECTS = OURS | CERTAIN | WITHOUT_ROW | WITH_ROW


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("classifier", ["token", "gap"])
@pytest.mark.parametrize("registers", [0, 2])
def test_what_is_loaded_is_what_was_saved(
  tmp_path, dialect, classifier, registers
):
  refused = []
  for size in SIZES:
    model = tiny(classifier=classifier, registers=registers, gelu="erf")
    params = flat(random_params(model, size))
    if dialect in WITHOUT_ROW and "cls" in params:
      params[POSITIONS][:, 0] = 0
    path = DIALECTS[dialect](tmp_path / "a", params)
    grid = model.grid(size)
    try:
      assert_same(weights.load(path, model, size), params)
    except ValueError as error:
      assert "grid=(h, w)" in str(error)
      refused.append(grid)
    assert_same(weights.load(path, model, size, grid=grid), params)
  assert not refused or dialect in WITHOUT_ROW | WITH_ROW
  assert (3, 3) not in refused


def test_two_readings_are_both_named(tmp_path):
  model = tiny(gelu="erf")
  params = flat(random_params(model, (12, 32)))
  path = as_timm(tmp_path / "a", params)
  with pytest.raises(
    ValueError, match="25 rows, 1 or 0 .* 3x8 or 5x5"
  ) as error:
    weights.load(path, model, (12, 32))
  assert f"{path} does not fit the model" in str(error.value)
  assert_same(weights.load(path, model, (12, 32), grid=(3, 8)), params)
  older = as_older(tmp_path / "b", params)
  with pytest.raises(ValueError, match="pos_embedding has 25 rows.*3x8 or 5x5"):
    weights.load(older, model, (12, 32))


def test_neither_a_square_nor_the_models_grid(tmp_path):
  path = as_timm(tmp_path / "a", flat(random_params(tiny(), (8, 12))))
  with pytest.raises(ValueError, match="7 rows, .* no square, nor .* 4x4"):
    weights.load(path, tiny(), 16)


def test_no_grid_is_empty():
  # Three patches, or three tokens and nothing else.
  assert resizing.rows_before(3, (3, 0), known=(), wanted=(1, 3)) == 0


def test_timms_own_grid_needs_no_telling():
  path = str(GOLDEN / "torch_timm_registers.safetensors")
  model = golden_model(registers=2, gelu="erf")
  told = weights.load(path, model, (32, 48), grid=(4, 6))
  assert_same(weights.load(path, model, (32, 48)), told)


@pytest.mark.parametrize("classifier", ["token", "gap"])
def test_registers_come_back_bit_for_bit(tmp_path, classifier):
  model = tiny(classifier=classifier, registers=2)
  params = flat(random_params(model, 8))
  params["registers"][:] = -0.0  # Of which 0 would make another zero.
  path = as_saved(".safetensors")(tmp_path / "a", params)
  found = flat(weights.load(path, model, 8))
  for name, array in params.items():
    assert found[name].tobytes() == array.tobytes(), name
  table = safetensors.numpy.load_file(path)["pos_embed"]
  own = int(classifier == "token")
  assert table.shape == (1, own + 2 + 4, 8)
  assert not table[:, own : own + 2].any()


def test_a_file_of_ours_says_how_its_rows_stand(tmp_path):
  """At another size, where no count would tell."""
  for classifier, grid in itertools.product(("token", "gap"), ((3, 8), None)):
    model = tiny(classifier=classifier)
    params = flat(random_params(model, (12, 32)))
    path = str(tmp_path / "a.safetensors")
    weights.save(path, params, grid=grid)
    given = weights.load(path, model, 16, grid=(3, 8))
    if grid:
      assert_same(weights.load(path, model, 16), given)
      continue
    with pytest.raises(ValueError, match="24 positions, which are no square"):
      weights.load(path, model, 16)
