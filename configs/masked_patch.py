"""Masked patch prediction (paper, section 4.6 and B.1.2): no labels are read.

  python -m vit_jax.main --config=configs/masked_patch.py \
    --config.input.source='tfrecord:PATH/train-*?classes=18291' \
    --workdir=runs/masked

  python -m vit_jax.main --config=configs/finetune.py:B/16,imagenet2012 \
    --config.init_from=runs/masked --workdir=runs/imagenet

MODEL,DATASET stand behind the colon: any ViT or hybrid; any source, or the name
of a TFDS data set. JFT, the paper's data, is private: that source is one's own
TFRecords (see `docs/data.md`), and labels may be anything there. A rehearsal:

  python -m vit_jax.main --config=configs/masked_patch.py:mu/4,fake:32,10,4096 \
    --config.image_size=32 --config.input.batch_size=64 --config.total=300 \
    --config.optim.warmup=30 --workdir=runs/rehearsal

On the way a few-shot probe reads ImageNet from TFDS; without that data, say
--config.evals.fewshot.kind=''. Probes of DATASET itself need its split "test".

The paper's B/16 has 79.9 % on ImageNet once fine-tuned, 2 points more than from
scratch, and most of that after 100k updates; not run here.
"""

from configs import common


def get_config(arg="B/16," + common.JFT):
  """Returns the recipe for "MODEL,DATASET"."""
  model, dataset = common.parse_arg(arg, model="B/16", dataset=common.JFT)
  source = dataset if ":" in dataset else f"tfds:{dataset}"

  config = common.base()
  config.total = "1M"
  config.image_size = (224,)
  config.objective = "masked_patch"  # Its keys' defaults are the paper's.

  config.model.name = model
  # Dropout is not stated: none, as in the paper's other runs on JFT.

  config.input.source = source
  config.input.ops = "decode_and_random_crop({size})|flip_lr"  # Not stated.
  config.input.batch_size = 4096
  config.input.max_labels = 32  # Whatever an image has, it is not read.

  config.optim.lr = 2e-4
  config.optim.warmup = "10k"
  # Weight decay and clipping are not stated: as in the other runs on JFT.
  config.optim.weight_decay = 0.1

  # How good the features are on the way, by a probe on ImageNet, or on the data
  # itself where that is not JFT. Nothing trains the class token's output.
  probe = common.IMAGENET_PROBE
  if not source.startswith("tfrecord:") and source != probe["source"]:
    probe = dict(shots=probe["shots"])
  with config.evals.unlocked():
    config.evals.fewshot = common.evaluator(
      kind="fewshot", representation="tokens", every="5%", **probe
    )
  config.checkpoint.every = "10k"
  return config
