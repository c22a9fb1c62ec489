import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from ml_collections import ConfigDict

from tests import reference_vit
from tests.tracing import result_types
from vit_jax import models, sharding, trees
from vit_jax.models import bit, blocks, derivatives

GOLDEN = pathlib.Path(__file__).parent / "golden"
GOLDEN_FIELDS = {
  "published_token": {},
  "published_gap": {"classifier": "gap"},
  "published_token_rep": {"representation_size": 24},
  "published_token_nonsquare": {},
}
BLOCK = {
  "LayerNorm_0/scale": (32,),
  "LayerNorm_0/bias": (32,),
  "LayerNorm_2/scale": (32,),
  "LayerNorm_2/bias": (32,),
  "MlpBlock_3/Dense_0/kernel": (32, 128),
  "MlpBlock_3/Dense_0/bias": (128,),
  "MlpBlock_3/Dense_1/kernel": (128, 32),
  "MlpBlock_3/Dense_1/bias": (32,),
  "MultiHeadDotProductAttention_1/query/kernel": (32, 2, 16),
  "MultiHeadDotProductAttention_1/query/bias": (2, 16),
  "MultiHeadDotProductAttention_1/key/kernel": (32, 2, 16),
  "MultiHeadDotProductAttention_1/key/bias": (2, 16),
  "MultiHeadDotProductAttention_1/value/kernel": (32, 2, 16),
  "MultiHeadDotProductAttention_1/value/bias": (2, 16),
  "MultiHeadDotProductAttention_1/out/kernel": (2, 16, 32),
  "MultiHeadDotProductAttention_1/out/bias": (32,),
}


def tiny(**fields):
  return models.create("mu/4", **{"num_classes": 5, "depth": 2, **fields})


def noise(*shape, seed=0):
  values = np.random.default_rng(seed).uniform(-1, 1, shape)
  return jnp.asarray(values, jnp.float32)


def init(model, images):
  """Parameters with no zeros in them: everything shows in the outputs."""
  rng = np.random.default_rng(1)
  abstract = jax.eval_shape(model.init, jax.random.key(0), images)["params"]

  def draw(path, leaf):
    center = 1.0 if path.endswith("scale") else 0.0
    return jnp.asarray(rng.normal(center, 0.2, leaf.shape), jnp.float32)

  return trees.map_with_path(draw, abstract)


def run(model, params, images, **kwargs):
  def apply(params, images):
    return model.apply({"params": params}, images, **kwargs)

  return jax.jit(apply)(params, images)


