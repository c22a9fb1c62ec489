"""Split expressions such as `train[:80%]+train[90%:]`, and a fair order to cut.

A slice must not depend on how files happen to be sorted: the first 90 % of a
folder sorted by class would miss the last classes. So every source that owns
its order lists a split in `stratified_order`, and all slices, in percent or in
examples, are plain cuts of that list.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_PART = re.compile(r"([^\[\]+:]+?)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?")


class Slice(NamedTuple):
  """One term of a split expression; empty bounds mean begin and end."""

  name: str
  start: str = ""
  stop: str = ""


def parse_split(text: str) -> dict[str, list[Slice]]:
  """Parses `name`, `name[a:b]` and sums of them; a, b are `12`, `-12`, `5%`.

  Returns:
    For each split that occurs, its terms in order.

  Raises:
    ValueError: the expression, and what one looks like.
  """
  slices: dict[str, list[Slice]] = {}
  for part in text.split("+"):
    match = _PART.fullmatch(part.strip())
    if not match:
      raise ValueError(
        f"Cannot read the split {text!r}. Write a name, a slice or a sum: "
        "'train', 'train[:90%]', 'train[100:900]', 'train[:80%]+train[90%:]'."
      )
    name, start, stop = match.groups(default="")
    slices.setdefault(name, []).append(Slice(name, start, stop))
  return slices


def take_slices(slices: Sequence[Slice], size: int) -> np.ndarray:
  """Positions that slices of one split of `size` examples select, in order.

  Percent borders are rounded to the nearest example, so `[:90%]` and `[90%:]`
  always meet without gap or overlap. Negative bounds count from the end.

  Returns:
    [k] int64 positions in 0..size-1.

  Raises:
    ValueError: a bound outside the split, nothing selected, or an example
      selected twice.
  """
  ranges = []
  for part in slices:
    start = _border(part, part.start, 0, size)
    stop = _border(part, part.stop, size, size)
    ranges.append(np.arange(start, stop, dtype=np.int64))
  text = "+".join(f"{s.name}[{s.start}:{s.stop}]" for s in slices)
  positions = np.concatenate(ranges)
  if not len(positions):
    raise ValueError(f"{text} selects none of the {size} examples.")
  if len(slices) > 1 and len(np.unique(positions)) < len(positions):
    raise ValueError(f"{text} selects some examples twice.")
  return positions


def _border(part: Slice, text: str, default: int, size: int) -> int:
  if not text:
    return default
  limit = 100 if text.endswith("%") else size
  value = int(text.rstrip("%"))
  if abs(value) > limit:
    raise ValueError(
      f"{part.name}[{part.start}:{part.stop}] goes beyond the split: "
      f"{text} of {size} examples."
    )
  value = value if value >= 0 and text[0] != "-" else limit + value
  return (value * size + 50) // 100 if text.endswith("%") else value


def stratified_order(labels: np.ndarray, names: Sequence[str]) -> np.ndarray:
  """A fixed order in which every stretch holds all classes in proportion.

  Within a class, examples are ordered by a hash of their names (so no run of
  similar neighbours stays together, and a new file moves no other). The j-th of
  a class's k examples is then put at (j + 1/2) / k of the whole list.

  Args:
    labels: [n] int, class of each example.
    names: [n] unique names, independent of where the data lies.

  Returns:
    [n] int64, a permutation of 0..n-1.
  """
  digests = b"".join(
    hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names
  )
  keys = np.frombuffer(digests, dtype="<u8")
  by_class = np.lexsort((keys, labels))
  counts = np.bincount(labels)
  first = np.cumsum(counts) - counts
  grouped = labels[by_class]
  rank = np.arange(len(labels)) - first[grouped]
  place = (rank + 0.5) / counts[grouped]
  return by_class[np.lexsort((keys[by_class], place))]
