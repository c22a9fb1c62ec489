"""The TPUs that can be planned for, and what their names mean.

Figures are those that Google publishes (cloud.google.com/tpu/docs); the matrix
unit's operations per cycle and the clock make up the published peak. A device
is what JAX calls one: a core of v2, v3 and TPU7x, a chip of the others.
"""

import math
import re
from typing import NamedTuple

from vit_jax import trees


class Chip(NamedTuple):
  """One kind of TPU, in terms of a JAX device.

  Attributes:
    name: "v3".
    devices: of one chip.
    cores: of one device; core-days count these.
    hbm_gib: memory of one device, without what the system keeps: what the
      compiler says it has (2**30 bytes).
    flops_per_cycle: of the matrix units, in bfloat16.
    clock: cycles a second.
    hbm_bandwidth: bytes a second.
    ici_bandwidth: bytes a second that all links of a device send, one way.
    dimensions: of the torus.
    chips_per_host: how many chips one machine has.
  """

  name: str
  devices: int
  cores: int
  hbm_gib: float
  flops_per_cycle: int
  clock: float
  hbm_bandwidth: float
  ici_bandwidth: float
  dimensions: int
  chips_per_host: int

  @property
  def hbm_bytes(self) -> int:
    """Bytes of one device that a program may use."""
    return int(self.hbm_gib * 2**30)

  @property
  def peak_flops(self) -> float:
    """Operations a second of a device's matrix units, in bfloat16."""
    return self.flops_per_cycle * self.clock


class Topology(NamedTuple):
  """TPUs joined by one fast network, or several such slices.

  Attributes:
    chip: the kind.
    sides: chips along each dimension of the torus.
    slices: how many of these.
  """

  chip: Chip
  sides: tuple[int, ...]
  slices: int = 1

  @property
  def name(self) -> str:
    """As a compiler knows one slice: "v3:16x16"."""
    return f"{self.chip.name}:{'x'.join(map(str, self.sides))}"

  @property
  def devices(self) -> int:
    """JAX devices in all slices."""
    return self.slices * math.prod(self.sides) * self.chip.devices


_MXU = 2 * 128 * 128  # Operations per cycle of one matrix unit up to v5p.

CHIPS = {
  chip.name: chip
  for chip in (
    Chip("v2", 2, 1, 7.48, _MXU, 0.70e9, 350e9, 124e9, 2, 4),
    Chip("v3", 2, 1, 15.48, 2 * _MXU, 0.94e9, 450e9, 164e9, 2, 4),
    Chip("v4", 1, 2, 30.75, 8 * _MXU, 1.05e9, 1228e9, 300e9, 3, 4),
    Chip("v5e", 1, 1, 15.75, 4 * _MXU, 1.50e9, 819e9, 200e9, 2, 4),
    Chip("v5p", 1, 2, 95.74, 8 * _MXU, 1.75e9, 2765e9, 600e9, 3, 4),
    Chip("v6e", 1, 1, 31.25, 16 * _MXU, 1.75e9, 1640e9, 400e9, 2, 4),
    Chip("tpu7x", 2, 1, 94.75, 16 * _MXU, 2.20e9, 3690e9, 300e9, 3, 4),
  )
}
# Names by the number of cores or chips, as one orders them: v3-512 has 512
# cores, v5e-256 has 256 chips.
_BY_CORES = ("v2", "v3", "v4", "v5p")
_ALIASES = {
  "v5litepod": "v5e",
  "v5lite": "v5e",
  "v7x": "tpu7x",
  "ironwood": "tpu7x",
}


def parse(text: str) -> Topology:
  """Reads a topology: "v3:16x16", "v3-512", "2*v5e:16x16" for two slices.

  Raises:
    ValueError: unknown TPU, or a shape or number that it does not come in.
  """
  match = re.fullmatch(
    r"(?:(\d+)\*)?([a-z]\w*?)(?::(\d+(?:x\d+)+)|-(\d+))", text.strip().lower()
  )
  if not match:
    raise ValueError(
      f"--topology={text!r}: write chips along each side, 'v3:16x16', or the "
      "name it is ordered by, 'v3-512'; '2*v5e:16x16' are two slices. There "
      f"are {', '.join(CHIPS)}."
    )
  slices, name, shape, number = match.groups()
  name = _ALIASES.get(name, name)
  trees.check_choice("--topology=", name, CHIPS)
  chip = CHIPS[name]
  if shape:
    sides = tuple(map(int, shape.split("x")))
  else:
    cores = chip.devices * chip.cores if name in _BY_CORES else 1
    sides = _sides(int(number), cores, chip, text)
  if len(sides) != chip.dimensions or min(sides) < 1:
    example = "x".join(["4"] * chip.dimensions)
    raise ValueError(
      f"--topology={text!r}: {name} is a torus of {chip.dimensions} "
      f"dimensions, for example {name}:{example}."
    )
  return Topology(chip, sides, int(slices or 1))


def _sides(number, cores, chip, text):
  """Finds the most compact torus of so many cores."""
  chips, rest = divmod(number, cores)
  # Sides are powers of two, the last ones the longest.
  power = chips.bit_length() - 1
  if rest or chips != 2**power or power < 0:
    near = [2 ** max(0, power) * cores, 2 ** (max(0, power) + 1) * cores]
    raise ValueError(
      f"--topology={text!r}: there is no such size; the nearest are "
      f"{chip.name}-{near[0]} and {chip.name}-{near[1]}, or give the sides."
    )
  count = chip.dimensions
  shares = [(power + i) // count for i in range(count)]
  return tuple(2**share for share in shares)
