"""The sweep over VTAB: same numbers however it is cut, killed or resumed."""

import importlib
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from scipy import optimize

import input_pipeline
from configs import common
from input_pipeline import holding, vtab
from tests import vtab_data
from tests.conftest import tiny_config
from vit_jax import build, launch, losses, models, objectives, optim
from vit_jax import weights as storage
from vit_jax.vtab import (
  masked_head,
  probe,
  programs,
  record,
  splits,
  sweep,
  units,
)

ROOT = pathlib.Path(__file__).parent.parent
FEW = ("caltech101", "clevr_count", "kitti_distance", "smallnorb_azimuth")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  """Fabricated data sets of all tasks: their folder, and the rows for them."""
  directory = tmp_path_factory.mktemp("vtab")
  return str(directory), vtab_data.make(directory)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
  """A file of weights of another size and another head."""
  path = str(tmp_path_factory.mktemp("weights") / "mu.npz")
  model = models.create("mu/4", num_classes=5)
  params = model.init(jax.random.key(7), jnp.zeros((1, 8, 8, 3)))["params"]
  storage.save(path, params)
  return path


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
  """Sweeps of the same shapes share their programs, as one sweep's units do."""
  known = {}
  real = programs.compile_all

  def compile_all(config, mesh, **sizes):
    masked_head.build(config, sizes["num_classes"])  # Which may refuse it.
    what = record.identity(config, []) | sizes
    key = json.dumps(what | {"evaluated": config.vtab.batch_size})
    if key not in known:
      known[key] = real(config, mesh, **sizes)
    return known[key]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(programs, "compile_all", compile_all)
    yield


def recipe(data, weights, arg="mu/4", **changes):
  config = importlib.import_module("configs.vtab").get_config(arg)
  changes = {
    "image_size": (16,),
    "init_from": weights,
    "total": "4",
    "input.batch_size": 16,
    "input.data_dir": data[0],
    "optim.lr": 0.05,
    "vtab.batch_size": 16,
  } | changes
  config.update_from_flattened_dict(changes)
  return config


def comparable(results):
  """Results without what depends on the clock on the wall."""
  return {
    (r["task"], r["stage"], json.dumps(r["hyper"]), r["seed"]): {
      key: value for key, value in r.items() if key != "seconds"
    }
    for r in results
  }


@pytest.fixture(scope="module")
def whole(data, weights, tmp_path_factory):
  """A sweep over all tasks that nobody disturbed: workdir and results."""
  workdir = tmp_path_factory.mktemp("whole")
  return workdir, sweep.run(recipe(data, weights), str(workdir), rows=data[1])


def test_all_tasks_are_measured_and_say_how(data, weights, whole, capsys):
  workdir, results = whole
  assert [r["task"] for r in results] == list(vtab.TASKS)
  for r in results:
    assert (r["stage"], r["split"], r["n"]) == ("final", "test", vtab_data.TEST)
    assert r["accuracy"] == r["correct"] / r["n"]
    assert (r["input_range"], r["image_size"], r["seed"]) == ("-1,1", [16], 0)
    assert r["trained_on"] == "train800val200"
    assert r["source_version"].count(".") == 2
    assert [step for step, _ in r["curve"]] == [1, 2, 3, 4]
    classes = vtab.TASKS[r["task"]].num_classes  # The head begins as zeros.
    assert r["curve"][0][1] == pytest.approx(np.log(classes), abs=1e-4)
  mean = np.mean([100 * r["accuracy"] for r in results])
  capsys.readouterr()
  again = sweep.run(
    recipe(data, weights), str(workdir), compare=str(workdir), rows=data[1]
  )
  assert again == results
  printed = capsys.readouterr().out
  assert f"{mean:.2f}" in printed
  assert "compiling" not in printed  # There was nothing left to do.
  assert {"report.html", "report.csv"} <= set(os.listdir(workdir))
  table = (workdir / "report.md").read_text()
  assert workdir.name in table  # Beside itself.


class Killed(BaseException):
  """Stands for a kill in the middle of a unit."""


