"""Recipes: the papers' values, nothing changed unseen, and rehearsals."""

import importlib
import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest

import input_pipeline
from configs import (
  augreg,
  common,
  plain_s16,
  pretrain,
  sam,
  scaling_vit,
  vit_h14_jft,
  vit_l16_jft,
)
from tests.conftest import tiny_config
from tests.test_configs import RECIPES, leaves, size_of_data
from vit_jax import build, evaluators, models, train

GOLDEN = pathlib.Path(__file__).parent / "golden" / "configs"

# Table 3 as the paper prints it; of two lengths the longer.
TABLE3 = """
B/16      jft           7 8e-4 linear 0.1  0.0
B/32      jft           7 8e-4 linear 0.1  0.0
L/32      jft           7 6e-4 linear 0.1  0.0
L/16      jft          14 4e-4 linear 0.1  0.0
H/14      jft          14 3e-4 linear 0.1  0.0
R50x1     jft           7 1e-3 linear 0.1  0.0
R50x2     jft           7 1e-3 linear 0.1  0.0
R101x1    jft           7 8e-4 linear 0.1  0.0
R152x1    jft           7 6e-4 linear 0.1  0.0
R152x2    jft           7 6e-4 linear 0.1  0.0
R50+B/16  jft           7 8e-4 linear 0.1  0.0
R50+B/32  jft           7 8e-4 linear 0.1  0.0
R50+L/32  jft           7 2e-4 linear 0.1  0.0
R50+L/16  jft          14 4e-4 linear 0.1  0.0
B/16      imagenet21k  90 1e-3 linear 0.03 0.1
B/32      imagenet21k  90 1e-3 linear 0.03 0.1
L/16      imagenet21k  90 1e-3 linear 0.03 0.1
L/32      imagenet21k  90 1e-3 linear 0.03 0.1
B/16      imagenet2012 300 3e-3 cosine 0.3 0.1
B/32      imagenet2012 300 3e-3 cosine 0.3 0.1
L/16      imagenet2012 300 3e-3 cosine 0.3 0.1
L/32      imagenet2012 300 3e-3 cosine 0.3 0.1
"""
ROWS = [line.split() for line in TABLE3.strip().splitlines()]
# Models of Tables 5 and 6 that have no row.
WITHOUT_ROW = ("R200x3,jft", "H/14,imagenet21k")
ARGS = RECIPES | {
  "pretrain": (*(f"{row[0]},{row[1]}" for row in ROWS), *WITHOUT_ROW)
}


def recipe(name, arg=""):
  module = importlib.import_module(f"configs.{name}")
  return module.get_config(arg) if arg else module.get_config()


# Nothing changes unseen


def differing(config, default):
  """Returns lines for all values that are not the default ones."""
  known = leaves(default)
  return [
    f"{key} = {value!r}"
    for key, value in leaves(config).items()
    if key not in known or known[key] != value
  ]


def effective(name, arg):
  """Returns a recipe's values, and what follows from them, as text."""
  config = recipe(name, arg)
  lines = [f"[{name}:{arg}]" if arg else f"[{name}]"]
  settings = config.copy_and_resolve_references()
  with settings.unlocked():
    settings.evals = {}
  lines += differing(settings, common.base())
  for key, entry in config.evals.items():
    own = differing(entry, common.evaluator(kind=entry.kind))
    lines += [f"evals.{key}.kind = {entry.kind!r}"]
    lines += [f"evals.{key}.{line}" for line in own]
  _, num_examples = size_of_data(config)
  rate, total = build.schedule(config, num_examples)
  warmup = build.durations(config, num_examples)(config.optim.warmup, "warmup")
  points = [
    f"{float(rate(step)):.6g} at {step}" for step in (warmup, total // 2, total)
  ]
  return "\n".join([*lines, f"# learning rate: {', '.join(points)}"])


def defaults():
  parts = {
    "defaults": leaves(common.base()),
    "evaluator": leaves(common.evaluator()),
    "evaluator of kind fewshot": leaves(common.evaluator(kind="fewshot")),
  }
  return "\n\n".join(
    "\n".join([f"[{name}]", *(f"{k} = {v!r}" for k, v in values.items())])
    for name, values in parts.items()
  )


@pytest.mark.parametrize("name", ["common", *ARGS])
def test_effective_values_are_those_on_record(name):
  if name == "common":
    text = defaults()
  else:
    text = "\n\n".join(effective(name, arg) for arg in ARGS[name])
  path = GOLDEN / f"{name}.txt"
  if os.environ.get("RENEW_GOLDEN"):
    path.write_text(text + "\n")
  assert path.exists() and path.read_text() == text + "\n", (
    f"configs/{name}.py has other values than {path.name} says. If that is "
    "meant, type this and let the change be reviewed:\n"
    "RENEW_GOLDEN=1 python -m pytest tests/test_recipes.py -k on_record"
  )


def test_nothing_on_record_is_forgotten():
  recorded = {path.stem for path in GOLDEN.glob("*.txt")}
  assert recorded == {"common", *ARGS}


# The papers' values


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]},{row[1]}")
def test_pretraining_is_table_3(row):
  model, dataset, epochs, lr, decay, weight_decay, dropout = row
  config = pretrain.get_config(f"{model},{dataset}")
  optim = config.optim
  assert (config.total, optim.lr) == (f"{epochs}ep", float(lr))
  assert (optim.schedule, optim.weight_decay) == (decay, float(weight_decay))
  assert (config.model.name, config.model.dropout) == (model, float(dropout))
  assert (optim.name, optim.b1, optim.b2) == ("adamw", 0.9, 0.999)
  assert (config.input.batch_size, config.image_size) == (4096, (224,))
  assert optim.clip == (1.0 if dataset == "imagenet2012" else 0.0)
  sigmoid = dataset != "imagenet2012"
  assert config.loss == ("sigmoid" if sigmoid else "softmax")
  assert config.model.head_bias == (-10 if sigmoid else 0)
  if "/" in model:
    width = models.VARIANTS[model.rpartition("+")[2][0]]["width"]
    assert config.model.representation_size == width
  rate, total = build.schedule(config, size_of_data(config)[1])
  assert float(rate(10_000)) == pytest.approx(float(lr), rel=1e-6)
  end = 1e-5 if decay == "linear" else 0.0
  middle = (10_000 + total) / 2
  assert float(rate(middle)) == pytest.approx((float(lr) + end) / 2, rel=1e-4)
  assert float(rate(total)) == pytest.approx(end, abs=1e-9)


