"""Evaluation counts every example once, on any batch size and mesh."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
from jax.sharding import Mesh

import input_pipeline
from tests.conftest import tiny_config
from vit_jax import evaluate as evaluate_command
from vit_jax import evaluators, launch, sharding, steps

CLASSES = ("a", "b", "c", "d")


def source_of(labels):
  """A source of 1-pixel images whose red value is the example's index."""
  width = max(len(row) for row in labels)
  table = np.array(
    [row + [-1] * (width - len(row)) for row in labels], np.int32
  )
  return input_pipeline.Source(
    spec="test:",
    split="test",
    num_examples=len(labels),
    class_names=CLASSES,
    digest="",
    parse=lambda i: {
      "image": tf.cast(tf.fill([1, 1, 3], i), tf.uint8),
      "labels": tf.gather(table, i),
    },
    name_of=str,
  )


def evaluate(labels, predictions, *, batch_size, devices, monkeypatch):
  """Runs the evaluator on a model that says `predictions`, by index."""
  table = jnp.array(predictions)

  def predict(params, batch):
    index = batch["image"][:, 0, 0, 0].astype(jnp.int32)
    return {"logits": 9.0 * jax.nn.one_hot(table[index], len(CLASSES))}

  monkeypatch.setattr(
    input_pipeline, "get_source", lambda *_: source_of(labels)
  )
  config = tiny_config(image_size=(1,))
  config.evals.test.update({"ops": "decode", "batch_size": batch_size})
  mesh = Mesh(
    np.array(jax.devices()[:devices]).reshape(-1, 1, 1), sharding.AXES
  )
  built = evaluators.build_all(
    config,
    classes=CLASSES,
    objective=steps.Objective(None, None, predict),
    mesh=mesh,
    params={},
  )
  return built["test"]({}, lambda: False)


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("batch_size", [1, 3, 4, 7, 16])
def test_eight_of_ten_is_080(batch_size, devices, monkeypatch):
  predictions = [0] * 8 + [1, 1]
  values = evaluate(
    [[0]] * 10,
    predictions,
    batch_size=batch_size,
    devices=devices,
    monkeypatch=monkeypatch,
  )
  assert values["n"] == 10
  assert values["top1"] == pytest.approx(0.8)
  assert values["top5"] == 1.0
  right, wrong = (
    np.log(np.exp(9) + 3) - 9,
    np.log(np.exp(9) + 3),
  )
  assert values["loss"] == pytest.approx(0.8 * right + 0.2 * wrong, rel=1e-5)


def test_one_image_on_eight_devices(monkeypatch):
  values = evaluate(
    [[2]], [2], batch_size=4, devices=8, monkeypatch=monkeypatch
  )
  assert (values["top1"], values["n"]) == (1.0, 1)


def test_several_labels_and_none_the_real_rule(monkeypatch):
  labels = [[1, 2], [2], [], [0, 3]]
  values = evaluate(
    labels, [1, 0, 2, 3], batch_size=3, devices=2, monkeypatch=monkeypatch
  )
  assert values["n"] == 3
  assert values["top1"] == pytest.approx(2 / 3)


def test_stopping_half_way_gives_nothing(monkeypatch):
  monkeypatch.setattr(
    input_pipeline, "get_source", lambda *_: source_of([[0]] * 9)
  )
  config = tiny_config(image_size=(1,))
  config.evals.test.update({"ops": "decode", "batch_size": 1})
  built = evaluators.build_all(
    config,
    classes=CLASSES,
    objective=types.SimpleNamespace(predict=None),
    mesh=Mesh(np.array(jax.devices()).reshape(-1, 1, 1), sharding.AXES),
    params={},
  )
  assert built["test"]({}, lambda: True) is None


def test_commands_use_what_a_run_left(tmp_path):
  """evaluate repeats the run's own figures; predict agrees with them."""
  from PIL import Image

  from vit_jax import predict, train

  config = tiny_config(total="4", ema=0.5)
  with launch.refusal():
    train.run(config, str(tmp_path))
  values = evaluate_command.run(config, str(tmp_path))
  last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
  for name, value in values.items():
    assert f'"{name}": {value}' in last
  other = evaluate_command.run(config, str(tmp_path), weights="params")
  assert other["test/loss"] != values["test/loss"]

  source = input_pipeline.get_source("fake:16,3,40", "test")
  paths = []
  for i in range(5):
    paths.append(str(tmp_path / f"{i}.png"))
    Image.fromarray(source.parse(np.int64(i))["image"].numpy()).save(paths[-1])
  (tmp_path / "bad.jpg").write_bytes(b"no image")
  found = dict(predict.run(str(tmp_path), [*paths, str(tmp_path / "bad.jpg")]))
  assert isinstance(found.pop(str(tmp_path / "bad.jpg")), ValueError)
  assert list(found) == paths
  for probabilities in found.values():
    assert sum(probabilities.values()) == pytest.approx(1)
    shares = list(probabilities.values())
    assert shares == sorted(shares, reverse=True)
    assert set(probabilities) == set(source.class_names)
