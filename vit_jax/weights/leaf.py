"""A stored array before it is read: the shape first, the memory second."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Leaf(NamedTuple):
  """An array in a file.

  Attributes:
    shape: known from the file's headers.
    dtype: what `read` returns.
    read: reads the values; called at most once by those who keep memory low.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[], np.ndarray]

  def then(
    self,
    shape: tuple[int, ...],
    function: Callable[[np.ndarray], np.ndarray],
  ) -> "Leaf":
    """Returns the leaf that `function` makes of this one when it is read."""
    return Leaf(tuple(shape), self.dtype, lambda: function(self.read()))


def count_of(number: int) -> str:
  """Returns a number of leaves as text: `1 leaf`, `2 leaves`."""
  return f"{number} {'leaf' if number == 1 else 'leaves'}"


def in_memory(array: np.ndarray) -> Leaf:
  """Wraps an array that is read already."""
  array = np.asarray(array)
  return Leaf(array.shape, array.dtype, lambda: array)
