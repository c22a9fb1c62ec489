"""Export: what is written is what was trained, name by name and bit by bit."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import input_pipeline
from tests.conftest import tiny_config
from tests.weight_files import (
  GOLDEN,
  assert_same,
  golden_model,
  random_params,
  shapes,
)
from vit_jax import (
  checkpoints,
  export,
  guard,
  models,
  steps,
  train,
  trees,
  weights,
)
from vit_jax.models import bit
from vit_jax.weights import torch_positions

ROOT = pathlib.Path(__file__).parent.parent
SCANNED = {"depth": 2, "scan": True}


@pytest.fixture(scope="module")
def scanned(tmp_path_factory):
  """The workdir of a run of two updates in scan form, with an average."""
  workdir = tmp_path_factory.mktemp("scanned")
  fields = {f"model.{field}": value for field, value in SCANNED.items()}
  config = tiny_config(total="2", ema=0.5, mixup=0.0, **fields)
  config.model.dropout = 0.0  # Compiles sooner.
  config.input.ops = "decode|resize({size})"
  config.checkpoint.every = "1"
  config.evals.test.kind = ""
  train.run(config, str(workdir))
  return workdir


def untrained(workdir, *, size=(16,), within=lambda params: params, **fields):
  """The workdir of a run that saved before its first update.

  `within` says what the model's parameters are a part of.
  """
  config = tiny_config(**{f"model.{key}": fields[key] for key in fields})
  config.image_size = size
  source = input_pipeline.get_source(config.input.source, "train")
  meta = guard.describe(config, source, 1) | {"step": 0, "values": {}}
  params = jax.tree.map(
    lambda leaf: jnp.asarray(leaf) / 10,
    random_params(make_model(**fields), (size[0], size[-1])),
  )
  state = steps.TrainState(
    jnp.int32(0), within(params), {"count": jnp.int32(0)}, {}
  )
  with checkpoints.Checkpoints(
    workdir / "checkpoints", keep=1, keep_every=0, best=""
  ) as saver:
    saver.save(state, meta)
    saver.wait()
  return workdir


def checkpoint(workdir, step, item):
  """A checkpoint's own tree, as Orbax has it."""
  with checkpoints.ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(workdir / "checkpoints" / step / item)


def make_model(**fields):
  return models.create("mu/4", num_classes=3, **fields)


def logits(model, params):
  images = jax.random.uniform(jax.random.key(0), (2, 16, 16, 3), minval=-1)
  params = jax.tree.map(jnp.asarray, params)
  return np.asarray(jax.jit(model.apply)({"params": params}, images)["logits"])


@pytest.mark.parametrize(
  "how, step, item",
  [
    ({}, "2", "ema"),
    ({"weights": "params"}, "2", "params"),
    ({"step": "1"}, "1", "ema"),
  ],
)
def test_npz_has_the_published_names_and_the_runs_bits(
  scanned, tmp_path, how, step, item
):
  done = export.run(str(scanned), str(tmp_path / "x.npz"), **how)
  tree = checkpoint(scanned, step, item)
  tree["Transformer"] = models.unstack_blocks(tree["Transformer"])
  expected = trees.flatten(tree)
  with np.load(tmp_path / "x.npz") as archive:
    found = dict(archive)
  assert_same(found, expected)
  assert found.keys() == trees.flatten(shapes(make_model(depth=2), 16)).keys()
  assert done.leaves == len(expected)
  assert done.parameters == sum(array.size for array in found.values())
  assert done.size == (tmp_path / "x.npz").stat().st_size
  assert done.grid == (4, 4)
  assert os.listdir(tmp_path) == ["x.npz"]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_loading_the_export_gives_the_same_logits(scanned, tmp_path, suffix):
  path = str(tmp_path / f"x{suffix}")
  export.run(str(scanned), path)
  model = make_model(**SCANNED)
  np.testing.assert_array_equal(
    logits(model, weights.load(path, model, 16)),
    logits(model, checkpoint(scanned, "2", "ema")),
  )


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("classifier", ["token", "gap"])
def test_loading_the_export_gives_the_same_bits(tmp_path, suffix, classifier):
  """With registers, and 3x8 positions, which are one less than a square."""
  fields = {"classifier": classifier, "registers": 2}
  workdir = untrained(tmp_path / "run", size=(12, 32), **fields)
  path = str(tmp_path / f"x{suffix}")
  assert export.run(str(workdir), path).grid == (3, 8)
  assert_same(
    weights.load(path, make_model(**fields), (12, 32)),
    checkpoint(workdir, "0", "params"),
  )


