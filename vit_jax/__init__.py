"""Vision Transformers in JAX: train, resume, evaluate, use."""

import os

# TensorFlow only reads images here. It greets on import unless told not to.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
