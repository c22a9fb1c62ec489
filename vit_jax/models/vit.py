"""The Vision Transformer (Dosovitskiy et al., arXiv:2010.11929) in Linen.

This room knows the architecture and nothing about data, losses or devices. The
parameter tree is the tree of the published `.npz` files, so reading and writing
those is no translation; with `scan` the blocks of one kind are stacked under
`Transformer/encoderblock`. Parameters are float32 always; `dtype` is what the
matrix products and the residual stream are computed in.

Letters: n images, h w pixels or grid, l tokens, d width, k heads, f MLP width.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax import sharding
from vit_jax.models import bit, resnet
from vit_jax.models.blocks import Block, MapHead, layer_norm, stack_blocks
from vit_jax.models.fields import (
  check_fields,
  check_image_size,
  pair,
  remat_of,
)
from vit_jax.models.posemb import PositionEmbedding

# Width, depth, MLP width and heads of every published plain variant. The MLP
# is not always four times as wide as the model.
VARIANTS = {
  name: dict(zip(("width", "depth", "mlp_dim", "num_heads"), row))
  for name, row in {
    "mu": (32, 1, 128, 2),
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "M": (512, 12, 2048, 8),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "So400m": (1152, 27, 4304, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "g-opt": (1536, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
    "G-opt": (1536, 48, 8192, 16),
    "e": (1792, 56, 15360, 16),
  }.items()
}

# Which mesh axis each dimension of a parameter lies on: the first regex that
# fits whole components at the end of the "/"-joined path wins, so one table
# serves parameters, optimiser moments and averages. Tensor parallelism splits
# attention by heads and the MLP by hidden units: one reduction at the end of
# each.
PARAM_AXES = (
  (r"embedding/kernel", (None, None, None, "fsdp")),
  (r"cls|registers|probe|mask_token", (None, None, "fsdp")),
  (r"(pos|x|y)_embedding", (None, None, "fsdp")),
  (r"relative_embedding", (None, None)),
  (r"(query|key|value)/kernel", ("fsdp", "model", None)),
  (r"(query|key|value)/bias", ("model", None)),
  (r"out/kernel", ("model", None, "fsdp")),
  (r"Dense_0/kernel", ("fsdp", "model")),
  (r"Dense_0/bias", ("model",)),
  (r"Dense_1/kernel", ("model", "fsdp")),
  (r"(head|pre_logits)/kernel", ("fsdp", "model")),
  (r"bias|scale|gamma", (None,)),
  *resnet.PARAM_AXES,
  *bit.PARAM_AXES,
)

# What a rematerialised block keeps for the backward pass.
REMAT_POLICIES = {
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "full": jax.checkpoint_policies.nothing_saveable,
}


class Encoder(nn.Module):
  """Position embedding, the blocks, and the last LayerNorm (equation 4)."""

  block: Mapping[str, Any]
  depth: int
  positions: Mapping[str, Any] | None  # of `PositionEmbedding`
  posemb_at: str
  dropout: float
  stochastic_depth: float
  scan: bool
  remat: str

  @nn.compact
  def __call__(self, x: Float[Array, "n l d"], train: bool):
    own, shared = None, None
    if self.posemb_at == "layers":
      own = self.positions
    elif self.positions:
      table = PositionEmbedding(**self.positions, name="posembed_input")(x)
      if self.posemb_at == "stem":
        x = x + table
      else:
        shared = table
    x = nn.Dropout(self.dropout)(x, deterministic=not train)
    x = sharding.by_example(x)
    block = {**self.block, "positions": own}
    run = self._scanned if self.scan else self._unrolled
    x = run(block, x, shared, train)
    return layer_norm(name="encoder_norm")(x)

  def _block_class(self, index):
    """The class of a block, which may compute itself again to save memory."""
    policy, count = remat_of(self.remat, self.depth)
    if policy == "none" or index >= count:
      return Block
    return nn.remat(
      Block,
      static_argnums=(2,),
      policy=REMAT_POLICIES[policy],
      prevent_cse=not self.scan,
    )

  def _drop_rates(self):
    """The rate of each block, linear in depth; None where nothing drops."""
    if not self.stochastic_depth:
      return [None] * self.depth
    last = max(1, self.depth - 1)
    return [self.stochastic_depth * i / last for i in range(self.depth)]

  def _unrolled(self, block, x, shared, train):
    for i, drop in enumerate(self._drop_rates()):
      layer = self._block_class(i)(**block, name=f"encoderblock_{i}")
      x = layer(x if shared is None else x + shared, train, drop)
      x = sharding.by_example(x)
    return x

  def _scanned(self, block, x, shared, train):
    if self.is_initializing():
      # nn.scan would draw other random numbers than the loop does: initialise
      # the loop and stack it, so both forms start equal from one seed.
      unrolled = nn.map_variables(
        Encoder._unrolled,
        "params",
        trans_out_fn=lambda tree: {"params": stack_blocks(tree["params"])},
        mutable=True,
      )
      return unrolled(self, block, x, shared, train)

    def body(layer, x, drop):
      x = layer(x if shared is None else x + shared, train, drop)
      return sharding.by_example(x), None

    scan = nn.scan(
      body,
      variable_axes={"params": 0, "intermediates": 0},
      split_rngs={"params": True, "dropout": True},
      length=self.depth,
    )
    drops = jnp.array(self._drop_rates()) if self.stochastic_depth else None
    return scan(self._block_class(0)(**block, name="encoderblock"), x, drops)[0]


class ViT(nn.Module):
  """The Vision Transformer; `vit_jax.models.create` fills in a variant.

  Attributes:
    num_classes: width of the head; 0 = no head, `logits` is `pre_logits`.
    width: d, channels of a token.
    depth: number of encoder blocks.
    mlp_dim: f, width of the MLP's hidden layer.
    num_heads: k, attention heads; must divide the width.
    patch_size: (h, w) of a patch, in pixels or, after a stem, in the stem's
      features; an int is a square.
    classifier: "token" reads a class token, "gap" the mean over the patches,
      "map" all tokens by an attention head; "none" classifies each token.
    representation_size: width of a tanh layer before the head; 0 = none.
    posemb: "learned_1d", "learned_2d", "sincos2d" (fixed), "relative" (offsets
      in attention) or "none".
    posemb_at: "stem" adds positions once, "layers" adds a table of its own in
      each block, "shared" adds the same table in each block.
    registers: tokens beside the class token that stand for no patch
      (arXiv:2309.16588).
    dropout: rate after the positions, attention and both MLP layers.
    attention_dropout: rate on the attention probabilities.
    stochastic_depth: rate at which the last block's branches are left out, for
      each example; it grows linearly from 0 in the first block.
    layer_scale: initial factor of each branch's channels; 0 has no factors.
    gelu: "tanh" as Google's models, or "erf", the exact form, as PyTorch's.
    head_bias: initial value of the head's bias.
    stem_width: of the hybrids' ResNet in 64 channels; 0 has no ResNet.
    stem_blocks: units in each stage of that ResNet; () is its root alone.
    dtype: compute type, "float32" or "bfloat16"; parameters stay float32.
    scan: roll the blocks into one loop: compiles faster, runs slower.
    remat: what to recompute in the backward pass: "none", "full" (everything
      in a block) or "dots" (all but its matrix products); "full:4" does so in
      the first 4 blocks alone, whose memory is held longest (not with `scan`).
  """

  num_classes: int
  width: int
  depth: int
  mlp_dim: int
  num_heads: int
  patch_size: Any
  classifier: str = "token"
  representation_size: int = 0
  posemb: str = "learned_1d"
  posemb_at: str = "stem"
  registers: int = 0
  dropout: float = 0.0
  attention_dropout: float = 0.0
  stochastic_depth: float = 0.0
  layer_scale: float = 0.0
  gelu: str = "tanh"
  head_bias: float = 0.0
  stem_width: float = 0.0
  stem_blocks: tuple[int, ...] = ()
  dtype: Any = "float32"
  scan: bool = False
  remat: str = "none"

  def __post_init__(self):
    object.__setattr__(self, "patch_size", pair(self.patch_size, "patch_size"))
    object.__setattr__(self, "stem_blocks", tuple(self.stem_blocks))
    if not isinstance(self.dtype, str):
      object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
    check_fields(self)
    super().__post_init__()

  def grid(self, image_size: Any) -> tuple[int, int]:
    """Says which grid (h, w) of patches images of a size give.

    Args:
      image_size: pixels: an int, (side,) or (h, w).

    Raises:
      ValueError: see `check_image_size`.
    """
    stride = resnet.stride(self.stem_blocks) if self.stem_width else 1
    patch = tuple(stride * side for side in self.patch_size)
    return check_image_size(image_size, patch)

  @nn.compact
  def __call__(
    self, images: Float[Array | np.ndarray, "n h w 3"], *, train: bool = False
  ) -> dict[str, Any]:
    """Classifies images.

    Args:
      images: `[n, h, w, 3]` float in the range the weights were trained with;
        h and w multiples of the patch.
      train: whether dropout acts (needs an rng named "dropout").

    Returns:
      `logits [n, c]` float32, `pre_logits [n, d]` float32 (what the head
      reads; of every token, `[n, l, …]`, with the classifier "none"),
      `tokens [n, l, d]` after the final norm (class token, registers, patches)
      and `grid (h, w)` of the patches. With "intermediates" mutable the
      attention probabilities `[n, k, l, l]` of each block are sown there as
      `attention_weights`.

    Raises:
      ValueError: images' size is no multiple of the patch, or the position
        table is one for another size.
    """
    grid = self.grid(images.shape[1:3])
    x = jnp.asarray(images)
    if self.stem_width:
      x = resnet.stem(
        x, blocks=self.stem_blocks, width=self.stem_width, dtype=self.dtype
      )
    x = nn.Conv(
      self.width,
      self.patch_size,
      strides=self.patch_size,
      padding="VALID",
      dtype=self.dtype,
      name="embedding",
    )(x)  # One linear map of each patch (equation 1).
    x = x.reshape(len(x), -1, self.width)  # [n, l, d]
    x = self._with_extra_tokens(x)
    absolute = self.posemb not in ("relative", "none")
    tokens = Encoder(
      block=dict(
        mlp_dim=self.mlp_dim,
        num_heads=self.num_heads,
        dropout=self.dropout,
        attention_dropout=self.attention_dropout,
        dtype=self.dtype,
        gelu=self.gelu,
        layer_scale=self.layer_scale,
        relative=grid[0] * grid[1] if self.posemb == "relative" else 0,
      ),
      depth=self.depth,
      positions=dict(
        kind=self.posemb, grid=grid, class_token=self.classifier == "token"
      )
      if absolute
      else None,
      posemb_at=self.posemb_at,
      dropout=self.dropout,
      stochastic_depth=self.stochastic_depth,
      scan=self.scan,
      remat=self.remat,
      name="Transformer",
    )(x, train)  # float32, as is all that follows
    x = self._pooled(tokens, grid[0] * grid[1])
    if self.representation_size:
      x = nn.tanh(nn.Dense(self.representation_size, name="pre_logits")(x))
    logits = x
    if self.num_classes:
      logits = nn.Dense(
        self.num_classes,
        kernel_init=nn.initializers.zeros,
        bias_init=nn.initializers.constant(self.head_bias),
        name="head",
      )(x)
    return dict(logits=logits, pre_logits=x, tokens=tokens, grid=grid)

  def _with_extra_tokens(self, x):
    """Puts the class token and the registers before the patches."""

    def learned(name, count, init):
      token = self.param(name, init, (1, count, self.width)).astype(x.dtype)
      return jnp.broadcast_to(token, (len(x), count, self.width))

    extra = []
    if self.classifier == "token":
      extra.append(learned("cls", 1, nn.initializers.zeros))
    if self.registers:
      init = nn.initializers.normal(0.02)  # Zeros would stay alike for ever.
      extra.append(learned("registers", self.registers, init))
    return jnp.concatenate([*extra, x], axis=1) if extra else x

  def _pooled(self, tokens, num_patches):
    """What is classified: [n, d], or the tokens themselves."""
    if self.classifier == "token":
      return tokens[:, 0]
    if self.classifier == "gap":
      return tokens[:, -num_patches:].mean(axis=1)
    if self.classifier == "map":
      head = MapHead(self.mlp_dim, self.num_heads, self.gelu, name="MAPHead_0")
      return head(tokens)
    return tokens
