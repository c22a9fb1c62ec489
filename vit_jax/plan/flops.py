"""How many floating-point operations a function takes, from its trace.

Only matrix products and convolutions are counted, a multiplication and an
addition each: all else is a few per cent, and papers do not count it either.
"""

import math
from collections.abc import Callable
from typing import Any

import jax


def count(function: Callable, *args: Any) -> int:
  """Counts the operations of `function(*args)`; nothing is computed.

  Args:
    function: traceable.
    *args: arrays or shapes.
  """
  return count_jaxpr(jax.make_jaxpr(function)(*args).jaxpr)


def count_jaxpr(jaxpr: Any) -> int:
  """Counts the operations of a trace; loops count as often as they run."""
  total = 0
  for eqn in jaxpr.eqns:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
      total += _dot(eqn)
    elif name == "conv_general_dilated":
      total += _conv(eqn)
    elif name == "cond":  # As if the dearest branch were taken.
      total += max(count_jaxpr(branch.jaxpr) for branch in params["branches"])
    else:
      times = params["length"] if name == "scan" else 1
      total += times * sum(map(count_jaxpr, _inner(params)))
  return total


def _inner(params):
  """The traces inside of an operation."""
  found = []
  for key, value in params.items():
    # What a derivative would be is not computed here.
    if key in ("fwd_jaxpr_thunk", "jvp_jaxpr_fun", "bwd"):
      continue
    for item in value if isinstance(value, (tuple, list)) else (value,):
      if hasattr(item, "eqns"):
        found.append(item)
      elif hasattr(getattr(item, "jaxpr", None), "eqns"):
        found.append(item.jaxpr)
  return found


def _dot(eqn):
  (contract, _), _ = eqn.params["dimension_numbers"]
  left = eqn.invars[0].aval.shape
  length = math.prod(left[i] for i in contract)
  return 2 * math.prod(eqn.outvars[0].aval.shape) * length


def _conv(eqn):
  kernel = eqn.invars[1].aval.shape
  out = eqn.params["dimension_numbers"].rhs_spec[0]
  taps = math.prod(kernel) // kernel[out]  # Products for one output value.
  # A strided convolution's gradient spreads its input with zeros, which the
  # compiler does not multiply by.
  zeros = math.prod(eqn.params["lhs_dilation"])
  groups = eqn.params["batch_group_count"]
  return 2 * math.prod(eqn.outvars[0].aval.shape) * taps // (zeros * groups)
