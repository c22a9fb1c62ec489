"""The mesh, the rule table and placement on eight devices."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from vit_jax import sharding

RULES = ((r"kernel", ("fsdp", "model")), (r"bias", (None,)))


def mesh(data=-1, fsdp=1, model=1):
  return sharding.make_mesh(
    types.SimpleNamespace(data=data, fsdp=fsdp, model=model)
  )


def leaf(*shape):
  return jax.ShapeDtypeStruct(shape, np.float32)


def test_minus_one_takes_the_rest():
  assert mesh().devices.shape == (8, 1, 1)
  assert mesh(2, -1, 2).devices.shape == (2, 2, 2)


@pytest.mark.parametrize(
  "shape", [(3, 1, 1), (4, 1, 1), (-1, -1, 1), (-1, 3, 1)]
)
def test_a_mesh_uses_every_device_once(shape):
  with pytest.raises(ValueError, match="does not make 8 devices"):
    mesh(*shape)


def test_rules_cover_moments_and_stacked_blocks_and_skip_what_does_not_divide():
  tree = {
    "kernel": leaf(4, 6),
    "mu": {"kernel": leaf(4, 6)},
    "blocks": {"kernel": leaf(12, 4, 6)},
    "odd": {"kernel": leaf(3, 6)},
    "count": leaf(),
    "bias": leaf(6),
  }
  specs = jax.tree.map(
    lambda where: where.spec,
    sharding.tree_shardings(tree, mesh(2, 2, 2), RULES),
  )
  assert (
    specs["kernel"] == specs["mu"]["kernel"] == PartitionSpec("fsdp", "model")
  )
  assert specs["blocks"]["kernel"] == PartitionSpec(None, "fsdp", "model")
  assert specs["odd"]["kernel"] == PartitionSpec(None, "model")
  assert specs["count"] == PartitionSpec()


def test_an_uncovered_leaf_is_an_error_that_lists_it():
  with pytest.raises(ValueError, match=r"probe: \(1, 4\) float32"):
    sharding.tree_shardings({"probe": leaf(1, 4)}, mesh(), RULES)


def test_a_batch_is_split_over_data_and_fsdp_and_ids_stay_home():
  batch = {"image": np.arange(32).reshape(16, 2), "id": np.arange(16)}
  placed = sharding.to_device(batch, mesh(2, 2, 2))
  assert list(placed) == ["image"]
  np.testing.assert_array_equal(placed["image"], batch["image"])
  assert placed["image"].addressable_shards[0].data.shape == (4, 2)


def test_batch_that_does_not_divide_names_all_numbers():
  sharding.check_batch_size(32, mesh(), 4)
  with pytest.raises(ValueError, match="24.*32.*8 data devices.*4.*Use 32"):
    sharding.check_batch_size(24, mesh(), 4)
  with pytest.raises(ValueError, match="Use 8 or 16"):
    sharding.check_batch_size(12, mesh(), 1)


def test_heads_that_do_not_divide_are_refused_in_words():
  tree = {"Transformer": {"kernel": leaf(4, 3)}}
  with pytest.raises(
    ValueError, match=r"config.mesh.model = 2.*\n.*kernel: 3 of"
  ):
    sharding.check_model(tree, mesh(2, 2, 2), RULES)
