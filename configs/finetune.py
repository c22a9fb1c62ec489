"""Fine-tuning as in the paper (section 4.1, Table 4), or on data of one's own.

  python -m vit_jax.main --config=configs/finetune.py:B/16,cifar100 \
    --config.init_from=ViT-B_16.npz --workdir=runs/cifar100

MODEL,DATASET: any model; a data set of the table below, or any source
(`folder:PATH`, `tfds:NAME`, …) whose splits are called train and test.
`init_from` is a published .npz, a .safetensors of timm or Hugging Face, or the
workdir of another run here, at any resolution: the positions are resized. The
paper's SGD without weight decay, batch 512, cosine, 384 pixels and a new head
of zeros; another `--config.image_size` changes all sizes with it.

Accuracy with the paper's weights: Tables 2, 5 and 6 of the paper; not run here.
"""

from configs import common

# Updates, warm-up and learning rates that the paper tried (Table 4); the rate
# used first is big_vision's for B/32. The paper does not state a warm-up: 500
# updates are its published code's, the others big_vision's.
DATASETS = {
  "imagenet2012": dict(
    total="20k",
    warmup="500",
    rates=(0.03, 0.01, 0.003, 0.06),
    test="validation",
  ),
  "cifar10": dict(total="10k", warmup="500", rates=(0.003, 0.01, 0.03, 0.001)),
  "cifar100": dict(total="10k", warmup="500", rates=(0.01, 0.003, 0.03, 0.001)),
  "oxford_iiit_pet": dict(
    total="500", warmup="100", rates=(0.003, 0.01, 0.03, 0.001)
  ),
  "oxford_flowers102": dict(
    total="500", warmup="100", rates=(0.003, 0.01, 0.03, 0.001)
  ),
}
# Of other data: the row for the small data sets of VTAB, warmed up as scenic's.
OTHERS = dict(total="2500", warmup="200", rates=(0.01,))


def get_config(arg="B/16,cifar10"):
  """Returns the recipe for "MODEL,DATASET"."""
  model, dataset = common.parse_arg(arg, model="B/16", dataset="cifar10")
  if dataset not in DATASETS and ":" not in dataset:
    raise ValueError(
      f"No recipe for the data set {dataset!r}; there are "
      f"{', '.join(DATASETS)}, and any source such as folder:PATH."
    )
  row = {"test": "test", **DATASETS.get(dataset, OTHERS)}

  config = common.base()
  config.total = row["total"]
  # The paper's 384 pixels are 27 patches of 14, and six pixels more.
  config.image_size = (378,) if model.endswith("/14") else (384,)
  config.init_from = "?"  # To be given.

  config.model.name = model
  # Dropout is not stated; the published code's figures are better without.

  config.input.source = dataset if ":" in dataset else f"tfds:{dataset}"
  config.input.ops = (
    "decode|resize({size*7/6})|random_crop({size})|flip_lr"  # 448, 384
  )

  config.optim.name = "sgd"
  config.optim.lr = row["rates"][0]
  config.optim.warmup = row["warmup"]
  config.optim.clip = 1.0
  config.optim.moment_dtype = "bfloat16"  # As in the published code.

  with config.evals.unlocked():
    config.evals.test = common.evaluator(split=row["test"], every="10%")
  config.checkpoint.every = "10%"
  return config
