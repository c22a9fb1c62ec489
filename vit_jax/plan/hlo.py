"""What the text of a compiled program says: cycles, and what devices send.

The TPU compiler writes into its optimised HLO how many cycles it expects each
operation to take. Their sum over the program, with the body of a loop as often
as it runs, is its own estimate of a step. Collectives are not in that sum.
"""

import collections
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_BYTES = {
  "pred": 1,
  "s4": 1, "u4": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4,
  "s64": 8, "u64": 8,
  "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8,
  "c64": 8, "c128": 16,
}  # fmt: skip

KINDS = (
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)


class Operation(NamedTuple):
  """An operation that the compiler has estimated.

  Attributes:
    name: the module it comes from, "backward …/MlpBlock_3/Dense_0/dot_general".
    cycles: of all its runs in one step.
    runs: how often it runs in one step.
  """

  name: str
  cycles: int
  runs: int


class Collective(NamedTuple):
  """One kind of communication in one step.

  Attributes:
    kind: one of `KINDS`.
    group: devices that take part in each; 0 where each sends to one other.
    runs: how often in a step.
    bytes: of the whole arrays, over all runs, on one device.
    module: where most of the bytes come from.
  """

  kind: str
  group: int
  runs: int
  bytes: int
  module: str


class Program(NamedTuple):
  """An optimised HLO module, cut into computations.

  Attributes:
    computations: name -> its instructions, a line each.
    entry: the one where the program starts.
  """

  computations: dict[str, list[str]]
  entry: str


def parse(text: str) -> Program:
  """Cuts the text of a module into its computations.

  Raises:
    ValueError: there is no entry computation.
  """
  computations: dict[str, list[str]] = {}
  entry, lines = "", None
  for line in text.splitlines():
    head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
    if head and not line.startswith(" "):
      lines = computations.setdefault(head[2], [])
      entry = head[2] if head[1] else entry
    elif line.startswith("}"):
      lines = None
    elif lines is not None:
      lines.append(line)
  if not entry:
    raise ValueError("The HLO text has no ENTRY computation.")
  return Program(computations, entry)


def walk(program: Program) -> Iterator[tuple[str, str, int]]:
  """Yields each instruction that runs: line, computation, runs in a step."""
  yield from _walk(program, program.entry, 1)


def _walk(program, name, runs):
  for line in program.computations.get(name, ()):
    yield line, name, runs
    loop = re.search(
      r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)", line
    )
    if loop:
      times = trip_count(program, line, loop[1])
      yield from _walk(program, loop[2], runs * times)
    called = re.search(
      r" (?:call|async-start)\(.*(?:to_apply|calls)=%?([\w.\-]+)", line
    )
    if called:
      yield from _walk(program, called[1], runs)
    branches = re.search(
      r" conditional\(.*branch_computations=\{([^}]*)\}", line
    )
    if branches:
      names = [part.strip().lstrip("%") for part in branches[1].split(",")]
      dearest = max(names, key=lambda branch: _cycles(program, branch))
      yield from _walk(program, dearest, runs)


def _cycles(program, name):
  return sum(
    runs * int(found[1])
    for line, _, runs in _walk(program, name, 1)
    if (found := _ESTIMATE.search(line))
  )


_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')


def trip_count(program: Program, line: str, condition: str) -> int:
  """Says how often a loop runs: as noted, or as its condition compares."""
  noted = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
  if noted:
    return int(noted[1])
  limits = [
    int(value)
    for inside in program.computations.get(condition, ())
    for value in re.findall(r" s32\[\][^ ]* constant\((\d+)\)", inside)
  ]
  return max(limits, default=1)


def cycles(program: Program) -> int:
  """Sums the compiler's estimates over one step."""
  return _cycles(program, program.entry)


def costliest(program: Program, number: int) -> list[Operation]:
  """Returns the operations with the most cycles; all blocks count as one."""
  total: collections.Counter[str] = collections.Counter()
  times: collections.Counter[str] = collections.Counter()
  for line, _, runs in walk(program):
    found = _ESTIMATE.search(line)
    if found:
      name = module(line)
      total[name] += runs * int(found[1])
      times[name] += runs
  return [
    Operation(name, value, times[name])
    for name, value in total.most_common(number)
  ]


