"""Trees addressed by path: the one place that walks them by name.

A leaf's path joins its keys with "/" (`Transformer/encoder_norm/scale`).
Decay masks, learning-rate factors, freezing, sharding and error reports all use
these few functions. This room knows nothing of models, meshes or files.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax


def path_name(path: Sequence[Any]) -> str:
  """Returns a JAX key path as text: `params/head/kernel`."""
  return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def flatten(tree: Any) -> dict[str, Any]:
  """Returns the leaves by path, in the tree's own order."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {path_name(path): leaf for path, leaf in leaves}


def map_with_path(function: Callable, tree: Any, *rest: Any) -> Any:
  """Maps `function(path, leaf, …)` over trees of the same structure."""
  return jax.tree_util.tree_map_with_path(
    lambda path, *leaves: function(path_name(path), *leaves), tree, *rest
  )


def first_match(
  rules: Iterable[tuple[str, Any]], path: str, default: Any = None
) -> Any:
  """Returns the value of the first rule that fits the end of `path`.

  Args:
    rules: `(regex, value)` pairs. A regex must fit whole path components up to
      the end, so that a rule for `head/kernel` also covers the optimiser's
      `0/mu/head/kernel`.
    path: a leaf's path.
    default: what to return where no rule fits.
  """
  for regex, value in rules:
    if re.search(f"(^|/)(?:{regex})$", path):
      return value
  return default


def select(tree: Any, regexes: Sequence[str], *, key: str) -> Any:
  """Returns a tree of bool: does any of `regexes` fit the leaf's path?

  Args:
    tree: any tree, abstract or not.
    regexes: as in `first_match`.
    key: where they come from, for the error.

  Raises:
    ValueError: a regex fits no leaf; names the nearest path.
  """
  paths = list(flatten(tree))
  for regex in regexes:
    if not any(first_match([(regex, True)], path, False) for path in paths):
      hint = nearest(regex, paths)
      raise ValueError(f"{key}: {regex!r} fits no parameter.{hint}")
  rules = [(regex, True) for regex in regexes]
  return map_with_path(lambda path, _: first_match(rules, path, False), tree)


def describe(leaf: Any) -> str:
  """Returns a leaf's shape and dtype as text: `(16, 16, 3, 768) float32`."""
  return f"{tuple(leaf.shape)} {leaf.dtype}"


def differences(stored: Any, expected: Any) -> list[str]:
  """Compares names, shapes and dtypes of two trees.

  Args:
    stored: what was found; leaves have `shape` and `dtype`.
    expected: what should be there.

  Returns:
    One line per leaf that is missing, unexpected or different; empty if equal.
  """
  stored, expected = flatten(stored), flatten(expected)
  lines = []
  for path in sorted(stored.keys() | expected.keys()):
    if path not in stored:
      lines.append(f"missing     {path}: {describe(expected[path])}")
    elif path not in expected:
      lines.append(f"unexpected  {path}: {describe(stored[path])}")
    elif describe(stored[path]) != describe(expected[path]):
      lines.append(
        f"different   {path}: stored {describe(stored[path])}, "
        f"expected {describe(expected[path])}"
      )
  return lines


def check_choice(key: str, value: Any, choices: Iterable[str]) -> None:
  """Refuses a value that is none of `choices`.

  Args:
    key: what the value was given to, with its sign: "config.loss = ".
    value: what came.
    choices: what may come.

  Raises:
    ValueError: key and value, the choices, and the nearest of them.
  """
  choices = list(choices)
  if value not in choices:
    raise ValueError(
      f"{key}{value!r}; there are {', '.join(choices)}."
      + nearest(str(value), choices)
    )


def nearest(name: str, options: Iterable[str]) -> str:
  """Returns " Did you mean 'x'?" for the option nearest to `name`, or ""."""
  close = difflib.get_close_matches(name, list(options), n=1, cutoff=0.4)
  return f" Did you mean {close[0]!r}?" if close else ""
