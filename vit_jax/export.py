"""Writes the weights of a run or a file for others to read.

python -m vit_jax.export --checkpoint=runs/digits --output=digits.npz

`.npz` has the published names, `.safetensors` timm's, which PyTorch reads. What
was written is loaded again before it gets its name: no file that is there
differs from the weights in a single bit, or in the grid of its positions.
"""

import logging
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from absl import flags
from ml_collections import ConfigDict

from vit_jax import checkpoints, images, launch, models
from vit_jax import weights as storage
from vit_jax.models import posemb
from vit_jax.weights import dialects, files, torch
from vit_jax.weights.leaf import count_of

log = logging.getLogger("vit_jax")

_SUFFIXES = (".npz", ".safetensors")


class Exported(NamedTuple):
  """What was written.

  Attributes:
    path: the file.
    leaves: number of arrays.
    parameters: number of values in them.
    size: of the file, in bytes.
    grid: (h, w) of the positions, or () where nothing says it.
  """

  path: str
  leaves: int
  parameters: int
  size: int
  grid: tuple[int, ...]

  def __str__(self) -> str:
    grid = f", grid {'x'.join(map(str, self.grid))}" if self.grid else ""
    return (
      f"{self.path}: {count_of(self.leaves)}, {self.parameters:,} parameters, "
      f"{self.size:,} bytes{grid}"
    )


def run(
  checkpoint: str,
  output: str,
  *,
  step: str = "latest",
  weights: str = "",
  heads: int = 0,
  grid: str = "",
  overwrite: bool = False,
) -> Exported:
  """Writes weights to a file, and reads it again to compare.

  Args:
    checkpoint: a workdir, its checkpoints, or one step's directory; or a file
      of weights, to be converted.
    output: ends in ".npz" or ".safetensors"; local, or in a bucket.
    step: of a run: "latest", "best" or a number.
    weights: of a run: "params" or "ema"; "" is ema where the run kept it.
    heads: attention heads; only PyTorch's files need to be told.
    grid: "HxW" of the positions, for a file that does not say it; else "".
    overwrite: whether `output` may be there already.

  Returns:
    What was written.

  Raises:
    ValueError: nothing to read, or nowhere to write; heads or a grid that
      cannot be; a model for which timm has no names; what was written is not
      what is read (no file is left).
  """
  output = os.path.expanduser(output)
  _check(checkpoint, output, overwrite)
  stored = storage.open(checkpoint, step=step, weights=weights)
  if grid:
    stored = stored._replace(grid=_grid(grid))
  params = _params(stored, heads)
  about: Mapping[str, str] = stored.about
  if output.endswith(".safetensors") and tf.io.gfile.isdir(stored.path):
    about, positions = _of_run(stored, has_head="head/kernel" in params)
    params |= positions
  _write(output, params, grid=stored.grid, about=about)
  return Exported(
    output,
    len(params),
    sum(array.size for array in params.values()),
    tf.io.gfile.stat(output).length,
    stored.grid,
  )


def _check(checkpoint, output, overwrite):
  if not checkpoint:
    raise ValueError("Say what to export: --checkpoint=runs/name")
  if not output.endswith(_SUFFIXES):
    raise ValueError(
      f"--output={output!r} must end in .npz (the published names) or in "
      ".safetensors (timm's names)."
    )
  with files.storage_errors(output):
    if tf.io.gfile.exists(output) and not overwrite:
      raise ValueError(f"{output} is there already; --overwrite replaces it.")


def _grid(text):
  match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
  if not match:
    raise ValueError(f"--grid={text!r} must be rows x columns, such as 14x14.")
  return tuple(int(side) for side in match.groups())


def _params(stored, heads):
  """The values of a model's parameters, under our names."""
  heads = heads or int(stored.about.get("num_heads", 0))
  if torch.is_torch(stored.leaves) and not heads:
    raise ValueError(
      f"{stored.path} has PyTorch's names, which do not say how many attention "
      "heads there are: give --heads (12 in ViT-B)."
    )
  leaves, complaints = dialects.to_ours(stored, heads=heads)
  if complaints:
    raise ValueError(f"{stored.path}: {' '.join(complaints)}")
  others = [name for name in leaves if name.startswith(dialects.OBJECTIVES)]
  for name in others:
    del leaves[name]
  if others:
    log.info("Left out %s: for pre-training.", ", ".join(others))
  return {name: leaf.read() for name, leaf in leaves.items()}


def _of_run(stored, *, has_head):
  """What a timm file says of a run beside its parameters.

  Returns:
    Its metadata, and the positions as a parameter where the model computes
    them: timm has no fixed ones.
  """
  meta = checkpoints.read_meta(stored.path)
  config = ConfigDict(meta["config"])
  classes = meta["guard"]["class_names"] if has_head else ()
  model = models.from_config(config.model, len(classes))
  about = torch.metadata(
    model,
    image_size=images.size_of(config),
    input_range=config.model.input_range,
    classes=classes,
  )
  if model.posemb != "sincos2d":
    return about, {}
  table = np.asarray(posemb.sincos2d(stored.grid, model.width))
  class_row = int(model.classifier == "token")
  table = np.pad(table, ((class_row, 0), (0, 0)))[None]
  return about, {dialects.POSITIONS: table}


def _write(output, params, *, grid, about):
  """Writes a file under another name, which it keeps until it is compared."""
  root, suffix = os.path.splitext(output)
  path = f"{root}.unverified{suffix}"
  with files.storage_errors(output):
    try:
      storage.save(path, params, grid=grid or None, about=about)
      _verify(path, params, grid)
      tf.io.gfile.rename(path, output, overwrite=True)
    except BaseException:
      if tf.io.gfile.exists(path):
        tf.io.gfile.remove(path)
      raise


def _verify(
  path: str, params: Mapping[str, np.ndarray], grid: tuple[int, ...]
) -> None:
  """Loads a file, and compares names, bits and grid with what should be in it.

  Whatever reads it later goes this way, too.
  """
  stored = storage.open(path)
  queries = [n for n in params if n.endswith("/query/kernel")]
  heads = params[queries[0]].shape[-2] if queries else 1  # A ResNet has none.
  found, wrong = dialects.to_ours(stored, heads=heads)
  wrong += sorted(found.keys() ^ params.keys())
  if stored.grid != grid and (stored.grid or len(set(grid)) > 1):
    wrong.append(f"the grid {stored.grid}")  # That of a square can go unsaid.
  for name in [] if wrong else params:
    array, wanted = found[name].read(), params[name]
    if array.shape != wanted.shape or array.tobytes() != wanted.tobytes():
      wrong.append(name)
  if wrong:
    raise ValueError(
      f"{path} was written, but is not the same when it is read: "
      f"{', '.join(wrong)}. It is removed."
    )


def _main(checkpoint, step, weights, **how):
  with launch.refusal():
    print(run(checkpoint, step=step, weights=weights, **how))


if __name__ == "__main__":
  CHECKPOINT = launch.checkpoint_flags()
  OUTPUT = flags.DEFINE_string("output", "", "FILE.npz or FILE.safetensors.")
  HEADS = flags.DEFINE_integer(
    "heads", 0, "Attention heads, where the checkpoint is a file of PyTorch's."
  )
  GRID = flags.DEFINE_string(
    "grid", "", "HxW of the positions, where the checkpoint does not say it."
  )
  OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace the output.")
  launch.start(
    lambda _: _main(
      *(flag.value for flag in CHECKPOINT),
      output=OUTPUT.value,
      heads=HEADS.value,
      grid=GRID.value,
      overwrite=OVERWRITE.value,
    )
  )
