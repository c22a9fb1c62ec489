"""Masked patches: what is corrupted, what is predicted, what is learned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import PartitionSpec as P

import input_pipeline
from configs import common
from configs import masked_patch as recipe
from tests.conftest import tiny_config
from vit_jax import (
  build,
  evaluators,
  export,
  models,
  objectives,
  sharding,
  start,
  steps,
  train,
  trees,
  weights,
)
from vit_jax.objectives import masked_patch


def masked_config(**changes):
  """The tiny run with this objective: 16 patches, of which 8 are corrupted."""
  config = tiny_config(
    **{"objective": "masked_patch", "mixup": 0.0, "evals.test.kind": ""}
  )
  config.update_from_flattened_dict(changes)
  return config


def batch_of(n=4, height=16, width=16, seed=0):
  rng = np.random.default_rng(seed)
  return {
    "image": jnp.array(rng.integers(0, 256, (n, height, width, 3)), jnp.uint8),
    "labels": jnp.full((n, 1), -1),
    "mask": jnp.ones(n),
  }


def with_head(params, seed=1):
  """The parameters with a head that is not zero."""
  head = params["masked_patch"]["head"]
  rng = np.random.default_rng(seed)
  drawn = jax.tree.map(
    lambda leaf: jnp.array(rng.normal(size=leaf.shape), jnp.float32), head
  )
  return params | {"masked_patch": params["masked_patch"] | {"head": drawn}}


# Corruption


@pytest.mark.parametrize(
  ("length", "share", "mask", "random", "counts"),
  [
    (196, 0.5, 0.8, 0.1, (78, 10, 10)),
    (16, 0.5, 0.8, 0.1, (6, 1, 1)),
    (9, 1.0, 0.0, 1.0, (0, 9, 0)),
    (10, 0.5, 0.5, 0.5, (2, 2, 1)),  # Halves round to even: 2.5 to 2.
    (6, 0.5, 0.5, 0.5, (2, 1, 0)),
  ],
)
def test_counts_are_exact(length, share, mask, random, counts):
  corruption = masked_patch.draw(
    jax.random.key(0), (50, length), share=share, mask=mask, random=random
  )
  corrupted, masked, source = map(np.asarray, corruption)
  swapped = source != np.arange(length)
  same = corrupted & ~masked & ~swapped
  for found, count in zip((masked, swapped, same), counts):
    assert (found.sum(axis=1) == count).all()
  assert not (masked & swapped).any()
  assert ((masked | swapped) <= corrupted).all()
  assert (corrupted.sum(axis=1) == sum(counts)).all()
  assert source.min() >= 0 and source.max() < length


def test_each_place_and_each_stand_in_is_as_likely():
  n, length = 20_000, 8
  corrupted, masked, source = map(
    np.asarray,
    masked_patch.draw(
      jax.random.key(1), (n, length), share=0.5, mask=0.5, random=0.25
    ),
  )
  np.testing.assert_allclose(corrupted.mean(axis=0), 4 / 8, atol=0.02)
  np.testing.assert_allclose(masked.mean(axis=0), 2 / 8, atol=0.02)
  rows, places = np.nonzero(source != np.arange(length))
  steps_on = (source[rows, places] - places) % length
  shares = np.bincount(steps_on, minlength=length) / len(rows)
  assert len(rows) == n and shares[0] == 0
  np.testing.assert_allclose(shares[1:], 1 / 7, atol=0.01)


def test_the_key_decides():
  def draw(seed):
    return masked_patch.draw(
      jax.random.key(seed), (3, 64), share=0.5, mask=0.8, random=0.1
    )

  one, again, other = (
    jax.tree.map(np.asarray, draw(seed)) for seed in (0, 0, 1)
  )
  jax.tree.map(np.testing.assert_array_equal, one, again)
  assert (one.corrupted != other.corrupted).any()
  assert (one.corrupted[0] != one.corrupted[1]).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_corrupting_embeddings(dtype):
  rng = np.random.default_rng(0)
  x = jnp.array(rng.normal(size=(5, 20, 3)), dtype)
  token = jnp.array(rng.normal(size=(1, 1, 3)), jnp.float32)
  corruption = masked_patch.draw(
    jax.random.key(2), (5, 20), share=0.5, mask=0.6, random=0.2
  )
  found = masked_patch.corrupt(x, token, corruption)
  assert found.dtype == x.dtype
  for i in range(5):
    for j in range(20):
      value = x[i, corruption.source[i, j]]
      if corruption.masked[i, j]:
        value = token[0, 0].astype(dtype)
      np.testing.assert_array_equal(found[i, j], value)


MODELS = {
  "token": {"model.remat": "full", "model.dtype": "bfloat16"},
  "none": {
    "model.classifier": "none",
    "model.registers": 2,
    "model.scan": True,
    "model.depth": 2,
  },
  "hybrid": {"model.name": "mu/1", "model.stem_width": 0.5},
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_behind_the_mask_nothing_is_seen(changes):
  """With all patches masked, another image gives the same predictions."""
  config = masked_config(
    **{"masked_patch.share": 1.0, "masked_patch.mask": 1.0} | changes
  )
  config.masked_patch.random = 0.0
  objective = objectives.build(config, 3)
  params = with_head(objective.init(jax.random.key(0)))

  def gradients(params):
    return jax.grad(
      lambda p: objective.loss(p, batch_of(), jax.random.key(1))["loss"][0]
    )(params)

  found = trees.flatten(jax.jit(gradients)(params))
  for path, gradient in found.items():
    hidden = "embedding/kernel" in path or "embedding/bias" in path
    hidden |= "conv_root" in path or "gn_root" in path
    # A key's bias adds the same to all that a query is compared with.
    if not path.endswith("key/bias"):
      assert bool(np.any(gradient)) != hidden, path


def test_without_mask_and_swaps_the_model_sees_the_image():
  """The loss is what plain outputs, the head and numpy make of it."""
  config = masked_config(
    **{
      "masked_patch.mask": 0.0,
      "masked_patch.random": 0.0,
      "masked_patch.share": 1.0,
      "model.dropout": 0.0,
    }
  )
  objective = objectives.build(config, 3)
  params = with_head(objective.init(jax.random.key(0)))
  batch = batch_of() | {
    "mask": jnp.array([1.0, 1.0, 0.0, 1.0]),
    "skipped": jnp.array([0.0, 1.0, 0.0, 0.0]),
  }
  metrics = objective.loss(params, batch, jax.random.key(1))
  total, weight = metrics["loss"]
  assert [float(value) for value in metrics["skipped"]] == [1, 3]
  outputs = objective.predict(params, batch)
  assert set(outputs) == {"logits", "pre_logits", "tokens", "grid"}
  tokens = np.asarray(outputs["tokens"], np.float64)[:, 1:]
  head = jax.tree.map(np.asarray, params["masked_patch"]["head"])
  logits = tokens @ head["kernel"] + head["bias"]
  classes = np.asarray(masked_patch.colors(batch["image"], (4, 4), 1))
  chosen = np.take_along_axis(logits, classes, axis=2)[..., 0]
  each = np.log(np.exp(logits).sum(axis=2)) - chosen
  expected = (each.mean(axis=1) * np.asarray(batch["mask"])).sum()
  assert float(weight) == 3
  assert float(total) == pytest.approx(expected, rel=1e-5)


def test_only_corrupted_patches_count():
  """What the pixels' head misses elsewhere changes nothing."""
  config = masked_config(**{"masked_patch.target": "pixels"})
  objective = objectives.build(config, 3)
  params = objective.init(jax.random.key(0))
  key = jax.random.key(5)
  corrupted = masked_patch.draw(
    jax.random.split(key)[0], (4, 16), share=0.5, mask=0.8, random=0.1
  ).corrupted
  batch = batch_of()
  pixels = np.asarray(batch["image"]) / 127.5 - 1
  patches = pixels.reshape(4, 4, 4, 4, 4, 3).swapaxes(2, 3).reshape(4, 16, -1)
  total, _ = objective.loss(params, batch, key)["loss"]
  # With a head of zeros the loss is the mean square of the target.
  expected = (patches[np.asarray(corrupted)] ** 2).mean() * 4
  assert float(total) == pytest.approx(expected, rel=1e-5)


