"""From files to numpy batches, in an order that never changes.

This package knows TensorFlow and numpy, but neither JAX nor the model: process
index and count come in as plain integers, batches go out as numpy arrays. The
caller hides the accelerators from TensorFlow before the first call.
"""

from input_pipeline.errors import AbsentError, DataError
from input_pipeline.loading import load_image
from input_pipeline.ops import parse_ops
from input_pipeline.pipeline import eval_batches, train_batches
from input_pipeline.sources import Source, get_source

__all__ = [
  "AbsentError",
  "DataError",
  "Source",
  "eval_batches",
  "get_source",
  "load_image",
  "parse_ops",
  "train_batches",
]
