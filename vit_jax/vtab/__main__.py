"""Runs the 19 tasks of VTAB-1k, or goes on with them: the same command.

python -m vit_jax.vtab --config=configs/vtab.py:B/16 \
  --config.init_from=ViT-B_16.npz --workdir=runs/vtab
"""

from absl import flags

from vit_jax import launch
from vit_jax.vtab import sweep

if __name__ == "__main__":
  CONFIG = launch.config_flag()
  WORKDIR = flags.DEFINE_string(
    "workdir", "", "Where results are kept; several machines may share it."
  )
  TASKS = flags.DEFINE_list("tasks", [], "Names of tasks; all by default.")
  SHARD = flags.DEFINE_string(
    "shard",
    "0/1",
    '"i/n": do every n-th task from the i-th, on machine i of n.',
  )
  SEEDS = flags.DEFINE_integer("seeds", 1, "Runs of each chosen setting.")
  COMPARE = flags.DEFINE_string(
    "compare", "", "Workdir of another sweep, for the report."
  )
  launch.start(
    lambda _: sweep.run(
      CONFIG.value,
      WORKDIR.value,
      tasks=TASKS.value,
      shard=SHARD.value,
      seeds=SEEDS.value,
      compare=COMPARE.value,
    )
  )
