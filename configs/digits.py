"""A small ViT on scikit-learn's real handwritten digits: the quickstart.

  python -m vit_jax.main --config=configs/digits.py --workdir=runs/digits

The same on your own folder of images, PATH/{train,test}/CLASS/…, at 64 pixels:

  python -m vit_jax.main --config=configs/digits.py --workdir=runs/mine \
    --config.input.source=folder:PATH --config.image_size=64 \
    --config.model.name=mu/8
"""

from configs import common


def get_config():
  """Returns the recipe."""
  config = common.base()
  config.total = "60ep"
  config.image_size = (16,)
  config.label_smoothing = 0.1
  config.log_every = "50"

  config.model.name = "mu/4"
  config.model.width = 64
  config.model.mlp_dim = 256
  config.model.num_heads = 4
  config.model.depth = 4
  config.model.dropout = 0.1

  config.input.source = "digits:"
  config.input.batch_size = 64

  config.optim.lr = 2e-3
  config.optim.warmup = "10%"
  config.optim.weight_decay = 0.1
  config.optim.clip = 1.0

  with config.evals.unlocked():
    config.evals.test = common.evaluator(batch_size=360, every="5ep")
  config.checkpoint.every = "10ep"
  config.checkpoint.best = "test/top1"
  return config