def test_a_resnet_is_exported_under_the_published_names(tmp_path):
  model = bit.BiT(num_classes=3, blocks=(1,), width_factor=0.5)
  params = random_params(model, 32)
  weights.save(str(tmp_path / "a.npz"), params)
  export.run(str(tmp_path / "a.npz"), str(tmp_path / "b.npz"))
  found = weights.open(str(tmp_path / "b.npz")).leaves
  assert all(name.startswith("resnet/") for name in found)
  assert_same(weights.load(str(tmp_path / "b.npz"), model, 32), params)


def test_what_only_pretraining_needs_is_left_out(tmp_path, caplog):
  caplog.set_level("INFO", "vit_jax")
  workdir = untrained(
    tmp_path / "run",
    within=lambda params: {
      "params": {name: params[name] for name in params if name != "head"},
      "masked_patch": {"mask_token": jnp.ones((1, 1, 32))},
    },
  )
  for suffix in (".npz", ".safetensors"):
    path = str(tmp_path / f"x{suffix}")
    export.run(str(workdir), path)
    assert_same(
      weights.load(path, models.create("mu/4", num_classes=0), 16),
      checkpoint(workdir, "0", "params")["params"],
    )
  about = weights.open(path).about
  assert json.loads(about["timm"])["num_classes"] == 0
  assert json.loads(about["classes"]) == []
  assert "masked_patch/mask_token" in caplog.text


def test_safetensors_say_how_to_use_them(scanned, tmp_path):
  export.run(str(scanned), str(tmp_path / "x.safetensors"))
  with safe_open(tmp_path / "x.safetensors", "np") as file:
    about = file.metadata()
    assert "blocks.1.attn.qkv.weight" in file.keys()  # noqa: SIM118
  meta = checkpoints.read_meta(scanned / "checkpoints" / "2")
  assert json.loads(about["classes"]) == meta["guard"]["class_names"]
  assert about["input_range"] == "-1,1"
  assert (about["gelu"], about["grid"]) == ("tanh", "4x4")
  assert json.loads(about["timm"])["img_size"] == [16, 16]


def test_fixed_positions_become_a_table_for_timm(tmp_path):
  workdir = untrained(tmp_path / "run", posemb="sincos2d")
  export.run(str(workdir), str(tmp_path / "x.npz"))
  export.run(str(workdir), str(tmp_path / "x.safetensors"))
  with np.load(tmp_path / "x.npz") as archive:
    assert not any("pos_embedding" in name for name in archive.files)
  learned = make_model(posemb="learned_1d")
  params = weights.load(str(tmp_path / "x.safetensors"), learned, 16)
  fixed = make_model(posemb="sincos2d")
  np.testing.assert_allclose(
    logits(learned, params),
    logits(fixed, checkpoint(workdir, "0", "params")),
    atol=1e-6,
  )


def test_files_are_converted_there_and_back():
  """In a file system that is none of this machine's; the grid comes along."""
  source, timm, back = (
    f"ram://export/{name}" for name in ("x.npz", "x.safetensors", "back.npz")
  )
  with np.load(GOLDEN / "published_token_nonsquare.npz") as archive:
    published = dict(archive)
  weights.save(source, published, grid=(4, 6))
  there = export.run(source, timm)
  again = export.run(timm, back, heads=4)
  assert there[1:3] == again[1:3] == (len(published), 24391)
  found = weights.open(back)
  assert there.grid == again.grid == found.grid == (4, 6)
  assert_same(
    {name: leaf.read() for name, leaf in found.leaves.items()}, published
  )


def test_a_grid_that_no_file_says_can_be_given(tmp_path):
  published = str(GOLDEN / "published_token_nonsquare.npz")
  path = str(tmp_path / "a.safetensors")
  assert export.run(published, path).grid == ()
  model = golden_model()
  expected = weights.load(published, model, (32, 48))
  assert_same(weights.load(path, model, (32, 48)), expected)
  assert export.run(published, path, grid="4x6", overwrite=True).grid == (4, 6)
  assert weights.open(path).grid == (4, 6)
  timm = str(GOLDEN / "torch_timm_registers.safetensors")
  with pytest.raises(ValueError, match=f"{timm}: .* 27 rows.*Say which grid"):
    export.run(timm, str(tmp_path / "b.npz"), heads=4)
  export.run(timm, str(tmp_path / "b.npz"), heads=4, grid="4x6")
  model = golden_model(registers=2, gelu="erf")
  assert_same(
    weights.load(str(tmp_path / "b.npz"), model, 32),
    weights.load(timm, model, 32, grid=(4, 6)),
  )


