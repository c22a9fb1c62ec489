"""Masked patch prediction: pre-training without labels (paper, B.1.2).

Half of the patches' embeddings are corrupted, before positions are added, and
the encoder's output at such a patch is to tell what colours were there. The
parameters are `params`, the tree of a ViT without a head, and beside it
`masked_patch`, which only this objective has. Whoever loads the weights, to
fine-tune or to export, finds the first by its name and leaves out the second.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key, Shaped, UInt8

from vit_jax import images, models, trees
from vit_jax.objectives import metrics_of
from vit_jax.steps import Objective

# What is predicted of a patch, and into how many cells along each side it is
# cut for that; 0 predicts its pixels.
TARGETS = {"mean_color": 1, "small_patch": 4, "pixels": 0}

_COLORS = 512  # Three bits of red, of green and of blue.


class Corruption(NamedTuple):
  """What becomes of each patch's embedding.

  Attributes:
    corrupted: `[n, l]`, whether its content is to be predicted.
    masked: `[n, l]`, whether the mask stands in its place.
    source: `[n, l]`, else whose embedding stands there; mostly its own.
  """

  corrupted: Bool[Array, "n l"]
  masked: Bool[Array, "n l"]
  source: Int[Array, "n l"]


def build(config: Any, num_classes: int) -> Objective:
  """Builds model, loss and prediction from a config.

  `predict` returns the outputs of the model on whole images; as there is no
  head, their `logits` are features too.

  Args:
    config: the whole config; see `configs/common.py`.
    num_classes: of the training source; labels play no part.

  Raises:
    ValueError: an unknown target, shares that cannot be, a model without
      patches or with layers that nothing would train, patches that the target
      cannot cut, or keys that need labels; with the key's name.
  """
  del num_classes
  _check_choices(config)
  model = models.from_config(config.model, 0)
  size, own = images.size_of(config), config.masked_patch
  _check_model(config, model)
  grid = model.grid(size)
  length = grid[0] * grid[1]
  patch = (size[0] // grid[0], size[1] // grid[1])
  _check_patches(own, length, patch)
  cells = TARGETS[own.target]
  head = nn.Dense(  # Zeros, so that the first loss is ln 512.
    _COLORS * cells**2 if cells else 3 * patch[0] * patch[1],
    kernel_init=nn.initializers.zeros,
  )

  def init(key):
    blank = jnp.zeros((1, *size, 3))
    token = jax.random.fold_in(key, 1)
    return {
      "params": model.init(key, blank, train=False)["params"],
      "masked_patch": {
        "mask_token": 0.02 * jax.random.normal(token, (1, 1, model.width)),
        "head": head.init(key, jnp.zeros((1, model.width)))["params"],
      },
    }

  def loss(params, batch, key):
    drawing, dropout = jax.random.split(key)
    inputs = images.normalize(batch["image"], config.model.input_range)
    corruption = draw(
      drawing,
      (len(inputs), length),
      share=own.share,
      mask=own.mask,
      random=own.random,
    )
    extra = params["masked_patch"]
    with _at_embedding(lambda x: corrupt(x, extra["mask_token"], corruption)):
      outputs = model.apply(
        {"params": params["params"]},
        inputs,
        train=True,
        rngs={"dropout": dropout},
      )
    patches = outputs["tokens"][:, -length:]
    predictions = head.apply({"params": extra["head"]}, patches)
    if cells:
      each = _color_loss(predictions, colors(batch["image"], grid, cells))
    else:
      pixels = cut(inputs, grid, 1).reshape(predictions.shape)
      each = jnp.square(predictions - pixels).mean(axis=-1)
    # An image has as many corrupted patches as any other: their mean is its.
    each = each.mean(axis=1, where=corruption.corrupted)
    return metrics_of(each, batch)

  def predict(params, batch):
    inputs = images.normalize(batch["image"], config.model.input_range)
    return model.apply({"params": params["params"]}, inputs, train=False)

  return Objective(init, loss, predict)


def _at_embedding(change):
  """Within this context a ViT's patch embeddings go through `change`."""

  def interpose(call, args, kwargs, context):
    x = call(*args, **kwargs)
    if (*context.module.path, context.method_name) != ("embedding", "__call__"):
      return x
    return change(x.reshape(len(x), -1, x.shape[-1])).reshape(x.shape)

  return nn.intercept_methods(interpose)


def draw(
  key: Key[Array, ""],
  shape: tuple[int, int],
  *,
  share: float,
  mask: float,
  random: float,
) -> Corruption:
  """Draws which patches are corrupted, and how: for each image as many.

  Args:
    key: decides it all.
    shape: (n, l), images and patches of each.
    share: of the patches that are corrupted; all counts are rounded.
    mask: of those, the share that the mask replaces.
    random: of those, the share that another patch of the image replaces, any
      other with equal chance. What is left keeps its embedding.
  """
  length = shape[1]
  corrupted = round(share * length)
  masked = round(mask * corrupted)
  swapped = min(round(random * corrupted), corrupted - masked)
  ranking, choice = jax.random.split(key)
  place = jnp.broadcast_to(jnp.arange(length), shape)
  rank = jax.random.permutation(ranking, place, axis=1, independent=True)
  other = place + jax.random.randint(choice, shape, 1, length)
  return Corruption(
    corrupted=rank < corrupted,
    masked=rank < masked,
    source=jnp.where(
      (rank >= masked) & (rank < masked + swapped), other % length, place
    ),
  )


