"""Split expressions such as `train[:80%]+train[90%:]`, and a fair order to cut.

A slice must not depend on how files happen to be sorted: the first 90 % of a
folder sorted by class would miss the last classes. So every source that owns
its order lists a split in `stratified_order`, and all slices, in percent or in
examples, are plain cuts of that list.
"""

import hashlib
import itertools
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


def take_ranges(slices: Sequence[Slice], size: int) -> list[tuple[int, int]]:
  """Ranges of positions that slices of one split of `size` examples select.

  Percent borders are rounded to the nearest example, so `[:90%]` and `[90%:]`
  always meet without gap or overlap. Negative bounds count from the end.

  Returns:
    (start, stop) of each slice, in the order given.

  Raises:
    ValueError: a bound outside the split, nothing selected, or an example
      selected twice.
  """
  ranges = [
    (_border(part, part.start, 0, size), _border(part, part.stop, size, size))
    for part in slices
  ]
  text = "+".join(f"{s.name}[{s.start}:{s.stop}]" for s in slices)
  filled = sorted(limits for limits in ranges if limits[0] < limits[1])
  if not filled:
    raise ValueError(f"{text} selects none of the {size} examples.")
  if any(one[1] > other[0] for one, other in itertools.pairwise(filled)):
    raise ValueError(f"{text} selects some examples twice.")
  return ranges


def take_slices(slices: Sequence[Slice], size: int) -> np.ndarray:
  """The positions in `take_ranges`, one by one: [k] int64."""
  ranges = take_ranges(slices, size)
  return np.concatenate(
    [np.arange(*limits, dtype=np.int64) for limits in ranges]
  )


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
