"""Thirty updates of a tiny model, with everything random switched on."""

from tests.conftest import tiny_config


def get_config():
  """Returns the recipe."""
  return tiny_config(
    **{
      "total": "30",
      "model.depth": 2,
      "model.attention_dropout": 0.1,
      "optim.warmup": "3",
      "evals.test.every": "5",
    }
  )
