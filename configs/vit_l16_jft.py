"""ViT-L/16 on JFT-300M, 14 epochs, for a TPU pod (the paper's Table 2).

  python -m vit_jax.main --config=configs/vit_l16_jft.py \
    --config.input.source='tfrecord:gs://BUCKET/jft/train-*?classes=18291' \
    --workdir=gs://BUCKET/runs/l16

The records are one's own, in the format of `configs/pretrain.py`, and any
number of classes. A rehearsal without data, on eight devices of any kind:

  python -m vit_jax.main --config=configs/vit_l16_jft.py \
    --config.input.source=fake:32,10,4096 --config.image_size=32 \
    --config.model.name=mu/4 --config.input.batch_size=64 --config.total=200 \
    --config.mesh.fsdp=2 --workdir=runs/rehearsal

The paper: 87.76 % on ImageNet once fine-tuned, 0.68k TPUv3-core-days; not run
here.
"""

from configs import pretrain


def get_config():
  """Returns the recipe."""
  return pretrain.for_pod("L/16")
