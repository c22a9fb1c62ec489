"""Where a sweep over VTAB spends its time, on invented data of 32 pixels.

    python -m benchmarks.vtab --model=Ti/16 --image_size=64 --steps=100

All 19 tasks with one setting, from scratch: the sweep's own lines, and last the
seconds of each kind and the share outside of training and evaluation steps. A
real sweep has larger images and 25 times as many updates.
"""

import tempfile

from absl import app, flags

from configs import vtab as recipe
from tests import vtab_data
from vit_jax.vtab import sweep

_MODEL = flags.DEFINE_string("model", "Ti/16", "As in config.model.name.")
_IMAGE_SIZE = flags.DEFINE_integer("image_size", 64, "Pixels a side.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Over all devices.")
_STEPS = flags.DEFINE_integer("steps", 100, "Updates of each task.")
_TASKS = flags.DEFINE_list("tasks", [], "Names of tasks; all by default.")


def main(argv: list[str]) -> None:
  del argv
  config = recipe.get_config(_MODEL.value)
  config.init_from = ""
  config.total = str(_STEPS.value)
  config.image_size = (_IMAGE_SIZE.value,)
  config.input.batch_size = config.vtab.batch_size = _BATCH_SIZE.value
  with tempfile.TemporaryDirectory() as folder:
    config.input.data_dir = f"{folder}/data"
    rows = vtab_data.make(config.input.data_dir)
    sweep.run(config, f"{folder}/sweep", tasks=_TASKS.value, rows=rows)


if __name__ == "__main__":
  app.run(main)
