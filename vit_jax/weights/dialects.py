"""The names that parameters have elsewhere, and ours for them.

Ours are those of the published ViT files, with one subtree for each block:
`Transformer/encoderblock_0/LayerNorm_2/scale`. This room renames, cuts stacked
blocks apart and squeezes; it knows no model and changes no value.
"""

import collections
import functools
import logging
import math
import re
from collections.abc import Mapping

import numpy as np

from vit_jax.models import bit
from vit_jax.weights import torch
from vit_jax.weights.leaf import Leaf

log = logging.getLogger("vit_jax")

POSITIONS = "Transformer/posembed_input/pos_embedding"

# What training code puts before a model's own names, by how these begin.
# "img" is the image tower where there is another for text.
_PREFIX = re.compile(
  r"(?:(?:opt|target|params|img)/)*"
  r"(?=(?:Transformer|embedding|conv_root|root_block|resnet|(?:conv_)?head)/"
  r"|(?:cls|pos_embedding)$)"
)

# Linen numbers the layers of a class; the published files number all layers of
# a block. No name is one of both, except LayerNorm_0, which is the same layer.
# A MAP head came after Linen and has Linen's names, unless it is so old that
# its layers stand at the root.
_RENAMES = [
  (re.compile(regex), ours)
  for regex, ours in (
    (r"(?:Transformer/)?pos_embedding", POSITIONS),
    (r"(.*/encoderblock(?:_\d+)?/)LayerNorm_1(/.*)", r"\1LayerNorm_2\2"),
    (r"(.*/encoderblock(?:_\d+)?/)MlpBlock_0(/.*)", r"\1MlpBlock_3\2"),
    (
      r"(.*/encoderblock(?:_\d+)?/MultiHeadDotProductAttention)_0(/.*)",
      r"\1_1\2",
    ),
    (r"probe", "MAPHead_0/probe"),
    (
      r"(?:MAPHead_0/)?(MultiHeadDotProductAttention|LayerNorm|MlpBlock)"
      r"_\d+(/.*)",
      r"MAPHead_0/\1_0\2",
    ),
    *bit.PUBLISHED_NAMES,
  )
]

# Older Flax kept the parameters of a GroupNorm in four dimensions.
_GROUP_NORM = re.compile(
  r"(?:.*/)?(?:gn\d+|gn_root|gn_proj|norm-pre-head|group_norm)/(?:scale|bias)"
)

_STACKED = re.compile(r"(.*/|)encoderblock/(.*)")
_BLOCK = re.compile(r"(.*/|)encoderblock_(\d+)/(.*)")


def to_ours(
  leaves: Mapping[str, Leaf],
  *,
  path: str,
  heads: int,
  grid: tuple[int, ...] = (),
) -> dict[str, Leaf]:
  """Gives the leaves of any dialect our names.

  Optimiser states and other towers beside the parameters are left out; the log
  says how many leaves these were.

  Args:
    leaves: name -> array, as a file has them.
    path: the file's, for messages.
    heads: attention heads of the model; PyTorch's files do not say it.
    grid: (h, w) of the stored positions where it is known, else ().

  Returns:
    The leaves, blocks apart. What is not known keeps its name.

  Raises:
    ValueError: two leaves are one of ours; a PyTorch model that none here is.
  """
  if torch.is_torch(leaves):
    try:
      return torch.from_torch(leaves, heads=heads, grid=grid)
    except ValueError as error:
      raise ValueError(f"{path}: {error}") from error
  ours: dict[str, Leaf] = {}
  origin: dict[str, str] = {}
  for name, leaf in unstack(_without_prefix(leaves, path)).items():
    renamed = _rename(name)
    if renamed in ours:
      raise ValueError(
        f"{path}: both {origin[renamed]} and {name} are {renamed}."
      )
    origin[renamed] = name
    ours[renamed] = _reshaped(renamed, leaf)
  if "cls" in ours and POSITIONS in ours:
    ours[POSITIONS] = _with_class_row(ours[POSITIONS], origin[POSITIONS])
  return ours


def has_class_row(count: int) -> bool:
  """Guesses from a number of positions whether one is a class token's.

  For files that say it in no other way: a square number has none, one more than
  a square has one.
  """
  return count > 1 and math.isqrt(count - 1) ** 2 == count - 1


def _without_prefix(leaves, path):
  prefixes = collections.Counter(
    match[0] for match in map(_PREFIX.match, leaves) if match
  )
  prefix = prefixes.most_common(1)[0][0] if prefixes else ""
  kept = {
    name.removeprefix(prefix): leaf
    for name, leaf in leaves.items()
    if name.startswith(prefix)
  }
  if len(kept) < len(leaves):
    log.info(
      "%s: left out %d leaves outside %s.",
      path,
      len(leaves) - len(kept),
      prefix,
    )
  return kept


def _rename(name):
  for regex, ours in _RENAMES:
    match = regex.fullmatch(name)
    if match:
      return match.expand(ours)
  return name


def _reshaped(name, leaf):
  """The leaf without dimensions of size one that ours does not have."""
  shape = leaf.shape
  four = shape[:3] == (1, 1, 1) and _GROUP_NORM.fullmatch(name)
  if four or (shape[:2] == (1, 1) and name == "conv_head/kernel"):
    shape = shape[3:] if four else shape[2:]
  if shape == leaf.shape:
    return leaf
  return leaf.then(shape, lambda array: array.reshape(shape))


def _with_class_row(table, name):
  """Adds the class token's row, zeros, where it joins after the positions.

  This is so where the table stands at the root, and never under the published
  name; of the third name there are both.
  """
  if name == POSITIONS or len(table.shape) != 3:
    return table
  _, count, width = table.shape
  if name != "pos_embedding" and has_class_row(count):
    return table
  return table.then(
    (1, count + 1, width), lambda array: np.pad(array, ((0, 0), (1, 0), (0, 0)))
  )


def unstack(leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
  """Cuts `encoderblock/…` into `encoderblock_0/…` and so on."""
  apart = {}
  for name, leaf in leaves.items():
    match = _STACKED.fullmatch(name)
    if not match or not leaf.shape:
      apart[name] = leaf
      continue
    # The parts are views: together they take the memory of the whole.
    whole = functools.cache(leaf.read)
    for i in range(leaf.shape[0]):
      apart[f"{match[1]}encoderblock_{i}/{match[2]}"] = Leaf(
        leaf.shape[1:], leaf.dtype, functools.partial(_part, whole, i)
      )
  return apart


def _part(whole, i):
  return whole()[i]


def stack(leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
  """The inverse of `unstack`."""
  rest: dict[str, Leaf] = {}
  blocks: dict[str, dict[int, Leaf]] = collections.defaultdict(dict)
  for name, leaf in leaves.items():
    match = _BLOCK.fullmatch(name)
    if match:
      blocks[f"{match[1]}encoderblock/{match[3]}"][int(match[2])] = leaf
    else:
      rest[name] = leaf
  return rest | {
    name: _stacked([layers[i] for i in sorted(layers)])
    for name, layers in blocks.items()
  }


def _stacked(layers):
  shape = (len(layers), *layers[0].shape)

  def read():
    array = np.empty(shape, layers[0].dtype)
    for i, layer in enumerate(layers):
      array[i] = layer.read()
    return array

  return Leaf(shape, layers[0].dtype, read)
