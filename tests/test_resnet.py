import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from tests import reference_resnet
from tests.tracing import result_types
from vit_jax import models, trees
from vit_jax.models import resnet

GOLDEN = pathlib.Path(__file__).parent / "golden"
GOLDEN_FIELDS = {
  "published_hybrid": {"stem_blocks": (1, 2, 1), "patch_size": 1},
  "published_hybrid_root_only": {"stem_blocks": (), "patch_size": 4},
  "published_hybrid_old_groupnorm": {"stem_blocks": (1, 1), "patch_size": 1},
}


class Features(nn.Module):
  """A module that has nothing but a stem."""

  blocks: tuple[int, ...]
  width: float = 0.5
  dtype: str = "float32"

  @nn.compact
  def __call__(self, images):
    return resnet.stem(
      images, blocks=self.blocks, width=self.width, dtype=self.dtype
    )


def noise(*shape, seed=0):
  values = np.random.default_rng(seed).uniform(-1, 1, shape)
  return jnp.asarray(values, jnp.float32)


def shapes(model, size):
  images = jax.ShapeDtypeStruct((1, *size, 3), jnp.float32)
  return jax.eval_shape(model.init, jax.random.key(0), images)["params"]


def draw(model, size=(64, 64)):
  """Parameters with no zeros in them: everything shows in the outputs."""
  rng = np.random.default_rng(1)

  def leaf(path, abstract):
    center = 1.0 if path.endswith("scale") else 0.0
    return jnp.asarray(rng.normal(center, 0.2, abstract.shape), jnp.float32)

  return trees.map_with_path(leaf, shapes(model, size))


def run(model, params, images):
  return jax.jit(lambda p, x: model.apply({"params": p}, x))(params, images)


def doubles(tree):
  return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


# Right values.


@pytest.mark.parametrize("name", GOLDEN_FIELDS)
def test_published_hybrids_give_published_logits(name):
  flat = dict(np.load(GOLDEN / f"{name}.npz"))
  if name.endswith("old_groupnorm"):
    flat = {k: v.squeeze() if "/gn" in f"/{k}" else v for k, v in flat.items()}
  golden = np.load(GOLDEN / f"{name}.io.npz")
  model = models.create(
    "mu/1",
    num_classes=7,
    width=32,
    depth=2,
    num_heads=4,
    mlp_dim=64,
    stem_width=0.5,
    **GOLDEN_FIELDS[name],
  )
  params = traverse_util.unflatten_dict(flat, sep="/")
  assert trees.differences(params, shapes(model, (64, 64))) == []
  outputs = run(model, params, golden["images"])
  np.testing.assert_allclose(outputs["logits"], golden["logits"], atol=2e-5)


