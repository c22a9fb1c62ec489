"""Plans a run on TPUs that are not here.

  python -m vit_jax.plan --config=configs/vit_l16_jft.py --topology=v3:16x16

`docs/tpu.md` explains every number.
"""

import contextlib
import dataclasses
import inspect
import json
import pathlib
import sys
from collections.abc import Iterator

import jax
from absl import flags
from rich import console, progress

from vit_jax import launch
from vit_jax.plan import Plan, compiling, plan_with_program, printing, sweeping

_CONFIG = launch.config_flag()
_TOPOLOGY = flags.DEFINE_string(
  "topology", "", "v3:16x16 (chips along each side) or v3-512 (by its name)."
)
_JSON = flags.DEFINE_string("json", "", "A file for the plan, or the sweep.")
_HLO = flags.DEFINE_string("hlo", "", "A file for the optimised program.")
_EFFORT = flags.DEFINE_string(
  "effort", "default", '"default" | "low": quickly, memory only.'
)
_SWEEP = flags.DEFINE_list(
  "sweep", [], "What to compare: some of mesh, remat, batch."
)
_NUM_CLASSES = flags.DEFINE_integer("num_classes", 0, "Of data not here.")
_NUM_EXAMPLES = flags.DEFINE_integer("num_examples", 0, "Of data not here.")
_EXPLAIN = flags.DEFINE_boolean("explain", False, "Say what the numbers are.")


def command(_: list[str]) -> None:
  """Plans, prints, and writes what was asked for."""
  if _EXPLAIN.value:
    print(inspect.getdoc(Plan))
    return
  if not _TOPOLOGY.value:
    raise launch.Refused("Say on what to run: --topology=v3:16x16")
  with launch.refusal():
    (_plan_many if _SWEEP.value else _plan_one)()
  if not compiling.available():
    print(f"\n{compiling.HOW_TO_INSTALL}")


def _options():
  return {
    "num_classes": _NUM_CLASSES.value,
    "num_examples": _NUM_EXAMPLES.value,
    "effort": _EFFORT.value,
    "cache": flags.FLAGS.compilation_cache,
  }


def _plan_one():
  config = _CONFIG.value
  with _watch("Compiling") as begin:
    found, program = plan_with_program(config, _TOPOLOGY.value, **_options())
    help_for = None
    if found.fits is False:
      help_for = sweeping.remedy(
        config, _TOPOLOGY.value, begin=begin, **_options()
      )
  print(printing.describe(found))
  result = dataclasses.asdict(found)
  if help_for and help_for.plan:
    result["would_fit"] = sweeping.overrides(help_for.changes)
    print(f"\nWhat would fit: {result['would_fit']}")
    print(f"  {printing.fit(help_for.plan)}")
  elif found.fits is False:
    print(
      "\nNo recomputation, accumulation or mesh that was tried would fit; take "
      "more or larger devices."
    )
  _write(_JSON.value, json.dumps(result, indent=2) + "\n")
  _write(_HLO.value, program)


def _plan_many():
  with _watch("Comparing") as begin:
    rows = sweeping.sweep(
      _CONFIG.value, _TOPOLOGY.value, _SWEEP.value, begin=begin, **_options()
    )
  print(printing.table(rows))
  result = [
    {"changes": row.changes, "reason": row.reason}
    | (dataclasses.asdict(row.plan) if row.plan else {})
    for row in rows
  ]
  _write(_JSON.value, json.dumps(result, indent=2) + "\n")


@contextlib.contextmanager
def _watch(what: str) -> Iterator:
  """Shows that the compiler is at work, and on what; to stderr."""
  bar = progress.Progress(
    progress.SpinnerColumn(),
    progress.TextColumn("{task.description}"),
    progress.BarColumn(),
    progress.TimeElapsedColumn(),
    console=console.Console(stderr=True),
    transient=True,
  )
  terminal = sys.stderr.isatty()
  task = bar.add_task(what, total=None)
  done = -1

  def begin(name, total=None):
    nonlocal done
    done += 1
    if not terminal:
      print(f"{what}: {name}", file=sys.stderr, flush=True)
    bar.update(task, description=name, total=total, completed=done)

  if not terminal:
    print(f"{what} …", file=sys.stderr, flush=True)
    yield begin
    return
  with bar:
    yield begin


def _write(path: str, text: str) -> None:
  if path:
    pathlib.Path(path).write_text(text)


if __name__ == "__main__":
  # The devices that are here, if any, stay free for others.
  jax.config.update("jax_platforms", "cpu")
  launch.start(command)
