"""A plan as text for people."""

from collections.abc import Iterable

from vit_jax import plan as planning
from vit_jax.plan import sweeping


def describe(found: planning.Plan) -> str:
  """Writes a plan: memory, time, what it is spent on, and the whole run."""
  mesh = ", ".join(f"{axis} {size}" for axis, size in found.mesh.items())
  lines = [
    f"{found.topology}: {found.devices} devices, mesh {mesh}; batch "
    f"{found.batch_size:,}, {found.params / 1e6:,.1f} M parameters",
    "",
    "Memory of a device",
    _row("parameters", _gigabytes(found.params_bytes)),
    _row("optimiser and averages", _gigabytes(found.optimizer_bytes)),
  ]
  if found.temp_bytes is not None:
    lines.append(_row("activations and the like", _gigabytes(found.temp_bytes)))
  if found.peak_hbm_bytes is not None:
    lines += [
      _row("peak", _gigabytes(found.peak_hbm_bytes)),
      _row("there are", _gigabytes(found.hbm_bytes)),
      f"  {fit(found)}",
    ]
  lines += [
    "",
    "One step",
    _row("model FLOPs", f"{found.model_flops_per_step:.3e}"),
    _row("executed FLOPs", f"{found.executed_flops_per_step:.3e}"),
  ]
  if found.estimated_cycles is not None:
    lines += _step(found)
  if found.collectives is not None:
    lines += ["", "Collectives, as if nothing else ran meanwhile"]
    lines += [
      _row(
        f"{row['runs']} {row['kind']} of {row['group']}",
        f"{_gigabytes(row['bytes'])}  {1e3 * row['seconds']:7.2f} ms  "
        f"mostly {row['module']}",
      )
      for row in found.collectives
    ] or ["  none"]
  lines += ["", "The run", _row("updates", f"{found.steps:,}")]
  if found.hours is not None:
    days = sweeping.total_core_days(found)
    lines += [
      _row("hours", f"{found.hours:,.1f}"),
      _row("core-days", f"{found.core_days:,.1f}"),
      _row("with all collectives", f"at most {days:,.1f} core-days"),
    ]
  lines.append(_row("exaFLOPs", f"{found.exaflops:,.4g}"))
  if found.compile_seconds is not None:
    lines += ["", f"Compiled in {found.compile_seconds:.0f} s."]
  return "\n".join([*lines, *found.assumptions])


def _step(found):
  lines = [
    _row("estimated cycles", f"{found.estimated_cycles / 1e6:,.1f} M"),
    _row("estimated seconds", f"{found.estimated_seconds:.4f}"),
    _row("share of the peak (MFU)", f"{100 * found.mfu:.1f} %"),
    _row("images a second", f"{found.images_per_second:,.0f}"),
    "",
    "Costliest operations",
  ]
  return lines + [
    f"  {100 * row['share']:5.1f} %  {row['cycles'] / 1e6:8.2f} M  "
    f"{row['runs']:4d} x  {row['name']}"
    for row in found.top_ops
  ]


def fit(found: planning.Plan) -> str:
  """Says whether a plan fits, and by how much."""
  room = found.hbm_bytes - (found.peak_hbm_bytes or 0)
  if found.fits:
    return f"It fits, with {_gigabytes(room)} to spare."
  return f"It does not fit: {_gigabytes(-room)} too much."


def table(rows: Iterable[sweeping.Row]) -> str:
  """Writes a sweep, the cheapest first."""
  lines = [
    f"{'core-days':>10} {'at most':>10} {'MFU':>6} {'peak GB':>8}  change"
  ]
  for row in rows:
    change = sweeping.overrides(row.changes) or "as it is"
    if row.plan is None:
      lines.append(f"{'refused':>10} {change}: {row.reason.splitlines()[0]}")
      continue
    found = row.plan
    days, most = found.core_days, sweeping.total_core_days(found)
    lines.append(
      f"{_number(days):>10} {_number(most):>10} "
      f"{_number(found.mfu and 100 * found.mfu):>6} "
      f"{_number((found.peak_hbm_bytes or 0) / 1e9):>8}  {change}"
      + ("" if found.fits else "  (does not fit)")
    )
  return "\n".join(lines)


def _row(name, value):
  return f"  {name:<26} {value}"


def _gigabytes(size):
  return f"{size / 1e9:8.3f} GB"


def _number(value):
  return "-" if value is None else f"{value:,.1f}"
