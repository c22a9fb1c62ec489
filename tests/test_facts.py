"""What leaves do not show is compared all the same."""

import pytest

from tests.weight_files import (
  GOLDEN,
  assert_same,
  flat,
  golden_model,
  random_params,
  tiny,
  traced_once,  # noqa: F401
)
from vit_jax import weights
from vit_jax.models import bit
from vit_jax.weights import facts, torch
from vit_jax.weights.leaf import in_memory

TIMM = str(GOLDEN / "torch_timm_token.safetensors")

# Fields, and models of equal leaves that differ in them.
PAIRS = {
  "gelu": ({}, {"gelu": "erf"}),
  "posemb": ({"posemb": "sincos2d"}, {"posemb": "none"}),
  "posemb_at": ({}, {"posemb_at": "shared"}),
}


def run_of(model):
  """As `weights.open` gives a run of a model; `test_weights` has real ones."""
  leaves = flat(random_params(model, 8))
  return weights.Stored(
    "a_run",
    {name: in_memory(array) for name, array in leaves.items()},
    (2, 2),
    facts.of(model, "0,1"),
  )


@pytest.mark.parametrize("field", PAIRS)
def test_a_run_of_another_meaning_is_refused(field):
  one, other = (tiny(**fields) for fields in PAIRS[field])
  weights.plan(run_of(one), one, 8)
  values = getattr(one, field), getattr(other, field)
  for model, wanted, (stored, expected) in (
    (one, other, values),
    (other, one, values[::-1]),
  ):
    with pytest.raises(ValueError, match="a_run does not fit") as error:
      weights.plan(run_of(model), wanted, 8)
    assert (
      f"different   {field}: stored {stored!r}, expected {expected!r} "
      f"(--config.model.{field})" in str(error.value)
    )


def test_it_stands_in_one_list_with_the_leaves():
  with pytest.raises(ValueError, match=r"model \(1 leaf\)") as error:
    weights.plan(run_of(tiny()), tiny(gelu="erf", registers=2), 8)
  for line in ("missing     registers: (1, 2, 8)", "different   gelu: stored"):
    assert line in str(error.value)


def test_a_resnet_has_none_of_it():
  model = bit.BiT(num_classes=3, blocks=(1,), width_factor=0.5)
  assert facts.of(model, "0,1") == {"input_range": "0,1"}
  assert not facts.differences({"gelu": "erf"}, model)


@pytest.mark.parametrize(
  "fields", [{"gelu": "tanh"}, {"posemb_at": "shared"}, {"num_heads": 4}]
)
def test_a_file_of_ours_is_compared_too(tmp_path, fields):
  model = tiny(gelu="erf")
  params = random_params(model, 8)
  about = torch.metadata(
    model, image_size=(8, 8), input_range="imagenet", classes=("a", "b", "c")
  )
  path = str(tmp_path / "a.safetensors")
  weights.save(path, params, grid=(2, 2), about=about)
  assert_same(weights.load(path, model, 8), params)
  stored = weights.open(path)
  assert stored.grid == (2, 2)
  assert stored.about["input_range"] == "imagenet"
  (field,) = fields
  with pytest.raises(ValueError, match=rf"--config\.model\.{field}\)"):
    weights.load(path, model.clone(**fields), 8)


def test_fixed_positions_are_a_table_in_timm():
  model = tiny(posemb="sincos2d")
  about = torch.metadata(
    model, image_size=(8, 8), input_range="-1,1", classes=()
  )
  assert about["posemb"] == "learned_1d"


def test_pytorchs_own_files_are_warned_of(warnings):
  weights.load(TIMM, golden_model(gelu="erf"), 32)
  assert not warnings()
  weights.load(TIMM, golden_model(), 32)
  (warning,) = warnings()
  assert TIMM in warning and "--config.model.gelu=erf" in warning


def test_published_files_say_nothing(warnings):
  path = str(GOLDEN / "published_token.npz")
  assert weights.open(path).about == {}
  weights.load(path, golden_model(gelu="erf"), 32)
  assert not warnings()
