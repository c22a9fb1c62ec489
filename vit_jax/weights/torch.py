"""PyTorch's files of the same models: timm's and Hugging Face's.

Leaves under their names get ours, the published ones, and leaves under ours get
timm's. No array is read on the way; what becomes of it is done when it is.

What no file shows: both libraries compute GELU with erf, as a model with
`gelu="erf"` does, and Hugging Face's ViT has an epsilon of 1e-12 in LayerNorm,
where its DINOv2, timm and this package have 1e-6.
"""

import functools
import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from vit_jax.models import Model, ViT
from vit_jax.weights import facts, resizing, torch_names, torch_positions
from vit_jax.weights.leaf import Leaf

log = logging.getLogger("vit_jax")

# The axes of timm's leaf in the order in which ours has them.
_AXES = {"conv": (2, 3, 1, 0), "dense": (1, 0)}


def is_torch(names: Iterable[str]) -> bool:
  """Says whether a file's names are timm's or Hugging Face's."""
  stems = ("patch_embed.proj.weight", "patch_embeddings.projection.weight")
  return any(name.endswith(stems) for name in names)


def from_torch(
  flat: Mapping[str, Leaf],
  *,
  heads: int,
  grid: resizing.Grid = (),
  wanted: resizing.Grid = (),
  position_rows: str = "",
) -> tuple[dict[str, Leaf], list[str]]:
  """Puts parameters of timm or Hugging Face under our names.

  Positions come out with one row for a class token (zeros where it stood
  nowhere) and none for registers (which take theirs along).

  Args:
    flat: a file's leaves.
    heads: k, of the model that is to have them.
    grid: (h, w) of the stored positions; () where it is not known, and can be
      any square or `wanted`.
    wanted: the grid of the model that is to have them, or ().
    position_rows: how many rows stand before the grid's; "" where nothing says
      it, and all that timm or Hugging Face would write is tried.

  Returns:
    The leaves, blocks apart, and complaints: with any of these the leaves are
    not to be read. What is not known keeps its name; a mask token is left out,
    which the log says.

  Raises:
    ValueError: an architecture that no model here has, with the reason and the
      leaves.
  """
  names = {torch_names.timm_name(name): name for name in flat}
  leaves = {name: flat[names[name]] for name in names}
  _check_known(leaves, names)
  if "mask_token" in leaves:
    log.info("Left out %s: it is for pre-training.", names["mask_token"])
    del leaves["mask_token"]
  complaints = []
  try:
    leaves |= torch_positions.from_torch(
      leaves,
      grid=grid,
      wanted=wanted,
      position_rows=position_rows,
      hugging_face=any("embeddings." in name for name in flat),
    )
  except ValueError as error:
    complaints.append(str(error))
  ours: dict[str, Leaf] = {}
  for name, leaf in leaves.items():
    entry = torch_names.find_timm(name)
    if entry:
      ours |= zip(entry.parts, _split(leaf, entry, heads))
    else:
      ours[names[name]] = leaf
  widths = {
    math.prod(leaf.shape[-2:])
    for name, leaf in ours.items()
    if name.endswith("/query/kernel")
  }
  complaints += [
    f"num_heads={heads} does not divide the file's width {width}."
    for width in sorted(widths)
    if width % heads
  ]
  return ours, complaints


def to_timm(flat: Mapping[str, Leaf]) -> dict[str, Leaf]:
  """Puts parameters under timm's names: the inverse of `from_torch`.

  Registers, which stand nowhere here, have positions of zeros in timm.

  Args:
    flat: leaves under our names, blocks apart.

  Raises:
    ValueError: timm has no place for some leaves; lists them all.
  """
  flat = torch_positions.to_timm(flat)
  entries = []
  homeless = []
  for path in flat:
    entry = torch_names.find_part(path)
    if entry and not path.startswith("pre_logits/"):
      entries.append(entry)
    else:
      homeless.append(path)
  if homeless:
    raise ValueError(
      "timm's ViTs have no place for these leaves:\n  "
      + "\n  ".join(homeless)
      + "\nWrite an .npz file, which keeps all of them; a pre_logits layer can "
      "also be left out by fine-tuning with representation_size=0."
    )
  timm = {
    entry.timm: _join([flat[part] for part in entry.parts], entry.layout)
    for entry in entries
  }
  if not any(".stages." in name for name in timm):
    # Of a ResNet without stages timm keeps the stem and nothing around it.
    timm = {
      name.replace("backbone.stem.", "backbone."): leaf
      for name, leaf in timm.items()
    }
  return timm


