"""Repeats a run from the config.json in its workdir.

  python -m vit_jax.main --config=configs/rerun.py:runs/digits/config.json \
    --workdir=runs/again
"""

import json
import pathlib

from configs import common


def get_config(path):
  """Returns the config that the file at `path` holds.

  Keys that have come since then take their defaults; keys that are gone are an
  error.
  """
  values = json.loads(pathlib.Path(path).read_text())
  config = common.base()
  with config.evals.unlocked():
    for name, entry in values.pop("evals").items():
      config.evals[name] = common.evaluator(**entry)
  config.update(_tuples(values))
  return config


def _tuples(value):
  """JSON has lists where configs have tuples, at any depth."""
  if isinstance(value, dict):
    return {key: _tuples(item) for key, item in value.items()}
  if isinstance(value, list):
    return tuple(_tuples(item) for item in value)
  return value