def test_what_cannot_be_is_refused(scanned, tmp_path):
  output = str(tmp_path / "x.npz")

  def refused(message, *arguments, **how):
    with pytest.raises(ValueError, match=message):
      export.run(*arguments, **how)

  refused("--checkpoint=", "", output)
  refused("nothing at", str(tmp_path / "none"), output)
  refused(r"'x\.pth' must end in \.npz", str(scanned), "x.pth")
  refused("No step 7", str(scanned), output, step="7")
  torch = str(GOLDEN / "torch_timm_token.safetensors")
  refused("torch_timm_token.* give --heads", torch, output)
  refused("does not divide .* 32", torch, output, heads=5)
  refused("--grid='4' must be rows x columns", torch, output, grid="4")
  refused("nowhere://", str(scanned), "nowhere://x.npz")
  rep = str(GOLDEN / "published_token_rep.npz")
  refused("pre_logits/kernel", rep, str(tmp_path / "x.safetensors"))
  assert not os.listdir(tmp_path)


def test_models_that_timm_cannot_compute_are_refused(tmp_path):
  workdir = untrained(tmp_path / "run", posemb_at="shared")
  with pytest.raises(ValueError, match="posemb_at='shared'"):
    export.run(str(workdir), str(tmp_path / "x.safetensors"))


def test_a_file_that_is_there_is_kept(scanned, tmp_path):
  output = tmp_path / "x.npz"
  output.write_text("mine")
  with pytest.raises(ValueError, match="x.npz is there already; --overwrite"):
    export.run(str(scanned), str(output))
  assert output.read_text() == "mine"
  export.run(str(scanned), str(output), overwrite=True)
  assert "cls" in weights.open(str(output)).leaves


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_what_is_not_the_same_when_read_is_removed(
  scanned, tmp_path, monkeypatch, suffix
):
  output = tmp_path / f"x{suffix}"
  output.write_text("mine")
  save = weights.save

  def faulty(path, params, **how):
    other = np.nextafter(params["head/bias"], np.float32(1))
    save(path, {**params, "head/bias": other}, **how)

  monkeypatch.setattr(weights, "save", faulty)
  with pytest.raises(ValueError, match=r"not the same when it is read: head"):
    export.run(str(scanned), str(output), overwrite=True)
  assert os.listdir(tmp_path) == [output.name]
  assert output.read_text() == "mine"


def test_a_grid_that_is_lost_is_noticed(tmp_path, monkeypatch):
  save = weights.save
  monkeypatch.setattr(weights, "save", lambda *args, grid, **how: save(*args))
  output = str(tmp_path / "x.npz")
  with pytest.raises(ValueError, match=r"not the same .*: the grid \(\)"):
    export.run(str(untrained(tmp_path / "run", size=(8, 16))), output)
  assert os.listdir(tmp_path) == ["run"]


def test_what_is_written_is_read_as_any_file_is(tmp_path, monkeypatch):
  """Names that only the writer understands are noticed, too."""
  monkeypatch.setattr(torch_positions, "to_timm", dict)  # No registers' rows.
  output = str(tmp_path / "x.safetensors")
  with pytest.raises(ValueError, match="not the same when it is read: .*pos_"):
    export.run(str(untrained(tmp_path / "run", registers=2)), output)
  assert os.listdir(tmp_path) == ["run"]


def test_the_command(scanned, tmp_path):
  output = tmp_path / "x.safetensors"

  flags = (f"--checkpoint={scanned}", f"--output={output}", "--step=1")
  done = subprocess.run(
    [sys.executable, "-m", "vit_jax.export", *flags],
    cwd=ROOT,
    env=os.environ | {"XLA_FLAGS": ""},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  export.run(str(scanned), str(tmp_path / "y.safetensors"), step="1")
  assert_same(load_file(output), load_file(tmp_path / "y.safetensors"))
  (line,) = done.stdout.splitlines()
  assert line.startswith(f"{output}: ") and line.endswith("grid 4x4")
