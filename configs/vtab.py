"""The 19 tasks of VTAB-1k, from weights that are already there.

  python -m vit_jax.vtab --config=configs/vtab.py:B/16 \
    --config.init_from=ViT-B_16.npz --workdir=runs/vtab [--seeds=3]

MODEL,PROTOCOL stand behind the colon: any model, and how it is tuned:

  paper        as the ViT paper: one setting for all tasks, 384 pixels
  augreg       as "How to train your ViT?": the best of eight on val200
  lightweight  as the VTAB paper's short sweep, as far as is known: of four
  linear       a probe on frozen features; the same as --config.mode=linear

`init_from` is a published .npz, a .safetensors of timm or Hugging Face, or the
workdir of a run here. The data have to be prepared; `docs/vtab.md` says how.
Lists to choose from can be changed: --config.vtab.lrs="(0.01, 0.003)"
--config.vtab.totals="('500', '2500')".

The paper's means of the 19 tasks are 77.6 (H/14 on JFT), 76.3 (L/16 on JFT) and
72.7 (L/16 on ImageNet-21k); not run here.
"""

from configs import common

# Learning rates and lengths to choose from. The paper's one setting is what it
# found best of four for all tasks together; the others are not stated.
PROTOCOLS: dict[str, dict[str, tuple]] = {
  "paper": dict(lrs=(), totals=()),
  "augreg": dict(lrs=(0.001, 0.003, 0.01, 0.03), totals=("500", "2500")),
  "lightweight": dict(lrs=(0.1, 0.01), totals=("2500", "10k")),
  "linear": dict(lrs=(), totals=()),
}


def get_config(arg="B/16,paper"):
  """Returns the recipe for "MODEL,PROTOCOL"."""
  model, protocol = common.parse_arg(arg, model="B/16", dataset="paper")
  if protocol not in PROTOCOLS:
    raise ValueError(
      f"No protocol {protocol!r}; there are {', '.join(PROTOCOLS)}."
    )
  config = common.base()
  with config.unlocked():
    config.mode = "linear" if protocol == "linear" else "finetune"
    config.vtab = common.vtab(protocol=protocol, **PROTOCOLS[protocol])
  config.total = "2500"
  # The paper's 384 pixels are 27 patches of 14, and six pixels more.
  config.image_size = (378,) if model.endswith("/14") else (384,)
  config.init_from = "?"  # To be given.

  config.model.name = model

  config.input.batch_size = 512

  config.optim.name = "sgd"
  config.optim.lr = 0.01
  config.optim.warmup = "8%"  # Scenic's 200 of 2500; not stated in the paper.
  config.optim.clip = 1.0
  config.optim.moment_dtype = "bfloat16"  # As in the published code.

  if protocol == "lightweight":
    config.vtab.preset = "task_adaptation"
    config.image_size = (224,)
    config.optim.warmup = "10%"
    config.optim.weight_decay = 0.01  # Times the learning rate.
    config.optim.clip = 0.0
  return config
