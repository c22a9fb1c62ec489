"""Scaling Vision Transformers (arXiv:2106.04560): one run, many lengths.

  python -m vit_jax.main --config=configs/scaling_vit.py:g/14 \
    --config.input.source='tfrecord:gs://BUCKET/jft3b/train-*?classes=29593' \
    --workdir=gs://BUCKET/runs/g14

The learning rate falls as the inverse root of the step and only cools down over
the last updates, so a run can be cut short anywhere: a branch takes one of its
checkpoints, which are kept every 50k updates, and cools down from there. It is
what a run of that length would have been.

  python -m vit_jax.main --config=configs/scaling_vit.py:g/14 \
    --config.input.source='tfrecord:gs://BUCKET/jft3b/train-*?classes=29593' \
    --config.resume_from=gs://BUCKET/runs/g14/checkpoints/200000 \
    --config.total=250k --workdir=gs://BUCKET/runs/g14-250k

MODEL is any ViT. JFT-3B is private: the records are one's own, in the format of
`configs/pretrain.py`. The values are the paper's and, where it has none,
big_vision's (`train_vit_g.py`). The paper's G/14 has 90.45 % on ImageNet once
fine-tuned; not run here. On fewer than eight devices: --config.mesh.fsdp=1.
"""

from configs import common


def get_config(arg="g/14"):
  """Returns the recipe for a model."""
  config = common.base()
  config.total = "1M"
  config.image_size = (224,)
  config.loss = "sigmoid"

  config.model.name = arg
  config.model.classifier = "map"  # Without class token and hidden layer.
  config.model.head_bias = -10.0
  config.model.dtype = "bfloat16"
  config.model.scan, config.model.remat = True, "full"

  config.input.source = "tfrecord:jft3b/train-*?classes=29593"
  config.input.ops = "decode_and_random_crop({size})|flip_lr"
  config.input.batch_size = 16_384  # 4096 for the smaller models.
  config.input.max_labels = 32  # More than an image has.

  config.optim.name = "adafactor"
  config.optim.lr = 8e-4
  config.optim.schedule = "rsqrt"
  config.optim.timescale = "10k"
  config.optim.warmup = "10k"
  config.optim.cooldown = "50k"
  config.optim.weight_decay = 0.03
  config.optim.decay_multipliers = (("head/kernel", 100.0),)  # 3.0: few-shot.
  config.optim.clip = 1.0
  config.optim.moment_dtype = "bfloat16"

  # g/14 and its moments are too much for one core of 16 GB.
  config.mesh.fsdp = 8

  with config.evals.unlocked():
    config.evals.fewshot = common.evaluator(
      kind="fewshot", every="10k", **common.IMAGENET_PROBE
    )
  config.checkpoint.keep_every = "50k"  # Where branches may begin.
  return config
