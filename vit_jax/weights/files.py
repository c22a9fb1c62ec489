"""Arrays in files, by name: shapes from the headers, values when asked for.

What a file is, its content says: a zip archive of `.npy` members (NumPy's
`.npz`), a `.safetensors` file, or a directory with a run's checkpoints. Local
disks, buckets and memory go through one reader. All values become float32.
This room knows bytes, not what the names mean.
"""

import contextlib
import functools
import json
import math
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorflow as tf
from ml_collections import ConfigDict

from vit_jax import checkpoints, images, models, trees
from vit_jax.weights import facts
from vit_jax.weights.leaf import Leaf

GRID_KEY = "posembed_input/grid"  # In an .npz, the (h, w) of its positions.

_FLOAT32 = np.dtype(np.float32)
_BFLOAT16 = np.dtype(jnp.bfloat16)
_NPY_HEADERS = {
  (1, 0): np.lib.format.read_array_header_1_0,
  (2, 0): np.lib.format.read_array_header_2_0,
}
_SAFETENSORS = {
  "F64": np.dtype("<f8"),
  "F32": np.dtype("<f4"),
  "F16": np.dtype("<f2"),
  "BF16": _BFLOAT16,
  **{f"I{8 * n}": np.dtype(f"<i{n}") for n in (1, 2, 4, 8)},
  **{f"U{8 * n}": np.dtype(f"<u{n}") for n in (1, 2, 4, 8)},
  "BOOL": np.dtype(bool),
}
# What reading a damaged member of an archive raises.
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, ValueError)


class Stored(NamedTuple):
  """What a file or a checkpoint holds, before any of it is read.

  Attributes:
    path: where it is.
    leaves: name -> array, which `read` returns as float32.
    grid: (h, w) of the positions, or () where nothing says it.
    about: what else is said of the model: `facts`, and in a file of ours
      "position_rows", how many rows stand before the positions of the grid.
  """

  path: str
  leaves: dict[str, Leaf]
  grid: tuple[int, ...]
  about: dict[str, str]


def open(path: str, *, step: str = "latest", weights: str = "") -> Stored:
  """Finds the arrays of a file or a checkpoint; reads headers only.

  The file stays open as long as one of its leaves is kept.

  Args:
    path: an .npz or .safetensors file, whatever its name; or a workdir, its
      checkpoints, or one step's directory.
    step: of a run: "latest", "best" or a number.
    weights: of a run: "params" or "ema"; "" is ema where the run kept it.

  Raises:
    ValueError: nothing there, or not such a file (with its size and what it
      looks like), or it is cut off; no such step or weights.
  """
  path = os.path.expanduser(path)
  with storage_errors(path):
    if tf.io.gfile.isdir(path):
      return _read_checkpoint(path, step, weights)
    if not tf.io.gfile.exists(path):
      raise ValueError(
        f"There is nothing at {path}. Give an .npz or .safetensors file, or a "
        "run's workdir, its checkpoints or one step's directory."
      )
    size = tf.io.gfile.stat(path).length
    file = tf.io.gfile.GFile(path, "rb")
    start = file.read(64)
    if start.startswith(b"PK"):
      return _read_npz(path, file, size)
    if start[8:9] == b"{":
      return _read_safetensors(path, file, size)
  raise ValueError(
    f"{path} ({size} bytes) is not an .npz archive, nor a .safetensors file: "
    + (
      f"it begins with {start[:24].decode('latin-1')!r}."
      if start
      else "it is empty."
    )
  )


@contextlib.contextmanager
def storage_errors(path: str) -> Iterator[None]:
  """Turns what TensorFlow raises for a file into a ValueError with its path."""
  try:
    yield
  except tf.errors.OpError as error:
    raise ValueError(f"{path}: {error.message}") from error


def _read_npz(path: str, file: tf.io.gfile.GFile, size: int) -> Stored:
  try:
    archive = zipfile.ZipFile(file)
    # Members are counted from the end: without a middle they begin too early.
    if any(info.header_offset < 0 for info in archive.infolist()):
      raise zipfile.BadZipFile
  except (zipfile.BadZipFile, tf.errors.InvalidArgumentError) as error:
    raise ValueError(
      f"{path} ({size} bytes) is not an .npz archive: it begins like one, but "
      "a part of it is missing. Is the download complete?"
    ) from error
  leaves = {}
  for info in archive.infolist():
    name, suffix = os.path.splitext(info.filename)
    if suffix != ".npy":
      raise ValueError(
        f"{path} ({size} bytes) is not an .npz archive: it is a zip archive "
        f"with {info.filename!r} in it. PyTorch's own files are of that kind; "
        "save the state dict as .safetensors instead."
      )
    leaves[name] = _npy_leaf(path, archive, info)
  grid = leaves.pop(GRID_KEY).read() if GRID_KEY in leaves else ()
  return Stored(path, leaves, tuple(int(side) for side in grid), {})


