"""Runs that start from weights: the paper's transfer, and what is refused."""

import json
import shutil

import jax
import numpy as np
import pytest
import tensorflow as tf
from etils import epath
from jax.sharding import PartitionSpec as P

from configs import digits, finetune
from tests.conftest import tiny_config
from vit_jax import (
  evaluate,
  launch,
  models,
  predict,
  start,
  train,
  trees,
  weights,
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
  """A file of weights for the tiny model at 8 pixels, three classes."""
  path = str(tmp_path_factory.mktemp("weights") / "tiny.npz")
  model = models.create("mu/4", num_classes=3)
  images = np.zeros((1, 8, 8, 3), np.float32)
  abstract = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
  rng = np.random.default_rng(0)
  weights.save(
    path,
    jax.tree.map(
      lambda x: rng.normal(size=x.shape).astype(np.float32), abstract
    ),
  )
  return path


def first(config, workdir):
  """The parameters with which a run of `config` begins, by path."""
  run = start.prepare(config, epath.Path(workdir))
  with run.saver:
    return trees.flatten(jax.device_get(run.state.params)), run


def leaves_of(path):
  return {name: leaf.read() for name, leaf in weights.open(path).leaves.items()}


def test_a_run_begins_with_the_weights_at_its_own_size(stored, tmp_path):
  file = leaves_of(stored)
  positions = "Transformer/posembed_input/pos_embedding"
  scratch, _ = first(tiny_config(), tmp_path / "scratch")
  ours, run = first(
    tiny_config(init_from=stored, ema=0.9, **{"mesh.fsdp": 2, "mesh.model": 2}),
    tmp_path / "ours",
  )
  assert int(run.state.step) == 0
  for name, leaf in ours.items():
    if name.startswith("head/"):
      np.testing.assert_array_equal(leaf, scratch[name])
    elif name == positions:
      assert leaf.shape == (1, 17, 32)
      np.testing.assert_array_equal(leaf[:, 0], file[name][:, 0])
    else:
      np.testing.assert_array_equal(leaf, file[name])
  jax.tree.map(np.testing.assert_array_equal, run.state.params, run.state.ema)
  placed = run.state.params["Transformer"]["encoderblock_0"]["MlpBlock_3"]
  assert placed["Dense_0"]["kernel"].sharding.spec == P("fsdp", "model")
  others = {"init_head": "keep", "init_resize": "bilinear"}
  kept, _ = first(tiny_config(init_from=stored, **others), tmp_path / "kept")
  np.testing.assert_array_equal(kept["head/kernel"], file["head/kernel"])
  assert (kept[positions] != ours[positions]).any()


def test_what_the_file_lacks_is_drawn_from_the_seed(stored, tmp_path):
  changes = {"seed": 3, "model.classifier": "map"}
  scratch, _ = first(tiny_config(**changes), tmp_path / "scratch")
  ours, _ = first(tiny_config(init_from=stored, **changes), tmp_path / "ours")
  fresh = [name for name in ours if name.startswith(("MAPHead_0", "head"))]
  assert fresh
  for name in fresh:
    np.testing.assert_array_equal(ours[name], scratch[name])


def test_other_patches_on_request(stored, tmp_path):
  changes = {"init_from": stored, "model.name": "mu/8"}
  with pytest.raises(ValueError) as error:
    first(tiny_config(**changes), tmp_path / "a")
  for word in ("embedding/kernel", "(4, 4, 3, 32)", "(8, 8, 3, 32)", "resize"):
    assert word in str(error.value)
  params, _ = first(tiny_config(init_patch="resize", **changes), tmp_path / "b")
  assert params["embedding/kernel"].shape == (8, 8, 3, 32)


def test_a_resumed_run_needs_its_first_weights_no_more(stored, tmp_path):
  path = str(tmp_path / "copy.npz")
  shutil.copy(stored, path)
  train.run(tiny_config(init_from=path, total="3"), str(tmp_path / "run"))
  (tmp_path / "copy.npz").unlink()
  (tmp_path / "run" / "summary.json").unlink()
  _, run = first(tiny_config(init_from=path, total="5"), tmp_path / "run")
  assert int(run.state.step) == 3


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"model.width": 64}, ["leaves", "stored (32,)", "expected (64,)"]),
    ({"model.depth": 2}, ["missing", "encoderblock_1/MlpBlock_3", "depth"]),
    ({"init_head": "drop"}, ["'drop'", "keep, reset"]),
    ({"init_resize": "nearest"}, ["'nearest'", "bilinear_corners"]),
    ({"resume_from": "somewhere"}, ["config.resume_from", "one of them"]),
    ({"init_from": "no/such.npz"}, ["no/such.npz", "workdir"]),
  ],
  ids=str,
)
def test_refusals_before_compilation(stored, tmp_path, changes, words):
  config = tiny_config(**{"init_from": stored, **changes})
  with pytest.raises(launch.Refused) as error:
    train.run(config, str(tmp_path))
  for word in words:
    assert word in str(error.value)