def module(line: str) -> str:
  """Names the model's part that an instruction comes from, and the pass."""
  noted = re.search(r'op_name="([^"]*)"', line)
  if not noted:
    own = re.match(r"\s*(?:ROOT )?%?([A-Za-z_\-]+)", line)
    return f"({own[1].strip('_-')})" if own else "(unnamed)"
  path = noted[1]
  which = "forward"
  if "rematted_computation" in path:
    which = "again"
  elif "transpose(" in path:
    which = "backward"
  elif "jvp(" not in path:
    which = "update"
  parts = []
  for part in path.split("/"):
    part = re.sub(r"^(?:\w+\()+([\w.]*)\)+$", r"\1", part)
    if part in (
      "",
      "step",
      "checkpoint",
      "rematted_computation",
      "while",
      "body",
    ):
      continue
    if part == "closed_call" or "." in part:  # Methods that are no modules.
      continue
    parts.append(re.sub(r"^encoderblock_\d+$", "encoderblock", part))
  return f"{which} {'/'.join(dict.fromkeys(parts))}"


def collectives(program: Program) -> list[Collective]:
  """Returns what the devices send each other in one step, largest first."""
  found: dict[tuple[str, int], dict[str, int]] = {}
  count: collections.Counter[tuple[str, int]] = collections.Counter()
  seen = set()
  for line, computation, runs in _with_fusions(program):
    match = re.search(rf" ({'|'.join(KINDS)})(?:-start)?\(", line)
    if not match:
      continue
    # One that runs beside arithmetic is written once for each of its phases.
    channel = re.search(r" channel_id=(\d+)", line)
    if channel and channel[1] in seen:
      continue
    if channel:
      seen.add(channel[1])
    kind = match[1]
    # The TPU's reduce-scatter is an all-reduce, and a slice fused to it.
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
      kind = "reduce-scatter"
    size = _result_bytes(line, match)
    group = _group_size(line)
    if match[1] == "reduce-scatter":
      size *= group
    if group != 1:  # Alone, a device sends nothing.
      key = (kind, group)
      modules = found.setdefault(key, collections.Counter())
      modules[module(line)] += size * runs
      count[key] += runs
  rows = [
    Collective(
      kind,
      group,
      count[kind, group],
      sum(modules.values()),
      max(modules, key=lambda name: modules[name]),
    )
    for (kind, group), modules in found.items()
  ]
  return sorted(rows, key=lambda row: -row.bytes)


def _with_fusions(program):
  """As `walk`, and inside of the fusions that run."""
  for line, name, runs in walk(program):
    yield line, name, runs
    fused = re.search(r" fusion\(.*calls=%?([\w.\-]+)", line)
    if fused:
      for inside in program.computations.get(fused[1], ()):
        yield inside, fused[1], runs


def _result_bytes(line, match):
  """The size of a collective's result; of a started one, of its last part."""
  shapes = re.findall(r"(\w+)\[([\d,]*)\]", line[: match.start()])
  sizes = [
    _BYTES.get(kind, 0) * math.prod(int(n) for n in sides.split(",") if n)
    for kind, sides in shapes
  ]
  if f"{match[1]}-start(" in line and len(sizes) > 1:
    # (operand, result, …): and for several arrays, (operands, results).
    sizes = [size for size in sizes if size > 8]
    return (
      sum(sizes) // 2 if match[1] != "all-gather" else max(sizes, default=0)
    )
  return sum(sizes)


def _group_size(line):
  """How many devices take part in one collective; 0 if that is not written."""
  named = re.search(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(.*?\))? \{([^}]*)\}",
    line,
  )
  if named:
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
    axes = re.findall(r"'(\w+)'", named[2])
    return math.prod(int(sizes[axis]) for axis in axes)
  iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line)
  if iota:
    return int(iota[2])
  listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
  return len(listed[1].split(",")) if listed else 0