def shapes(model, size):
  images = jax.ShapeDtypeStruct((1, *size, 3), jnp.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
  return {name: leaf.shape for name, leaf in trees.flatten(params).items()}


def equations(model, params, images, **kwargs):
  """Counts (primitive, type of its result) in the traced forward pass."""

  def apply(params):
    return model.apply({"params": params}, images, **kwargs)

  return result_types(apply, params)


def stacked(params):
  return {**params, "Transformer": models.stack_blocks(params["Transformer"])}


# Right values.


@pytest.mark.parametrize("name", GOLDEN_FIELDS)
def test_published_weights_give_published_logits(name):
  flat = dict(np.load(GOLDEN / f"{name}.npz"))
  golden = np.load(GOLDEN / f"{name}.io.npz")
  model = models.create(
    "mu/8",
    num_classes=7,
    depth=2,
    num_heads=4,
    mlp_dim=64,
    **GOLDEN_FIELDS[name],
  )
  outputs = run(
    model, traverse_util.unflatten_dict(flat, sep="/"), golden["images"]
  )
  np.testing.assert_allclose(outputs["logits"], golden["logits"], atol=1e-5)
  ours = shapes(model, golden["images"].shape[1:3])
  assert ours == {name: leaf.shape for name, leaf in flat.items()}


@pytest.mark.parametrize(
  "fields",
  [
    {},
    {"classifier": "gap", "registers": 2},
    {"classifier": "map", "representation_size": 12},
    {"classifier": "none", "patch_size": (4, 2)},
    {"patch_size": (4, 2), "classifier": "gap", "posemb": "learned_2d"},
    {"num_classes": 0, "posemb": "none"},
    {"posemb": "sincos2d", "registers": 3},
    {"posemb": "relative", "registers": 1},
    {"posemb": "relative", "classifier": "gap"},
    {"posemb_at": "layers", "registers": 1},
    {"posemb_at": "layers", "posemb": "learned_2d", "classifier": "map"},
    {"posemb_at": "shared", "classifier": "gap"},
    {"posemb_at": "shared", "posemb": "sincos2d"},
    {"layer_scale": 0.5, "gelu": "erf"},
    {"stem_width": 0.5, "stem_blocks": (1, 2), "patch_size": (1, 2)},
  ],
  ids=str,
)
def test_equals_numpy_reference(fields):
  model = tiny(**fields)
  images = noise(2, 32, 48, 3) if model.stem_width else noise(2, 8, 12, 3)
  params = init(model, images)
  outputs, sown = run(model, params, images, mutable=["intermediates"])
  exact = reference_vit.forward(
    jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params),
    np.asarray(images, np.float64),
    classifier=model.classifier,
    posemb=model.posemb,
    posemb_at=model.posemb_at,
    gelu=model.gelu,
  )
  for name in ("logits", "pre_logits", "tokens"):
    np.testing.assert_allclose(outputs[name], exact[name], atol=2e-5)
  assert outputs["grid"] == model.grid(images.shape[1:3])
  weights = trees.flatten(sown["intermediates"]["Transformer"])
  assert len(weights) == model.depth
  np.testing.assert_allclose(
    np.stack(list(weights.values())), exact["weights"], atol=1e-5
  )
  # The rolled-up form gives the same from the same parameters.
  rolled = run(model.clone(scan=True, remat="full"), stacked(params), images)
  np.testing.assert_allclose(rolled["logits"], outputs["logits"], atol=1e-5)


def test_layer_norm_epsilon_is_the_published_one():
  x = jnp.array([[0.0, 1e-3]])
  norm = blocks.layer_norm(name=None)
  y = norm.apply({"params": {"scale": jnp.ones(2), "bias": jnp.zeros(2)}}, x)
  np.testing.assert_allclose(y, [[-0.4472136, 0.4472136]], rtol=1e-5)


# Parameters.

COUNTS = {  # name, classes -> parameters at 224 pixels (SPEC 1.2)
  ("Ti/16", 1000): 5_717_416,
  ("S/32", 1000): 22_878_952,
  ("S/16", 1000): 22_050_664,
  ("B/32", 1000): 88_224_232,
  ("B/16", 0): 85_798_656,
  ("B/16", 1000): 86_567_656,
  ("B/8", 1000): 86_576_872,
  ("L/32", 1000): 306_535_400,
  ("L/16", 1000): 304_326_632,
  ("H/14", 1000): 632_045_800,
  ("R+Ti/16", 0): 6_144_704,
  ("R+Ti/16", 1000): 6_337_704,
  ("R26+S/32", 1000): 36_431_912,
  ("R26+B/32", 1000): 101_383_976,
  ("R50+B/16", 0): 97_890_112,
  ("R50+B/16", 1000): 98_659_112,
  ("R50+L/32", 1000): 328_994_856,
}
REP_COUNTS = {
  ("B/32", 21843): 104_843_091,
  ("B/16", 21843): 103_186_515,
  ("R50+B/16", 21843): 115_277_971,
  ("L/32", 21843): 328_949_075,
  ("L/16", 1000): 305_376_232,
  ("H/14", 21843): 660_385_363,
}
GAP_COUNTS = {
  ("S/16", 1000): 22_049_896,
  ("S/32", 1000): 22_878_184,
  ("B/16", 1000): 86_566_120,
  ("M/16", 0): 38_323_712,
  ("So400m/14", 0): 412_442_352,
  ("g/14", 0): 1_011_199_616,
  ("g-opt/14", 0): 1_134_561_792,
  ("G/14", 0): 1_842_772_352,
  ("G-opt/14", 0): 1_663_302_144,
  ("e/14", 0): 3_805_417_728,
}
MAP_COUNTS = {
  ("B/16", 0): 92_884_224,
  ("So400m/14", 0): 427_680_704,
  ("g/14", 0): 1_036_448_384,
  ("g-opt/14", 0): 1_162_891_776,
  ("G/14", 0): 1_881_132_416,
  ("G-opt/14", 0): 1_697_925_632,
  ("e/14", 0): 3_873_342_720,
}


