"""The small files of a run: on a disk, or in a bucket.

A disk can rename a file, so a new text appears whole or not at all. A bucket
(`gs://…`) has neither appending nor renaming; but an object appears when it is
closed, whole, so it is written as it is to be.
"""

import contextlib
import os
import pathlib
from typing import Any

import tensorflow as tf
from etils import epath

_gfile = tf.io.gfile


def is_remote(path: epath.PathLike) -> bool:
  """Whether a path lies in a bucket, which cannot append or rename."""
  return "://" in str(path)


def join(directory: epath.PathLike, name: str) -> str:
  """Returns the path of a file in a directory."""
  return f"{str(directory).rstrip('/')}/{name}"


def exists(path: epath.PathLike) -> bool:
  """Whether there is such a file."""
  return _gfile.exists(str(path))


def read(path: epath.PathLike) -> str:
  """Returns a text file; "" where there is none."""
  if not exists(path):
    return ""
  with _gfile.GFile(str(path)) as file:
    return file.read()


def write(path: epath.PathLike, text: str) -> None:
  """Writes a text file that is never seen half-written."""
  if is_remote(path):
    with _gfile.GFile(str(path), "w") as file:
      file.write(text)
    return
  path = pathlib.Path(path)
  other = path.with_name(path.name + ".tmp")
  with other.open("w") as file:
    file.write(text)
    sync(file)
  other.replace(path)


def remove(path: epath.PathLike) -> None:
  """Removes a file."""
  _gfile.remove(str(path))


def sync(file: Any) -> None:
  """Makes sure that an open local file outlives the machine."""
  file.flush()
  with contextlib.suppress(OSError):  # Not every file system can.
    os.fsync(file.fileno())


def copy_tree(source: epath.PathLike, target: epath.PathLike) -> None:
  """Copies what is in a directory into another one, either in a bucket or not.

  Files of the same names are overwritten.
  """
  for root, _, names in _gfile.walk(str(source)):
    below = root.removeprefix(str(source)).strip("/")
    where = join(target, below) if below else str(target)
    _gfile.makedirs(where)
    for name in names:
      _gfile.copy(join(root, name), join(where, name), overwrite=True)


def move_tree(source: epath.PathLike, target: epath.PathLike) -> None:
  """Gives a directory another name."""
  if is_remote(source):
    copy_tree(source, target)
    _gfile.rmtree(str(source))
  else:
    pathlib.Path(source).rename(target)