def metadata(
  model: Model,
  *,
  image_size: tuple[int, int],
  input_range: str,
  classes: Sequence[str],
) -> dict[str, str]:
  """Says what timm's leaves do not: how to use them.

  Args:
    model: whose parameters are written.
    image_size: pixels (h, w).
    input_range: of the images' values; see `vit_jax.images.INPUT_RANGES`.
    classes: names of the head's outputs.

  Returns:
    Texts for a .safetensors header. "timm" is JSON: the arguments with which
    timm's `VisionTransformer` computes the same (a hybrid needs an
    `embed_layer` as well). "classes" is JSON, too.

  Raises:
    ValueError: there are no such arguments.
  """
  if not isinstance(model, ViT):
    raise ValueError(
      "Only ViTs are written under timm's names. Write an .npz file."
    )
  if model.posemb_at != "stem":
    raise ValueError(
      f"posemb_at={model.posemb_at!r}: timm's ViTs add positions once, at the "
      "stem. Write an .npz file."
    )
  pools = {"token": "token", "gap": "avg", "map": "map", "none": ""}
  arguments = {
    "img_size": image_size,
    "patch_size": model.patch_size,
    "num_classes": model.num_classes,
    "global_pool": pools[model.classifier],
    "embed_dim": model.width,
    "depth": model.depth,
    "num_heads": model.num_heads,
    # timm cuts width * mlp_ratio down to an int.
    "mlp_ratio": math.nextafter(model.mlp_dim / model.width, math.inf),
    "init_values": model.layer_scale or None,
    "class_token": model.classifier == "token",
    "pos_embed": "none" if model.posemb == "none" else "learn",
    "reg_tokens": model.registers,
    "fc_norm": False,
    "pool_include_prefix": model.classifier == "map",
    "act_layer": {"tanh": "gelu_tanh", "erf": "gelu"}[model.gelu],
  }
  about = facts.of(model, input_range)
  if model.posemb == "sincos2d":
    about["posemb"] = "learned_1d"  # Of timm's kinds, the one with a table.
  return {
    **about,
    "timm": json.dumps(arguments),
    "classes": json.dumps(list(classes)),
    "layer_norm_eps": "1e-6",
  }


def _check_known(leaves, names):
  """Refuses what a model of this package would compute differently."""

  def refuse(reason, found):
    raise ValueError(
      f"No model here computes this: {reason}. The file has {found}."
    )

  for regex, reason in torch_names.REFUSED:
    matches = [names[name] for name in leaves if re.fullmatch(regex, name)]
    if matches:
      refuse(reason, ", ".join(matches))
  # timm's gated MLP has a plain one's names; its second layer is half as wide.
  inner, outer = (f"blocks.0.mlp.{layer}.weight" for layer in ("fc1", "fc2"))
  if {inner, outer} <= leaves.keys():
    shapes = leaves[inner].shape, leaves[outer].shape
    if shapes[0] != shapes[1][::-1]:
      found = f"{names[inner]} {shapes[0]} and {names[outer]} {shapes[1]}"
      refuse(torch_names.GATED, found)


def _split(leaf, entry, heads):
  """Our leaves of one of timm's."""
  shape = leaf.shape
  if entry.layout == "same":
    return [leaf]
  if entry.layout in _AXES:
    return [_transposed(leaf, _AXES[entry.layout])]
  # Rows of fused leaves follow each other: all heads of one, then the next's.
  rows = shape[0] // len(entry.parts)
  width = shape[1] if entry.layout == "out" else rows
  if width % heads:
    heads = 1  # There will be a complaint; until then all is one head.
  if entry.layout == "out":  # [d, d] -> [k, d / k, d]
    ours = (heads, width // heads, rows)
    return [leaf.then(ours, lambda x: x.T.reshape(ours))]
  ours = (*shape[1:], heads, width // heads)  # [d, k, d / k]
  whole = leaf._replace(read=functools.cache(leaf.read))  # The parts are views.
  return [
    whole.then(ours, lambda x, i=i: x[i : i + rows].T.reshape(ours))
    for i in range(0, shape[0], rows)
  ]


def _join(parts, layout):
  """timm's leaf of ours: the inverse of `_split`."""
  first = parts[0]
  shape = first.shape
  if layout == "same":
    return first
  if layout in _AXES:
    return _transposed(first, tuple(np.argsort(_AXES[layout]).tolist()))
  if layout == "out":
    rows = shape[0] * shape[1]
    return first.then((shape[2], rows), lambda x: x.reshape(rows, -1).T)
  rows = shape[-2] * shape[-1]
  flat = (*shape[:-2], rows)

  def read():
    return np.concatenate([part.read().reshape(flat).T for part in parts])

  return first._replace(shape=(len(parts) * rows, *shape[:-2]), read=read)


def _transposed(leaf, axes):
  shape = tuple(leaf.shape[axis] for axis in axes)
  return leaf.then(shape, lambda x: x.transpose(axes))
