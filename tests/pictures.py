"""Pictures for the tests of the ops, and how to run one."""

import io
import pathlib

import numpy as np
import tensorflow as tf
from PIL import Image

from input_pipeline import parse_ops

AWKWARD = pathlib.Path(__file__).parent / "data" / "awkward"


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
  """Noise, uint8 [height, width, 3]."""
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, (height, width, 3)).astype(np.uint8)


def scene(height: int, width: int, blob: int = 24) -> np.ndarray:
  """Strong coloured blobs of about `blob` pixels; no finer detail."""
  coarse = Image.fromarray(picture(height // blob + 2, width // blob + 2))
  return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))


def encode(image: Image.Image | np.ndarray, kind: str = "PNG", **options):
  """The bytes of a file."""
  if isinstance(image, np.ndarray):
    image = Image.fromarray(image)
  buffer = io.BytesIO()
  image.save(buffer, kind, **options)
  return buffer.getvalue()


def run(ops: str, image, seed: int = 0) -> np.ndarray:
  """The image that an op string makes of bytes or pixels."""
  features = {"image": tf.constant(image), "seed": seed}
  return parse_ops(ops)(features)["image"].numpy()


def distance(a: np.ndarray, b: np.ndarray) -> float:
  """Mean absolute difference, in levels."""
  assert a.shape == b.shape
  return np.abs(a.astype(float) - b).mean()
