"""The mesh, the rule table and placement on eight devices."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from ml_collections import ConfigDict

from vit_jax import sharding

RULES = ((r"kernel", ("fsdp", "model")), (r"bias", (None,)))


def mesh(data=-1, fsdp=1, model=1, dcn=1, devices=None):
  sizes = {"data": data, "fsdp": fsdp, "model": model, "dcn": dcn}
  return sharding.make_mesh(ConfigDict(sizes), devices)


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


def test_model_sizes_that_would_do_are_named():
  tree = {"Transformer": {"kernel": leaf(4, 12), "other": leaf(4, 18)}}
  rules = ((r"kernel|other", ("fsdp", "model")),)
  with pytest.raises(ValueError, match=r"may be 1, 2, 3, 6\."):
    sharding.check_model(tree, mesh(1, 1, 8), rules)


def test_what_does_not_divide_goes_to_a_dimension_that_does():
  tree = {"kernel": leaf(1025, 1024), "layers": {"kernel": leaf(8, 1025, 1024)}}
  where = sharding.tree_shardings(tree, mesh(1, 8, 1), RULES)
  assert where["kernel"].spec == PartitionSpec(None, "fsdp")
  # Never to the layers: they are taken one by one.
  assert where["layers"]["kernel"].spec == PartitionSpec(None, None, "fsdp")


def test_large_leaves_that_stay_whole_are_refused_with_their_sizes():
  odd = {"kernel": leaf(1025, 1023), "small": {"kernel": leaf(3, 3)}}
  sharding.check_spread(odd, mesh(8, 1, 1), RULES)  # Copies are meant there.
  with pytest.raises(ValueError, match=r"fsdp = 8.*\n  kernel: .* 5 MB") as it:
    sharding.check_spread(odd, mesh(1, 8, 1), RULES)
  assert "small" not in str(it.value)
  even = {"kernel": leaf(514, 1023)}
  with pytest.raises(ValueError, match=r"Set config.mesh.fsdp = 2,"):
    sharding.check_spread(even, mesh(1, 8, 1), RULES)


def test_moments_lie_as_their_parameters_and_factors_as_far_as_they_can():
  params = {"a": {"kernel": leaf(4, 6)}, "kernel": leaf(8, 2)}
  where = sharding.tree_shardings(params, mesh(2, 2, 2), RULES)
  state = {
    "mu": params,
    "row": {"a": {"kernel": leaf(4, 1)}, "kernel": leaf(1, 2)},
    "count": leaf(),
    "other": leaf(5),
  }
  found = jax.tree.map(
    lambda place: place.spec, sharding.moment_shardings(state, params, where)
  )
  assert found["mu"]["a"]["kernel"] == PartitionSpec("fsdp", "model")
  assert found["row"]["a"]["kernel"] == PartitionSpec("fsdp", None)
  assert found["row"]["kernel"] == PartitionSpec(None, "model")
  assert found["count"] == found["other"] == PartitionSpec()


def test_a_dimension_is_cut_for_as_many_data_devices_as_divide_it():
  params = {
    "even": leaf(512, 256),
    "taken": leaf(512, 255),
    "half": leaf(1026, 515),
    "odd": leaf(511, 513),
    "small": leaf(8, 8),
  }
  spec = {"taken": PartitionSpec("fsdp")}
  over = mesh(4, 2, 1)
  where = {
    name: jax.NamedSharding(over, spec.get(name, PartitionSpec()))
    for name in params
  }
  parts = {
    name: place.shard_shape(params[name].shape)
    for name, place in sharding.spread_over_data(params, where).items()
  }
  assert parts == {
    "even": (128, 256),
    "taken": (64, 255),  # By fsdp, and then by data.
    "half": (513, 515),  # In two, each held by two of the four.
    "odd": (511, 513),
    "small": (8, 8),
  }


class Core:
  """A device of one of two slices."""

  platform = "cpu"

  def __init__(self, number):
    self.id, self.slice_index = number, number // 4


def test_slices_are_the_outer_part_of_data():
  cores = [Core(i) for i in range(8)]
  over = mesh(-1, 2, 1, dcn=2, devices=cores).devices
  assert over.shape == (4, 2, 1)
  slices = np.vectorize(lambda core: core.slice_index)(over)
  np.testing.assert_array_equal(slices[:, 0, 0], [0, 0, 1, 1])
  assert mesh(2, 2, 1, dcn=-1, devices=cores).devices.shape == (4, 2, 1)
  with pytest.raises(ValueError, match=r"in 2 slices: set .*dcn=2"):
    mesh(devices=cores)
  with pytest.raises(ValueError, match="dcn=3 x data=-1"):
    mesh(dcn=3, devices=cores)
