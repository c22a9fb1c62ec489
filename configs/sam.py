"""Sharpness-aware minimisation: ViTs on ImageNet without strong augmentation.

  python -m vit_jax.main --config=configs/sam.py:B/16 --workdir=runs/sam

"When Vision Transformers Outperform ResNets" (arXiv:2106.01548) trained the
published `sam/` weights so: each update takes the gradient where the loss is
highest within a distance of `sam_rho` (arXiv:2010.01412), at twice the cost.
The reach is the one reported for B/16 (vision_transformer issue 153); smaller
models want less: --config.optim.sam_rho. There every accelerator looked for its
own worst point, on its 64 images; here all look for that of the whole batch, so
that the result is the same on any mesh. All else is as in big_vision's
configuration of GSAM, which was made to be compared. The paper has 5.3 % more
of top-1 for B/16 than without; not run here.
"""

from configs import common


def get_config(arg="B/16"):
  """Returns the recipe for a model."""
  config = common.base()
  config.total = "300ep"
  config.image_size = (224,)
  config.loss = "sigmoid"

  config.model.name = arg
  config.model.classifier = "gap"
  config.model.head_bias = -10.0

  config.input.source = "tfds:imagenet2012"
  config.input.split = "train[:99%]"
  config.input.ops = "decode_and_random_crop({size})|flip_lr"
  config.input.batch_size = 4096

  config.optim.lr = 3e-3
  config.optim.schedule = "linear"
  config.optim.end_lr = 3e-5
  config.optim.warmup = "10k"
  config.optim.weight_decay = 0.3
  config.optim.clip = 1.0
  config.optim.sam_rho = 0.2

  with config.evals.unlocked():
    config.evals.update(common.imagenet_evals())
  return config
