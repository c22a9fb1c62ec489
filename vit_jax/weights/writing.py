"""Writes arrays to files that are never seen half-written.

As everywhere in this room float32, one leaf in memory at a time, on local disks
and in buckets alike.
"""

import contextlib
import json
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from vit_jax.weights.files import GRID_KEY, storage_errors
from vit_jax.weights.leaf import Leaf, in_memory


def write_npz(
  path: str, leaves: Mapping[str, Leaf], grid: tuple[int, ...]
) -> None:
  """Writes an archive that `numpy.load` reads; equal leaves, equal bytes.

  Args:
    path: local, or in a bucket.
    leaves: by name.
    grid: (h, w) of the positions, kept under a name of its own; () keeps none.
  """
  if grid:
    leaves = {**leaves, GRID_KEY: in_memory(np.array(grid, np.int32))}
  with _whole_file(path) as file:
    stream: Any = _Stream(file)
    with zipfile.ZipFile(stream, "w") as archive:
      for name, leaf in leaves.items():
        with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
          np.lib.format.write_array(member, leaf.read(), allow_pickle=False)


class _Stream:
  """What zipfile writes to: without `tell` it never goes back.

  A file in a bucket cannot be changed behind its end.
  """

  def __init__(self, file):
    self._file = file

  def write(self, data: bytes) -> int:
    self._file.write(data)
    return len(data)

  def flush(self) -> None:
    self._file.flush()


def write_safetensors(
  path: str,
  leaves: Mapping[str, Leaf],
  about: Mapping[str, str],
  grid: tuple[int, ...],
) -> None:
  """Writes a .safetensors file.

  Args:
    path: local, or in a bucket.
    leaves: by name.
    about: its metadata.
    grid: (h, w) of the positions, kept there as "grid"; () keeps none.
  """
  metadata = {"format": "pt", **about}  # Hugging Face's readers ask for it.
  if grid:
    metadata["grid"] = "x".join(map(str, grid))
  header: dict[str, Any] = {"__metadata__": metadata}
  end = 0
  for name, leaf in leaves.items():
    start, end = end, end + 4 * math.prod(leaf.shape)
    header[name] = {
      "dtype": "F32",
      "shape": list(leaf.shape),
      "data_offsets": [start, end],
    }
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)  # The data begins at a multiple of 8.
  with _whole_file(path) as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for leaf in leaves.values():
      file.write(leaf.read().astype("<f4").tobytes())


@contextlib.contextmanager
def _whole_file(path: str) -> Iterator[tf.io.gfile.GFile]:
  """Opens another name, which becomes `path` once all is written."""
  other = f"{path}.tmp"
  with storage_errors(path):
    tf.io.gfile.makedirs(os.path.dirname(path) or ".")
    try:
      with tf.io.gfile.GFile(other, "wb") as file:
        yield file
      tf.io.gfile.rename(other, path, overwrite=True)
    except BaseException:
      with contextlib.suppress(tf.errors.OpError):
        tf.io.gfile.remove(other)
      raise
