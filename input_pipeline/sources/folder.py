"""`folder:PATH` — one's own images, a folder for each class.

Two layouts are understood, on local disks and in buckets alike:

  PATH/SPLIT/CLASS/...   when PATH/train holds folders; splits are the folders.
  PATH/CLASS/...         has one split, called `train` or `all`, to be cut into
                         slices: train on `train[:90%]`, test on `train[90%:]`.

Classes are the folders (of train, where there are splits), sorted by plain byte
order, and the same for every split. Files count as images by their extension,
in any letter case; what they really contain is found out when decoding. Hidden
files and folders are left out, other files are logged. Either layout lists a
split in `splits.stratified_order`, so every slice holds all classes.
"""

import collections
import hashlib
import logging
import os

import numpy as np
import tensorflow as tf

from input_pipeline import splits
from input_pipeline.errors import AbsentError, suggest
from input_pipeline.sources import Features, Source, absolute

_IMAGES = frozenset(("bmp", "gif", "jpeg", "jpg", "png", "webp"))
# Images too, but not read here: worth a word of their own.
_UNSUPPORTED = frozenset(
  ("avif", "heic", "heif", "jp2", "jxl", "svg", "tif", "tiff")
)
_SPLITS = frozenset(("dev", "eval", "test", "val", "valid", "validation"))
_gfile = tf.io.gfile

log = logging.getLogger("input_pipeline")


def make(argument: str, split: str, data_dir: str) -> Source:
  """Lists the files of `split` and builds the source; reads no image."""
  if not argument:
    raise ValueError("The source 'folder:' needs a path: folder:PATH.")
  root = _root(argument, data_dir)
  slices = splits.parse_split(split)
  class_names, folder_of = _layout(root, list(slices))
  files = []
  for name, parts in slices.items():
    found = _list_split(root, folder_of[name], class_names)
    files += [found[i] for i in splits.take_slices(parts, len(found))]
  labels = np.array([label for label, _ in files], np.int32)[:, None]
  names = [name for _, name in files]
  digest = hashlib.sha256(
    "\n".join([*class_names, "", *names]).encode()
  ).hexdigest()
  label_table, name_table = tf.constant(labels), tf.constant(names)

  def parse(index: tf.Tensor) -> Features:
    name = name_table[index]
    image = tf.io.read_file(tf.strings.join([root, name], "/"))
    return {"image": image, "labels": label_table[index], "name": name}

  return Source(
    spec=f"folder:{argument}",
    split=split,
    num_examples=len(files),
    class_names=tuple(class_names),
    digest=digest,
    parse=parse,
    name_of=lambda index: os.path.join(root, names[index]),
  )


def split_names(argument: str, data_dir: str) -> tuple[str, ...]:
  """Splits hold folders; without a `train` that does there is one split."""
  root = _root(argument, data_dir)
  names = _folders(root) if _gfile.isdir(root) else []
  if "train" not in names or not _folders(f"{root}/train"):
    return ("train",)
  return tuple(name for name in names if _folders(f"{root}/{name}"))


def unsupported(argument: str, data_dir: str = "") -> tuple[str, ...]:
  """Paths of the images that are left out, as their format is never read."""
  root = _root(argument, data_dir)
  found: list[str] = []
  for name in _folders(root):
    _, others = _walk(root, name)
    found += [f"{root}/{x}" for x in others if _extension(x) in _UNSUPPORTED]
  return tuple(found)


def _root(argument: str, data_dir: str) -> str:
  return absolute(argument, data_dir).rstrip("/") or "/"


def _layout(root: str, wanted: list[str]) -> tuple[list[str], dict[str, str]]:
  """Class names, and for each split asked for its folder below the root."""
  if not _gfile.isdir(root):
    raise AbsentError(f"{root} is not a folder. {_neighbours(root)}")
  folders = _folders(root)
  if not folders:
    kinds = collections.Counter(_extension(name) for name in _listdir(root))
    raise ValueError(
      f"{root} has no folders in it: put images into {root}/CLASS/ or "
      f"{root}/SPLIT/CLASS/. Found there: {_show_counts(kinds)}."
    )
  if "train" in folders and _folders(f"{root}/train"):
    for name in wanted:
      if name not in folders:
        raise ValueError(
          f"{root} has no split {name!r}. " + suggest(name, folders)
        )
    return _folders(f"{root}/train"), {name: name for name in wanted}
  for name in folders:
    if name in _SPLITS and _folders(f"{root}/{name}"):
      raise ValueError(
        f"{root} has a split {name!r} but no 'train', where the list of "
        f"classes comes from. Found there: {_show(folders)}."
      )
  for name in wanted:
    if name not in ("train", "all"):
      raise ValueError(
        f"{root} has no split {name!r}: its folders are classes "
        f"({_show(folders)}), so there is one split, 'train'. Cut it into "
        "slices, 'train[:90%]' to train on and 'train[90%:]' to test on."
      )
  return folders, dict.fromkeys(wanted, "")


