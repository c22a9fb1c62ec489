"""The few-shot probe: its algebra, its draws, and every example counted."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
from jax.sharding import Mesh

import input_pipeline
from configs import common, rerun
from tests.conftest import tiny_config
from vit_jax import (
  build,
  evaluate,
  evaluators,
  models,
  sharding,
  steps,
  train,
  weights,
)
from vit_jax import predict as predict_command
from vit_jax.evaluators import fewshot

GOLDEN = pathlib.Path(__file__).parent / "golden"


def test_accuracies_are_big_visions():
  golden = np.load(GOLDEN / "fewshot.npz")
  x, x_test = (golden[key].astype(np.float64) for key in ("x", "x_test"))
  probe = fewshot.fit(x, golden["y"], 5)
  strengths = [key for key in golden if key.startswith("accuracy_l2_")]
  assert len(strengths) == 4
  for key in strengths:
    strength = float(key.removeprefix("accuracy_l2_"))
    best = fewshot.scores(probe, x_test, strength).argmax(axis=1)
    assert np.mean(best == golden["y_test"]) == pytest.approx(
      float(golden[key]), abs=1e-6
    )


def test_four_points_by_hand():
  """Deviation √1.25 + 1e-5, products 4/s and 5/s²: 4/s / (5/s² + 2)."""
  probe = fewshot.fit(np.arange(4.0)[:, None], np.array([0, 0, 1, 1]), 2)
  found = fewshot.weights(probe, 2.0)
  np.testing.assert_allclose(found[0], [-0.596286572, 0.596286572], rtol=1e-8)
  np.testing.assert_allclose(found[1], 0, atol=1e-12)
  at_border = fewshot.scores(probe, np.array([[1.5]]), 2.0)
  np.testing.assert_allclose(at_border, 0, atol=1e-12)


@pytest.mark.parametrize(("n", "d"), [(4, 1), (30, 8), (8, 8), (8, 30)])
@pytest.mark.parametrize("strength", [2.0, 1024.0])
def test_primal_and_dual_are_least_squares(n, d, strength):
  """|X W - Y|² + s |W|² is |A W - B|² with √s I below X and zeros below Y."""
  rng = np.random.default_rng(n + d)
  features = rng.normal(size=(n, d))
  labels = np.arange(n) % 3
  x = (features - features.mean(axis=0)) / (features.std(axis=0) + 1e-5)
  x = np.hstack([x, np.full((n, 1), 100.0)])
  y = np.where(labels[:, None] == np.arange(3), 1.0, -1.0)
  below = np.sqrt(strength) * np.eye(d + 1)
  expected = np.linalg.lstsq(
    np.vstack([x, below]), np.vstack([y, np.zeros((d + 1, 3))])
  )[0]
  ours = fewshot.fit(features, labels, 3)
  forms = [
    ours._replace(left=left, spectrum=spectrum, right=right)
    for left, spectrum, right in (fewshot.primal(x, y), fewshot.dual(x, y))
  ]
  for probe in (ours, *forms):
    found = fewshot.weights(probe, strength)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def test_draws():
  labels = np.random.default_rng(1).integers(0, 4, 200)
  labels[labels == 3] = 2  # Of the last class there is one.
  labels[17] = 3
  few = fewshot.choose(labels, 4, shots=5, seed=0)
  assert np.bincount(labels[few]).tolist() == [5, 5, 5, 1]
  assert len(set(few)) == 16
  again = fewshot.choose(labels, 4, shots=5, seed=0)
  other = fewshot.choose(labels, 4, shots=5, seed=1)
  np.testing.assert_array_equal(few, again)
  assert set(few) != set(other)
  assert set(few) < set(fewshot.choose(labels, 4, shots=9, seed=0))
  rng = np.random.default_rng(0)
  first = rng.permutation(np.flatnonzero(labels == 0))[:5]
  np.testing.assert_array_equal(few[:5], first)


CLASSES = ("a", "b", "c")
NUM_TRAIN, NUM_TEST = 45, 31


def example(index, split):
  """An image of one pixel, and its label: the colour tells it, mostly."""
  rng = np.random.default_rng((index, split == "test"))
  label = int(rng.integers(3))
  pixel = 60 * np.eye(3)[label] + rng.integers(0, 150, 3)
  return pixel.astype(np.uint8), label


def source_of(split, unlabelled=()):
  size = NUM_TEST if split == "test" else NUM_TRAIN
  pixels, labels = zip(*(example(i, split) for i in range(size)))
  labels = [-1 if i in unlabelled else y for i, y in enumerate(labels)]
  images = np.array(pixels).reshape(-1, 1, 1, 3)
  return input_pipeline.Source(
    spec="test:",
    split=split,
    num_examples=size,
    class_names=CLASSES,
    digest=split,
    parse=lambda i: {
      "image": tf.gather(images, i),
      "labels": tf.gather(np.array(labels, np.int32)[:, None], i),
    },
    name_of=str,
  )


def predict(params, batch):
  del params
  pixels = batch["image"].astype(jnp.float32)
  n = len(pixels)
  patch = pixels.reshape(n, 1, 3)
  other = jnp.flip(patch, axis=-1) ** 2  # Of a token that stands for no patch.
  tokens = jnp.concatenate([other, other, patch], axis=1)
  return {
    "pre_logits": pixels.reshape(n, 3),
    "tokens": tokens,
    "grid": (1, 1),
  }


def build_probe(monkeypatch, *, devices=1, unlabelled=(), **changes):
  monkeypatch.setattr(
    input_pipeline,
    "get_source",
    lambda _, split, *__: source_of(split, unlabelled),
  )
  config = tiny_config(image_size=(1,))
  entry = {"kind": "fewshot", "ops": "decode", "shots": (2, 5)}
  with config.evals.unlocked():
    del config.evals.test
    config.evals.probe = common.evaluator(**(entry | changes))
  mesh = Mesh(
    np.array(jax.devices()[:devices]).reshape(-1, 1, 1), sharding.AXES
  )
  built = evaluators.build_all(
    config,
    classes=("another", "model's"),
    objective=steps.Objective(None, None, predict),
    mesh=mesh,
    params={},
  )
  return built["probe"], config


def run_probe(monkeypatch, **changes):
  evaluator, config = build_probe(monkeypatch, **changes)
  values = evaluator({}, lambda: False)
  assert [f"probe/{name}" for name in values] == evaluators.value_names(config)
  return values


def expected(shots, strength, seeds=(0, 1, 2), unlabelled=()):
  """The mean accuracy, by another route: a linear system."""
  rows = {
    split: [example(i, split) for i in range(size) if i not in unlabelled]
    for split, size in (("train", NUM_TRAIN), ("test", NUM_TEST))
  }
  (x, y), (x_test, y_test) = (
    (np.array(part, np.float64) for part in zip(*rows[split]))
    for split in ("train", "test")
  )
  accuracies = []
  for seed in seeds:
    rng = np.random.default_rng(seed)
    few = np.concatenate(
      [rng.permutation(np.flatnonzero(y == c))[:shots] for c in range(3)]
    )
    mean, deviation = x[few].mean(axis=0), x[few].std(axis=0) + 1e-5
    a, b = (
      np.insert((part - mean) / deviation, 3, 100.0, axis=1)
      for part in (x[few], x_test)
    )
    targets = 2.0 * (y[few][:, None] == np.arange(3)) - 1
    w = np.linalg.solve(a.T @ a + strength * np.eye(4), a.T @ targets)
    accuracies.append(np.mean((b @ w).argmax(axis=1) == y_test))
  return np.mean(accuracies)


@pytest.mark.parametrize(
  ("devices", "batch_size"), [(1, 3), (2, 16), (8, 3), (8, 64)]
)
def test_every_example_counts_once(monkeypatch, devices, batch_size):
  values = run_probe(
    monkeypatch, devices=devices, batch_size=batch_size, strengths=(1024.0, 2.0)
  )
  assert values == {
    "2shot_top1": pytest.approx(expected(2, 1024)),
    "2shot_top1_l2_2": pytest.approx(expected(2, 2)),
    "5shot_top1": pytest.approx(expected(5, 1024)),
    "5shot_top1_l2_2": pytest.approx(expected(5, 2)),
    "n": NUM_TEST,
  }
  assert values["5shot_top1"] > 0.5  # Or the numbers above say little.


def test_what_has_no_label_is_left_out(monkeypatch):
  unlabelled = (0, 3, 17)
  values = run_probe(monkeypatch, unlabelled=unlabelled)
  assert values["n"] == NUM_TEST - 3
  assert values["5shot_top1"] == pytest.approx(
    expected(5, 1024, unlabelled=unlabelled)
  )


def test_a_split_without_labels_is_refused(monkeypatch):
  evaluator, _ = build_probe(monkeypatch, unlabelled=range(NUM_TRAIN))
  with pytest.raises(ValueError, match="No image of test: train has a label"):
    evaluator({}, lambda: False)


def test_the_order_of_arrival_changes_nothing(monkeypatch):
  """Several processes read records in files in an order of their own."""
  values = run_probe(monkeypatch, batch_size=4)
  batches_of = input_pipeline.eval_batches

  def backwards(*args, **kwargs):
    batches, count = batches_of(*args, **kwargs)
    turned = [
      {key: rows[::-1] for key, rows in batch.items()} for batch in batches
    ]
    return iter(turned[::-1]), count

  monkeypatch.setattr(input_pipeline, "eval_batches", backwards)
  assert run_probe(monkeypatch, batch_size=4) == values


def test_tokens_are_the_mean_of_the_patches(monkeypatch):
  values = run_probe(monkeypatch)
  assert run_probe(monkeypatch, representation="tokens") == values


def test_seeds(monkeypatch):
  values = run_probe(monkeypatch, seeds=(7,))
  assert values["2shot_top1"] == pytest.approx(expected(2, 1024, seeds=(7,)))


def test_stopping_anywhere_gives_nothing(monkeypatch):
  evaluator, _ = build_probe(monkeypatch, batch_size=16)
  asked = 0

  def stop_after(calls):
    nonlocal asked
    asked = 0

    def stop():
      nonlocal asked
      asked += 1
      return asked > calls

    return stop

  assert evaluator({}, stop_after(1000)) is not None
  in_all = asked
  assert in_all == 3 + 2 + 2 * 3  # Batches of both splits; shots x seeds.
  for calls in range(in_all):
    assert evaluator({}, stop_after(calls)) is None


def test_scarce_classes_are_told_of(monkeypatch, warnings):
  run_probe(monkeypatch, shots=(5,))
  assert not warnings()
  run_probe(monkeypatch, shots=(20,))
  (text,) = warnings()
  assert "fewer than 20 examples" in text and "test: train" in text


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"shots": ()}, "shots = .*whole numbers above 0"),
    ({"shots": (0, 5)}, "shots = .0, 5.*whole numbers above 0"),
    ({"shots": (5, 5)}, "shots = .5, 5.*different"),
    ({"seeds": (-1,)}, "seeds = .-1.*whole numbers from 0"),
    ({"strengths": (0.0,)}, "strengths = .0.0.*numbers above 0"),
    ({"batch_size": 0}, "batch_size = 0"),
    ({"representation": "logits"}, "'logits'.*pre_logits, tokens.*Did you"),
    ({"train_split": "test"}, "both 'test'"),
    ({"ops": "decode|resize(2)"}, "2x2.*1x1"),
  ],
  ids=str,
)
def test_refusals(monkeypatch, changes, words):
  with pytest.raises(ValueError, match=f"config.evals.probe: .*{words}"):
    build_probe(monkeypatch, **changes)


def test_data_that_cannot_be_probed(monkeypatch):
  train_split, test = source_of("train"), source_of("test")

  def refused(**changes):
    fields = {**vars(test), **changes}
    other = input_pipeline.Source(**fields)
    with pytest.raises(ValueError) as error:
      fewshot.build(
        common.evaluator(kind="fewshot", ops="decode"),
        config=tiny_config(image_size=(1,)),
        source=other,
        classes=(),
        objective=steps.Objective(None, None, predict),
        mesh=Mesh(np.array(jax.devices()).reshape(-1, 1, 1), sharding.AXES),
        shardings={},
      )
    return str(error.value)

  monkeypatch.setattr(input_pipeline, "get_source", lambda *_: train_split)
  text = refused(class_names=("a", "b"))
  assert "'train' has 3 classes, 'test' has 2" in text
  text = refused(
    parse=lambda i: test.parse(i) | {"labels": tf.constant([0, 1], tf.int32)}
  )
  assert "test: gives an image several labels" in text


def test_an_entry_of_another_kind_is_refused():
  """As `--config.evals.test.kind=fewshot` would make it."""
  config = tiny_config(**{"evals.test.kind": "fewshot"})
  parts = build.inference(
    config, sharding.make_mesh(config.mesh), num_classes=3
  )
  with pytest.raises(ValueError, match=r'common.evaluator\(kind="fewshot"\)'):
    evaluators.build_all(
      config,
      classes=(),
      objective=parts[0],
      mesh=sharding.make_mesh(config.mesh),
      params=parts[1],
    )


def test_probing_other_data_while_training_and_afterwards(tmp_path):
  config = tiny_config(total="2", **{"checkpoint.best": "other/5shot_top1"})
  with config.evals.unlocked():
    config.evals.other = common.evaluator(
      kind="fewshot", source="fake:16,5,60", shots=(1, 5), every="1"
    )
  train.run(config, str(tmp_path))
  text = (tmp_path / "metrics.jsonl").read_text()
  rows = [json.loads(row) for row in text.splitlines()]
  assert rows[-1]["other/n"] == 60
  names = {"other/1shot_top1", "other/5shot_top1"}
  assert all(names <= row.keys() for row in rows)
  values = evaluate.run(config, str(tmp_path))
  for name in names:
    assert values[name] == rows[-1][name]
  # Five colours under noise, told apart by what three classes taught, or less.
  assert rows[-1]["other/5shot_top1"] > 0.4
  again = rerun.get_config(tmp_path / "config.json")
  assert again.to_dict() == config.to_dict()
  config.evals.other.kind = ""  # What is switched off keeps its keys.
  off = common.evaluator(**config.evals.other.to_dict())
  assert off.to_dict() == config.evals.other.to_dict()


def features_alone(**changes):
  config = tiny_config(**{"evals.test.kind": "", "input.source": ""} | changes)
  with config.evals.unlocked():
    config.evals.probe = common.evaluator(
      kind="fewshot", source="fake:16,5,60", shots=(5,)
    )
  return config


def test_any_head_or_none_will_do(tmp_path):
  found = []
  for num_classes in (0, 7):
    model = models.create("mu/4", num_classes=num_classes)
    image = np.zeros((1, 16, 16, 3), np.float32)
    path = str(tmp_path / f"{num_classes}.npz")
    weights.save(path, model.init(jax.random.key(0), image)["params"])
    found.append(evaluate.run(features_alone(), path))
  assert found[0] == found[1]
  train.run(tiny_config(total="1"), str(tmp_path / "run"))
  assert evaluate.run(features_alone(), str(tmp_path / "run"))["probe/n"] == 60


def test_probing_what_masked_patches_taught(tmp_path):
  """By the run's own config, and as weights of a plain model."""
  own = features_alone(
    objective="masked_patch",
    total="1",
    mixup=0.0,
    **{"input.source": "fake:16,3,40"},
  )
  train.run(own, str(tmp_path))
  values = evaluate.run(own, str(tmp_path))
  assert evaluate.run(features_alone(), str(tmp_path)) == values
  with pytest.raises(ValueError, match="trained without classes"):
    next(predict_command.run(str(tmp_path), []))
