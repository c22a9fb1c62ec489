"""The TPU's compiler, on a machine without a TPU.

`pip install 'jax[tpu]'` brings libtpu, which compiles for any TPU when it is
told which. Nothing here asks what JAX's default backend is, and nothing of
libtpu is loaded before it is needed. Results are kept: the same program for the
same TPUs is compiled once.
"""

import contextlib
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from vit_jax.plan.chips import Topology

# For the compiler alone: ask no metadata server which TPU this is, let other
# programs use libtpu as well, and do not warn of the TPU that is not there.
_ENVIRONMENT = {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  "TPU_MIN_LOG_LEVEL": "3",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_STDERR_LOG_LEVEL": "3",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_WORKER_ID": "0",
}

# How hard the compiler tries. Its estimates of cycles mean something only at
# its default; less effort is for memory and shapes.
EFFORTS = {"default": 0.0, "low": -1.0}

HOW_TO_INSTALL = (
  "The TPU compiler is not installed (it needs no TPU): pip install "
  f"'jax[tpu]=={jax.__version__}'. Without it there are no memory, cycles and "
  "collectives."
)


class Compiled(NamedTuple):
  """What the compiler made of a step; bytes are of one device.

  Attributes:
    hlo: the optimised program's text; "" if it does not fit.
    arguments: bytes of the state and the batch.
    temporaries: bytes of all that lives only within a step.
    peak: the most bytes in use; where it does not fit, as much as would be.
    fits: whether the compiler could place everything.
    seconds: it took to compile, when it was.
  """

  hlo: str
  arguments: int
  temporaries: int
  peak: int
  fits: bool
  seconds: float


def available() -> bool:
  """Whether libtpu is installed."""
  return importlib.util.find_spec("libtpu") is not None


def devices(topology: Topology) -> Sequence[jax.Device]:
  """Returns the devices of TPUs that are not here, to compile for.

  Raises:
    ValueError: libtpu is not installed, or knows no such topology.
  """
  if not available():
    raise ValueError(HOW_TO_INSTALL)
  for name, value in _ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  from jax.experimental import topologies

  options: dict[str, Any] = {"num_slices": topology.slices}
  if topology.chip.name == "v4":  # One device for both cores of a chip.
    options["chip_config_name"] = "megacore"
  try:
    found = topologies.get_topology_desc(
      topology_name=topology.name, platform="tpu", **options
    ).devices
  except Exception as error:  # It raises whatever libtpu's status says.
    raise ValueError(
      f"The TPU compiler knows no {topology.name}: {error}"
    ) from error
  if len(found) != topology.devices:
    raise ValueError(
      f"{topology.name} should have {topology.devices} devices, but the "
      f"compiler has {len(found)}."
    )
  return found


def compile_step(
  lowered: jax.stages.Lowered, topology: Topology, *, effort: str, cache: str
) -> Compiled:
  """Compiles a step, or finds what compiling it gave before.

  Args:
    lowered: for `devices(topology)`.
    topology: which TPUs.
    effort: a key of `EFFORTS`.
    cache: folder where results are kept; "" keeps none.
  """
  path = pathlib.Path(cache) / "plans" / f"{_key(lowered, topology, effort)}.gz"
  if cache and path.exists():
    return Compiled(*json.loads(gzip.decompress(path.read_bytes())))
  compiled = _compile(lowered, effort)
  if cache:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(gzip.compress(json.dumps(compiled).encode(), 3))
    temporary.replace(path)
  return compiled


def _key(lowered, topology, effort):
  """All that the result depends on."""
  parts = [
    lowered.as_text(),
    topology.name,
    str(topology.slices),
    effort,
    os.environ.get("XLA_FLAGS", ""),
    os.environ.get("LIBTPU_INIT_ARGS", ""),
    *(importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")),
  ]
  return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _compile(lowered, effort):
  began = time.perf_counter()
  settings = {
    "jax_exec_time_optimization_effort": EFFORTS[effort],
    # JAX's own cache would keep the program, which cannot run here.
    "jax_enable_compilation_cache": False,
  }
  try:
    with _set(settings):
      compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    needed = out_of_memory(str(error))
    if needed is None:
      raise
    return Compiled("", 0, 0, needed, False, time.perf_counter() - began)
  memory = compiled.memory_analysis()
  held = (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
  )
  return Compiled(
    hlo=compiled.as_text(),
    arguments=memory.argument_size_in_bytes,
    temporaries=memory.temp_size_in_bytes,
    peak=held + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
    fits=True,
    seconds=time.perf_counter() - began,
  )


@contextlib.contextmanager
def _set(settings):
  previous = {name: getattr(jax.config, name) for name in settings}
  try:
    for name, value in settings.items():
      jax.config.update(name, value)
    yield
  finally:
    for name, value in previous.items():
      jax.config.update(name, value)


def out_of_memory(message: str) -> int | None:
  """Reads from the compiler's message how many bytes the step would need.

  Returns:
    None if the message is about something else.
  """
  if "RESOURCE_EXHAUSTED" not in message:
    return None
  found = re.search(r"\(([\d.]+)([KMGT])\) exceeds", message) or re.search(
    r"Used ([\d.]+)([KMGT]) of", message
  )
  if not found:
    return 0
  return int(float(found[1]) * 1024 ** ("KMGT".index(found[2]) + 1))