def count(name, num_classes, **fields):
  # Blocks are alike: tracing one of them instead of 56 saves a minute.
  model = models.create(name, num_classes=num_classes, **fields)
  sizes = shapes(model.clone(depth=1), (224, 224))
  block = sum(np.prod(s) for p, s in sizes.items() if "encoderblock" in p)
  return sum(map(np.prod, sizes.values())) + (model.depth - 1) * block


def test_parameter_counts():
  for key, expected in COUNTS.items():
    assert count(*key) == expected, key
  for (name, classes), expected in REP_COUNTS.items():
    size = models.create(name, num_classes=0).width
    assert count(name, classes, representation_size=size) == expected, name
  for key, expected in GAP_COUNTS.items():
    assert count(*key, classifier="gap") == expected, key
  for key, expected in MAP_COUNTS.items():
    assert count(*key, classifier="map") == expected, key


def test_variants_are_complete():
  assert len(models.VARIANTS) == 13
  assert models.VARIANTS["So400m"]["mlp_dim"] == 4304
  covered = {*COUNTS, *GAP_COUNTS}
  names = {name.split("/")[0] for name, _ in covered if "+" not in name}
  assert names | {"mu"} == set(models.VARIANTS)


def test_hybrids_are_the_papers():
  # Tokens along a side at 224 and 384 pixels; R+Ti/16 really is a /32.
  for name, units, sides in (
    ("R50+B/16", (3, 4, 9), (14, 24)),
    ("R50+L/16", (3, 4, 9), (14, 24)),
    ("R50+B/32", (3, 4, 6, 3), (7, 12)),
    ("R50+L/32", (3, 4, 6, 3), (7, 12)),
    ("R26+S/32", (2, 2, 2, 2), (7, 12)),
    ("R26+B/32", (2, 2, 2, 2), (7, 12)),
    ("R+Ti/16", (), (7, 12)),
  ):
    model = models.create(name, num_classes=1)
    assert model.stem_blocks == units
    assert [model.grid(s)[0] for s in (224, 384)] == list(sides)
    assert model.grid((224, 384)) == sides
  small = models.create("R26+S/32", num_classes=1, stem_blocks=(1,), depth=2)
  assert (small.stem_blocks, small.stem_width) == ((1,), 1.0)


def test_names_and_shapes_are_the_published_ones():
  model = models.create("mu/4", num_classes=5, depth=2, representation_size=7)
  expected = {
    "cls": (1, 1, 32),
    "embedding/kernel": (4, 4, 3, 32),
    "embedding/bias": (32,),
    "Transformer/posembed_input/pos_embedding": (1, 7, 32),
    "Transformer/encoder_norm/scale": (32,),
    "Transformer/encoder_norm/bias": (32,),
    "pre_logits/kernel": (32, 7),
    "pre_logits/bias": (7,),
    "head/kernel": (7, 5),
    "head/bias": (5,),
  }
  looped = {
    f"Transformer/encoderblock_{i}/{name}": shape
    for i in range(2)
    for name, shape in BLOCK.items()
  }
  assert shapes(model, (8, 12)) == expected | looped
  scanned = {
    f"Transformer/encoderblock/{name}": (2, *shape)
    for name, shape in BLOCK.items()
  }
  assert shapes(model.clone(scan=True), (8, 12)) == expected | scanned