def test_widths_are_those_of_the_models():
  assert {
    name: row["width"] for name, row in models.VARIANTS.items()
  } == pretrain.WIDTHS


@pytest.mark.parametrize(
  ("name", "arg", "words"),
  [
    (
      "pretrain",
      "B/16,imagenet21",
      "'imagenet21' .*Did you mean 'imagenet21k'",
    ),
    ("pretrain", "R50x1,imagenet21k", "'R50x1' on imagenet21k.*R50x1"),
    ("augreg", "B/16,jft", "'jft' here, but imagenet21k"),
    ("augreg", "B/16,imagenet21k,aug=medum1", "Did you mean 'medium1'"),
    ("augreg", "B/16,imagenet21k,augs=medium1", "option 'augs'.*'aug'"),
    ("augreg", "B/16,imagenet21k,wd=0.3", "wd '0.3' here, but 0.1, 0.03"),
    ("augreg", "B/16,imagenet21k,epochs=x", "number of epochs 'x'.*300, 30"),
    ("augreg", "B/16,imagenet2012,epochs=30", "epochs '30' here, but 300"),
  ],
)
def test_arguments_that_mean_nothing(name, arg, words):
  with pytest.raises(ValueError, match=words):
    recipe(name, arg)


def test_augreg_has_28_settings_of_a_model():
  found = set()
  for aug in augreg.AUGMENTATIONS:
    for drop in ("0.0", "0.1"):
      for wd in ("0.1", "0.03"):
        arg = f"B/16,imagenet21k,aug={aug},drop={drop},wd={wd}"
        config = augreg.get_config(arg)
        assert config.model.dropout == config.model.stochastic_depth
        found.add(
          (
            config.input.ops,
            config.mixup,
            config.model.dropout,
            config.optim.weight_decay,
          )
        )
  assert len(found) == 28
  config = augreg.get_config("L/16,imagenet21k")  # As published.
  assert (config.mixup, config.optim.weight_decay) == (0.5, 0.1)
  assert config.input.ops.endswith("|randaug(2, 20)")


def test_a_branch_of_scaling_vit_leaves_the_run_without_a_jump():
  main = scaling_vit.get_config()
  branch = scaling_vit.get_config()
  branch.total = "250k"
  at = int(200e3)
  rate, _ = build.schedule(main, 10**9)
  branched, _ = build.schedule(branch, 10**9)
  assert (
    float(branched(at))
    == float(rate(at))
    == pytest.approx(8e-4 / np.sqrt(1 + 190_000 / 10_000))
  )
  assert float(branched(225_000)) == pytest.approx(
    8e-4 / np.sqrt(1 + 215_000 / 10_000) / 2
  )
  assert float(branched(250_000)) == 0


def test_a_branch_is_what_a_run_of_its_length_would_have_been(tmp_path):
  cooling = {"optim.schedule": "rsqrt", "optim.cooldown": "2"}
  trunk = tiny_config(total="4", **{"optim.schedule": "rsqrt"})
  train.run(trunk, str(tmp_path / "trunk"))
  whole = tiny_config(total="6", **cooling)
  whole = train.run(whole, str(tmp_path / "whole"))
  branch = tiny_config(
    total="6", resume_from=str(tmp_path / "trunk"), **cooling
  )
  branch = train.run(branch, str(tmp_path / "branch"))
  jax.tree.map(np.testing.assert_array_equal, branch, whole)


