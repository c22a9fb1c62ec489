"""Writes the weights of a run or a file for others to read.

python -m vit_jax.export --checkpoint=runs/digits --output=digits.npz

`.npz` has the published names, `.safetensors` timm's, which PyTorch reads. What
was written is read again before it gets its name: no file that is there differs
from the weights in a single bit.
"""

import os
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
from vit_jax.weights.leaf import in_memory

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
      f"{self.path}: {self.leaves} leaves, {self.parameters:,} parameters, "
      f"{self.size:,} bytes{grid}"
    )


def run(
  checkpoint: str,
  output: str,
  *,
  step: str = "latest",
  weights: str = "",
  heads: int = 0,
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
    overwrite: whether `output` may be there already.

  Returns:
    What was written.

  Raises:
    ValueError: nothing to read, or nowhere to write; a model for which timm
      has no names; what was written is not what is read (no file is left).
  """
  output = os.path.expanduser(output)
  _check(checkpoint, output, overwrite)
  stored = storage.open(checkpoint, step=step, weights=weights)
  if torch.is_torch(stored.leaves) and not heads:
    raise ValueError(
      f"{stored.path} has PyTorch's names, which do not say how many attention "
      "heads there are: give --heads (12 in ViT-B)."
    )
  leaves = dialects.to_ours(
    stored.leaves, path=stored.path, heads=heads, grid=stored.grid
  )
  params = {name: leaf.read() for name, leaf in leaves.items()}
  about: dict[str, str] = {}
  if output.endswith(".safetensors") and tf.io.gfile.isdir(stored.path):
    about, positions = _of_run(stored)
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


def _of_run(stored):
  """What a timm file says of a run beside its parameters.

  Returns:
    Its metadata, and the positions as a parameter where the model computes
    them: timm has no fixed ones.
  """
  meta = checkpoints.read_meta(stored.path)
  config, classes = ConfigDict(meta["config"]), meta["guard"]["class_names"]
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
      _verify(path, params)
      tf.io.gfile.rename(path, output, overwrite=True)
    except BaseException:
      if tf.io.gfile.exists(path):
        tf.io.gfile.remove(path)
      raise


def _verify(path: str, params: Mapping[str, np.ndarray]) -> None:
  """Compares a file with what should be in it, bit by bit."""
  expected = {name: in_memory(array) for name, array in params.items()}
  if path.endswith(".safetensors"):
    expected = torch.to_timm(expected)
  written = storage.open(path).leaves
  wrong = sorted(written.keys() ^ expected.keys())
  for name in written.keys() & expected.keys():
    found, wanted = written[name].read(), expected[name].read()
    if found.shape != wanted.shape or found.tobytes() != wanted.tobytes():
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
  OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace the output.")
  launch.start(
    lambda _: _main(
      *(flag.value for flag in CHECKPOINT),
      output=OUTPUT.value,
      heads=HEADS.value,
      overwrite=OVERWRITE.value,
    )
  )
