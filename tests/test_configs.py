"""Configs: every recipe builds, every key can be set and has an effect."""

import importlib
import pathlib
import pkgutil
import re

import jax
import numpy as np
import pytest
from absl import flags
from ml_collections import config_flags

import configs
import input_pipeline
from configs import common, fashion
from tests.conftest import tiny_config
from vit_jax import build, evaluators, images, sharding, steps

ROOT = pathlib.Path(__file__).parent.parent
# Recipes and what may stand behind their colon.
RECIPES = {
  "augreg": (
    "",
    "S/16,imagenet2012",
    "B/32,imagenet21k,aug=light2,drop=0.1,wd=0.03,epochs=30",
  ),
  "digits": ("",),
  "fashion": ("",),
  "finetune": (
    "",
    "R50+L/16,imagenet2012",
    "B/32,oxford_iiit_pet",
    "L/32,cifar100+grid",
    "H/14,oxford_flowers102",
    "R50x1,folder:PATH",
    "L/16,fake:32,10,100",
  ),
  "plain_s16": ("", "300"),
  "pretrain": (
    "",
    "L/16,jft",
    "H/14,imagenet21k",
    "R50+B/16,jft",
    "R50x1,jft",
  ),
  "sam": ("",),
  "scaling_vit": ("", "G/14"),
  "vit_h14_jft": ("",),
  "vit_l16_jft": ("",),
  "masked_patch": ("", "R50+B/16,imagenet2012", "mu/4,fake:32,10,100"),
  "vtab": ("", "H/14,augreg", "R50x1,lightweight", "L/16,linear"),
}
# Classes and training examples of data that is not here.
SIZES = {
  fashion.FASHION: (10, 60_000),
  "": (397, 800),  # Of VTAB's tasks, which bring their own.
  "tfds:imagenet2012": (1000, 1_281_167),
  "tfds:cifar10": (10, 50_000),
  "tfds:cifar100": (100, 50_000),
  "tfds:oxford_iiit_pet": (37, 3680),
  "tfds:oxford_flowers102": (102, 1020),
  "folder:PATH": (5, 1000),
  "tfrecord:jft/train-*?classes=18291": (18_291, 303_000_000),
  "tfrecord:jft3b/train-*?classes=29593": (29_593, 3_000_000_000),
  "tfrecord:imagenet21k/train-*?classes=21843": (21_843, 14_000_000),
}


def size_of_data(config):
  """Returns the classes and training examples of a recipe's data."""
  if config.input.source in SIZES:
    return SIZES[config.input.source]
  source = input_pipeline.get_source(config.input.source, config.input.split)
  return source.num_classes, source.num_examples


def leaves(config, prefix=""):
  """Returns every key of a config with its value."""
  found = {}
  for key, value in config.items():
    if hasattr(value, "items"):
      found |= leaves(value, f"{prefix}{key}.")
    else:
      found[prefix + key] = value
  return found


def parsed(*overrides):
  """Returns tests/tiny_recipe.py with command-line overrides."""
  holder = flags.FlagValues()
  argv = ["", "--config=tests/tiny_recipe.py", *overrides]
  flag = config_flags.DEFINE_config_file(
    "config", flag_values=holder, lock_config=True, sys_argv=argv
  )
  holder(argv)
  return flag.value


@pytest.fixture
def at_root(monkeypatch):
  monkeypatch.chdir(ROOT)


def mesh_of(config):
  return sharding.make_mesh(config.mesh)


def test_every_recipe_is_tested():
  names = {module.name for module in pkgutil.iter_modules(configs.__path__)}
  assert RECIPES.keys() == names - {"common", "rerun"}