@pytest.mark.parametrize("size", [(64, 64), (37, 50)])
@pytest.mark.parametrize("blocks", [(), (2,), (1, 2, 1)], ids=str)
def test_stem_equals_numpy_reference(blocks, size):
  model = Features(blocks)
  params = draw(model)
  images = noise(2, *size, 3)
  features = run(model, params, images)
  exact = [
    reference_resnet.stem(image, doubles(params)) for image in doubles(images)
  ]
  np.testing.assert_allclose(features, exact, atol=2e-5)
  stride = resnet.stride(blocks)
  assert features.shape[1:3] == (-(-size[0] // stride), -(-size[1] // stride))


def test_small_weights_are_divided_by_their_deviation_plus_1e_5():
  kernel = jnp.array([-1e-6, 1e-6]).reshape(1, 1, 2, 1)
  standard = resnet.standardize(kernel).ravel()
  np.testing.assert_allclose(standard, [-1 / 11, 1 / 11], rtol=1e-5)


def test_group_norm_is_the_published_one():
  x = jnp.stack([jnp.zeros(32), jnp.full(32, 1e-3)])[None]
  params = {"scale": jnp.ones(32), "bias": jnp.zeros(32)}
  y = resnet.group_norm().apply({"params": params}, x)
  np.testing.assert_allclose(y[0, :, 5], [-0.4472136, 0.4472136], rtol=1e-5)


def test_bfloat16_computes_near_and_keeps_float32():
  model = Features((1, 1))
  params = draw(model)
  images = noise(2, 32, 32, 3)
  low = model.clone(dtype="bfloat16")
  features, exact = run(low, params, images), run(model, params, images)
  assert features.dtype == jnp.bfloat16
  assert {leaf.dtype for leaf in jax.tree.leaves(shapes(low, (32, 32)))} == {
    jnp.dtype("float32")
  }
  np.testing.assert_allclose(features.astype(jnp.float32), exact, atol=0.2)
  counts = result_types(lambda p: low.apply({"params": p}, images), params)
  assert counts["conv_general_dilated", "bfloat16"] == 9
  assert counts["rsqrt", "float32"] == 9 and not counts["rsqrt", "bfloat16"]
  assert counts["sqrt", "float32"] == 9 and not counts["sqrt", "bfloat16"]


# Parameters.


def test_names_have_no_scope_around_the_stem():
  flat = trees.flatten(shapes(Features((1, 2), width=1.0), (32, 32)))
  sizes = {name: leaf.shape for name, leaf in flat.items()}
  norms = {"gn1": 128, "gn2": 128, "gn3": 512, "gn_proj": 512}
  prefix = "block2/unit1/"
  assert {k: v for k, v in sizes.items() if k.startswith(prefix)} == {
    f"{prefix}conv1/kernel": (1, 1, 256, 128),
    f"{prefix}conv2/kernel": (3, 3, 128, 128),
    f"{prefix}conv3/kernel": (1, 1, 128, 512),
    f"{prefix}conv_proj/kernel": (1, 1, 256, 512),
    **{f"{prefix}{norm}/scale": (c,) for norm, c in norms.items()},
    **{f"{prefix}{norm}/bias": (c,) for norm, c in norms.items()},
  }
  scopes = {name.rsplit("/", 2)[0] for name in sizes if "unit" in name}
  assert scopes == {"block1/unit1", "block2/unit1", "block2/unit2"}
  root = {name: shape for name, shape in sizes.items() if "unit" not in name}
  assert root == {
    "conv_root/kernel": (7, 7, 3, 64),
    "gn_root/scale": (64,),
    "gn_root/bias": (64,),
  }
  assert "block2/unit2/conv_proj/kernel" not in sizes


HYBRIDS = {  # name -> parameters with 1000 classes, tokens' grid; 224 pixels
  "R+Ti/16": (6_337_704, 7),
  "R26+S/32": (36_431_912, 7),
  "R26+B/32": (101_383_976, 7),
  "R50+B/16": (98_659_112, 14),
  "R50+L/32": (328_994_856, 7),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_published_hybrids_have_the_published_sizes(name):
  model = models.create(name, num_classes=1000)
  count, side = HYBRIDS[name]
  sizes = trees.flatten(shapes(model.clone(depth=1), (224, 224)))
  sizes = {name: leaf.size for name, leaf in sizes.items()}
  block = sum(size for name, size in sizes.items() if "encoderblock" in name)
  assert sum(sizes.values()) + (model.depth - 1) * block == count
  stem, _, variant = name.partition("+")
  blocks, patch = resnet.blocks_of(stem, int(variant.split("/")[1]))
  assert resnet.stride(blocks) * patch * side == 224


def test_every_parameter_has_mesh_axes():
  for path, leaf in trees.flatten(shapes(Features((1,)), (32, 32))).items():
    axes = trees.first_match(models.PARAM_AXES, path)
    assert len(axes) == len(leaf.shape), path
    assert (axes[-1] == "fsdp") == path.endswith("kernel"), path


def test_initial_values():
  model = Features((1, 1), width=1.0)
  images = noise(1, 32, 32, 3)
  flat = trees.flatten(jax.jit(model.init)(jax.random.key(0), images)["params"])
  for path, leaf in flat.items():
    if path.endswith("kernel"):
      fan_in = np.prod(leaf.shape[:3])
      np.testing.assert_allclose(leaf.std(), fan_in**-0.5, rtol=0.1)
      assert np.abs(leaf).max() <= 2 / 0.87 * fan_in**-0.5
    else:
      ones = path.endswith("scale") and "gn3" not in path
      np.testing.assert_array_equal(leaf, float(ones), err_msg=path)


def test_a_fresh_unit_passes_its_input_on():
  x = jnp.abs(noise(1, 5, 5, 128))
  unit = resnet.Unit(32, 1, "float32")
  y, _ = jax.jit(unit.init_with_output)(jax.random.key(0), x)
  np.testing.assert_array_equal(y, x)


# Names.


def test_stems_by_name():
  assert resnet.blocks_of("R50", 32) == ((3, 4, 6, 3), 1)
  assert resnet.blocks_of("R50", 16) == ((3, 4, 9), 1)
  assert resnet.blocks_of("R26", 32) == ((2, 2, 2, 2), 1)
  assert resnet.blocks_of("R26", 16) == ((2, 2, 4), 1)
  assert resnet.blocks_of("R101", 16) == ((3, 4, 26), 1)
  assert resnet.blocks_of("R152", 32) == ((3, 8, 36, 3), 1)
  assert resnet.blocks_of("R", 16) == ((), 8)
  # Three convolutions a unit, the root and the classifier make the number.
  for name, units in resnet.BLOCKS.items():
    assert name == "R" or int(name[1:]) == 3 * sum(units) + 2
  strides = [resnet.stride((1,) * stages) for stages in range(5)]
  assert strides == [4, 4, 8, 16, 32]


@pytest.mark.parametrize(
  ("name", "patch", "words"),
  [
    ("R5", 16, ["'R5'", "R26, R50", "Did you mean 'R50'"]),
    ("R50", 14, ["R50", "16 or 32", "14"]),
    ("R", 32, ["stem R ", "16 pixels", "32"]),
  ],
)
def test_unknown_stems_are_refused(name, patch, words):
  with pytest.raises(ValueError) as error:
    resnet.blocks_of(name, patch)
  for word in words:
    assert word in str(error.value)


@pytest.mark.parametrize("width", [0.75, 0.0, -1.0, 0.501])
def test_widths_without_groups_are_refused(width):
  with pytest.raises(ValueError, match=f"{width} .*32 groups.*multiple of 0.5"):
    shapes(Features((), width), (32, 32))
