"""What the fields of a model and the size of its images may be.

Checks that need no array and no device, so that a run can be refused, in
words, before anything is built.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from vit_jax import trees
from vit_jax.models import resnet

REMAT = ("none", "dots", "full")

CHOICES = {
  "classifier": ("token", "gap", "map", "none"),
  "posemb": ("learned_1d", "learned_2d", "sincos2d", "relative", "none"),
  "posemb_at": ("stem", "layers", "shared"),
  "gelu": ("tanh", "erf"),
  "dtype": ("float32", "bfloat16"),
}


def normalize(field: str, value: Any) -> Any:
  """Brings a field's value to the one type that the model has it in.

  From NumPy's numbers, an int for a float, a list for a tuple.

  Raises:
    ValueError: it is of no such kind; names the field.
  """
  convert, kind = _KINDS.get(field, (lambda value: value, ""))
  try:
    return convert(value)
  except TypeError:
    raise ValueError(f"{field}={value!r} must be {kind}.") from None


def _integer(value):
  if isinstance(value, bool):
    raise TypeError
  return operator.index(value)


def _number(value):
  if isinstance(value, (bool, str)):
    raise TypeError
  return float(value)


def _truth(value):
  if not isinstance(value, (bool, np.bool_)):
    raise TypeError
  return bool(value)


def _integers(values):
  return tuple(_integer(value) for value in values)


def _sides(value):
  return _integer(value) if np.ndim(value) == 0 else _integers(value)


_KINDS: dict[str, tuple[Callable, str]] = {
  **dict.fromkeys(
    ("num_classes", "width", "depth", "mlp_dim", "num_heads"),
    (_integer, "an int"),
  ),
  **dict.fromkeys(("representation_size", "registers"), (_integer, "an int")),
  **dict.fromkeys(
    ("dropout", "attention_dropout", "stochastic_depth"), (_number, "a number")
  ),
  **dict.fromkeys(
    ("layer_scale", "head_bias", "stem_width"), (_number, "a number")
  ),
  "stem_blocks": (_integers, "a tuple of ints"),
  "patch_size": (_sides, "an int or a pair (h, w)"),
  "scan": (_truth, "True or False"),
}


def pair(value: Any, what: str) -> tuple[int, int]:
  """Reads an int, (n,) or (h, w) as (h, w)."""
  try:
    values = (_integer(value),) if np.ndim(value) == 0 else tuple(value)
    values = tuple(map(_integer, values)) * (1 if len(values) == 2 else 2)
    if len(values) != 2 or min(values) < 1:
      raise TypeError
  except TypeError:
    raise ValueError(
      f"{what}={value!r} must be a positive int or a pair (h, w) of them."
    ) from None
  return values[0], values[1]


def remat_of(value: str, depth: int) -> tuple[str, int]:
  """Reads which blocks recompute what: "full", or "full:4" for the first 4.

  Args:
    value: of `ViT.remat`.
    depth: blocks of the model.

  Returns:
    One of `REMAT`, and the number of blocks.

  Raises:
    ValueError: it is neither, or there are fewer blocks.
  """
  policy, given, count = str(value).partition(":")
  trees.check_choice("remat=", policy, REMAT)
  if not given:
    return policy, depth
  if policy == "none" or not count.isdecimal() or not 0 < int(count) <= depth:
    raise ValueError(
      f"remat={value!r}: write 'full:4' to recompute the first 4 blocks, and "
      f"from 1 to {depth} of them."
    )
  return policy, int(count)


def check_image_size(size: Any, patch_size: Any) -> tuple[int, int]:
  """Says which grid of patches images of a size give.

  Args:
    size: pixels: an int, (side,) or (h, w).
    patch_size: pixels: likewise.

  Returns:
    The grid (h, w).

  Raises:
    ValueError: a side is no multiple of the patch's; names both, the remainder
      and the nearest legal sizes.
  """
  size = pair(size, "image_size")
  patch_size = pair(patch_size, "patch_size")
  for side, s, p in zip(("height", "width"), size, patch_size):
    if s % p:
      nearest = [n for n in (s - s % p, s - s % p + p) if n]
      raise ValueError(
        f"Image {side} {s} is not a multiple of the patch's {p} pixels "
        f"(remainder {s % p}; image {size}, patch {patch_size}); nearest legal "
        f"{side}: {' or '.join(map(str, nearest))}."
      )
  return size[0] // patch_size[0], size[1] // patch_size[1]


def check_fields(model: Any) -> None:
  """Refuses field values that no ViT can have; ValueError says why."""
  for field, choices in CHOICES.items():
    trees.check_choice(f"{field}=", getattr(model, field), choices)
  for field in ("width", "depth", "mlp_dim", "num_heads"):
    value = getattr(model, field)
    if not isinstance(value, int) or value < 1:
      raise ValueError(f"{field}={value!r} must be a positive int.")
  for field in ("num_classes", "representation_size", "registers"):
    value = getattr(model, field)
    if not isinstance(value, int) or value < 0:
      raise ValueError(f"{field}={value!r} must be an int, 0 for none.")
  for field in ("dropout", "attention_dropout", "stochastic_depth"):
    value = getattr(model, field)
    if not 0.0 <= value < 1.0:
      raise ValueError(f"{field}={value!r} must be a rate in [0, 1).")
  if model.width % model.num_heads:
    legal = [k for k in range(1, model.width + 1) if model.width % k == 0]
    near = sorted(legal, key=lambda k: abs(k - model.num_heads))[:3]
    raise ValueError(
      f"width={model.width} is not divisible by num_heads={model.num_heads}; "
      f"the nearest that divide it: {sorted(near)}."
    )
  if model.layer_scale < 0:
    raise ValueError(
      f"layer_scale={model.layer_scale!r}; use 0 (none) or more."
    )
  policy, count = remat_of(model.remat, model.depth)
  if model.scan and count < model.depth:
    raise ValueError(
      f"remat={model.remat!r} names some blocks, but scan=True makes one "
      f"loop of all of them: use remat={policy!r}, or scan=False."
    )
  _check_positions(model)
  _check_stem(model)


def _check_positions(model):
  width, kind, where = model.width, model.posemb, model.posemb_at
  if kind == "sincos2d" and (width % 4 or width < 8):
    raise ValueError(
      f'posemb="sincos2d" needs a width that is a multiple of 4 and at least '
      f"8, got width={width}."
    )
  if kind == "learned_2d" and width % 2:
    raise ValueError(
      f'posemb="learned_2d" splits the width in two, got width={width}.'
    )
  allowed = {
    "learned_1d": ("stem", "layers", "shared"),
    "learned_2d": ("stem", "layers", "shared"),
    "sincos2d": ("stem", "shared"),  # Fixed tables would all be the same.
  }.get(kind, ("stem",))
  if where not in allowed:
    raise ValueError(
      f"posemb={kind!r} can be at {' or '.join(allowed)}, not "
      f"posemb_at={where!r}."
    )


def _check_stem(model):
  if model.stem_width:
    resnet.root_channels(model.stem_width)
  blocks = model.stem_blocks
  if any(not isinstance(n, int) or n < 1 for n in blocks) or (
    blocks and not model.stem_width
  ):
    raise ValueError(
      f"stem_blocks={blocks!r} with stem_width={model.stem_width!r}: give the "
      "units of each stage, like (3, 4, 9), and a width of 0.5 or more."
    )
