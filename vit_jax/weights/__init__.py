"""Parameters in and out of files: `load` and `save`.

Files of any dialect that is known (see `files` and `dialects`) become the
parameters of a model (see `fitting`): host memory, one leaf at a time. What
does not fit is refused before any of it is read.
"""

import logging
import os
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from vit_jax import models, trees
from vit_jax.models import fields
from vit_jax.weights import (
  dialects,
  resizing,
  torch,
  torch_positions,
  writing,
)
from vit_jax.weights.files import Stored, open
from vit_jax.weights.fitting import Report, plan
from vit_jax.weights.leaf import Leaf

__all__ = ["Report", "Stored", "load", "open", "plan", "save"]

log = logging.getLogger("vit_jax")


def load(
  path: str,
  model: models.Model,
  image_size: Any,
  *,
  head: str = "keep",
  resize: str = "bicubic",
  grid: tuple[int, int] | None = None,
  rng: jax.Array | None = None,
  patch: str = "keep",
  step: str = "latest",
  weights: str = "",
) -> dict[str, Any]:
  """Loads parameters for a model that sees images of a size.

  Positions are resized from their grid to the model's. Where only one of file
  and model has a class token, it is dropped, or starts as zeros.

  Args:
    path: see `open`, as for `step` and `weights`.
    model: whose parameters are wanted, as a loop or a scan.
    image_size: pixels: an int, (side,) or (h, w).
    head: "keep" takes the file's head, which must fit. "reset" takes the head
      that the model's `init` gives; the layer `pre_logits` is kept where the
      model has the same. A model without head takes any file. What a run's
      objective had beside its model is dropped with the head.
    resize: "bicubic", "bilinear" or "bilinear_corners" (as the published
      fine-tuning code).
    grid: (h, w) of the stored positions. Else it is what the file says, else
      square, else the model's, if that has as many.
    rng: for parameters that only the model has and that start at random.
    patch: "keep", or "resize" where the model's patches are of another size
      (see `resizing.resize_patch`).

  Returns:
    A tree of numpy float32, as the model's `init` makes it.

  Raises:
    ValueError: as `open`; a leaf is missing, unexpected or of another shape, a
      field of the model is not the file's (see `facts`), a grid is not known or
      cannot be (lists all of these); `rng` is needed; an unknown choice.
  """
  report = plan(
    open(path, step=step, weights=weights),
    model,
    image_size,
    head=head,
    resize=resize,
    grid=grid,
    rng=rng,
    patch=patch,
  )
  for note in report.notes:
    log.info("%s: %s.", path, note)
  summary, leaves = report.summary(), dict(report.leaves)
  if getattr(model, "scan", False):
    leaves = dialects.stack(leaves)
  del report  # A leaf that is read is let go, with what it was cut from.
  params = {name: leaves.pop(name).read() for name in list(leaves)}
  log.info("%s: %s.", path, summary)
  for name in ("head/kernel", "conv_head/kernel"):
    if head == "keep" and name in params and not params[name].any():
      log.warning(
        "%s: the head is all zeros, so all images get the same logits.", path
      )
  return traverse_util.unflatten_dict(params, sep="/")


def save(
  path: str,
  params: Any,
  *,
  grid: tuple[int, int] | None = None,
  about: Mapping[str, str] = types.MappingProxyType({}),
) -> None:
  """Saves parameters as float32; the file is there whole or not at all.

  Args:
    path: ends in ".npz" for the names of the published files, or in
      ".safetensors" for timm's; local, or in a bucket.
    params: a model's, as a loop or a scan; numpy or jax arrays.
    grid: (h, w) of the positions. Where they are no square, and it is not
      given, a file can be loaded only for as many positions, or with `grid`.
    about: metadata of a .safetensors file; see `torch.metadata`.

  Raises:
    ValueError: another suffix; the positions are not of that grid; leaves that
      timm has no place for.
  """
  path = os.path.expanduser(path)
  suffix = os.path.splitext(path)[1]
  if suffix not in (".npz", ".safetensors"):
    raise ValueError(
      f"{path!r} ends neither in .npz (the published names) nor in "
      ".safetensors (timm's names)."
    )
  leaves = dialects.unstack(
    {name: _float32(array) for name, array in trees.flatten(params).items()}
  )
  sides = () if grid is None else fields.pair(grid, "grid")
  resizing.check_grid(path, leaves, sides)
  if suffix == ".npz":
    if len(set(sides)) < 2:
      sides = ()  # A square needs no telling.
    writing.write_npz(path, dialects.to_published(leaves), sides)
  else:
    rows = torch_positions.rows_before(leaves)
    about = {**about, "position_rows": str(rows)}
    writing.write_safetensors(path, torch.to_timm(leaves), about, sides)


def _float32(array):
  return Leaf(
    tuple(array.shape),
    np.dtype(np.float32),
    lambda: np.asarray(array, np.float32, order="C"),
  )