# Targets


def test_colors_by_hand():
  image = np.zeros((1, 2, 4, 3), np.uint8)
  image[0, :, :2] = (255, 0, 128)
  image[0, 0, 2:] = (63, 64, 31)  # The mean of these and of zeros is
  found = masked_patch.colors(jnp.array(image), (1, 2), 1)  # 31.5, 32, 15.5.
  assert found.tolist() == [[[7 * 64 + 0 + 4], [0 + 8 + 0]]]


@pytest.mark.parametrize("cells", [1, 2, 4])
@pytest.mark.parametrize(
  "shape", [(16, 16, 2, 2), (8, 24, 2, 3), (16, 8, 1, 2)]
)
def test_colors_of_cells(cells, shape):
  height, width, rows, columns = shape
  pixels = np.asarray(batch_of(3, height, width)["image"])
  found = np.asarray(
    masked_patch.colors(jnp.array(pixels), (rows, columns), cells)
  )
  assert found.shape == (3, rows * columns, cells**2)
  h, w = height // rows, width // columns
  for n, patch, cell in np.ndindex(found.shape):
    top = patch // columns * h + cell // cells * (h // cells)
    left = patch % columns * w + cell % cells * (w // cells)
    part = pixels[n, top : top + h // cells, left : left + w // cells]
    red, green, blue = (part.mean(axis=(0, 1)) // 32).astype(int)
    assert found[n, patch, cell] == red * 64 + green * 8 + blue


@pytest.mark.parametrize("target", ["mean_color", "small_patch"])
def test_the_first_loss_is_that_of_chance(target):
  config = masked_config(**{"masked_patch.target": target})
  objective = objectives.build(config, 3)
  params = objective.init(jax.random.key(0))
  total, weight = objective.loss(params, batch_of(), jax.random.key(1))["loss"]
  assert float(total / weight) == pytest.approx(np.log(512), rel=1e-6)
  width = {"mean_color": 512, "small_patch": 16 * 512}[target]
  assert params["masked_patch"]["head"]["kernel"].shape == (32, width)


# Parameters, their places, and runs that start from them


def test_the_model_is_the_one_that_is_trained_with_labels():
  ours = objectives.build(masked_config(), 3).init(jax.random.key(0))
  model = models.from_config(tiny_config().model, 0)
  theirs = model.init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))["params"]
  jax.tree.map(np.testing.assert_array_equal, ours["params"], theirs)
  assert ours.keys() == {"params", "masked_patch"}


def test_a_run_on_a_mesh_and_what_starts_from_it(tmp_path):
  config = masked_config(
    total="3", **{"mesh.fsdp": 2, "mesh.model": 2, "accumulate": 2}
  )
  with config.evals.unlocked():
    config.evals.probe = common.evaluator(kind="fewshot", shots=(5,))
  state = train.run(config, str(tmp_path / "masked"))
  own = state.params["masked_patch"]
  assert own["mask_token"].sharding.spec == P(None, None, "fsdp")
  assert own["head"]["kernel"].sharding.spec == P("fsdp", "model")
  assert evaluators.value_names(config) == ["probe/5shot_top1", "probe/n"]

  tuned = tiny_config(
    init_from=str(tmp_path / "masked"), **{"model.classifier": "map"}
  )
  run = start.prepare(tuned, epath.Path(tmp_path / "tuned"))
  with run.saver, run.batches:
    params = trees.flatten(jax.device_get(run.state.params))
  trained = trees.flatten(jax.device_get(state.params["params"]))
  fresh = {name for name in params if name.startswith(("head/", "MAPHead_0/"))}
  assert trained.keys() - params.keys() == {"cls"}
  for name in params.keys() - fresh:
    kept = trained[name]
    if name.endswith("pos_embedding"):
      kept = kept[:, 1:]
    np.testing.assert_array_equal(params[name], kept)

  path = str(tmp_path / "out.npz")
  export.run(str(tmp_path / "masked"), path)
  assert weights.open(path).leaves.keys() == trained.keys()


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"objective": "mask_patch"}, "'mask_patch'.*supervised.*'masked_patch'"),
    (
      {"masked_patch.target": "pixel"},
      "target = 'pixel'.*mean_color.*'pixels'",
    ),
    ({"masked_patch.share": 1.5}, r"'share': 1.5.*\[0, 1\]"),
    ({"masked_patch.mask": 0.95}, "'mask': 0.95, 'random': 0.1.*together"),
    ({"masked_patch.share": 0.01}, "0.01 of 16 patches corrupts none"),
    ({"image_size": (4,)}, "of 1 patches"),
    (
      {
        "masked_patch.target": "small_patch",
        "model.name": "mu/14",
        "image_size": (28,),
      },
      "4x4 cells, which patches of 14x14 pixels",
    ),
    (
      {"model.name": "R50x1", "model.dropout": 0.0},
      "'R50x1' has no patches",
    ),
    ({"model.classifier": "map"}, 'classifier = \'map\'.*"token", "gap"'),
    ({"model.representation_size": 8}, "representation_size = 8.*use 0"),
    ({"model.input_range": "0,2"}, "'0,2'.*imagenet"),
    ({"mixup": 0.2}, "config.mixup = 0.2 acts on labels"),
    ({"cutmix": 0.2}, "config.cutmix = 0.2 acts on labels"),
    ({"label_smoothing": 0.1}, "config.label_smoothing = 0.1 acts on labels"),
    ({"loss": "sigmoid"}, "config.loss = 'sigmoid' acts on labels"),
    ({"init_from": "a.npz"}, "config.init_from = 'a.npz'.*resume_from"),
    (
      {"evals.test.kind": "classification"},
      r"config.evals.test classifies.*evals.test.kind=''",
    ),
  ],
  ids=str,
)
def test_refusals(changes, words):
  with pytest.raises(ValueError, match=words):
    objectives.build(masked_config(**changes), 3)


