"""What this package says when it refuses: bad data, and near misses."""

import difflib
from collections.abc import Iterable


class DataError(ValueError):
  """A record that cannot be read or decoded; names the file and the reason."""


class AbsentError(ValueError):
  """Data that does not lie where it was looked for; names the places."""


def suggest(word: str, allowed: Iterable[str], intro: str = "Allowed") -> str:
  """Ends an error message: what is allowed, and the nearest match if any.

  Args:
    word: what came.
    allowed: what may come.
    intro: what to call that list.

  Returns:
    `"Allowed: a, b; did you mean 'a'?"`.
  """
  allowed = sorted(allowed)
  near = difflib.get_close_matches(word, allowed, n=1, cutoff=0.5)
  hint = f"; did you mean {near[0]!r}?" if near else "."
  return f"{intro}: {', '.join(allowed) or 'nothing'}{hint}"