def stop_after(monkeypatch, calls, how, *, of="step"):
  """Lets `how()` happen in a call of a program, after so many of them."""
  made = itertools.count()
  real = programs.compile_all

  def compile_all(*args, **options):
    compiled = real(*args, **options)

    def watched(*state_and_batch):
      if next(made) == calls:
        how()
      return getattr(compiled, of)(*state_and_batch)

    return compiled._replace(**{of: watched})

  monkeypatch.setattr(programs, "compile_all", compile_all)


def test_shards_that_are_killed_give_the_same_table(
  data, weights, whole, tmp_path, monkeypatch
):
  workdir = str(tmp_path)
  # Another batch size of evaluations: every example counts once all the same.
  changes = {"checkpoint.every": "2", "vtab.batch_size": 8}

  def run(shard):
    config = recipe(data, weights, **changes)
    return sweep.run(config, workdir, tasks=FEW, shard=shard, rows=data[1])

  def kill():
    raise Killed

  with monkeypatch.context() as patch:
    stop_after(patch, 4 + 3, kill)  # In the second task, behind a save.
    with pytest.raises(Killed):
      run("0/2")
  kept = list(tmp_path.glob("units/kitti_distance/**/training/2/params"))
  assert len(kept) == 1
  for calls, of, step in ((1, "step", 2), (0, "right", 4)):
    with monkeypatch.context() as patch:
      stop_after(
        patch, calls, lambda: os.kill(os.getpid(), signal.SIGTERM), of=of
      )
      with pytest.raises(
        launch.Terminated, match=f"step {step} of clevr_count"
      ):
        run("1/2")
    (kept,) = tmp_path.glob("units/clevr_count/**/training/*/params")
    assert kept.parent.name == str(step)
  made = []
  real = input_pipeline.train_batches
  monkeypatch.setattr(
    input_pipeline,
    "train_batches",
    lambda *args, **options: (
      made.append(options["start_step"]) or real(*args, **options)
    ),
  )
  run("1/2")
  results = run("0/2")
  assert made == [0, 2]  # The others were trained already.
  assert not list(tmp_path.glob("units/**/training"))
  expected = comparable(r for r in whole[1] if r["task"] in FEW)
  assert comparable(results) == expected


def test_the_choice_is_made_without_the_test_split(
  data, weights, tmp_path, monkeypatch
):
  opened = []
  real = splits.Splits.open

  def open_split(self, name):
    opened.append((self.stage, name))
    return real(self, name)

  monkeypatch.setattr(splits.Splits, "open", open_split)
  config = recipe(
    data,
    weights,
    **{"vtab.lrs": (3e38, 1e-9, 0.5), "vtab.stage": "select"},
  )
  run = dict(tasks=["oxford_iiit_pet"], seeds=2, rows=data[1])
  tried = sweep.run(config, str(tmp_path), **run)
  assert set(opened) == {("select", "train800"), ("select", "val200")}
  best = max(tried, key=lambda r: r["accuracy"])["hyper"]["lr"]
  assert {r["n"] for r in tried} == {vtab_data.VALIDATION}
  diverged = tried[0]
  assert diverged["correct"] == 0
  assert "the loss is nan in update" in diverged["note"]
  # Going on with the same sweep, the choice is there already.
  opened.clear()
  config.vtab.stage = "final"
  results = sweep.run(config, str(tmp_path), **run)
  assert {stage for stage, _ in opened} == {"final"}
  final = [r for r in results if r["stage"] == "final"]
  assert [r["hyper"]["lr"] for r in final] == [best, best]
  assert [r["seed"] for r in final] == [0, 1]
  assert final[0]["curve"] != final[1]["curve"]
  # A final training that diverges is a failure, not a number.
  config = recipe(data, weights, **{"optim.lr": 3e38})
  with pytest.raises(launch.Refused, match="oxford_iiit_pet.*loss is nan"):
    sweep.run(config, str(tmp_path / "other"), **run)


