"""Where arrays live: the mesh, the rule table applied, and placement.

The mesh always has the axes (data, fsdp, model); an unused axis has size 1.
Which dimension of a weight goes to which axis is fixed by the table beside the
model (`PARAM_AXES`), so data parallel, FSDP, tensor parallel or a mix is only
the mesh's shape. Examples are split over data and fsdp together, the
optimiser's state also over data.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax import trees

AXES = ("data", "fsdp", "model")
Rules = Sequence[tuple[str, tuple[str | None, ...]]]

# Values from which a leaf is worth splitting in ways that the table does not
# say; smaller ones cost more in messages than they take in memory.
LARGE = 2**16

# The mesh whose activations are being traced; see `activations_on`.
_traced: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar(
  "mesh of the activations", default=None
)


def make_mesh(config: Any, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Arranges the devices as (data, fsdp, model).

  Args:
    config: `config.mesh`: devices along data, fsdp and model, and slices (dcn);
      one may be -1. Slices are joined by the slow network of the data centre,
      so they are the outermost part of the axis data, which sends least.
    devices: all of JAX's by default.

  Raises:
    ValueError: the shape does not use each device exactly once, or `dcn` is not
      the number of slices that the devices are in.
  """
  devices = jax.devices() if devices is None else devices
  names = ("dcn", *AXES) if config.dcn != 1 else AXES
  shape = {name: config[name] for name in names}
  asked = " x ".join(f"{name}={size}" for name, size in shape.items())
  known = math.prod(size for size in shape.values() if size != -1)
  free = [name for name, size in shape.items() if size == -1]
  if len(free) == 1 and known > 0 and len(devices) % known == 0:
    shape[free[0]] = len(devices) // known
  if min(shape.values()) < 1 or math.prod(shape.values()) != len(devices):
    raise ValueError(
      f"config.mesh: {asked} does not make {len(devices)} devices. Give sizes "
      f"whose product is {len(devices)}; one of them may be -1."
    )
  dcn = shape.pop("dcn", 1)
  slices = len({getattr(device, "slice_index", 0) for device in devices})
  if slices not in (1, dcn):
    raise ValueError(
      f"config.mesh.dcn = {dcn}, but the {len(devices)} devices are in "
      f"{slices} slices: set --config.mesh.dcn={slices}."
    )
  return Mesh(_arrange(tuple(shape.values()), dcn, slices, devices), AXES)


def _arrange(shape, dcn, slices, devices):
  """Lays out devices so that the mesh's neighbours are the machine's."""
  whole = (dcn * shape[0], *shape[1:])
  # `jax.make_mesh` would do this too, but gives axes of explicit sharding.
  if len(devices) == 1 or devices[0].platform != "tpu":
    return np.asarray(devices).reshape(whole)
  from jax.experimental import mesh_utils

  split = {"allow_split_physical_axes": True}  # Any shape, on any torus.
  if slices > 1:
    return mesh_utils.create_hybrid_device_mesh(
      shape, (dcn, 1, 1), devices, **split
    )
  return mesh_utils.create_device_mesh(whole, devices, **split)


@contextlib.contextmanager
def activations_on(mesh: Mesh) -> Iterator[None]:
  """Within, `by_example` keeps activations where the mesh has the examples."""
  token = _traced.set(mesh)
  try:
    yield
  finally:
    _traced.reset(token)


