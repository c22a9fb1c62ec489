"""Trees by path: names, first match, selection, differences."""

import jax
import numpy as np
import pytest

from vit_jax import trees

TREE = {
  "head": {"kernel": np.zeros((2, 3), np.float32), "bias": np.zeros(3)},
  "Transformer": {"encoder_norm": {"scale": np.ones(2)}},
}


def test_flatten_names_leaves_by_path():
  assert list(trees.flatten(TREE)) == [
    "Transformer/encoder_norm/scale",
    "head/bias",
    "head/kernel",
  ]


def test_first_match_wins_and_fits_whole_components():
  rules = [("head/kernel", 1), (".*kernel", 2)]
  assert trees.first_match(rules, "head/kernel") == 1
  assert trees.first_match(rules, "0/mu/head/kernel") == 1
  assert trees.first_match(rules, "ahead/kernel") == 2
  assert trees.first_match(rules, "head/kernel/x", ()) == ()


def test_select_marks_what_fits_and_refuses_what_fits_nothing():
  mask = trees.select(TREE, [".*kernel"], key="config.x")
  assert mask["head"] == {"kernel": True, "bias": False}
  with pytest.raises(ValueError, match=r"config.x: 'head/kernl'.*head/kernel"):
    trees.select(TREE, ["head/kernl"], key="config.x")


def test_differences_list_every_leaf_with_both_shapes():
  other = jax.tree.map(np.copy, TREE)
  other["head"]["kernel"] = np.zeros((2, 4), np.float32)
  del other["head"]["bias"]
  other["extra"] = np.zeros((), np.int32)
  lines = "\n".join(trees.differences(other, TREE))
  assert "missing     head/bias: (3,) float64" in lines
  assert "unexpected  extra: () int32" in lines
  assert "stored (2, 4) float32, expected (2, 3) float32" in lines
  assert trees.differences(TREE, TREE) == []
