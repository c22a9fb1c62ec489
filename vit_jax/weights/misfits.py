"""Stored leaves that are not a model's: the whole list, and what to do."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from vit_jax import trees
from vit_jax.weights import dialects
from vit_jax.weights.leaf import Leaf, count_of

# Which field of a model decides whether there are leaves of a name.
_FIELDS = (
  (r"pre_logits/", "representation_size"),
  (r"MAPHead_0/", "classifier"),
  (r".*_embedding$", "posemb or posemb_at"),
  (r"registers$", "registers"),
  (r".*/LayerScale_\d/", "layer_scale"),
  (r"conv_root/|gn_root/|block\d/", "ResNet before its blocks"),
  (r".*/encoderblock_\d+/LayerNorm_0/", "depth"),
)
_HEAD = "|".join(
  (r"(conv_)?head/", r"pre_logits/", r"MAPHead_0/", *dialects.OBJECTIVES)
)


def check(
  path: str,
  have: Mapping[str, Leaf],
  wanted: Mapping[str, Any],
  others: Sequence[str] = (),
) -> None:
  """Refuses leaves that do not fit.

  Args:
    path: of the file, for the message.
    have: its leaves, with whatever could be made to fit.
    wanted: the model's leaves, with `shape`, that must come from there.
    others: what else does not fit, in words.

  Raises:
    ValueError: lists every leaf that is missing, unexpected or of another
      shape, then the others, and hints at the reason.
  """
  found = {
    name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    for name, leaf in have.items()
  }
  lines = trees.differences(found, wanted)
  if lines or others:
    counted = f" ({count_of(len(lines))})" if lines else ""
    raise ValueError(
      f"{path} does not fit the model{counted}:\n  "
      + "\n  ".join((*lines, *others))
      + "".join(f"\n{hint}" for hint in _hints(found, wanted))
    )


def _hints(
  found: Mapping[str, Any], wanted: Mapping[str, Any]
) -> Iterator[str]:
  """Yields what the differences may mean, and what to do then."""
  alone = found.keys() ^ wanted.keys()
  shapes = {
    name: (found[name].shape, wanted[name].shape)
    for name in found.keys() & wanted.keys()
    if found[name].shape != wanted[name].shape
  }
  for regex, field in _FIELDS:
    if any(re.match(regex, name) for name in alone):
      yield f"The file is of a model with another {field}."
  for name in shapes.keys() & {"head/bias", "conv_head/bias"}:
    (old,), (new,) = shapes[name]
    yield f"The file's head has {old} classes, the model's has {new}."
  if "pre_logits/kernel" in found.keys() - wanted.keys():
    size = found["pre_logits/kernel"].shape[1]
    yield f"representation_size={size} keeps the layer before the head."
  if any(re.match(_HEAD, name) for name in alone | shapes.keys()):
    yield 'head="reset" drops the file\'s head and starts a new one.'
  old, new = shapes.get("embedding/kernel", ((), ()))
  if old[:2] != new[:2] and old[2:] == new[2:]:
    yield f'patch="resize" makes {new[:2]} patches of the file\'s {old[:2]}.'