# The recipe, and that it learns


def test_the_recipe_is_the_papers():
  config = recipe.get_config()
  schedule, total = build.schedule(config, 303_000_000)
  assert (total, config.input.batch_size) == (1_000_000, 4096)
  for step, rate in ((5000, 1e-4), (10_000, 2e-4), (505_000, 1e-4)):
    assert float(schedule(step)) == pytest.approx(rate, rel=1e-4)
  assert config.masked_patch.to_dict() == {
    "share": 0.5,
    "mask": 0.8,
    "random": 0.1,
    "target": "mean_color",
  }
  assert config.evals.fewshot.source == "tfds:imagenet2012"
  assert recipe.get_config("mu/4,digits:").evals.fewshot.source == ""


def test_it_learns_digits_without_labels():
  """Far below chance, and features that tell more than random weights do."""
  config = recipe.get_config("mu/4,digits:")
  config.image_size = (16,)
  config.total = "1000"
  config.model.depth = 2
  config.input.batch_size = 64
  config.optim.lr, config.optim.warmup = 5e-3, "10%"
  config.evals.fewshot.update(
    {"ops": "decode|resize({size})", "shots": (10, 25), "strengths": (1.0,)}
  )
  source = input_pipeline.get_source("digits:", "train")
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
  parts = build.parts(
    config, mesh, num_classes=10, num_examples=source.num_examples
  )
  state = steps.init_state(parts.objective, parts.tx, parts.shardings, seed=0)
  probe = evaluators.build_all(
    config,
    classes=source.class_names,
    objective=parts.objective,
    mesh=mesh,
    params=parts.state.params,
  )["fewshot"]
  random = probe(state.params, lambda: False)
  step = build.train_step(config, mesh, parts)
  whole = input_pipeline.eval_batches(
    source, "decode|resize(16)", batch_size=source.num_examples
  )
  digits = next(whole[0])
  rng = np.random.default_rng(0)

  def batch():
    rows = rng.choice(source.num_examples, 64, replace=False)
    rows = {key: digits[key][rows] for key in ("image", "labels", "mask")}
    return sharding.to_device(rows, mesh)

  # The tests compile fast and run slowly; here it is worth the other way round.
  step = step.lower(state, batch()).compile(
    {"xla_backend_optimization_level": 2}
  )
  losses = []
  for _ in range(parts.total):
    state, metrics = step(state, batch())
    losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
  assert losses[0] == pytest.approx(np.log(512), rel=1e-5)
  # Whoever knows how often each colour comes, and no image, has this loss.
  classes = masked_patch.colors(jnp.array(digits["image"]), (4, 4), 1)
  shares = np.bincount(np.asarray(classes).ravel()) / classes.size
  blind = -sum(share * np.log(share) for share in shares if share)
  assert np.mean(losses[-20:]) < 0.65 * blind
  trained = probe(state.params, lambda: False)
  for name in ("10shot_top1", "25shot_top1"):
    assert trained[name] > random[name] + 0.1