def by_example(x: jax.Array) -> jax.Array:
  """Keeps activations split by examples and by nothing else.

  Left to itself, the compiler may follow the split of a weight instead and send
  activations where it should gather weights. Does nothing on one device and
  outside of `activations_on`.

  Args:
    x: [n, ...].
  """
  mesh = _traced.get()
  if mesh is None or mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(x, batch_sharding(mesh))


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
    ValueError: lists the leaves whose dimension does not divide, and the sizes
      that would.
  """
  ways = mesh.shape["model"]
  bad, sizes = [], []
  for path, leaf in trees.flatten(params).items():
    if "Transformer" not in path:
      continue
    axes = trees.first_match(rules, path, ())
    for axis, size in zip(axes, leaf.shape[leaf.ndim - len(axes) :]):
      if axis == "model":
        sizes.append(size)
        if size % ways:
          bad.append(f"  {path}: {size} of {trees.describe(leaf)}")
  if bad:
    common = math.gcd(*sizes)
    legal = [str(n) for n in range(1, common + 1) if common % n == 0]
    raise ValueError(
      f"config.mesh.model = {ways} does not divide the model's heads or MLP; "
      f"it may be {', '.join(legal)}. What it does not divide:\n"
      + "\n".join(bad)
    )


def check_spread(params: Any, mesh: Mesh, rules: Rules) -> None:
  """Refuses a mesh that would leave large weights whole on every device.

  A weight that the table splits, but whose dimensions the mesh does not divide,
  would silently take its full size everywhere, and its moments as well.

  Raises:
    ValueError: lists the leaves with their sizes, and the nearest mesh that
      does split them.
  """
  whole = {}
  for path, leaf in trees.flatten(params).items():
    axes, wanted = _place(leaf, trees.first_match(rules, path, ()), mesh)
    split = any(axis and mesh.shape[axis] > 1 for axis in axes)
    if wanted and not split and leaf.size >= LARGE:
      whole[path] = (leaf, wanted)
  if whole:
    lines = [
      f"  {path}: {trees.describe(leaf)}, {_megabytes(leaf)} MB"
      for path, (leaf, _) in whole.items()
    ]
    axis = next(iter(whole.values()))[1][0]
    ways = mesh.shape[axis]
    fits = max(
      n
      for n in range(1, ways + 1)
      if ways % n == 0
      and all(any(s % n == 0 for s in leaf.shape) for leaf, _ in whole.values())
    )
    raise ValueError(
      f"config.mesh.{axis} = {ways} divides no dimension of these weights, so "
      f"each device would hold all of them:\n"
      + "\n".join(lines)
      + f"\nSet config.mesh.{axis} = {fits}, or another size that divides them."
    )


def _megabytes(leaf):
  return math.ceil(leaf.size * leaf.dtype.itemsize / 1e6)


def _place(leaf, axes, mesh):
  """Says which axis each dimension lies on, as far as sizes divide.

  Returns:
    An axis or None for each dimension; and the axes, of more than one device,
    that had no place.
  """
  stacked = leaf.ndim - len(axes)  # A dimension of layers, never split.
  axes = [None] * stacked + list(axes)
  wanted = []
  for i, axis in enumerate(axes):
    if axis and leaf.shape[i] % mesh.shape[axis]:
      axes[i] = None
      wanted.append(axis)
  # What does not divide goes to the largest dimension that is free and does.
  homeless = []
  for axis in wanted:
    free = [
      i
      for i in range(stacked, leaf.ndim)
      if leaf.size >= LARGE
      and leaf.shape[i] % mesh.shape[axis] == 0
      and (axes[i] is None or mesh.shape[axes[i]] == 1)
    ]
    if free:
      axes[max(free, key=lambda i: leaf.shape[i])] = axis
    else:
      homeless.append(axis)
  # Where an axis moved in, one of size 1 moved out; it splits nothing.
  return axes, homeless


def tree_shardings(abstract: Any, mesh: Mesh, rules: Rules) -> Any:
  """Finds the sharding of every leaf of a parameter tree.

  Args:
    abstract: leaves with `shape`; nothing is computed.
    mesh: from `make_mesh`.
    rules: `(path regex, axis name or None per dimension)`, first match wins.
      Stacked blocks have one leading dimension more, which is never split. An
      axis that does not divide its dimension goes, in a large leaf, to another
      that it does; else the dimension stays whole.

  Raises:
    ValueError: lists the leaves that no rule covers.
  """
  uncovered = []

  def place(path, leaf):
    if leaf.ndim == 0:
      return replicated(mesh)
    axes = trees.first_match(rules, path, ())
    if not axes or leaf.ndim - len(axes) not in (0, 1):
      uncovered.append(f"  {path}: {trees.describe(leaf)}")
      return None
    return NamedSharding(mesh, PartitionSpec(*_place(leaf, axes, mesh)[0]))

  shardings = trees.map_with_path(place, abstract)
  if uncovered:
    raise ValueError(
      "No sharding rule covers these leaves; add them to the model's "
      "PARAM_AXES:\n" + "\n".join(uncovered)
    )
  return shardings


def moment_shardings(abstract: Any, params: Any, shardings: Any) -> Any:
  """Finds the sharding of every leaf of an optimiser's state.

  A leaf whose path ends in a parameter's lies as `shardings` has that one, but
  for dimensions that it does not share. All others are whole.

  Args:
    abstract: the optimiser's state; leaves with `shape`.
    params: the parameters' shapes.
    shardings: where the moments of each parameter go; same tree.
  """
  known = {
    path: (leaf.shape, where)
    for (path, leaf), where in zip(
      trees.flatten(params).items(), jax.tree.leaves(shardings)
    )
  }
  whole = NamedSharding(jax.tree.leaves(shardings)[0].mesh, PartitionSpec())

  def place(path, leaf):
    parts = path.split("/")
    for i in range(len(parts)):
      shape, where = known.get("/".join(parts[i:]), ((), whole))
      if shape == leaf.shape:
        return where
      if shape and len(shape) == leaf.ndim:
        axes = list(where.spec) + [None] * (leaf.ndim - len(where.spec))
        kept = [
          axis if ours == theirs else None
          for axis, ours, theirs in zip(axes, leaf.shape, shape)
        ]
        return NamedSharding(where.mesh, PartitionSpec(*kept))
    return whole

  return trees.map_with_path(place, abstract)


def spread_over_data(abstract: Any, shardings: Any) -> Any:
  """Splits every large leaf over the data devices as well.

  Those hold copies of the parameters, but each needs only its part of what an
  update computes: gradients, moments, and the change itself (ZeRO, stage 1;
  arXiv:1910.02054).

  Args:
    abstract: leaves with `shape`.
    shardings: of the parameters; same tree.

  Returns:
    As `shardings`, where in each large leaf one dimension, the one that can be
    cut into most parts, is cut as often as the data devices allow.
  """
  return jax.tree.map(
    lambda leaf, where: _spread(leaf.shape, where), abstract, shardings
  )


def _spread(shape, where):
  mesh = where.mesh
  data = mesh.shape["data"]
  axes = list(where.spec) + [None] * (len(shape) - len(where.spec))
  parts = [
    math.gcd(size // (mesh.shape[axis] if axis else 1), data)
    for size, axis in zip(shape, axes)
  ]
  if math.prod(shape) < LARGE or max(parts) == 1:
    return where
  i = max(range(len(shape)), key=lambda i: (parts[i], shape[i]))
  ours = "data"
  if parts[i] < data:
    # A dimension of 1280 can be cut for 256 of 512 devices. The other factor of
    # the axis, which holds copies, gets a name of its own: same devices.
    ours = "data_parts"
    inner = (data // parts[i], parts[i], *mesh.devices.shape[1:])
    mesh = Mesh(mesh.devices.reshape(inner), ("data_copies", ours, *AXES[1:]))
  axes[i] = (axes[i], ours) if axes[i] else ours
  return NamedSharding(mesh, PartitionSpec(*axes))


def place(arrays: Any, shardings: Any) -> Any:
  """Puts arrays that every process has onto the devices, each its part.

  Args:
    arrays: a tree of numpy arrays.
    shardings: of each; same tree.
  """
  return jax.tree.map(
    lambda array, where: jax.make_array_from_callback(
      array.shape, where, lambda index: array[index]
    ),
    arrays,
    shardings,
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
