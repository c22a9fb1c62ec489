import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference_resnet
from tests.test_resnet import doubles, draw, noise, run, shapes
from tests.tracing import result_types
from vit_jax import models, trees
from vit_jax.models import bit


def tiny(**fields):
  return bit.BiT(
    **{"num_classes": 5, "blocks": (1, 2), "width_factor": 0.5, **fields}
  )


# Right values.


@pytest.mark.parametrize(
  ("fields", "size"),
  [
    ({"blocks": (1, 2, 1)}, (64, 64)),
    ({}, (37, 50)),
    ({"num_classes": 0}, (10, 40)),
  ],
  ids=str,
)
def test_equals_numpy_reference(fields, size):
  model = tiny(**fields)
  params = draw(model)
  images = noise(2, *size, 3)
  outputs = run(model, params, images)
  exact = reference_resnet.bit(doubles(params), doubles(images))
  for name in ("logits", "pre_logits", "tokens"):
    np.testing.assert_allclose(outputs[name], exact[name], atol=2e-5)
  assert outputs["grid"] == model.grid(size)
  assert np.prod(model.grid(size)) == outputs["tokens"].shape[1]


def test_small_weights_are_divided_by_the_root_of_their_variance_plus_1e_10():
  kernel = jnp.array([-1e-6, 1e-6]).reshape(1, 1, 2, 1)
  standard = bit.standardize(kernel).ravel()
  np.testing.assert_allclose(standard, [-(101**-0.5), 101**-0.5], rtol=1e-5)


def test_group_norm_is_the_published_one():
  x = jnp.stack([jnp.zeros(32), jnp.full(32, 1e-3)])[None]
  params = {"scale": jnp.ones(32), "bias": jnp.zeros(32)}
  y = bit.group_norm().apply({"params": params}, x)
  np.testing.assert_allclose(y[0, :, 5], [-0.1561738, 0.1561738], rtol=1e-5)
  # The variance survives a mean that is much larger.
  y = bit.group_norm().apply({"params": params}, 1e3 * x + 1e4)
  np.testing.assert_allclose(y[0, :, 5], [-1.0, 1.0], rtol=1e-3)


def test_bfloat16_computes_near_and_keeps_float32():
  model = tiny(dtype=jnp.bfloat16)
  assert model == tiny(dtype="bfloat16")
  params = draw(model)
  images = noise(2, 32, 32, 3)
  outputs, exact = run(model, params, images), run(tiny(), params, images)
  assert {leaf.dtype for leaf in jax.tree.leaves(shapes(model, (32, 32)))} == {
    jnp.dtype("float32")
  }
  for name in ("logits", "pre_logits", "tokens"):
    assert outputs[name].dtype == jnp.float32
    np.testing.assert_allclose(outputs[name], exact[name], atol=0.2)
  counts = result_types(lambda p: model.apply({"params": p}, images), params)
  assert counts["conv_general_dilated", "bfloat16"] == 12
  assert counts["dot_general", "float32"] == 1


def test_remat_changes_nothing_but_what_is_kept():
  images = noise(2, 32, 32, 3)
  params = draw(tiny())

  def results(remat):
    def loss(params):
      outputs = tiny(remat=remat).apply({"params": params}, images)
      return jnp.square(outputs["logits"]).sum()

    residuals = jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params)
    kept = sum(leaf.size for leaf in jax.tree.leaves(residuals))
    return jax.jit(jax.grad(loss))(params), kept

  (grads, kept), (other_grads, other_kept) = map(results, ("none", "full"))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3),
    grads,
    other_grads,
  )
  assert other_kept < 0.7 * kept


# Parameters.

COUNTS = {  # with 1000 classes, in millions, as listed by PyTorch's timm
  "R50x1": 25.55,
  "R50x3": 217.32,
  "R101x1": 44.54,
  "R101x3": 387.93,
  "R152x2": 236.34,
  "R152x4": 936.53,
}


