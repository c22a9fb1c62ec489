"""Fashion-MNIST from scratch: a ViT of 0.3 M parameters and 49 patches.

  apt install dataset-fashion-mnist
  python -m vit_jax.main --config=configs/fashion.py --workdir=runs/fashion

89 % of the test images after 10 epochs, in less than 20 minutes on two CPU
cores, and 90 % fine-tuned at 32 pixels (`docs/reproduce.md`). The Debian
package brings the 60 000 training images; where they lie elsewhere, say
--config.input.source=idx:DIR. MNIST and KMNIST are read alike.
"""

from configs import common

FASHION = (
  "idx:/usr/share/datasets/fashion-mnist?names=T-shirt,Trouser,Pullover,Dress,"
  "Coat,Sandal,Shirt,Sneaker,Bag,Boot"
)


def get_config(arg=FASHION):
  """Returns the recipe; the argument is another source."""
  config = common.base()
  config.total = "10ep"
  config.image_size = (28,)
  config.label_smoothing = 0.1

  config.model.name = "mu/4"
  config.model.width = 64
  config.model.depth = 6
  config.model.mlp_dim = 256
  config.model.num_heads = 4

  config.input.source = arg
  config.input.ops = "flip_lr"
  config.input.batch_size = 256

  config.optim.lr = 2e-3
  config.optim.warmup = "5%"
  config.optim.weight_decay = 0.1
  config.optim.clip = 1.0

  with config.evals.unlocked():
    config.evals.test = common.evaluator(ops="decode", every="1ep")
  config.checkpoint.every = "1ep"
  return config
