"""Trains, or goes on training: the same command does both.

python -m vit_jax.main --config=configs/digits.py --workdir=runs/digits
"""

from absl import flags

from vit_jax import launch, lr_grid

if __name__ == "__main__":
  CONFIG = launch.config_flag()
  WORKDIR = flags.DEFINE_string(
    "workdir", "", "Where the run lives: checkpoints, metrics, config."
  )
  launch.start(
    lambda _: lr_grid.run(CONFIG.value, WORKDIR.value), many_hosts=True
  )