@pytest.mark.parametrize(
  ("name", "arg"), [(name, arg) for name in RECIPES for arg in RECIPES[name]]
)
def test_every_recipe_builds_without_memory(name, arg):
  module = importlib.import_module(f"configs.{name}")
  config = module.get_config(arg) if arg else module.get_config()
  assert config.is_locked
  assert "python -m vit_jax" in module.__doc__
  num_classes, num_examples = size_of_data(config)
  # Blocks are alike: two of them tell as much as 32, in less time.
  with config.unlocked():
    config.model.depth = 0 if config.model.name.count("x") else 2
  parts = build.parts(
    config,
    mesh_of(config),
    num_classes=num_classes,
    num_examples=num_examples,
  )
  assert float(parts.schedule(parts.total // 2)) > 0
  for ops in (config.input.ops, *(e.ops for e in config.evals.values())):
    input_pipeline.parse_ops(images.sized(ops, images.size_of(config)))


# The paper's Table 4, and section B.1.1 for what is held out (percent).
TABLE4 = """
imagenet2012       20000  0.003 0.01 0.03 0.06   1
cifar100           10000  0.001 0.003 0.01 0.03  2
cifar10            10000  0.001 0.003 0.01 0.03  2
oxford_iiit_pet      500  0.001 0.003 0.01 0.03  10
oxford_flowers102    500  0.001 0.003 0.01 0.03  10
"""


@pytest.mark.parametrize("row", TABLE4.split("\n")[1:-1])
def test_table_4(row):
  dataset, total, *rates, held = row.split()
  config = importlib.import_module("configs.finetune").get_config(
    f"B/16,{dataset}+grid"
  )
  assert build.durations(config, 50_000)("100%", "") == int(total)
  assert config.lr_grid == tuple(map(float, rates))
  fit = f"{100 - int(held)}%"
  assert config.lr_splits == (f"train[:{fit}]", f"train[{fit}:]")
  assert config.input.source == f"tfds:{dataset}"


def test_fine_tuning_is_the_papers():
  config = importlib.import_module("configs.finetune").get_config(
    "B/16,cifar10"
  )
  assert (config.optim.name, config.optim.momentum) == ("sgd", 0.9)
  assert (config.input.batch_size, config.optim.clip) == (512, 1.0)
  assert (config.optim.weight_decay, config.init_head) == (0.0, "reset")
  schedule, total = build.schedule(config, 50_000)
  assert (total, config.image_size) == (10_000, (384,))
  for step, rate in ((0, 0), (250, 0.0015), (500, 0.003), (5250, 0.0015)):
    assert float(schedule(step)) == pytest.approx(rate, rel=1e-5), step
  assert float(schedule(total)) == pytest.approx(0, abs=1e-9)
  assert images.sized(config.input.ops, images.size_of(config)) == (
    "decode|resize((448, 448))|random_crop((384, 384))|flip_lr"
  )
  with pytest.raises(ValueError, match="folder:PATH.*'cifar'.*cifar100"):
    importlib.import_module("configs.finetune").get_config("B/16,cifar")


def test_every_key_can_be_set_on_the_command_line_with_its_type(at_root):
  for key, value in leaves(tiny_config()).items():
    text = repr(value) if isinstance(value, tuple) else str(value)
    ours = leaves(parsed(f"--config.{key}={text}"))
    assert ours[key] == value, key
    assert type(ours[key]) is type(value), key


@pytest.mark.parametrize(
  ("key", "on", "off"),
  [
    ("mixup", "0.2", 0.0),
    ("ema", "0.9", 0.0),
    ("optim.warmup", "5%", "0"),
    ("evals.test.kind", "classification", ""),
    ("checkpoint.best", "test/top1", ""),
    ("model.scan", "True", False),
  ],
)
def test_what_is_switched_on_can_be_switched_off(at_root, key, on, off):
  config = parsed(f"--config.{key}={on}", f"--config.{key}={off}")
  assert leaves(config)[key] == off


def test_tuples_are_set_and_emptied(at_root):
  config = parsed(
    "--config.optim.freeze=('head/.*', 'cls')",
    "--config.optim.multipliers=(('head/.*', 0.5),)",
    "--config.optim.decay_paths=()",
  )
  assert config.optim.freeze == ("head/.*", "cls")
  assert config.optim.multipliers == (("head/.*", 0.5),)
  assert config.optim.decay_paths == ()


@pytest.mark.parametrize(
  "override",
  ["optim.lr=None", "optim.lr=fast", "seed=1.5", "model.scan=maybe", "modle=3"],
)
def test_a_value_of_another_type_is_refused(at_root, override):
  with pytest.raises((flags.Error, ValueError, KeyError, AttributeError)):
    parsed(f"--config.{override}")


@pytest.mark.parametrize("text", ["8,12", "(8,12)"])
def test_image_size_as_a_tuple(at_root, text):
  config = parsed(f"--config.image_size={text}")
  assert images.size_of(config) == (8, 12)
  assert images.size_of(parsed("--config.image_size=8")) == (8, 8)
  assert images.sized("resize({size})", (8, 12)) == "resize((8, 12))"


def test_sizes_in_ops():
  ops = "resize_small({side*8/7})|resize({size*7/6})"
  assert images.sized(ops, (224, 384)) == (
    "resize_small(256)|resize((261, 448))"
  )
  for ops in ("resize({sides})", "resize({size*2})"):
    with pytest.raises(ValueError, match="braces"):
      images.sized(ops, (8, 8))


def test_every_key_is_read_somewhere():
  """A key that no line of code names has no effect."""
  code = "".join(
    path.read_text()
    for folder in ("vit_jax", "input_pipeline")
    for path in (ROOT / folder).rglob("*.py")
  )
  for key in leaves(tiny_config()):
    name = key.rpartition(".")[2]
    assert re.search(rf"\b{name}\b", code), key


def fingerprint(config):
  """Returns all that a config decides of a run's numbers and places."""
  source = input_pipeline.get_source(
    config.input.source, config.input.split, config.input.data_dir
  )
  mesh = mesh_of(config)
  parts = build.parts(
    config,
    mesh,
    num_classes=source.num_classes,
    num_examples=source.num_examples,
  )
  batch = next(
    input_pipeline.train_batches(
      source,
      images.sized(config.input.ops, images.size_of(config)),
      batch_size=config.input.batch_size,
      seed=config.seed,
      streams=config.input.streams,
      shuffle_buffer=config.input.shuffle_buffer,
    )
  )
  on_device = sharding.to_device(batch, mesh)
  evals = evaluators.build_all(
    config,
    classes=source.class_names,
    objective=parts.objective,
    mesh=mesh,
    params=parts.state.params,
  )
  seen = [
    (name, entry.batch_size, evaluated(config, entry))
    for name, entry in config.evals.items()
    if name in evals
  ]
  step = build.train_step(config, mesh, parts)
  init = jax.jit(
    lambda: steps.new_state(
      parts.objective, parts.tx, seed=config.seed, ema=config.ema
    )
  )
  return (
    step.lower(parts.state, on_device).as_text(),
    init.lower().as_text(),
    batch["image"].tobytes(),
    batch["id"].tobytes(),
    str(parts.shardings),
    seen,
  )


def evaluated(config, entry):
  source = input_pipeline.get_source(
    entry.source or config.input.source, entry.split, config.input.data_dir
  )
  ops = images.sized(entry.ops, images.size_of(config))
  first = next(input_pipeline.eval_batches(source, ops, batch_size=4)[0])
  return source.num_examples, first["image"].tobytes()


# What shows elsewhere than in numbers and places, and the test that sees it.
ELSEWHERE = {
  "lr_grid": "test_lr_grid.py: the best rate trains on all",
  "lr_splits": "test_lr_grid.py: the best rate trains on all",
  "evals.test.weights": "test_train.py: average is saved and evaluated",
  "log_every": "test_train.py: rows",
  "profile": "test_report.py: profiler window",
  "resume_from": "test_train.py: resume_from",
  "init_from": "test_finetune.py",
  "init_head": "test_finetune.py",
  "init_resize": "test_finetune.py",
  "init_patch": "test_finetune.py",
  "checkpoint.every": "test_train.py: SIGTERM against periodic saves",
  "checkpoint.keep": "test_checkpoints.py",
  "checkpoint.keep_every": "test_checkpoints.py",
  "checkpoint.best": "test_checkpoints.py",
  "checkpoint.allow_change": "test_checkpoints.py",
  "evals.test.every": "test_train.py: rows",
  "input.prefetch": "test_feed.py",
  "input.on_error": "test_feed.py",
  "input.max_bad_share": "test_feed.py",
  "input.max_labels": "test_feed.py",
  "input.cache": "test_pipeline_choices.py",
  "input.service": "test_pipeline_service.py",
  "evals.test.cache": "test_pipeline_choices.py",
  "input.data_dir": "test_sources.py",
}
CHANGED = {
  "seed": 1,
  "objective": "masked_patch",
  "masked_patch.share": 0.25,
  "masked_patch.mask": 0.5,
  "masked_patch.random": 0.2,
  "masked_patch.target": "pixels",
  "total": "9",
  "image_size": (8,),
  "accumulate": 2,
  "ema": 0.5,
  "loss": "sigmoid",
  "label_smoothing": 0.1,
  "mixup": 0.5,
  "cutmix": 0.5,
  "model.name": "mu/8",
  "model.width": 64,
  "model.depth": 2,
  "model.mlp_dim": 64,
  "model.num_heads": 4,
  "model.classifier": "gap",
  "model.representation_size": 8,
  "model.posemb": "none",
  "model.posemb_at": "shared",
  "model.registers": 1,
  "model.dropout": 0.2,
  "model.attention_dropout": 0.1,
  "model.stochastic_depth": 0.1,
  "model.layer_scale": 0.1,
  "model.gelu": "erf",
  "model.head_bias": -1.0,
  "model.stem_width": 0.5,
  "model.stem_blocks": (1,),
  "model.input_range": "0,1",
  "model.dtype": "bfloat16",
  "model.scan": True,
  "model.remat": "full",
  "input.source": "fake:16,3,48",
  "input.split": "other",
  "input.ops": "decode|resize({size})",
  "input.batch_size": 16,
  "input.streams": 2,
  "input.shuffle_buffer": 1,
  "optim.name": "sgd",
  "optim.lr": 1e-2,
  "optim.schedule": "rsqrt",
  "optim.warmup": "2",
  "optim.cooldown": "2",
  "optim.end_lr": 1e-4,
  "optim.timescale": "5",
  "optim.weight_decay": 0.2,
  "optim.decay_paths": ("head/kernel",),
  "optim.decay_multipliers": (("head/kernel", 3.0),),
  "optim.clip": 0.5,
  "optim.sam_rho": 0.05,
  "optim.b1": 0.8,
  "optim.b2": 0.8,
  "optim.eps": 1e-3,
  "optim.momentum": 0.5,
  "optim.moment_dtype": "bfloat16",
  "optim.multipliers": (("head/.*", 0.5),),
  "optim.freeze": ("head/.*",),
  "optim.zero": False,
  "mesh.data": 4,
  "mesh.fsdp": 2,
  "mesh.model": 2,
  "mesh.dcn": 2,
  "evals.test.kind": "",
  "evals.test.source": "fake:16,3,9",
  "evals.test.split": "other",
  "evals.test.ops": "decode|central_crop(12)|resize({size})",
  "evals.test.batch_size": 3,
}
# Keys that act only beside another.
MASKED = {"mixup": 0.0, "evals.test.kind": ""}  # What needs labels is off.
BESIDE = {
  "objective": MASKED,
  **{
    f"masked_patch.{key}": {"objective": "masked_patch"} | MASKED
    for key in ("share", "mask", "random", "target")
  },
  "optim.end_lr": {"optim.schedule": "linear"},
  "optim.timescale": {"optim.schedule": "rsqrt"},
  "optim.momentum": {"optim.name": "sgd"},
  "optim.zero": {"model.width": 512},  # Small leaves are never split.
  "mesh.data": {"mesh.fsdp": 2},
  "mesh.dcn": {"mesh.data": 8},
  "model.stem_blocks": {"model.stem_width": 0.5},
  "model.stochastic_depth": {"model.depth": 2},
  "accumulate": {"mesh.data": 1, "mesh.model": 8, "model.num_heads": 8},
}


def test_the_list_of_effects_is_complete():
  assert leaves(tiny_config()).keys() == CHANGED.keys() | ELSEWHERE.keys()


@pytest.mark.slow
def test_every_key_has_an_effect():
  known = {}

  def of(changes):
    key = tuple(sorted(changes.items()))
    if key not in known:
      known[key] = fingerprint(tiny_config(**changes))
    return known[key]

  for key, value in CHANGED.items():
    beside = BESIDE.get(key, {})
    base = of(beside)
    # With fsdp 2, data 4 is what -1 means: what changes is that it is checked.
    if key in ("mesh.data", "mesh.dcn"):
      with pytest.raises(ValueError, match="does not make 8 devices"):
        of({key: 8} | beside)
      continue
    assert of({key: value} | beside) != base, key


@pytest.mark.parametrize(
  ("changes", "loss"),
  [
    ({}, np.log(3)),
    ({"loss": "sigmoid"}, 3 * np.log(2)),
    (
      {"loss": "sigmoid", "model.head_bias": -10.0},
      10 + 3 * np.log1p(np.exp(-10)),
    ),
    ({"label_smoothing": 0.3}, np.log(3)),
  ],
)
def test_first_loss_of_the_objective(changes, loss):
  config = tiny_config(mixup=0.0, **changes)
  objective = build.objectives.build(config, 3)
  batch = {
    "image": np.zeros((2, 16, 16, 3), np.uint8),
    "labels": np.array([[1], [2]], np.int32),
    "mask": np.array([1, 0], np.float32),
  }
  params = objective.init(jax.random.key(0))
  batch = jax.tree.map(jax.numpy.asarray, batch)
  total, weight = objective.loss(params, batch, jax.random.key(1))["loss"]
  assert float(weight) == 1
  assert float(total) == pytest.approx(loss, rel=1e-5)


def test_data_comes_as_the_devices_take_it():
  config = tiny_config()
  source = input_pipeline.get_source(config.input.source, "train")
  batch = next(
    input_pipeline.train_batches(
      source, "decode|resize(16)", batch_size=8, seed=0
    )
  )
  assert batch["image"].dtype == np.uint8
  assert batch["labels"].dtype == np.int32
  assert batch["mask"].dtype == np.float32
  assert common.base().input.source == ""