@pytest.mark.parametrize("name", [*COUNTS, "R50x2", "R152x1", "R200x3"])
def test_parameter_counts(name):
  depth, width = map(int, name[1:].split("x"))
  stages = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
  expected, channels = 7 * 7 * 3 * 64 * width, 64 * width
  for i, units in enumerate(stages.get(depth, (3, 24, 36, 3))):
    c = 64 * width * 2**i
    expected += channels * 4 * c  # conv_proj
    for _ in range(units):
      # Three convolutions, each after two numbers for every channel it reads.
      expected += channels * c + 9 * c * c + 4 * c * c
      expected += 2 * channels + 2 * c + 2 * c
      channels = 4 * c
  expected += 2 * channels + 1000 * channels + 1000
  model = bit.create(name, num_classes=1000)
  sizes = jax.tree.leaves(shapes(model, (32, 32)))
  count = sum(leaf.size for leaf in sizes)
  assert count == expected
  if name in COUNTS:
    assert round(count / 1e6, 2) == COUNTS[name]
  if name == "R50x1":
    assert count == 25_549_352


UNIT = {  # published name in a unit -> ours
  "a/group_norm/gamma": "gn1/scale",
  "a/group_norm/beta": "gn1/bias",
  "a/standardized_conv2d/kernel": "conv1/kernel",
  "b/group_norm/gamma": "gn2/scale",
  "b/group_norm/beta": "gn2/bias",
  "b/standardized_conv2d_17/kernel": "conv2/kernel",
  "c/group_norm/gamma": "gn3/scale",
  "c/group_norm/beta": "gn3/bias",
  "c/standardized_conv2d/kernel": "conv3/kernel",
  "a/proj/standardized_conv2d/kernel": "conv_proj/kernel",
}


def test_published_names_are_ours_renamed():
  root = "resnet/root_block/standardized_conv2d/kernel"
  published = {
    root: "root_block/conv_root/kernel",
    "resnet/group_norm/gamma": "norm-pre-head/scale",
    "resnet/group_norm/beta": "norm-pre-head/bias",
    "resnet/head/conv2d/kernel": "conv_head/kernel",
    "resnet/head/conv2d/bias": "conv_head/bias",
  }
  for unit in ("block1/unit01", "block2/unit01", "block2/unit02"):
    for theirs, ours in UNIT.items():
      if unit.endswith("01") or "proj" not in theirs:
        published[f"resnet/{unit}/{theirs}"] = f"{unit}/{ours}"
  assert set(trees.flatten(shapes(tiny(), (32, 32)))) == set(published.values())
  for theirs, ours in published.items():
    matches = [(re.fullmatch(r, theirs), new) for r, new in bit.FROM_PUBLISHED]
    assert [m.expand(new) for m, new in matches if m] == [ours]


def test_every_parameter_has_mesh_axes():
  for path, leaf in trees.flatten(shapes(tiny(), (32, 32))).items():
    axes = trees.first_match(models.PARAM_AXES, path)
    assert len(axes) == len(leaf.shape), path
    assert ("fsdp" in axes) == path.endswith("kernel"), path


def test_fresh_head_gives_its_bias():
  images = noise(2, 32, 32, 3)
  model = tiny(head_bias=-6.9)
  init = jax.jit(lambda key: model.init_with_output(key, images, train=True))
  outputs, variables = init(jax.random.key(0))
  np.testing.assert_array_equal(outputs["logits"], np.full((2, 5), -6.9, "f4"))
  flat = trees.flatten(variables["params"])
  assert not flat["conv_head/kernel"].any()
  for path, leaf in flat.items():
    if "gn" in path or "norm" in path:
      np.testing.assert_array_equal(leaf, float(path.endswith("scale")))


def test_grid_of_any_image_size():
  model = bit.create("R50x1", num_classes=10)
  assert model.grid(224) == (7, 7)
  assert model.grid((384,)) == (12, 12)
  assert model.grid((100, 65)) == (4, 3)
  with pytest.raises(ValueError, match="image_size"):
    model.grid((0, 32))


# Errors.


@pytest.mark.parametrize("name", ["R51x1", "R50", "R50x0", "Rx1", "50x1"])
def test_unknown_names_are_refused(name):
  with pytest.raises(ValueError) as error:
    bit.create(name, num_classes=10)
  for word in (repr(name), "R26, R50, R101", "'R50x1'"):
    assert word in str(error.value)


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"remat": "dots"}, ["'dots'", "none, full"]),
    ({"dtype": "float16"}, ["'float16'", "bfloat16"]),
    ({"num_classes": -1}, ["num_classes=-1"]),
    ({"width_factor": 0.3}, ["0.3", "32 groups", "multiple of 0.5"]),
  ],
)
def test_fields_are_checked(fields, words):
  with pytest.raises(ValueError) as error:
    tiny(**fields)
  for word in words:
    assert word in str(error.value)