def corrupt(
  x: Float[Array, "n l d"],
  mask_token: Float[Array, "1 1 d"],
  corruption: Corruption,
) -> Float[Array, "n l d"]:
  """Puts the mask and other patches where `corruption` says so."""
  x = jnp.take_along_axis(x, corruption.source[..., None], axis=1)
  mask_token = mask_token.astype(x.dtype)
  return jnp.where(corruption.masked[..., None], mask_token, x)


def cut(
  pixels: Shaped[Array, "n h w 3"], grid: tuple[int, int], cells: int
) -> Shaped[Array, "n l q p 3"]:
  """Cuts images into the pixels of each cell of each patch, all row by row.

  Args:
    pixels: `[n, h, w, 3]`.
    grid: (h, w) of the l patches.
    cells: along each side of a patch; q is their number.
  """
  n, height, width, _ = pixels.shape
  rows, columns = grid[0] * cells, grid[1] * cells
  x = pixels.reshape(n, rows, height // rows, columns, width // columns, 3)
  x = x.swapaxes(2, 3)  # [n, rows, columns, ph, pw, 3]
  x = x.reshape(n, grid[0], cells, grid[1], cells, -1, 3)
  return x.swapaxes(2, 3).reshape(n, grid[0] * grid[1], cells**2, -1, 3)


def colors(
  pixels: UInt8[Array, "n h w 3"], grid: tuple[int, int], cells: int
) -> Int[Array, "n l q"]:
  """Returns the mean colour of each cell of each patch, as one of 512 classes.

  Three bits each of red, green and blue make the class 64 r + 8 g + b.

  Args:
    pixels: `[n, h, w, 3]`, 0 to 255.
    grid: (h, w) of the l patches.
    cells: along each side of a patch; q is their number.
  """
  x = cut(pixels, grid, cells).astype(jnp.int32)
  bits = x.sum(axis=3) // (32 * x.shape[3])  # Exact, as no mean of floats is.
  return 64 * bits[..., 0] + 8 * bits[..., 1] + bits[..., 2]


def _color_loss(predictions, classes):
  """[n, l]: the mean over a patch's cells, to be the same at chance."""
  logits = predictions.reshape(*classes.shape, _COLORS)
  return optax.softmax_cross_entropy_with_integer_labels(logits, classes).mean(
    axis=-1
  )


def _check_choices(config):
  for key, value, allowed in (
    ("masked_patch.target", config.masked_patch.target, tuple(TARGETS)),
    ("model.input_range", config.model.input_range, images.INPUT_RANGES),
  ):
    trees.check_choice(f"config.{key} = ", value, allowed)
  for key, off in (
    ("mixup", 0.0),
    ("cutmix", 0.0),
    ("label_smoothing", 0.0),
    ("loss", "softmax"),
  ):
    if config[key] != off:
      raise ValueError(
        f"config.{key} = {config[key]!r} acts on labels, which masked_patch "
        f"does not read; leave it at {off!r}."
      )
  if config.init_from:
    raise ValueError(
      f"config.init_from = {config.init_from!r}: masked_patch starts from "
      "scratch, or goes on from a run of its own by config.resume_from."
    )
  for name, entry in config.evals.items():
    if entry.kind == "classification":
      raise ValueError(
        f"config.evals.{name} classifies, and masked_patch trains no head: use "
        'common.evaluator(kind="fewshot"), or switch it off with '
        f"--config.evals.{name}.kind=''."
      )


def _check_model(config, model):
  if not isinstance(model, models.ViT):
    raise ValueError(
      f"config.model.name = {config.model.name!r} has no patches to mask; use "
      "a ViT or a hybrid, such as 'B/16' or 'R50+B/16'."
    )
  for key, bad, fix in (
    ("classifier", model.classifier == "map", '"token", "gap" or "none"'),
    ("representation_size", model.representation_size > 0, "0"),
  ):
    if bad:
      raise ValueError(
        f"config.model.{key} = {config.model[key]!r} makes layers that no "
        f"patch trains; use {fix}. A run that starts from this one may have "
        "them."
      )


def _check_patches(own, length, patch):
  shares = {key: own[key] for key in ("share", "mask", "random")}
  if (
    not all(0 <= share <= 1 for share in shares.values())
    or own.mask + own.random > 1
  ):
    raise ValueError(
      f"config.masked_patch: {shares}; all are in [0, 1], mask and random "
      "together as well."
    )
  if round(own.share * length) < 1 or length < 2:
    raise ValueError(
      f"config.masked_patch.share = {own.share} of {length} patches corrupts "
      "none, or leaves no other; use more, or a larger config.image_size."
    )
  cells = TARGETS[own.target]
  if cells and any(side % cells for side in patch):
    raise ValueError(
      f"config.masked_patch.target = {own.target!r} cuts a patch into "
      f"{cells}x{cells} cells, which patches of {patch[0]}x{patch[1]} pixels "
      "are not a multiple of; use mean_color or pixels."
    )