def test_the_best_on_val200_is_chosen_and_the_first_of_equals(tmp_path):
  config = importlib.import_module("configs.vtab").get_config("mu/4,augreg")
  candidates = units.settings(config, ())
  for i, setting in enumerate(candidates):
    assert units.choose(tmp_path, "dtd", candidates, 0) is None
    accuracy = (0.1, 0.3, 0.3, 0.2)[i % 4]
    unit = units.Unit("dtd", "select", setting, 0)
    unit.write(tmp_path, {"accuracy": accuracy})
  assert units.choose(tmp_path, "dtd", candidates, 0) == candidates[1]
  assert units.choose(tmp_path, "dtd", candidates[:1], 0) == candidates[0]


def test_selection_has_no_way_to_the_test_split(data):
  task = data[1]["svhn"]
  select = splits.for_stage("select", "svhn", task, data[0])
  assert select.open("val200").num_examples == vtab_data.VALIDATION
  for split in ("test", "train800val200"):
    with pytest.raises(ValueError, match=f"never '{split}'.*final stage"):
      select.open(split)
  assert not any("test" in text for text in select.expressions.values())
  final = splits.for_stage("final", "svhn", task, data[0])
  assert final.open("test").num_examples == vtab_data.TEST
  short = task._replace(num_test=vtab_data.TEST + 1)
  with pytest.raises(input_pipeline.DataError, match="13 examples.*VTAB 14"):
    splits.for_stage("final", "svhn", short, data[0]).open("test")
  with pytest.raises(input_pipeline.DataError, match="labels 0 to 10; .* to 9"):
    final.check_labels(np.array([[0], [10]]))


def test_a_task_that_fails_stops_no_other(
  data, weights, tmp_path, capsys, monkeypatch
):
  config = recipe(data, weights)
  rows = data[1]
  lost = rows["dtd"]._replace(source="tfds:lost:1.*.*")
  run = dict(tasks=["dtd", "eurosat"])
  with pytest.raises(launch.Refused, match="1 of 2 tasks.*(?s:.*)dtd: .*lost"):
    sweep.run(config, str(tmp_path), rows=rows | {"dtd": lost}, **run)
  printed = capsys.readouterr().out
  assert "mean of 19           | –" in printed
  assert "eurosat final" in printed
  # All data are looked for before anything is compiled.
  assert printed.index("dtd failed") < printed.index("eurosat final")
  with monkeypatch.context() as patch:
    patch.delattr(programs, "compile_all")
    with pytest.raises(launch.Refused, match="dtd: .*lost"):
      sweep.run(config, str(tmp_path), rows=rows | {"dtd": lost}, **run)
  capsys.readouterr()
  sweep.run(config, str(tmp_path), rows=rows, **run)
  printed = capsys.readouterr().out
  assert "dtd final" in printed
  assert "eurosat final" not in printed
  # What was made of other weights or settings is not mixed with this.
  for changes, words in (
    ({"model.depth": 2}, "model.depth: was 0, is 2"),
    ({"optim.lr": 0.1}, "settings: was .*lr=0.05.* is .*lr=0.1"),
  ):
    other = recipe(data, weights, **changes)
    with pytest.raises(launch.Refused, match=words):
      sweep.run(other, str(tmp_path), rows=rows, **run)


def test_masked_head_is_a_head_of_the_true_size():
  classes = 5
  config = tiny_config(mixup=0.0, **{"model.dropout": 0.0})
  rng = np.random.default_rng(0)
  batch = {
    "image": jnp.asarray(rng.integers(0, 256, (4, 16, 16, 3)), jnp.uint8),
    "labels": jnp.asarray(rng.integers(0, classes, (4, 1)), jnp.int32),
    "mask": jnp.ones(4),
  }
  ours = masked_head.build(config, 9)
  true = objectives.build(config, classes)
  params = ours.init(jax.random.key(0))
  head = {
    "kernel": jnp.asarray(rng.normal(size=(32, 9)), jnp.float32),
    "bias": jnp.asarray(rng.normal(size=9), jnp.float32),
  }
  cut = {name: leaf[..., :classes] for name, leaf in head.items()}
  extra = {
    "classes": jnp.full(4, classes, jnp.int32),
    "seed": jnp.zeros(4, jnp.int32),
  }

  def results_of(objective, params, batch):
    def loss(params):
      return objective.loss(params, batch, jax.random.key(1))["loss"][0]

    def all_of_them(params):
      outputs = objective.predict(params, batch)
      return *jax.value_and_grad(loss)(params), outputs["logits"]

    return jax.jit(all_of_them)(params)

  found, grads, logits = results_of(
    ours, params | {"head": head}, batch | extra
  )
  expected, wanted, true_logits = results_of(
    true, params | {"head": cut}, batch
  )
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  for leaf in grads["head"].values():
    assert not np.any(leaf[..., classes:])  # Exactly.
  grads["head"] = {k: leaf[..., :classes] for k, leaf in grads["head"].items()}

  def assert_close(one, other):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)

  jax.tree.map(assert_close, grads, wanted)
  assert_close(logits[:, :classes], true_logits)
  assert np.all(logits[:, classes:] == -np.inf)
  hot = losses.multi_hot(batch["labels"], classes)
  right = losses.top_k_hit(true_logits, hot, 1).sum()
  assert masked_head.correct({"logits": logits}, batch) == right