def _list_split(
  root: str, folder: str, class_names: list[str]
) -> list[tuple[int, str]]:
  """All images of a split as (label, path below the root), in fair order."""
  base = os.path.join(root, folder).rstrip("/")
  folders = set(_folders(base))
  strange = sorted(folders - set(class_names))
  if strange:
    raise ValueError(
      f"{base} has classes that {root}/train does not have: {_show(strange)}. "
      + suggest(strange[0], class_names)
    )
  files: list[tuple[int, str]] = []
  others = [
    os.path.join(folder, name) for name in _listdir(base) if name not in folders
  ]
  for label, name in enumerate(class_names):
    images: list[str] = []
    if name in folders:
      images, rest = _walk(root, os.path.join(folder, name))
      others += rest
    if not images:
      log.warning("Class %r has no images in %s.", name, base)
    files += [(label, path) for path in images]
  _log_extensions(root, folder, [path for _, path in files], others)
  if not files:
    raise ValueError(
      f"{base} has no images ({', '.join(sorted(_IMAGES))}) in its "
      f"{len(class_names)} class folders. Found there: "
      f"{_show_counts(collections.Counter(map(_extension, others)))}."
    )
  labels = np.array([label for label, _ in files])
  order = splits.stratified_order(labels, [path for _, path in files])
  return [files[i] for i in order]


def _walk(root: str, below: str) -> tuple[list[str], list[str]]:
  """Images and other files under `root/below`, as paths below the root."""
  images, others = [], []
  for name in sorted(_listdir(f"{root}/{below}"), key=os.fsencode):
    path = f"{below}/{name}"
    # Only odd names are looked up: asking a bucket about each image is slow.
    if _extension(name) in _IMAGES:
      images.append(path)
    elif _gfile.isdir(f"{root}/{path}"):
      deeper_images, deeper_others = _walk(root, path)
      images += deeper_images
      others += deeper_others
    else:
      others.append(path)
  return images, others


def _log_extensions(
  root: str, folder: str, images: list[str], others: list[str]
) -> None:
  """Says what was counted, and what was left out and why."""
  base = os.path.join(root, folder)
  counts = collections.Counter(map(_extension, images))
  log.info("%s: %d images (%s).", base, len(images), _show_counts(counts))
  if not others:
    return
  counts = collections.Counter(map(_extension, others))
  log.warning(
    "%s: left out %d other files (%s).", base, len(others), _show_counts(counts)
  )
  unsupported = [x for x in others if _extension(x) in _UNSUPPORTED]
  if unsupported:
    log.warning(
      "Unsupported image formats, left out (convert them to PNG or JPEG): %s.",
      _show([f"{root}/{path}" for path in unsupported]),
    )


def _listdir(path: str) -> list[str]:
  """Names in a folder but hidden ones; buckets end folders with a slash."""
  names = (name.rstrip("/") for name in _gfile.listdir(path))
  return [name for name in names if name and not name.startswith(".")]


def _folders(path: str) -> list[str]:
  """Names of the folders in a folder, in plain byte order."""
  names = [name for name in _listdir(path) if _gfile.isdir(f"{path}/{name}")]
  return sorted(names, key=os.fsencode)


def _extension(path: str) -> str:
  return os.path.splitext(path)[1].lower().lstrip(".")


def _neighbours(root: str) -> str:
  """What lies where a missing folder was expected."""
  parent, name = os.path.split(root.rstrip("/"))
  parent = parent or "."
  if not _gfile.isdir(parent):
    return f"{parent} does not exist either."
  return suggest(name, _folders(parent), f"Folders in {parent}")


def _show(names: list[str]) -> str:
  more = f" and {len(names) - 10} more" if len(names) > 10 else ""
  return ", ".join(names[:10]) + more


def _show_counts(counts: collections.Counter) -> str:
  shown = (
    f"{n} {ext or 'without extension'}" for ext, n in counts.most_common()
  )
  return ", ".join(shown) or "nothing"