@pytest.mark.parametrize(
  "fields",
  [
    {"representation_size": 7, "registers": 2, "layer_scale": 0.1},
    {"posemb": "learned_2d", "posemb_at": "layers", "classifier": "map"},
    {"posemb": "relative"},
    {"stem_width": 0.5, "stem_blocks": (1, 1)},
  ],
  ids=str,
)
def test_every_parameter_has_mesh_axes(fields):
  model = models.create("mu/1", num_classes=5, **fields)
  for scan in (False, True):
    for path, shape in shapes(model.clone(scan=scan), (8, 8)).items():
      axes = trees.first_match(models.PARAM_AXES, path)
      stacked_axis = scan and "encoderblock/" in path
      assert len(axes) + stacked_axis == len(shape), path
      axes = [axis for axis in axes if axis]
      assert len(set(axes)) == len(axes), path
  first = dict(models.PARAM_AXES)
  assert first["(query|key|value)/kernel"] == ("fsdp", "model", None)
  assert first["Dense_1/kernel"] == ("model", "fsdp")


def test_initial_values():
  model = models.create(
    "mu/16",
    num_classes=5,
    depth=1,
    width=256,
    mlp_dim=512,
    num_heads=4,
    representation_size=9,
    head_bias=-10.0,
  )
  images = noise(1, 64, 64, 3)
  flat = trees.flatten(model.init(jax.random.key(0), images)["params"])
  block = "Transformer/encoderblock_0/"
  attention = block + "MultiHeadDotProductAttention_1/"
  for name in ("query", "key", "value", "out"):
    kernel = flat[attention + name + "/kernel"]
    assert 0.98 < np.abs(kernel).max() / np.sqrt(6 / 512) <= 1.0
    assert not flat[attention + name + "/bias"].any()
  kernel = flat[block + "MlpBlock_3/Dense_0/kernel"]
  assert 0.98 < np.abs(kernel).max() / np.sqrt(6 / 768) <= 1.0
  assert 0 < np.abs(flat[block + "MlpBlock_3/Dense_1/bias"]).max() < 1e-5
  kernel = flat["embedding/kernel"]
  np.testing.assert_allclose(kernel.std(), 768**-0.5, rtol=0.02)
  assert np.abs(kernel).max() <= 2 / 0.87 * 768**-0.5
  positions = flat["Transformer/posembed_input/pos_embedding"]
  np.testing.assert_allclose(positions.std(), 0.02, rtol=0.1)
  assert not flat["cls"].any() and not flat["head/kernel"].any()
  assert (flat["head/bias"] == -10.0).all()


# Laws.


def test_scan_starts_from_the_loops_parameters_bit_for_bit():
  images = noise(1, 8, 8, 3)
  for draw in (lambda f: f, jax.jit):
    loop, scan = (
      draw(lambda key, m=m: m.init(key, images)["params"])(jax.random.key(3))
      for m in (tiny(), tiny(scan=True))
    )
    jax.tree.map(np.testing.assert_array_equal, stacked(loop), scan)
    back = models.unstack_blocks(scan["Transformer"])
    jax.tree.map(np.testing.assert_array_equal, dict(loop["Transformer"]), back)
  kernels = scan["Transformer"]["encoderblock"]["MlpBlock_3"]["Dense_0"][
    "kernel"
  ]
  assert (kernels[0] != kernels[1]).any()


def test_scan_and_remat_change_neither_logits_nor_gradients():
  images = noise(2, 8, 8, 3)
  params = init(tiny(), images)

  def value_and_grad(params, model):
    def loss(params):
      logits = model.apply({"params": params}, images)["logits"]
      return jnp.square(logits).sum(), logits

    return jax.jit(jax.grad(loss, has_aux=True))(params)

  grads, logits = value_and_grad(params, tiny())
  for scan, remat in (
    (False, "dots"),
    (False, "full"),
    (False, "full:1"),
    (True, "none"),
    (True, "dots"),
    (True, "full"),
  ):
    form = stacked if scan else dict
    model = tiny(scan=scan, remat=remat)
    other_grads, other = value_and_grad(form(params), model)
    np.testing.assert_allclose(other, logits, atol=1e-5)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
      form(grads),
      other_grads,
    )


