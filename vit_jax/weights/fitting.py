"""Fits stored parameters to a model.

Works on shapes. Leaf by leaf, what a file holds becomes what the model wants:
head, class token, positions and patch. Whatever then still differs is refused,
all of it in one list, and nothing is read before all of it fits.
"""

import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import models, trees
from vit_jax.models import fields, posemb
from vit_jax.weights import dialects, facts, misfits, resizing, torch
from vit_jax.weights.files import Stored
from vit_jax.weights.leaf import Leaf, count_of, in_memory

log = logging.getLogger("vit_jax")

HEADS = ("keep", "reset")
PATCHES = ("keep", "resize")

_HEAD = ("head/", "conv_head/")  # A ViT's and a ResNet's.
_PRE_LOGITS = ("pre_logits/",)
_MAP_HEAD = ("MAPHead_0/",)


class Report(NamedTuple):
  """How a model's parameters come from stored leaves.

  Attributes:
    leaves: the parameters by name, blocks apart, not yet read.
    matched: names of those that are taken as they are.
    reshaped: names of those that are resized, cut or extended.
    dropped: names of stored leaves that are not used.
    fresh: names of parameters that do not come from the file.
    notes: what was done, in words.
  """

  leaves: dict[str, Leaf]
  matched: list[str]
  reshaped: list[str]
  dropped: list[str]
  fresh: list[str]
  notes: list[str]

  def summary(self) -> str:
    """Returns the counts, and the names of all but those that match."""
    parts = [f"{count_of(len(self.matched))} matched"]
    for kind in ("reshaped", "dropped", "fresh"):
      names = getattr(self, kind)
      listed = f" ({', '.join(names)})" if names else ""
      parts.append(f"{len(names)} {kind}{listed}")
    return "; ".join(parts)


def plan(
  stored: Stored,
  model: models.Model,
  image_size: Any,
  *,
  head: str = "keep",
  resize: str = "bicubic",
  grid: tuple[int, int] | None = None,
  rng: jax.Array | None = None,
  patch: str = "keep",
) -> Report:
  """Says how a model's parameters come from what is stored; reads nothing.

  Args:
    stored: from `weights.open`.
    model: the target.
    image_size: pixels that the model is to see: an int, (side,) or (h, w).
    head: "keep" or "reset"; see `weights.load`, as for all that follow.
    resize: one of `posemb.RESIZE_METHODS`.
    grid: (h, w) of the stored positions.
    rng: for fresh parameters that start at random.
    patch: "keep" or "resize".

  Raises:
    ValueError: as `weights.load`.
  """
  trees.check_choice("head=", head, HEADS)
  trees.check_choice("resize=", resize, posemb.RESIZE_METHODS)
  trees.check_choice("patch=", patch, PATCHES)
  if getattr(model, "scan", False):
    model = model.clone(scan=False)
  size = fields.pair(image_size, "image_size")
  wanted = _wanted(model, size)
  known = stored.grid if grid is None else fields.pair(grid, "grid")
  ours, complaints = dialects.to_ours(
    stored._replace(grid=known),
    heads=getattr(model, "num_heads", 1),  # A ResNet has none.
    wanted=model.grid(size),
  )
  grids = resizing.Grids(
    known=known,
    wanted=model.grid(size),
    class_token="cls" in ours,
    method=resize,
  )
  have = dict(ours)
  fresh = _fit_head(have, wanted, reset=head == "reset")
  notes = _fit_class_token(have, wanted)
  if not complaints:
    resized, complaints = resizing.fit_positions(have, wanted, grids)
    notes += resized
  if patch == "resize":
    notes += resizing.fit_patch(have, wanted)
  must_fit = {name: wanted[name] for name in wanted if name not in fresh}
  complaints += facts.differences(stored.about, model)
  misfits.check(stored.path, have, must_fit, complaints)
  _warn_of_gelu(stored, model)
  have |= _draw(model, size, fresh, rng=rng, path=stored.path)
  leaves = {name: have[name] for name in wanted}
  return _report(ours, leaves, fresh, notes)


def _warn_of_gelu(stored, model):
  """Warns where the names are PyTorch's, and nothing says of which model."""
  silent = torch.is_torch(stored.leaves) and "gelu" not in stored.about
  if silent and model.gelu != "erf":
    log.warning(
      "%s does not say which GELU it is for. PyTorch's models have the exact "
      "one, --config.model.gelu=erf; this model has %r.",
      stored.path,
      model.gelu,
    )


def _wanted(model, size):
  images = jax.ShapeDtypeStruct((1, *size, 3), jnp.float32)
  return trees.flatten(
    jax.eval_shape(model.init, jax.random.key(0), images)["params"]
  )


def _of(names, parts):
  return [name for name in names if name.startswith(parts)]


def _fit_head(have, wanted, *, reset):
  """Drops what the model's head does not take.

  Returns:
    The names of the parameters that start afresh instead.
  """
  if not reset and _of(wanted, _HEAD):
    return []  # All of it must fit.
  dropped = _of(have, _HEAD + dialects.OBJECTIVES)
  hidden = _of(have, _PRE_LOGITS)
  if not _of(wanted, _PRE_LOGITS) or (
    reset and any(have[n].shape != wanted[n].shape for n in hidden)
  ):
    dropped += hidden
  if not _of(wanted, _MAP_HEAD):
    dropped += _of(have, _MAP_HEAD)
  for name in dropped:
    del have[name]
  parts = _HEAD + _PRE_LOGITS + _MAP_HEAD if reset else ()
  return [name for name in _of(wanted, parts) if name not in have]


def _fit_class_token(have, wanted):
  """Drops a class token, or adds one of zeros; returns a note if so."""
  if "cls" in have and "cls" not in wanted:
    del have["cls"]
    return ["class token dropped, and its position"]
  if "cls" in wanted and "cls" not in have:
    have["cls"] = in_memory(np.zeros(wanted["cls"].shape, np.float32))
    return ["class token starts as zeros, and its position"]
  return []


def _draw(model, size, names, *, rng, path):
  """Takes the named parameters from the model's own initialisation."""
  if not names:
    return {}

  @jax.jit
  def init(key):
    # Compiled, so that what is not returned is never made.
    images = jnp.zeros((1, *size, 3))
    params = trees.flatten(model.init(key, images)["params"])
    return {name: params[name] for name in names}

  values = jax.device_get(init(jax.random.key(0) if rng is None else rng))
  if rng is None:
    others = jax.device_get(init(jax.random.key(1)))
    at_random = [n for n in names if (values[n] != others[n]).any()]
    if at_random:
      raise ValueError(
        f"{path} has no {', '.join(at_random)}, random at the start: give a "
        "key, rng=jax.random.key(0)."
      )
  # Copied, as device_get may return what cannot be written to.
  return {name: in_memory(np.array(value)) for name, value in values.items()}


def _report(stored, leaves, fresh, notes):
  """Sorts the names: a leaf that nothing touched is still the file's own."""
  drawn = [n for n in leaves if n in fresh or n not in stored]
  kept = [n for n in leaves if n not in drawn]
  report = Report(
    leaves=leaves,
    matched=[n for n in kept if leaves[n] is stored[n]],
    reshaped=[n for n in kept if leaves[n] is not stored[n]],
    dropped=[n for n in stored if n not in kept],
    fresh=drawn,
    notes=list(notes),
  )
  words = [
    word
    for word, names in (
      ("kept", kept),
      ("dropped", report.dropped),
      ("fresh", drawn),
    )
    if _of(names, _PRE_LOGITS)
  ]
  if words:
    report.notes.append(f"pre_logits {' and '.join(words)}")
  return report