def test_rates_from_a_table_make_the_updates_of_the_schedule():
  config = tiny_config(**{"optim.name": "sgd", "optim.warmup": "2"})
  params = {"kernel": jnp.linspace(-1, 1, 6)}
  schedule, total = build.schedule(config, 40)
  usual = optim.make_optimizer(config.optim, params, schedule)
  ours = optax.chain(
    optim.make_optimizer(config.optim, params, optax.constant_schedule(1.0)),
    programs.scale_by_table(total + 5),
  )
  states = [usual.init(params), ours.init(params)]
  rates = jnp.zeros(total + 5).at[:total].set(schedule(jnp.arange(total)))
  states[1] = (states[1][0], states[1][1]._replace(scale=rates))
  both = [params, params]
  for step in range(total):
    for i, tx in enumerate((usual, ours)):
      grads = {"kernel": jnp.cos(step + both[i]["kernel"])}
      updates, states[i] = tx.update(grads, states[i], both[i])
      both[i] = optax.apply_updates(both[i], updates)
    np.testing.assert_array_equal(both[0]["kernel"], both[1]["kernel"])


def test_held_images_are_those_of_the_pipeline(data):
  task = data[1]["clevr_count"]
  source = input_pipeline.get_source(
    task.source, task.splits.train800val200, data[0]
  )
  ops = vtab.bit_vit(task).train_ops.replace("{size}", "8")
  kept, left, held = holding.hold(source, ops)
  assert left == "flip_lr"
  once = ops.removesuffix("|flip_lr")
  batches, _ = input_pipeline.eval_batches(source, once, batch_size=32)
  expected = next(batches)
  found = next(input_pipeline.train_batches(kept, "", batch_size=32, seed=0))
  for batch in (expected, found):
    order = np.argsort(batch["id"])
    for key in batch:
      batch[key] = batch[key][order]
  for key in ("image", "labels", "id"):
    np.testing.assert_array_equal(found[key], expected[key])
  assert sorted(held.ids) == list(range(32))
  with pytest.raises(ValueError, match="of one size: decode and resize"):
    holding.read(source, "decode|clevr_count")


@pytest.mark.parametrize("strength", [0.1, 10.0])
def test_logistic_probe_is_the_minimum(strength):
  rng = np.random.default_rng(3)
  x, y = rng.normal(size=(30, 4)), np.arange(30) % 3
  x += y[:, None]

  def loss(flat):
    weights, bias = flat[:12].reshape(4, 3), flat[12:]
    logits = x @ weights + bias
    logits -= logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -log_p[np.arange(30), y].sum() + strength / 2 * (weights**2).sum()

  best = optimize.minimize(loss, np.zeros(15)).x
  weights, bias = probe.logistic(x, y, 3, strength=strength)
  np.testing.assert_allclose(weights, best[:12].reshape(4, 3), atol=1e-3)
  np.testing.assert_allclose(
    bias - bias.mean(), best[12:] - best[12:].mean(), atol=1e-3
  )


