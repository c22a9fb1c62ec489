"""Where arrays live: the mesh, the rule table applied, and placement.

The mesh always has the axes (data, fsdp, model); an unused axis has size 1.
Which dimension of a weight goes to which axis is fixed by the table beside the
model (`PARAM_AXES`), so data parallel, FSDP, tensor parallel or a mix is only
the mesh's shape. Examples are split over data and fsdp together.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax import trees

AXES = ("data", "fsdp", "model")
Rules = Sequence[tuple[str, tuple[str | None, ...]]]


def make_mesh(config: Any, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Arranges the devices as (data, fsdp, model).

  Args:
    config: `config.mesh`: devices along data, fsdp, model; one may be -1.
    devices: all of JAX's by default.

  Raises:
    ValueError: the shape does not use each device exactly once.
  """
  devices = jax.devices() if devices is None else devices
  shape = [config.data, config.fsdp, config.model]
  asked = " x ".join(f"{axis}={size}" for axis, size in zip(AXES, shape))
  known = math.prod(size for size in shape if size != -1)
  if shape.count(-1) == 1 and known > 0 and len(devices) % known == 0:
    shape[shape.index(-1)] = len(devices) // known
  if min(shape) < 1 or math.prod(shape) != len(devices):
    raise ValueError(
      f"config.mesh: {asked} does not make {len(devices)} devices. Give sizes "
      f"whose product is {len(devices)}; one of them may be -1."
    )
  # `jax.make_mesh` would follow the torus, but gives axes of explicit sharding.
  if len(devices) > 1 and devices[0].platform == "tpu":
    from jax.experimental import mesh_utils

    return Mesh(mesh_utils.create_device_mesh(shape, devices), AXES)
  return Mesh(np.asarray(devices).reshape(shape), AXES)


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of an array that every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of a batch: its first axis over data and fsdp."""
  return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def batch_devices(mesh: Mesh) -> int:
  """Returns the number of parts into which a global batch is split."""
  return mesh.shape["data"] * mesh.shape["fsdp"]


def check_batch_size(size: int, mesh: Mesh, accumulate: int) -> None:
  """Refuses a global batch that does not divide over devices and parts.

  Raises:
    ValueError: names the batch, the devices and the nearest legal sizes.
  """
  parts = batch_devices(mesh) * accumulate
  if accumulate < 1:
    raise ValueError(f"config.accumulate = {accumulate}; use 1 or more.")
  if size < 1 or size % parts:
    lower, upper = size // parts * parts, (size // parts + 1) * parts
    legal = f"{lower} or {upper}" if lower > 0 else str(upper)
    raise ValueError(
      f"config.input.batch_size = {size} does not divide by {parts}: "
      f"{batch_devices(mesh)} data devices (data x fsdp) times "
      f"config.accumulate = {accumulate}. Use {legal}."
    )


def check_model(params: Any, mesh: Mesh, rules: Rules) -> None:
  """Refuses a model whose heads or MLP the `model` axis cannot cut.

  Raises:
    ValueError: lists the leaves whose dimension does not divide.
  """
  ways = mesh.shape["model"]
  bad = []
  for path, leaf in trees.flatten(params).items():
    axes = trees.first_match(rules, path, ())
    for axis, size in zip(axes, leaf.shape[leaf.ndim - len(axes) :]):
      if axis == "model" and size % ways and "Transformer" in path:
        bad.append(f"  {path}: {size} of {trees.describe(leaf)}")
  if bad:
    raise ValueError(
      f"config.mesh.model = {ways} does not divide the model's heads or MLP:\n"
      + "\n".join(bad)
    )


def tree_shardings(abstract: Any, mesh: Mesh, rules: Rules) -> Any:
  """Finds the sharding of every leaf of a state or parameter tree.

  Args:
    abstract: leaves with `shape`; nothing is computed. Optimiser moments and
      averaged weights end in their parameter's path, so its rule serves them.
    mesh: from `make_mesh`.
    rules: `(path regex, axis name or None per dimension)`, first match wins.
      Stacked blocks have one leading dimension more, which is never split. A
      dimension that does not divide by its axis stays whole.

  Raises:
    ValueError: lists the leaves that no rule covers.
  """
  uncovered = []

  def place(path, leaf):
    if leaf.ndim == 0:
      return replicated(mesh)
    axes = trees.first_match(rules, path, ())
    if leaf.ndim == len(axes) + 1 and axes:
      axes = (None, *axes)
    if leaf.ndim != len(axes):
      uncovered.append(f"  {path}: {trees.describe(leaf)}")
      return None
    axes = [
      axis if axis and size % mesh.shape[axis] == 0 else None
      for axis, size in zip(axes, leaf.shape)
    ]
    return NamedSharding(mesh, PartitionSpec(*axes))

  shardings = trees.map_with_path(place, abstract)
  if uncovered:
    raise ValueError(
      "No sharding rule covers these leaves; add them to the model's "
      "PARAM_AXES:\n" + "\n".join(uncovered)
    )
  return shardings


def place(array: np.ndarray, where: NamedSharding) -> jax.Array:
  """Puts an array that every process has onto the devices, each its part."""
  return jax.make_array_from_callback(
    array.shape, where, lambda index: array[index]
  )


def to_device(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
  """Assembles the global batch from each process's share, split over devices.

  Args:
    batch: this process's rows, name -> [n / processes, ...].
    mesh: from `make_mesh`.

  Returns:
    name -> [n, ...] on the devices. Record ids stay on the host.
  """
  sharding = batch_sharding(mesh)
  return {
    name: jax.make_array_from_process_local_data(sharding, rows)
    for name, rows in batch.items()
    if name != "id"
  }
