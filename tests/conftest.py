"""Eight CPU devices for every test, and strict shapes; set before JAX loads."""

import logging
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
os.environ["XLA_FLAGS"] = (
  "--xla_force_host_platform_device_count=8"
  " --xla_backend_optimization_level=0"  # Compiles in half the time.
)

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

# The shapes in signatures are checked in every call that the tests make.
jaxtyping.install_import_hook(
  [f"vit_jax.{room}" for room in ("images", "losses", "models", "schedules")],
  "beartype.beartype",
)

from configs import common  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
  """Programs that several tests compile are compiled once, over all workers."""
  base = tmp_path_factory.getbasetemp()
  worker = "PYTEST_XDIST_WORKER" in os.environ
  directory = (base.parent if worker else base) / "xla"
  jax.config.update("jax_compilation_cache_dir", str(directory))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def tiny_config(**changes):
  """A run of seconds: mu/4 on 16-pixel noise, 8 updates, all things random."""
  config = common.base()
  config.total = "8"
  config.image_size = (16,)
  config.log_every = "1"
  config.mixup = 0.2
  config.model.name = "mu/4"
  config.model.dropout = 0.1
  config.input.source = "fake:16,3,40"
  config.input.ops = "decode_and_random_crop({size})|flip_lr"
  config.input.batch_size = 8
  config.optim.clip = 1.0
  config.optim.weight_decay = 0.1
  with config.evals.unlocked():
    config.evals.test = common.evaluator(batch_size=16, every="4")
  config.checkpoint.every = "3"
  config.update_from_flattened_dict(changes)
  return config


@pytest.fixture
def warnings(caplog):
  """The warnings of our own logger."""
  logging.getLogger("vit_jax").propagate = True
  return lambda: [
    record.getMessage()
    for record in caplog.records
    if record.name == "vit_jax" and record.levelno >= logging.WARNING
  ]