def test_linear_mode(data, weights, tmp_path, monkeypatch):
  computed = []
  real = probe.Prober._compute
  monkeypatch.setattr(
    probe.Prober,
    "_compute",
    lambda self, source, ops: (
      computed.append(source.split) or real(self, source, ops)
    ),
  )
  row = data[1]["svhn"].splits
  for kind, given, strengths, reads in (
    ("ridge", (), probe.STRENGTHS["ridge"], [row.train800, row.val200]),
    ("logistic", (1.0,), (), []),
  ):
    config = recipe(data, weights, mode="linear", **{"vtab.probe": kind})
    config.vtab.strengths = given
    *tried, final = sweep.run(
      config, str(tmp_path / kind), tasks=["svhn"], seeds=2, rows=data[1]
    )
    assert tuple(r["hyper"]["strength"] for r in tried) == strengths
    best = max(tried, key=lambda r: r["accuracy"], default=final)
    assert final["hyper"] == best["hyper"]
    assert final["protocol"] == f"linear, {kind}"
    # Once for each split, whatever the number of strengths.
    assert computed == [*reads, row.train800val200, row.test]
    computed.clear()
    assert final["n"] == vtab_data.TEST
    assert final["accuracy"] > 0.5  # Colours tell the classes.
  # Features stay, so that a unit which is lost costs no pass over the images.
  (lost,) = tmp_path.glob("logistic/units/svhn/final/**/result.json")
  lost.unlink()
  again = sweep.run(
    config, str(tmp_path / "logistic"), tasks=["svhn"], rows=data[1]
  )
  assert (computed, comparable(again)) == ([], comparable([final]))


@pytest.mark.parametrize(
  ("changes", "options", "words"),
  [
    ({"init_from": "?"}, {}, "--config.init_from=PATH"),
    ({"lr_grid": (0.1,)}, {}, "config.vtab.lrs, not .* config.lr_grid"),
    ({"mode": "linaer"}, {}, "config.mode = 'linaer'.*Did you mean 'linear'"),
    ({"vtab.stage": "test"}, {}, "config.vtab.stage = 'test'.*final, select"),
    ({"vtab.preset": "bit"}, {}, "preprocessing 'bit'.*'bit_vit'"),
    (
      {"vtab.lrs": (0.1, 0.1)},
      {},
      r"config.vtab.lrs = \(0.1, 0.1\).*different",
    ),
    ({"vtab.totals": (5,)}, {}, r"config.vtab.totals = \(5,\).*'2500'"),
    ({"mixup": 0.2}, {}, "config.mixup = 0.2: VTAB"),
    ({"input.batch_size": 6}, {}, "batch_size = 6 does not divide by 8"),
    ({}, {"tasks": ["dtdd"]}, "--tasks: 'dtdd'.*Did you mean 'dtd'"),
    ({}, {"shard": "2/2"}, "--shard='2/2': write i/n.*at most 19"),
    ({}, {"shard": "1"}, "--shard='1'"),
    ({}, {"seeds": 0}, "--seeds=0"),
    ({}, {"compare": "nowhere"}, "--compare=nowhere: there are no results"),
    (
      {"mode": "linear", "vtab.probe": "svm"},
      {},
      "config.vtab.probe = 'svm'.*ridge, logistic",
    ),
  ],
)
def test_refusals(changes, options, words, data, weights, tmp_path):
  config = recipe(data, weights, **changes)
  with pytest.raises(launch.Refused, match=words):
    sweep.run(config, str(tmp_path), rows=data[1], **options)
  assert not list(tmp_path.glob("units/*"))


def test_protocols_are_those_of_the_papers():
  get_config = importlib.import_module("configs.vtab").get_config
  paper = get_config()
  assert (paper.optim.name, paper.optim.momentum) == ("sgd", 0.9)
  assert (paper.input.batch_size, paper.optim.clip) == (512, 1.0)
  assert (paper.optim.weight_decay, paper.image_size) == (0.0, (384,))
  (setting,) = units.settings(paper, ())
  assert setting.name == "lr=0.01,total=2500"
  schedule, total = build.schedule(setting.config, 1000)
  assert total == 2500
  for step, rate in ((0, 0), (100, 0.005), (200, 0.01), (1350, 0.005)):
    assert float(schedule(step)) == pytest.approx(rate, rel=1e-5), step
  grids = {
    protocol: [
      (s.config.optim.lr, s.config.total)
      for s in units.settings(get_config(f"B/16,{protocol}"), ())
    ]
    for protocol in ("augreg", "lightweight")
  }
  rates = (0.001, 0.003, 0.01, 0.03)
  assert grids["augreg"] == [(r, t) for r in rates for t in ("500", "2500")]
  assert grids["lightweight"] == [
    (r, t) for r in (0.1, 0.01) for t in ("2500", "10k")
  ]
  assert get_config("L/16,linear").mode == "linear"
  assert get_config("H/14").image_size == (378,)
  with pytest.raises(ValueError, match="'papers'; there are paper, augreg"):
    get_config("B/16,papers")


