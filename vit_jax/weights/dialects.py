"""The names that parameters have elsewhere, and ours for them.

Ours are those of the published ViT files, with one subtree for each block:
`Transformer/encoderblock_0/LayerNorm_2/scale`. This room renames, cuts stacked
blocks apart and squeezes; it knows no model and changes no value.
"""

import collections
import functools
import logging
import re
from collections.abc import Mapping

import numpy as np

from vit_jax.models import bit
from vit_jax.weights import resizing, torch
from vit_jax.weights.files import Stored
from vit_jax.weights.leaf import Leaf
from vit_jax.weights.torch_positions import POSITIONS

log = logging.getLogger("vit_jax")

# Begin the names of leaves that an objective has beside its model's.
OBJECTIVES = ("masked_patch/",)

# What training code puts before a model's own names, by how these begin.
# "img" is the image tower where there is another for text.
_PREFIX = re.compile(
  r"(?:(?:opt|target|params|img)/)*"
  r"(?=(?:Transformer|embedding|conv_root|root_block|resnet|(?:conv_)?head)/"
  r"|(?:cls|pos_embedding)$)"
)

# What may stand beside the parameters of a model, as a regex for the beginning
# of names: all that is known of training code. Anything else is unexpected.
_BESIDE = r"(?:opt|opt_state|state)/|(?:step|count)$"

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
    *bit.FROM_PUBLISHED,
  )
]

# Older Flax kept the parameters of a GroupNorm in four dimensions.
_GROUP_NORM = re.compile(
  r"(?:.*/)?(?:gn\d+|gn_root|gn_proj|norm-pre-head|group_norm)/(?:scale|bias)"
)

_STACKED = re.compile(r"(.*/|)encoderblock/(.*)")
_BLOCK = re.compile(r"(.*/|)encoderblock_(\d+)/(.*)")


def to_ours(
  stored: Stored, *, heads: int, wanted: resizing.Grid = ()
) -> tuple[dict[str, Leaf], list[str]]:
  """Gives the leaves of any dialect our names.

  Optimiser states and other towers beside the parameters are left out; the log
  says how many leaves these were, and of what.

  Args:
    stored: its leaves have the names of a file; its grid can be ().
    heads: attention heads of the model; PyTorch's files do not say it.
    wanted: the grid (h, w) of the model, or (): what positions can be of where
      nothing says it and they are no square.

  Returns:
    The leaves, blocks apart, and complaints: with any of these the leaves are
    not to be read. What is not known keeps its name.

  Raises:
    ValueError: two leaves are one of ours; two trees of parameters; a PyTorch
      model that none here is.
  """
  path, leaves, grid, about = stored
  try:
    if torch.is_torch(leaves):
      return torch.from_torch(
        leaves,
        heads=heads,
        grid=grid,
        wanted=wanted,
        position_rows=about.get("position_rows", ""),
      )
    ours, origin = _renamed(unstack(_without_prefix(leaves, path)))
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error
  complaints = []
  if "cls" in ours and POSITIONS in ours:
    table, name = ours[POSITIONS], origin[POSITIONS]
    try:
      ours[POSITIONS] = _with_class_row(table, name, known=grid, wanted=wanted)
    except ValueError as error:
      complaints.append(f"{name} {error}")
  return ours, complaints


def _without_prefix(leaves, path):
  """The parameters under their own names, and what nothing explains."""
  prefixes = collections.Counter(
    match[0] for match in map(_PREFIX.match, leaves) if match
  )
  if len(prefixes) > 1:
    trees = " and ".join(
      f"{count} under {prefix!r}" for prefix, count in prefixes.most_common()
    )
    raise ValueError(
      f"there is more than one tree of parameters: {trees}. Keep one."
    )
  prefix = next(iter(prefixes), "")
  beside = _BESIDE
  if prefix.endswith("img/"):
    beside += "|" + prefix.removesuffix("img/") + r"(?:txt/|(?:t|b)$)"
  kept = {}
  left_out: collections.Counter[str] = collections.Counter()
  for name, leaf in leaves.items():
    group = re.match(beside, name)
    if prefix and name.startswith(prefix):
      kept[name.removeprefix(prefix)] = leaf
    elif group:
      left_out[group[0]] += 1
    else:
      kept[name] = leaf
  if left_out:
    log.info(
      "%s: left out what stands beside the parameters: %s.",
      path,
      ", ".join(f"{group} ({n})" for group, n in sorted(left_out.items())),
    )
  return kept


def _renamed(leaves):
  """The leaves under our names, and the names that they had."""
  ours: dict[str, Leaf] = {}
  origin: dict[str, str] = {}
  for name, leaf in leaves.items():
    renamed = _rename(name)
    if renamed in ours:
      raise ValueError(f"both {origin[renamed]} and {name} are {renamed}.")
    origin[renamed] = name
    ours[renamed] = _reshaped(renamed, leaf)
  return ours, origin


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


def _with_class_row(table, name, *, known, wanted):
  """Adds the class token's row, zeros, where it joins after the positions.

  This is so where the table stands at the root, and never under the published
  name; of the third name there are both.
  """
  if name == POSITIONS or len(table.shape) != 3:
    return table
  _, count, width = table.shape
  if name != "pos_embedding" and resizing.rows_before(
    count, (1, 0), known=known, wanted=wanted
  ):
    return table
  return table.then(
    (1, count + 1, width), lambda array: np.pad(array, ((0, 0), (1, 0), (0, 0)))
  )


def to_published(leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
  """Returns leaves under our names, blocks apart, as published files have them.

  A ViT's names are ours; a ResNet's are not.
  """
  if "root_block/conv_root/kernel" not in leaves:
    return dict(leaves)
  published = {}
  for name, leaf in leaves.items():
    for regex, theirs in bit.TO_PUBLISHED:
      name = re.sub(f"^{regex}$", theirs, name)
    if name == "resnet/head/conv2d/kernel":
      leaf = leaf.then((1, 1, *leaf.shape), lambda array: array[None, None])
    published[name] = leaf
  return published


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
