"""Op strings: `"decode|resize(256)|central_crop(224)"` becomes one function.

An op is a factory: called with the arguments of the string, it returns a
function that replaces one feature. `@op` puts it into `OPS`; a new file in this
folder needs no other mention. Random ops are stateless: they get a seed that
depends on the example and on the op's place in the string, and nothing else.
"""

import ast
import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from input_pipeline.errors import suggest

Features = dict[str, Any]


class Op(NamedTuple):
  """An entry of `OPS`.

  Attributes:
    factory: arguments -> (value, *needs, seed if random) -> value.
    on: the feature that is replaced.
    needs: features that are read besides.
    random: whether the function takes a seed, int64 [2].
  """

  factory: Callable[..., Callable[..., tf.Tensor]]
  on: str
  needs: tuple[str, ...]
  random: bool


OPS: dict[str, Op] = {}

# Work that the device does, where it is cheaper: which key says it instead.
_MOVED = {
  "value_range": "images travel as uint8 and the device scales them: set "
  "config.model.input_range ('-1,1', '0,1' or 'imagenet')",
  "onehot": "labels travel as class indices and the device expands them: the "
  "number of classes comes from the source, config.loss chooses the loss",
  "keep": "batches always have the keys image, labels, mask and id: drop it",
}
for _name in ("vgg_value_range", "clip_value_range"):
  _MOVED[_name] = _MOVED["value_range"]


def op(
  *names: str,
  on: str = "image",
  needs: tuple[str, ...] = (),
  random: bool = False,
) -> Callable:
  """Decorator: makes a factory available in op strings under `names`."""

  def register(factory):
    for name in names:
      OPS[name] = Op(factory, on, needs, random)
    return factory

  return register


def parse_ops(text: str) -> Callable[[Features], Features]:
  """Turns an op string into a function of features.

  Grammar: ops separated by `|`; an op is `name` or `name(arguments)`, and the
  arguments are Python literals, by place or by name. The empty string is the
  identity.

  Args:
    text: e.g. `"decode_and_random_crop(224)|flip_lr"`.

  Returns:
    features -> features, for eager use and for tf.data alike. Features are a
    dict with `image` (bytes or uint8 [h, w, 3]), when the string has random ops
    `seed` (int64 scalar), and what else its ops work on: `labels`, `name`.
    Other entries pass through. Its attribute `text` is the op string.

  Raises:
    ValueError: syntax, unknown op (list and nearest match), wrong arguments
      (the op's signature), or an op that lives on the device (the config key).
      From the function: a feature that an op needs is not there.
  """
  steps = [_build(node, text) for node in _sections(text)]

  def apply(features: Features) -> Features:
    features = dict(features)
    for position, (name, function) in enumerate(steps):
      entry = OPS[name]
      _check_features(name, features, text)
      inputs = [features[key] for key in (entry.on, *entry.needs)]
      if entry.random:
        example = tf.cast(features["seed"], tf.int64)
        inputs.append(tf.stack([example, tf.constant(position, tf.int64)]))
      features[entry.on] = function(*inputs)
    return features

  apply.text = text  # type: ignore[attr-defined]  # for errors to quote
  return apply


def divide(text: str) -> tuple[str, str]:
  """Cuts an op string before its first random op.

  Returns:
    The ops that give the same every time, and the others; either may be "".

  Raises:
    ValueError: as `parse_ops`.
  """
  nodes = _sections(text)
  fixed = list(
    itertools.takewhile(
      lambda node: not OPS[_build(node, text)[0]].random, nodes
    )
  )
  parts = [ast.unparse(node) for node in nodes]
  return "|".join(parts[: len(fixed)]), "|".join(parts[len(fixed) :])


def _check_features(name: str, features: Features, text: str) -> None:
  """Raises unless all is there that the op works on."""
  entry = OPS[name]
  if entry.random and "seed" not in features:
    raise ValueError(
      f"The op {name} draws random numbers: put an integer 'seed' into the "
      f"features, or leave it out of {text!r}."
    )
  for key in (entry.on, *entry.needs):
    if key not in features:
      raise ValueError(
        f"The op {name} in {text!r} needs the feature {key!r}, but the source "
        f"gives only: {', '.join(features)}."
      )


def _sections(text: str) -> list[ast.expr]:
  """The ops of a string in order; `|` happens to be Python's own operator."""
  if not text.strip():
    return []
  try:
    node = ast.parse(f"({text}\n)", mode="eval").body
  except SyntaxError as error:
    raise ValueError(
      f"Cannot read the op string {text!r} ({error.msg}). Write names with "
      "literal arguments, separated by single bars: 'decode|resize(224)'."
    ) from None
  sections: list[ast.expr] = []
  while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
    sections.append(node.right)
    node = node.left
  return [node, *reversed(sections)]


def _build(node: ast.expr, text: str) -> tuple[str, Callable[..., tf.Tensor]]:
  """Calls the factory of one op: (name, function)."""
  if isinstance(node, ast.Call):
    name, args, keywords = ast.unparse(node.func), node.args, node.keywords
  else:
    name, args, keywords = ast.unparse(node), [], []
  if name in _MOVED:
    raise ValueError(f"{name!r} in {text!r} is no host op: {_MOVED[name]}.")
  if name not in OPS:
    raise ValueError(f"Unknown op {name!r} in {text!r}. " + suggest(name, OPS))
  factory = OPS[name].factory
  try:
    values = [_literal(arg) for arg in args]
    named = {str(k.arg): _literal(k.value) for k in keywords}
    inspect.signature(factory).bind(*values, **named)
    return name, factory(*values, **named)
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"Wrong arguments in {ast.unparse(node)!r} of {text!r}, which should "
      f"read {_form(name)}: {error}"
    ) from None


def _literal(node: ast.expr) -> Any:
  try:
    return ast.literal_eval(node)
  except ValueError:
    raise ValueError(
      f"{ast.unparse(node)} is not a number, a quoted text, a tuple or a list"
    ) from None


def _form(name: str) -> str:
  """How to write an op, e.g. `resize(size, method='bilinear')`."""
  parameters = inspect.signature(OPS[name].factory).parameters.values()
  plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
  return name + str(inspect.Signature(plain))


for _module in pkgutil.iter_modules(__path__):
  importlib.import_module(f"{__name__}.{_module.name}")
