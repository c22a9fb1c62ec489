"""What a traced function is made of."""

import collections

import jax


def result_types(function, *args):
  """Counts (primitive, type of its result) in the traced function."""

  def walk(jaxpr):
    for eqn in jaxpr.eqns:
      yield eqn.primitive.name, str(eqn.outvars[0].aval.dtype)
      for value in eqn.params.values():
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
          yield from walk(inner)

  return collections.Counter(walk(jax.make_jaxpr(function)(*args).jaxpr))
