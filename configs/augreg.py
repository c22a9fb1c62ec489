"""AugReg: "How to train your ViT?" (arXiv:2106.10270), its whole grid.

  python -m vit_jax.main --config=configs/augreg.py:S/16,imagenet2012 \
    --workdir=runs/s16

  python -m vit_jax.main \
    --config=configs/augreg.py:B/16,imagenet21k,aug=light1,drop=0.1,wd=0.03 \
    --config.input.source=folder:PATH --workdir=runs/b16

MODEL,DATASET,… where DATASET is imagenet2012 or imagenet21k (one's own records,
see `configs/pretrain.py`) and the rest is any of

  aug     none light1 light2 medium1 medium2 strong1 strong2
  drop    0.0, or 0.1: dropout, and stochastic depth in the last block
  wd      0.1 or 0.03
  epochs  300, or 30 for imagenet21k

What is not given is as published for the model (imagenet21k, 300 epochs) or as
big_vision has it (imagenet2012). Results are in the paper; not run here.
"""

from configs import common

# RandAugment's layers and magnitude, and mixup.
AUGMENTATIONS = {
  "none": ("", 0.0),
  "light1": ("|randaug(2, 0)", 0.0),  # Not nothing: magnitude 0 changes a lot.
  "light2": ("|randaug(2, 10)", 0.2),
  "medium1": ("|randaug(2, 15)", 0.2),
  "medium2": ("|randaug(2, 15)", 0.5),
  "strong1": ("|randaug(2, 20)", 0.5),
  "strong2": ("|randaug(2, 20)", 0.8),
}
# The published weights' settings on imagenet21k, and big_vision's on
# imagenet2012; of models that are not listed, those of B/16.
PUBLISHED = {
  "Ti/16": ("none", "0.03"),
  "S/32": ("none", "0.1"),
  "S/16": ("light1", "0.03"),
  "B/32": ("light1", "0.1"),
  "B/16": ("medium1", "0.1"),
  "B/8": ("medium2", "0.1"),
  "L/16": ("strong1", "0.1"),
  "R+Ti/16": ("none", "0.03"),
  "R26+S/32": ("light1", "0.1"),
  "R50+L/32": ("medium1", "0.1"),  # And drop=0.1.
}
BIG_VISION = {
  "Ti/16": ("light1", "0.1"),
  "S/32": ("medium1", "0.1"),
  "B/16": ("medium2", "0.1"),
}
DATASETS = {
  "imagenet21k": common.IMAGENET21K,
  "imagenet2012": "tfds:imagenet2012",
}


def get_config(arg="B/16,imagenet21k"):
  """Returns the recipe for "MODEL,DATASET,key=value,…"."""
  model, rest = common.parse_arg(arg, model="B/16", dataset="imagenet21k")
  dataset, *options = rest.split(",")
  source = common.pick(DATASETS, dataset, "data set")
  imagenet = dataset == "imagenet2012"
  known = BIG_VISION if imagenet else PUBLISHED
  aug, wd = known.get(model, known["B/16"])
  drop = "0.1" if known is PUBLISHED and model == "R50+L/32" else "0.0"
  setting = dict(aug=aug, drop=drop, wd=wd, epochs="300")
  for option in options:
    key, _, value = option.partition("=")
    common.pick(setting, key, "option")
    setting[key] = value
  ops, mixup = common.pick(AUGMENTATIONS, setting["aug"], "augmentation")
  rate = common.pick(
    {"0.0": 0.0, "0": 0.0, "0.1": 0.1}, setting["drop"], "drop"
  )
  decay = common.pick({"0.1": 0.1, "0.03": 0.03}, setting["wd"], "wd")

  lengths = {"300": "300ep"} if imagenet else {"300": "300ep", "30": "30ep"}

  config = common.base()
  config.total = common.pick(lengths, setting["epochs"], "number of epochs")
  config.image_size = (224,)
  # As in big_vision; the paper does not say.
  config.loss = "sigmoid"
  config.mixup = mixup

  config.model.name = model
  config.model.head_bias = -6.9 if imagenet else -10.0
  config.model.dropout = config.model.stochastic_depth = rate

  config.input.source = source
  config.input.split = "train[:99%]" if imagenet else "train"
  config.input.ops = "decode_and_random_crop({size})|flip_lr" + ops
  config.input.batch_size = 4096

  config.optim.warmup = "10k"
  config.optim.weight_decay = decay
  config.optim.clip = 1.0
  config.optim.moment_dtype = "bfloat16"  # As in big_vision.

  with config.evals.unlocked():
    if imagenet:
      config.evals.update(common.imagenet_evals())
    else:
      config.evals.fewshot = common.evaluator(
        kind="fewshot", every="5%", **common.IMAGENET_PROBE
      )
  return config