def test_every_key_of_the_sweep_is_read():
  code = "".join(
    path.read_text() for path in (ROOT / "vit_jax" / "vtab").glob("*.py")
  )
  for key in common.vtab():
    # The size of batches is read by `evaluators.batch_size`.
    assert f"vtab.{key}" in code or key == "batch_size", key


def test_kubernetes_job_shares_the_tasks_out():
  job = yaml.safe_load((ROOT / "launch" / "vtab.yaml").read_text())
  spec = job["spec"]
  assert (job["kind"], spec["completionMode"]) == ("Job", "Indexed")
  (container,) = spec["template"]["spec"]["containers"]
  command = " ".join(container["command"] + container.get("args", []))
  number = spec["completions"]
  assert f"--shard=$(JOB_COMPLETION_INDEX)/{number}" in command
  assert number <= len(vtab.TASKS)
  assert spec["parallelism"] <= number
  assert "vit_jax.vtab" in command


@pytest.mark.slow
def test_the_command_counts_all_of_kitti(weights, tmp_path):
  """A data set of the true size; another one is missing."""
  row = vtab.TASKS["kitti_distance"]
  vtab_data._write(tmp_path / "data", "tfds:kitti:3.*.*", [row])

  def command(workdir, batch_size, tasks):
    return subprocess.run(
      [
        sys.executable,
        *("-m", "vit_jax.vtab", "--config=configs/vtab.py:mu/4"),
        f"--config.init_from={weights}",
        f"--config.input.data_dir={tmp_path / 'data'}",
        f"--config.vtab.batch_size={batch_size}",
        *("--config.image_size=16", "--config.input.batch_size=64"),
        "--config.vtab.lrs=(0.01, 0.1)",
        "--config.total=8",
        f"--tasks={tasks}",
        f"--workdir={tmp_path / workdir}",
      ],
      cwd=ROOT,
      capture_output=True,
      text=True,
    )

  found = []
  for workdir, batch_size in (("one", 8), ("other", 512)):
    done = command(workdir, batch_size, "kitti_distance,dtd")
    assert done.returncode == 2
    assert "1 of 2 tasks failed" in done.stderr
    assert "dtd: tfds:dtd:3.*.* is not prepared" in done.stderr
    done = command(workdir, batch_size, "kitti_distance")
    assert done.returncode == 0, done.stderr
    assert "0 s: " in done.stdout  # There was nothing left to do.
    paths = (tmp_path / workdir).glob("units/*/final/*/*/result.json")
    (result,) = (json.loads(path.read_text()) for path in paths)
    found.append((result["hyper"], result["correct"], result["n"]))
  assert found[0] == found[1]
  assert found[0][-1] == 711


@pytest.mark.slow
def test_two_shards_of_all_tasks_are_the_whole(data, weights, whole, tmp_path):
  for shard in ("1/2", "0/2"):
    results = sweep.run(
      recipe(data, weights), str(tmp_path), shard=shard, rows=data[1]
    )
  assert comparable(results) == comparable(whole[1])


@pytest.mark.slow
def test_where_the_time_goes_is_told():
  """As `docs/vtab.md` has it, with fewer tasks."""
  done = subprocess.run(
    [sys.executable, "-m", "benchmarks.vtab", "--tasks=dtd,svhn", "--steps=30"],
    cwd=ROOT,
    env=os.environ | {"XLA_FLAGS": ""},
    capture_output=True,
    text=True,
    check=True,
  )
  last = done.stdout.splitlines()[-1]
  assert re.search(r"training [\d.]+ s.* evaluation steps: [\d.]+%\.$", last)