@pytest.mark.parametrize(
  "fields",
  [
    {"classifier": "map", "posemb_at": "layers", "scan": True},
    {"stem_width": 0.5, "stem_blocks": (1,), "posemb": "relative"},
  ],
  ids=str,
)
def test_mesh_shapes_give_the_same_logits(fields):
  model = tiny(patch_size=2, **fields)
  images = noise(8, 16, 16, 3)
  params = init(model, images)
  logits = run(model, params, images)["logits"]
  for shape in ((8, 1, 1), (1, 8, 1), (2, 2, 2)):
    mesh = sharding.make_mesh(
      ConfigDict({**dict(zip(sharding.AXES, shape)), "dcn": 1})
    )
    placed = jax.device_put(
      params, sharding.tree_shardings(params, mesh, models.PARAM_AXES)
    )
    batch = jax.device_put(images, sharding.batch_sharding(mesh))
    np.testing.assert_allclose(
      run(model, placed, batch)["logits"], logits, atol=1e-5
    )


def test_own_derivatives_are_autodiffs():
  x, g = 3 * noise(4, 7), noise(4, 7, seed=1)
  for own, reference in (
    (derivatives.gelu_tanh, jax.nn.gelu),
    (derivatives.softmax, jax.nn.softmax),
  ):
    ours, theirs = (jax.vjp(f, x) for f in (own, reference))
    np.testing.assert_allclose(ours[0], theirs[0], atol=1e-6)
    np.testing.assert_allclose(ours[1](g)[0], theirs[1](g)[0], atol=1e-6)


