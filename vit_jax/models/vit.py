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
from jaxtyping import Array, Float

from vit_jax.models.blocks import Block, layer_norm, stack_blocks
from vit_jax.models.fields import check_fields, check_image_size, pair
from vit_jax.models.posemb import PositionEmbedding, sincos2d

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
  (r"cls", (None, None, "fsdp")),
  (r"pos_embedding", (None, None, "fsdp")),
  (r"(query|key|value)/kernel", ("fsdp", "model", None)),
  (r"(query|key|value)/bias", ("model", None)),
  (r"out/kernel", ("model", None, "fsdp")),
  (r"Dense_0/kernel", ("fsdp", "model")),
  (r"Dense_0/bias", ("model",)),
  (r"Dense_1/kernel", ("model", "fsdp")),
  (r"(head|pre_logits)/kernel", ("fsdp", "model")),
  (r"bias|scale", (None,)),
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
  grid: tuple[int, int]
  posemb: str
  dropout: float
  scan: bool
  remat: str

  @nn.compact
  def __call__(self, x: Float[Array, "n l d"], train: bool):
    if self.posemb == "learned_1d":
      x = PositionEmbedding(self.grid, name="posembed_input")(x)
    elif self.posemb == "sincos2d":
      table = sincos2d(self.grid, x.shape[-1])
      # A class token has no place in the grid: its row is zero.
      prefix = x.shape[1] - table.shape[0]
      table = jnp.pad(table, ((prefix, 0), (0, 0)))
      x = x + table[None].astype(x.dtype)
    x = nn.Dropout(self.dropout)(x, deterministic=not train)
    if self.scan:
      x = self._scanned(x, train)
    else:
      x = self._unrolled(x, train)
    return layer_norm(name="encoder_norm")(x)

  def _block_class(self):
    if self.remat == "none":
      return Block
    return nn.remat(
      Block,
      static_argnums=(2,),
      policy=REMAT_POLICIES[self.remat],
      prevent_cse=not self.scan,
    )

  def _unrolled(self, x, train):
    for i in range(self.depth):
      x = self._block_class()(**self.block, name=f"encoderblock_{i}")(x, train)
    return x

  def _scanned(self, x, train):
    if self.is_initializing():
      # nn.scan would draw other random numbers than the loop does: initialise
      # the loop and stack it, so both forms start equal from one seed.
      unrolled = nn.map_variables(
        Encoder._unrolled,
        "params",
        trans_out_fn=lambda tree: {"params": stack_blocks(tree["params"])},
        mutable=True,
      )
      return unrolled(self, x, train)
    scan = nn.scan(
      lambda block, x, _: (block(x, train), None),
      variable_axes={"params": 0, "intermediates": 0},
      split_rngs={"params": True, "dropout": True},
      length=self.depth,
    )
    block = self._block_class()(**self.block, name="encoderblock")
    return scan(block, x, None)[0]


class ViT(nn.Module):
  """The Vision Transformer; `vit_jax.models.create` fills in a variant.

  Attributes:
    num_classes: width of the head; 0 = no head, `logits` is `pre_logits`.
    width: d, channels of a token.
    depth: number of encoder blocks.
    mlp_dim: f, width of the MLP's hidden layer.
    num_heads: k, attention heads; must divide the width.
    patch_size: (h, w) of a patch in pixels; an int is a square.
    classifier: "token" reads a class token, "gap" the mean over all tokens.
    representation_size: width of a tanh layer before the head; 0 = none.
    posemb: "learned_1d", "sincos2d" (fixed) or "none".
    dropout: rate after the positions, attention and both MLP layers.
    attention_dropout: rate on the attention probabilities.
    head_bias: initial value of the head's bias.
    dtype: compute type, "float32" or "bfloat16"; parameters stay float32.
    scan: roll the blocks into one loop: compiles faster, runs slower.
    remat: what to recompute in the backward pass: "none", "full" (everything
      in a block) or "dots" (all but its matrix products).
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
  dropout: float = 0.0
  attention_dropout: float = 0.0
  head_bias: float = 0.0
  dtype: Any = "float32"
  scan: bool = False
  remat: str = "none"

  def __post_init__(self):
    object.__setattr__(self, "patch_size", pair(self.patch_size, "patch_size"))
    if not isinstance(self.dtype, str):
      object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
    check_fields(self)
    super().__post_init__()

  @nn.compact
  def __call__(
    self, images: Float[Array, "n h w 3"], *, train: bool = False
  ) -> dict[str, Any]:
    """Classifies images.

    Args:
      images: `[n, h, w, 3]` float in the range the weights were trained with;
        h and w multiples of the patch.
      train: whether dropout acts (needs an rng named "dropout").

    Returns:
      `logits [n, c]` float32, `pre_logits [n, d]` float32 (what the head
      reads), `tokens [n, l, d]` after the final norm, the class token first if
      there is one, and `grid (h, w)` of the other tokens. With "intermediates"
      mutable the attention probabilities `[n, k, l, l]` of each block are sown
      there as `attention_weights`.

    Raises:
      ValueError: images' size is no multiple of the patch, or the position
        table is one for another size.
    """
    grid = check_image_size(images.shape[1:3], self.patch_size)
    x = nn.Conv(
      self.width,
      self.patch_size,
      strides=self.patch_size,
      padding="VALID",
      dtype=self.dtype,
      name="embedding",
    )(images)  # One linear map of each patch (equation 1).
    x = x.reshape(len(x), -1, self.width)  # [n, l, d]
    if self.classifier == "token":
      cls = self.param("cls", nn.initializers.zeros, (1, 1, self.width))
      cls = jnp.broadcast_to(cls.astype(x.dtype), (len(x), 1, self.width))
      x = jnp.concatenate([cls, x], axis=1)
    tokens = Encoder(
      block=dict(
        mlp_dim=self.mlp_dim,
        num_heads=self.num_heads,
        dropout=self.dropout,
        attention_dropout=self.attention_dropout,
        dtype=self.dtype,
      ),
      depth=self.depth,
      grid=grid,
      posemb=self.posemb,
      dropout=self.dropout,
      scan=self.scan,
      remat=self.remat,
      name="Transformer",
    )(x, train)  # float32, as is all that follows
    x = tokens[:, 0] if self.classifier == "token" else tokens.mean(axis=1)
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
