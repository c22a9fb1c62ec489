"""Vision Transformers in JAX: train, resume, evaluate, use."""