def test_the_range_of_values_stays_that_of_the_weights(tmp_path):
  train.run(tiny_config(total="1"), str(tmp_path / "a"))
  config = tiny_config(
    init_from=str(tmp_path / "a"), **{"model.input_range": "0,1"}
  )
  with pytest.raises(ValueError, match="'-1,1'.*model.input_range=-1,1.*'0,1'"):
    first(config, tmp_path / "b")


def test_forgotten_weights_are_asked_for(tmp_path):
  config = finetune.get_config("mu/4,fake:16,3,40")
  config.image_size = (16,)
  config.input.batch_size = 8
  with pytest.raises(
    ValueError, match="starts from weights.*--config.init_from=PATH"
  ):
    first(config, tmp_path)


@pytest.mark.parametrize("where", ["ram://finetune/x.npz", "local"])
def test_a_file_is_evaluated_as_it_is(stored, tmp_path, where):
  path = stored
  if where != "local":
    tf.io.gfile.makedirs("ram://finetune")
    tf.io.gfile.copy(stored, where, overwrite=True)
    path = where
  config = tiny_config(image_size=(8,), **{"input.ops": "decode|resize(8)"})
  values = evaluate.run(config, path)
  assert values["test/n"] == 40
  kept = tiny_config(
    init_from=path,
    init_head="keep",
    image_size=(8,),
    total="1",
    **{"optim.lr": 0.0, "input.ops": "decode|resize(8)"},
  )
  train.run(kept, str(tmp_path))
  summary = json.loads((tmp_path / "summary.json").read_text())["final"]
  assert values["test/loss"] == pytest.approx(
    summary["test/loss"]["value"], rel=1e-6
  )
  with pytest.raises(ValueError, match="nope.npz.*workdir"):
    evaluate.run(config, "nope.npz")
  with pytest.raises(ValueError, match="file of weights.*init_from"):
    next(predict.run(stored, ["x.png"]))


def small(config, size):
  """A ViT of seconds on the digits, with the recipe's own optimiser."""
  config.image_size = (size,)
  config.model.update(name="mu/2", width=32, mlp_dim=64, num_heads=4, depth=2)
  config.input.update(source="digits:", batch_size=64)
  config.evals.test.update(batch_size=360, every="0")
  config.checkpoint.update(every="0", best="")
  return config


def top1(workdir):
  summary = json.loads((workdir / "summary.json").read_text())
  return summary["final"]["test/top1"]["value"]


def test_digits_at_8_pixels_then_at_16(tmp_path):
  config = small(digits.get_config(), 8)
  config.total, config.model.dropout, config.optim.lr = "20ep", 0.0, 5e-3
  train.run(config, str(tmp_path / "small"))

  config = small(finetune.get_config("mu/2,digits:"), 16)
  config.input.ops = "decode|resize({size})"
  config.init_from = str(tmp_path / "small")
  config.total, config.optim.lr, config.optim.warmup = "4ep", 0.03, "10%"
  train.run(config, str(tmp_path / "large"))

  assert top1(tmp_path / "small") > 0.9
  assert top1(tmp_path / "large") > top1(tmp_path / "small") - 0.02