def _npy_leaf(path, archive, info):
  def broken(error):
    return ValueError(f"{path}: {info.filename} cannot be read: {error}")

  try:
    with archive.open(info) as member:
      version = np.lib.format.read_magic(member)
      shape, _, dtype = _NPY_HEADERS[version](member)
  except (KeyError, *_BROKEN) as error:
    raise broken(error) from error
  # NumPy does not know bfloat16 and writes it as two bytes of anything.
  view = _BFLOAT16 if dtype == np.dtype("V2") else dtype
  if view is dtype and dtype.kind not in "fiub":
    raise ValueError(
      f"{path}: {info.filename} holds {dtype}, which is no number; this is not "
      "a file of weights."
    )

  def load():
    try:
      with storage_errors(path), archive.open(info) as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
    except _BROKEN as error:
      raise broken(error) from error
    return array.view(view).astype(_FLOAT32, order="C", copy=False)

  return Leaf(shape, _FLOAT32, load)


def _read_safetensors(path: str, file: tf.io.gfile.GFile, size: int) -> Stored:
  """Eight bytes that count the header's, the header (JSON), then the data."""
  file.seek(0)
  length = int.from_bytes(file.read(8), "little")
  try:
    header = json.loads(file.read(min(length, size)))
    about = header.pop("__metadata__", {})
    leaves = {
      name: _tensor_leaf(path, file, 8 + length, name, entry)
      for name, entry in header.items()
    }
    ends = [entry["data_offsets"][1] for entry in header.values()]
  except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as e:
    raise ValueError(
      f"{path} ({size} bytes) is not a .safetensors file: its header cannot be "
      f"read ({e!r})."
    ) from e
  end = 8 + length + max(ends, default=0)
  if size < end:
    raise ValueError(
      f"{path} ({size} bytes) is cut off: its header tells of {end} bytes. Is "
      "the download complete?"
    )
  about = {name: str(text) for name, text in about.items()}
  match = re.fullmatch(r"(\d+)x(\d+)", about.pop("grid", ""))
  grid = tuple(int(side) for side in match.groups()) if match else ()
  return Stored(path, leaves, grid, about)


def _tensor_leaf(path, file, base, name, entry):
  if entry["dtype"] not in _SAFETENSORS:
    raise ValueError(
      f"{path}: {name} holds {entry['dtype']}; there are "
      f"{', '.join(_SAFETENSORS)}."
    )
  dtype, shape = _SAFETENSORS[entry["dtype"]], tuple(entry["shape"])
  start = entry["data_offsets"][0]

  def load():
    with storage_errors(path):
      file.seek(base + start)
      data = file.read(math.prod(shape) * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape).astype(_FLOAT32)

  return Leaf(shape, _FLOAT32, load)


def _read_checkpoint(path: str, step: str, weights: str) -> Stored:
  """A step of a run, on the host: no device, no sharding."""
  where = checkpoints.locate(path, step)
  kept = [item for item in ("ema", "params") if (where / item).exists()]
  if weights and weights not in kept:
    raise ValueError(
      f"{where} holds no {weights!r} weights, but {', '.join(kept)}."
    )
  item = where / (weights or kept[0])
  # A Checkpointer would look, and warn, for a file that only a step has.
  tree = ocp.StandardCheckpointHandler().metadata(item).tree

  @functools.cache
  def values():
    # Orbax returns arrays of the kind that it is shown; these take no memory.
    kind = jax.tree.map(
      lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), tree
    )
    with ocp.StandardCheckpointer() as checkpointer:
      return trees.flatten(checkpointer.restore(item, kind))

  def value(name):
    return values()[name].astype(_FLOAT32, copy=False)

  leaves = {
    name: Leaf(tuple(leaf.shape), _FLOAT32, functools.partial(value, name))
    for name, leaf in trees.flatten(tree).items()
  }
  config = ConfigDict(checkpoints.read_meta(where)["config"])
  model = models.from_config(config.model, num_classes=0)
  return Stored(
    str(where),
    leaves,
    model.grid(images.size_of(config)),
    facts.of(model, config.model.input_range),
  )
