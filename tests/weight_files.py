"""Tiny models and the files of their weights, for the tests that read them."""

import functools
import io
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import models, trees
from vit_jax.weights import fitting

GOLDEN = pathlib.Path(__file__).parent / "golden"
TOKEN = GOLDEN / "published_token.npz"
BLOCK = "Transformer/encoderblock_0/"
POSITIONS = "Transformer/posembed_input/pos_embedding"


_WANTED = functools.cache(fitting._wanted)


@pytest.fixture(autouse=True)
def traced_once(monkeypatch):
  """Traces a model at a size once, for all files that are fitted to it."""
  monkeypatch.setattr(fitting, "_wanted", _WANTED)


def golden_model(**fields):
  """The model of the golden files: patch 8, width 32, 2 blocks, 7 classes."""
  defaults = dict(num_classes=7, depth=2, num_heads=4, mlp_dim=64)
  return models.create("mu/8", **{**defaults, **fields})


def tiny(**fields):
  """A smaller one: patch 4, width 8, one block, 3 classes."""
  defaults = dict(num_classes=3, width=8, num_heads=2, mlp_dim=16)
  return models.create("mu/4", **{**defaults, **fields})


@functools.cache
def shapes(model, size):
  height, width = (size, size) if isinstance(size, int) else size
  images = jax.ShapeDtypeStruct((1, height, width, 3), jnp.float32)
  return jax.eval_shape(model.init, jax.random.key(0), images)["params"]


def initial(model, size, key, part):
  """The part of its parameters that the model itself starts with."""
  images = jnp.zeros((1, size, size, 3))
  return jax.jit(lambda key: model.init(key, images)["params"][part])(key)


def random_params(model, size, seed=0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda leaf: rng.normal(size=leaf.shape).astype(np.float32),
    shapes(model, size),
  )


def flat(params):
  return trees.flatten(params)


def npz(path, leaves, rename=lambda name: name):
  """Writes leaves by NumPy itself; returns the path as text."""
  np.savez(path, **{rename(name): leaf for name, leaf in leaves.items()})
  return str(path)


def npz_bytes(leaves):
  buffer = io.BytesIO()
  np.savez(buffer, **leaves)
  return buffer.getvalue()


def assert_same(one, other):
  """Equal names and bits."""
  one, other = flat(one), flat(other)
  assert one.keys() == other.keys()
  for name, leaf in one.items():
    np.testing.assert_array_equal(leaf, other[name], err_msg=name)
