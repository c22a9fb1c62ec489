"""Plans beside each other: which mesh, which memory, which batch.

A sweep compares a handful of configs; a remedy looks for the smallest change
that makes a config fit.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from vit_jax import models, trees
from vit_jax import plan as planning
from vit_jax.plan import chips

KINDS = ("mesh", "remat", "batch")
Changes = dict[str, Any]


class Row(NamedTuple):
  """One config of a sweep.

  Attributes:
    changes: what differs from the config that was given: key -> value.
    plan: None where the config was refused.
    reason: why it was.
  """

  changes: Changes
  plan: planning.Plan | None
  reason: str = ""


def sweep(
  config: Any,
  topology: str,
  kinds: list[str],
  *,
  begin: Callable[[str, int], None] = lambda what, of: None,
  **options: Any,
) -> list[Row]:
  """Plans all combinations, and sorts them by what the run would cost.

  Args:
    config: where to start from.
    topology: as in `plan`.
    kinds: of `KINDS`.
    begin: told what is planned next, and the number of all plans.
    **options: of `plan`.

  Returns:
    Those that fit by core-days, collectives included as if nothing else ran
    meanwhile; then those that do not fit, and those that were refused.

  Raises:
    ValueError: an unknown kind.
  """
  for kind in kinds:
    trees.check_choice("--sweep=", kind, KINDS)
  choices = [_choices(kind, config, chips.parse(topology)) for kind in kinds]
  combinations = list(itertools.product(*choices))
  rows = []
  for combination in combinations:
    changes = {
      key: value for part in combination for key, value in part.items()
    }
    begin(overrides(changes) or "as it is", len(combinations))
    try:
      found = planning.plan(changed(config, changes), topology, **options)
    except ValueError as error:
      rows.append(Row(changes, None, str(error)))
      continue
    rows.append(Row(changes, found))
  return sorted(rows, key=_cost)


def _cost(row):
  if row.plan is None:
    return 2, 0.0
  cost = total_core_days(row.plan)
  if cost is None:
    return int(not row.plan.fits), float(row.plan.peak_hbm_bytes or 0)
  return int(not row.plan.fits), cost


def total_core_days(found: planning.Plan) -> float | None:
  """Core-days with collectives that wait for nothing else and hide nowhere."""
  if found.core_days is None or found.estimated_seconds is None:
    return None
  waiting = (found.collective_seconds or 0) / found.estimated_seconds
  return found.core_days * (1 + waiting)


def _choices(kind, config, topology):
  """What a sweep tries of one kind: a handful."""
  if kind == "remat":
    values = ["none", *_some_blocks(config), "dots", "full"]
    return [{"model.remat": value} for value in values]
  if kind == "batch":
    size = config.input.batch_size
    return [{"input.batch_size": n} for n in (size // 2, size, 2 * size)]
  whole = {"mesh.data": -1, "mesh.fsdp": 1, "mesh.model": 1}
  fsdp = [n for n in (8, 32) if topology.devices % n == 0]
  model = [n for n in (2,) if topology.devices % n == 0]
  return [
    whole,
    *(whole | {"mesh.fsdp": n} for n in fsdp),
    *(whole | {"mesh.model": n} for n in model),
  ]


def _some_blocks(config):
  """Ways to recompute a quarter or half of the blocks, if not scanned."""
  depth = getattr(models.from_config(config.model, 1), "depth", 0)
  parts = sorted({depth // 4, depth // 2} - {0})
  return [] if config.model.scan else [f"full:{count}" for count in parts]


def remedy(
  config: Any,
  topology: str,
  *,
  begin: Callable[[str], None] = lambda what: None,
  **options: Any,
) -> Row | None:
  """Finds a change that makes a config fit, tried from small to large.

  Each is compiled, at low effort, so what is named does fit.

  Args:
    config: one that does not fit.
    topology: as in `plan`.
    begin: told what is tried next.
    **options: of `plan`.

  Returns:
    The first that fits; None if none does.
  """
  options["effort"] = "low"
  for changes in _remedies(config, chips.parse(topology)):
    begin(overrides(changes))
    try:
      found = planning.plan(changed(config, changes), topology, **options)
    except ValueError:
      continue
    if found.fits:
      return Row(changes, found)
  return None


def _remedies(config, topology) -> Iterator[Changes]:
  """Changes that save memory: the first cost least, the last save most."""
  frugal: Changes = {}
  if not config.optim.zero:
    frugal["optim.zero"] = True
    yield dict(frugal)
  if config.model.remat == "none":
    for some in _some_blocks(config):
      yield frugal | {"model.remat": some}
  if config.model.remat != "full":
    frugal["model.remat"] = "full"
    yield dict(frugal)
  if not config.model.scan and "x" not in config.model.name:
    frugal["model.scan"] = True  # A loop may keep more than it needs.
    yield dict(frugal)
  parts = config.accumulate
  for more in (4, 16):
    yield frugal | {"accumulate": more * parts}
  for ways in (4, 16, 64, 256):
    if topology.devices % (ways * config.mesh.model) == 0:
      split = {"mesh.data": -1, "mesh.fsdp": ways}
      yield frugal | split
      yield frugal | split | {"accumulate": 4 * parts}


def changed(config: Any, changes: Changes) -> Any:
  """Returns a copy of a config with `changes`, by dotted keys."""
  config = copy.deepcopy(config)
  config.update_from_flattened_dict(changes)
  return config


def overrides(changes: Changes) -> str:
  """Writes changes as the flags that make them."""
  return " ".join(f"--config.{key}={value}" for key, value in changes.items())