# A product with a derivative of its own, its formula, and what it multiplies.
PRODUCTS = {
  "attend": (
    derivatives.attend,
    lambda x, y: jnp.einsum("nkql,nlkd->nqkd", jax.nn.softmax(x), y),
    [(2, 3, 4, 5), (2, 5, 3, 6)],
  ),
  "to_heads": (
    derivatives.to_heads,
    lambda x, y: jnp.einsum("nld,dkh->nlkh", x, y),
    [(2, 4, 6), (6, 3, 2)],
  ),
  "gelu_tanh": (
    functools.partial(derivatives.gelu_product, "tanh"),
    lambda x, y: jax.nn.gelu(x) @ y,
    [(2, 4, 6), (6, 3)],
  ),
  "gelu_erf": (
    functools.partial(derivatives.gelu_product, "erf"),
    lambda x, y: jax.nn.gelu(x, approximate=False) @ y,
    [(2, 4, 6), (6, 3)],
  ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_have_the_derivatives_of_their_formulas(name):
  own, formula, shapes = PRODUCTS[name]
  inputs = [3 * noise(*shape, seed=i) for i, shape in enumerate(shapes)]
  ours, theirs = (jax.vjp(f, *inputs) for f in (own, formula))
  np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
  g = noise(*ours[0].shape, seed=2)
  for our, their in zip(ours[1](g), theirs[1](g), strict=True):
    np.testing.assert_allclose(our, their, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gelu", derivatives.GELUS)
def test_gelus_result_is_not_kept(gelu):
  def backward(*inputs):
    return jax.vjp(functools.partial(derivatives.gelu_product, gelu), *inputs)[
      1
    ]

  x, kernel = noise(2, 4, 6), noise(6, 3)
  kept = jax.tree.leaves(jax.eval_shape(backward, x, kernel))
  assert sorted(leaf.shape for leaf in kept) == [x.shape, kernel.shape]


def test_remat_keeps_less():
  model = tiny()
  images = jnp.zeros((2, 32, 32, 3))
  params = init(model, images)

  def kept(remat):
    def loss(params):
      outputs = model.clone(remat=remat).apply({"params": params}, images)
      return outputs["tokens"].sum()

    residuals = jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params)
    return sum(leaf.size for leaf in jax.tree.leaves(residuals))

  assert kept("full") < kept("dots") < kept("none")
  assert kept("full") < kept("full:1") < kept("none")


def test_bfloat16_computes_near_and_keeps_float32():
  images = noise(2, 8, 8, 3)
  model = tiny(dtype="bfloat16", representation_size=6)
  params = init(model, images)
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
  outputs = run(model, params, images)
  exact = run(model.clone(dtype="float32"), params, images)
  for name in ("logits", "pre_logits", "tokens"):
    assert outputs[name].dtype == jnp.float32
    np.testing.assert_allclose(outputs[name], exact[name], atol=0.1)
  assert (outputs["logits"] != exact["logits"]).any()
  assert tiny(dtype=jnp.bfloat16) == tiny(dtype="bfloat16")
  counts = equations(model, params, images)
  assert counts["conv_general_dilated", "bfloat16"] == 1
  assert counts["dot_general", "bfloat16"] == 2 * 8
  assert counts["dot_general", "float32"] == 2  # pre_logits and head
  assert counts["exp", "float32"] == 2 and not counts["exp", "bfloat16"]


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("field", ["dropout", "attention_dropout"])
def test_dropout_acts_in_training_only(field, scan):
  images = noise(2, 8, 8, 3)
  model = tiny(scan=scan, **{field: 0.5})
  params = init(model, images)

  @jax.jit
  def train(seed):
    rngs = {"dropout": jax.random.key(seed)}
    return model.apply({"params": params}, images, train=True, rngs=rngs)

  np.testing.assert_array_equal(train(0)["logits"], train(0)["logits"])
  assert (train(0)["logits"] != train(1)["logits"]).any()
  np.testing.assert_array_equal(
    run(model, params, images)["logits"],
    run(model.clone(**{field: 0.0}), params, images)["logits"],
  )


def test_dropout_stands_where_the_paper_has_it():
  images = noise(1, 8, 8, 3)
  params = init(tiny(depth=1), images)
  training = dict(train=True, rngs={"dropout": jax.random.key(0)})

  def draws(**fields):
    model = tiny(depth=1, **fields)
    counts = equations(model, params, images, **training)
    return sum(n for (name, _), n in counts.items() if name == "random_bits")

  assert draws() == 0
  # After the positions, after attention and after both layers of the MLP.
  assert draws(dropout=0.5) == 4
  assert draws(attention_dropout=0.5) == 1


def test_dropout_rate_on_attention_probabilities():
  x, rate = jnp.ones((4, 50, 32)), 0.3
  block = blocks.Block(
    mlp_dim=8, num_heads=2, dropout=0.0, attention_dropout=rate, dtype="float32"
  )
  params = block.init(jax.random.key(0), x, False)["params"]
  params = jax.tree.map(jnp.zeros_like, params)
  attention = params["MultiHeadDotProductAttention_1"]
  attention["value"]["bias"] += 1.0
  attention["out"]["kernel"] += 1 / 32
  y = block.apply(
    {"params": params}, x, True, rngs={"dropout": jax.random.key(1)}
  )
  kept = y - x  # a row's share of kept probabilities / (1 - rate)
  np.testing.assert_allclose(kept.mean(), 1.0, atol=0.02)
  # 50 draws a row in each of two heads, averaged over the heads.
  spread = np.sqrt(rate / (1 - rate) / 50 / 2)
  np.testing.assert_allclose(kept[..., 0].std(), spread, rtol=0.2)


def test_patches_without_positions_have_no_order():
  model = tiny(posemb="none")
  images = noise(1, 8, 16, 3)
  params = init(model, images)
  swapped = jnp.concatenate([images[:, :, 8:], images[:, :, :8]], axis=2)
  a, b = (run(model, params, x) for x in (images, swapped))
  np.testing.assert_allclose(a["logits"], b["logits"], atol=1e-5)
  order = [0, 3, 4, 1, 2, 7, 8, 5, 6]
  np.testing.assert_allclose(a["tokens"][:, order], b["tokens"], atol=1e-5)


def test_fresh_head_gives_its_bias():
  images = noise(2, 8, 8, 3)
  model = tiny(head_bias=-6.9)
  logits = model.init_with_output(jax.random.key(0), images)[0]["logits"]
  np.testing.assert_array_equal(logits, np.full((2, 5), -6.9, np.float32))


def test_attention_weights_come_only_on_request():
  images = noise(1, 8, 8, 3)
  model = tiny(scan=True)
  params = init(model, images)
  outputs, sown = run(model, params, images, mutable=["intermediates"])
  (weights,) = jax.tree.leaves(sown)
  assert weights.shape == (2, 1, 2, 5, 5)
  np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-5)
  np.testing.assert_array_equal(
    outputs["logits"], run(model, params, images)["logits"]
  )
  assert set(jax.eval_shape(model.init, jax.random.key(0), images)) == {
    "params"
  }


@pytest.mark.parametrize("scan", [False, True])
def test_stochastic_depth_grows_linearly_and_takes_whole_branches(scan):
  images = noise(400, 4, 8, 3)
  model = tiny(depth=3, stochastic_depth=0.5)
  params = init(model, images)
  for i in range(3):  # Branches add nothing ...
    block = params["Transformer"][f"encoderblock_{i}"]
    for layer in (
      block["MultiHeadDotProductAttention_1"]["out"],
      block["MlpBlock_3"]["Dense_1"],
    ):
      layer.update(jax.tree.map(jnp.zeros_like, layer))
  form = stacked if scan else dict
  model = model.clone(scan=scan)
  training = dict(train=True, rngs={"dropout": jax.random.key(0)})
  nothing = run(model, form(params), images)["tokens"]
  for i, rate in enumerate((0.0, 0.25, 0.5)):  # ... but one, to one channel.
    layer = params["Transformer"][f"encoderblock_{i}"]["MlpBlock_3"]["Dense_1"]
    bias, layer["bias"] = layer["bias"], layer["bias"].at[0].set(1.0)
    tokens = run(model, form(params), images, **training)["tokens"]
    layer["bias"] = bias
    same = (abs(tokens - nothing) < 1e-6).all(axis=2)  # [n, l]
    assert (same.all(1) | ~same.any(1)).all()
    np.testing.assert_allclose(same.mean(), rate, atol=0.08)


def test_kept_branches_are_scaled_up():
  x = jnp.ones((4000, 2, 3))
  y = blocks.StochasticDepth().apply(
    {}, x, 0.2, rngs={"dropout": jax.random.key(0)}
  )
  assert set(np.unique(y)) == {0.0, 1.25}
  np.testing.assert_allclose(y.mean(), 1.0, atol=0.02)


# Errors.


@pytest.mark.parametrize(
  ("name", "fields", "words"),
  [
    ("X/16", {}, ["'X'", "So400m"]),
    ("g-op/16", {}, ["Did you mean 'g-opt'"]),
    ("B16", {}, ["'B16'", "B/16"]),
    ("B/0", {}, ["patch_size"]),
    ("B/16", {"droput": 0.1}, ["'droput'", "Did you mean 'dropout'", "scan"]),
    ("B/16", {"num_heads": 7}, ["768", "num_heads=7", "6", "8"]),
    ("B/16", {"classifier": "map2"}, ["'map2'", "token", "Did you mean 'map'"]),
    ("R50+B/14", {}, ["R50", "14", "16 or 32"]),
    ("R51+B/16", {}, ["'R51'", "Did you mean 'R50'"]),
    ("R50x1", {"posemb": "none"}, ["posemb='none'", "R50x1"]),
    ("R51x1", {}, ["'R51x1'", "R50"]),
    ("B/16", {"stem_width": 0.3}, ["0.3", "19.2", "0.5"]),
    ("B/16", {"stem_blocks": (1,)}, ["(1,)", "stem_width=0.0"]),
    ("B/16", {"layer_scale": -1.0}, ["layer_scale=-1.0"]),
    ("B/16", {"registers": -1}, ["registers=-1"]),
    ("B/16", {"stochastic_depth": 1.0}, ["stochastic_depth=1.0"]),
    ("B/16", {"posemb_at": "top"}, ["'top'", "shared"]),
    (
      "B/16",
      {"posemb": "relative", "posemb_at": "layers"},
      ["'relative' can be at stem", "'layers'"],
    ),
    (
      "B/16",
      {"posemb": "sincos2d", "posemb_at": "layers"},
      ["stem or shared"],
    ),
    (
      "B/16",
      {"posemb": "learned_2d", "width": 33, "num_heads": 3},
      ["width=33"],
    ),
    ("B/16", {"remat": "all"}, ["'all'", "dots"]),
    ("B/16", {"remat": "full:13"}, ["'full:13'", "from 1 to 12"]),
    ("B/16", {"remat": "none:2"}, ["'none:2'", "'full:4'"]),
    ("B/16", {"remat": "full:2", "scan": True}, ["'full:2'", "scan=False"]),
    ("B/16", {"posemb": "learned"}, ["'learned'", "Did you mean 'learned_"]),
    ("B/16", {"dtype": "float16"}, ["float16", "bfloat16"]),
    ("B/16", {"dtype": "flot32"}, ["'flot32'", "Did you mean 'float32'"]),
    ("B/16", {"dropout": 1.0}, ["dropout=1.0"]),
    ("B/16", {"depth": -1}, ["depth=-1"]),
    ("B/16", {"representation_size": -1}, ["representation_size=-1"]),
    ("B/16", {"patch_size": (16, 16, 3)}, ["patch_size", "(16, 16, 3)"]),
    ("B/16", {"posemb": "sincos2d", "width": 774, "num_heads": 6}, ["774"]),
  ],
)
def test_refusals(name, fields, words):
  with pytest.raises(ValueError) as error:
    models.create(name, num_classes=10, **fields)
  for word in words:
    assert word in str(error.value)


def test_fields_of_zero_leave_the_variants():
  zeros = dict(width=0, depth=0, mlp_dim=0, num_heads=0, patch_size=())
  assert models.create("S/16", num_classes=3, **zeros) == models.create(
    "S/16", num_classes=3, patch_size=16
  )
  assert models.create("S/16x8", num_classes=3).patch_size == (16, 8)
  assert models.create("S/16", num_classes=None).num_classes == 0


def test_fields_take_what_stands_for_their_type():
  model = models.create(
    "mu/4",
    num_classes=np.int64(7),
    width=np.int64(64),
    patch_size=np.array([4, 8]),
    representation_size=None,
    stem_blocks=[],
    layer_scale=0,
    head_bias=-10,
  )
  assert model == models.create(
    "mu/4x8", num_classes=7, width=64, head_bias=-10.0
  )
  assert model.grid(np.array([8, 16])) == model.grid([8, 16]) == (2, 2)
  hybrid = models.create("R50+B/16", num_classes=1, stem_blocks=[1, 1])
  assert hybrid.stem_blocks == (1, 1)


@pytest.mark.parametrize(
  ("field", "value", "kind"),
  [
    ("depth", 2.0, "an int"),
    ("depth", True, "an int"),
    ("dropout", "0.1", "a number"),
    ("stem_blocks", 3, "a tuple of ints"),
    ("scan", "yes", "True or False"),
    ("patch_size", 1.5, "an int or a pair"),
  ],
)
def test_fields_of_another_type_are_refused(field, value, kind):
  with pytest.raises(ValueError) as error:
    models.create("mu/4", num_classes=1, **{field: value})
  assert f"{field}={value!r} must be {kind}" in str(error.value)


def test_numpy_goes_in_without_jit():
  images = np.asarray(noise(1, 8, 8, 3))
  for model in (
    models.create("mu/4", num_classes=2),
    bit.BiT(num_classes=2, blocks=(1,), width_factor=0.5),
  ):
    params = jax.tree.map(
      np.asarray, model.init(jax.random.key(0), images)["params"]
    )
    logits = model.apply({"params": params}, images)["logits"]
    np.testing.assert_array_equal(logits, np.zeros((1, 2)))


def test_image_size_must_fit_the_patches():
  assert models.check_image_size((224,), 16) == (14, 14)
  assert models.check_image_size((32, 48), (16, 8)) == (2, 6)
  model = tiny()
  with pytest.raises(ValueError) as error:
    model.init(jax.random.key(0), jnp.zeros((1, 8, 10, 3)))
  for word in ("10", "4", "remainder 2", "8 or 12"):
    assert word in str(error.value)
  with pytest.raises(ValueError, match="nearest legal height: 16"):
    models.check_image_size(10, 16)


def test_positions_of_another_size_are_explained():
  model = tiny()
  params = init(model, noise(1, 8, 8, 3))
  with pytest.raises(
    ValueError, match=r"5 positions .*\(2, 3\) needs 7 .*load"
  ):
    model.apply({"params": params}, noise(1, 8, 12, 3))
