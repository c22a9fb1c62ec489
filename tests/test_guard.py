"""The guard: what a run must keep, and what may change."""

import json

import pytest

import input_pipeline
from tests.conftest import tiny_config
from vit_jax import guard


def test_the_guard_takes_a_key_that_is_younger_than_the_checkpoint():
  saved = {"guard": {"seed": 0}, "config": {}}
  now = {"guard": {"seed": 0, "registers": 0}, "config": {}}
  guard.check(saved, now, allow=False)


def test_the_guard_names_both_values_and_can_be_overruled(warnings):
  saved = {"guard": {"seed": 0, "model": {"name": "B/16"}}, "config": {"lr": 1}}
  now = {"guard": {"seed": 1, "model": {"name": "B/32"}}, "config": {"lr": 2}}
  with pytest.raises(ValueError, match="allow_change") as error:
    guard.check(saved, now, allow=False)
  assert "seed: was 0, is 1" in str(error.value)
  assert "model.name: was 'B/16', is 'B/32'" in str(error.value)
  assert "lr" not in str(error.value)
  guard.check(saved, now, allow=True)
  assert "seed: was 0, is 1" in warnings()[0]


def test_what_is_saved_is_json_and_equals_itself():
  source = input_pipeline.get_source("fake:16,3,40", "train")
  meta = guard.describe(tiny_config(), source, streams=2)
  assert meta["guard"]["streams"] == 2
  saved = json.loads(json.dumps(meta))
  assert saved == meta
  guard.check(saved, meta, allow=False)