def test_pod_recipes_are_the_rows_of_table_3():
  for module, arg in ((vit_l16_jft, "L/16,jft"), (vit_h14_jft, "H/14,jft")):
    ours, row = leaves(module.get_config()), leaves(pretrain.get_config(arg))
    changed = {key for key in ours if ours[key] != row[key]}
    speed = {"model.dtype", "optim.moment_dtype", "optim.zero"}
    assert changed == speed  # No number of the paper.


def test_plain_and_sharpness_aware():
  config = plain_s16.get_config("300")
  rate, total = build.schedule(config, 1_268_355)
  assert total == 300 * 1_268_355 // 1024
  assert float(rate(10_000)) == pytest.approx(1e-3)
  assert float(rate(total)) == pytest.approx(0, abs=1e-9)
  # AdamW with big_vision's 1e-4, which is 0.1 times the rate here.
  assert (config.input.batch_size, config.optim.weight_decay) == (1024, 0.1)
  assert (config.mixup, config.model.posemb) == (0.2, "sincos2d")
  assert (config.loss, config.model.classifier) == ("softmax", "gap")
  assert config.input.ops.endswith("|flip_lr|randaug(2, 10)")
  assert (config.optim.clip, config.input.split) == (1.0, "train[:99%]")
  assert sam.get_config().optim.sam_rho == 0.2


# Rehearsals: the recipes as they are, smaller and on made-up images


def small(config, source, tmp_path):
  """Makes seconds of a recipe; everything that defines it stays."""
  config.input.source = source
  config.input.data_dir = str(tmp_path / "data")  # Where nothing lies.
  config.input.batch_size = 8
  config.image_size = (16,)
  config.model.name = "mu/4"
  config.model.representation_size = 32
  config.total = "2"
  config.log_every = "1"
  return config


def rows_of(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def test_the_jft_row_trains_saves_and_resumes_on_a_mesh(tmp_path, warnings):
  config = small(vit_l16_jft.get_config(), "fake:16,10,64", tmp_path)
  config.mesh.fsdp = 2
  config.total, config.checkpoint.every = "4", "2"
  workdir = tmp_path / "run"
  state = train.run(config, str(workdir))
  rows = rows_of(workdir)
  assert rows[0]["train/loss"] == pytest.approx(10.000454, rel=1e-6)
  # Warm-up was shortened to the run: each update has the rate that made it.
  assert [row["train/lr"] for row in rows] == pytest.approx(
    [4e-4 * step / 4 for step in range(4)]
  )
  assert any("evals.fewshot is left out" in text for text in warnings())

  # As if it had been killed after step 2 was saved.
  (workdir / "summary.json").unlink()
  shutil.rmtree(workdir / "checkpoints" / "4")
  resumed = train.run(config, str(workdir))
  assert [row["step"] for row in rows_of(workdir)] == [1, 2, 3, 4]
  jax.tree.map(np.testing.assert_array_equal, state, resumed)


@pytest.mark.parametrize(
  ("arg", "source", "loss"),
  [
    ("B/16,imagenet21k", "fake:16,21843,64", 10.991648),
    ("B/16,imagenet2012", "fake:16,1000,64", np.log(1000)),
  ],
)
def test_rows_rehearse(tmp_path, arg, source, loss):
  config = small(pretrain.get_config(arg), source, tmp_path)
  train.run(config, str(tmp_path / "run"))
  first, last = rows_of(tmp_path / "run")
  assert first["train/loss"] == pytest.approx(loss, rel=1e-6)
  if "val" in config.evals:
    assert last["val/n"] == 64
    assert last["val/loss"] == pytest.approx(loss, rel=0.1)


def probes(probe, rehearsal):
  config = tiny_config()
  with config.evals.unlocked():
    del config.evals["test"]
    config.evals.fewshot = common.evaluator(kind="fewshot", source=probe)
  return evaluators.build_all(
    config,
    classes=(),
    objective=None,
    mesh=None,
    params={},
    rehearsal=rehearsal,
  )


def test_only_a_rehearsal_does_without_data_that_is_not_here(tmp_path):
  nowhere = f"folder:{tmp_path}/none"
  assert probes(nowhere, rehearsal=True) == {}
  with pytest.raises(ValueError, match="config.evals.fewshot: .*not a folder"):
    probes(nowhere, rehearsal=False)
  with pytest.raises(ValueError, match="config.evals.fewshot: Unknown kind"):
    probes("fodler:x", rehearsal=True)
  assert build.is_rehearsal(tiny_config())
  assert not build.is_rehearsal(tiny_config(**{"input.source": "digits:"}))


@pytest.mark.parametrize(
  ("dataset", "last"), [("jft", 18290), ("imagenet21k", 21842)]
)
def test_missing_records_are_described(tmp_path, dataset, last):
  config = pretrain.get_config(f"B/16,{dataset}")
  words = (
    f"{dataset}/ does not exist.*tf.train.Example.*'image' .*'labels' .*"
    rf"0\.\.{last}, .*input_pipeline.write"
  )
  with pytest.raises(ValueError, match=words):
    input_pipeline.get_source(config.input.source, "train", str(tmp_path))
