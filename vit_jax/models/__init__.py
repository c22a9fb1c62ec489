"""Models by name: `create("B/16", num_classes=1000)`."""

import dataclasses
import re
from typing import Any, SupportsIndex

from vit_jax import trees
from vit_jax.models import bit, fields, resnet
from vit_jax.models.blocks import stack_blocks, unstack_blocks
from vit_jax.models.fields import check_image_size
from vit_jax.models.vit import PARAM_AXES, VARIANTS, ViT

__all__ = [
  "Model",
  "PARAM_AXES",
  "VARIANTS",
  "ViT",
  "check_image_size",
  "create",
  "from_config",
  "stack_blocks",
  "unstack_blocks",
]

Model = ViT | bit.BiT

# Fields of a ViT that may be given to `create` (the rest are Linen's own).
FIELDS = tuple(
  field.name
  for field in dataclasses.fields(ViT)
  if field.name not in ("parent", "name", "num_classes")
)


def create(
  name: str, *, num_classes: SupportsIndex | None, **overrides: Any
) -> Model:
  """Builds the model of a name.

  Args:
    name: variant/patch: "B/16", "mu/4"; "S/16x8" has patches 16 high, 8 wide.
      A hybrid has a ResNet before it, "R50+B/16", and 16 is what both make of
      the image together. "R50x3" is a ResNet of the paper's Table 6, three
      times as wide as the usual one.
    num_classes: classes of the head; 0 = no head.
    **overrides: fields of `ViT` to change. A `width`, `depth`, `mlp_dim`,
      `num_heads`, `patch_size`, `stem_width` or `stem_blocks` of 0 or () leaves
      what the name says.

  Returns:
    The module; it holds no arrays.

  Raises:
    ValueError: unknown variant or override (with the list and the nearest), or
      a field value that cannot be.
  """
  for key in overrides:
    if key not in FIELDS:
      raise ValueError(
        f"Unknown model field {key!r}; there are {', '.join(FIELDS)}."
        + trees.nearest(key, FIELDS)
      )
  # What is not given, and what is None, is as the name says, or the default.
  num_classes = fields.normalize("num_classes", num_classes or 0)
  given = {
    key: fields.normalize(key, value)
    for key, value in overrides.items()
    if value is not None
  }
  if re.fullmatch(r"R\d+x\d+", name):
    return _create_bit(name, num_classes, given)
  match = re.fullmatch(r"(?:(R\d*)\+)?([^+/]+)/(\d+)(?:x(\d+))?", name)
  if not match:
    raise ValueError(
      f"Model name {name!r} is not of the form variant/patch, such as 'B/16', "
      f"'R50+B/16' or 'R50x1'; variants: {', '.join(VARIANTS)}."
    )
  stem, variant, height, width = match.groups()
  if variant not in VARIANTS:
    raise ValueError(
      f"Unknown model variant {variant!r}; there are {', '.join(VARIANTS)}."
      + trees.nearest(variant, VARIANTS)
    )
  patch = (int(height), int(width or height))
  named: dict[str, Any] = {"stem_width": 0.0, "stem_blocks": ()}
  if stem:
    if patch[0] != patch[1]:
      raise ValueError(f"{name!r}: the patches of a hybrid are square.")
    blocks, size = resnet.blocks_of(stem, patch[0])
    named, patch = {"stem_width": 1.0, "stem_blocks": blocks}, (size, size)
  named |= VARIANTS[variant] | {"patch_size": patch}
  for key in named:
    if not given.get(key):  # 0 and () leave what the name says.
      given[key] = named[key]
  return ViT(num_classes=num_classes, **given)


def from_config(config: Any, num_classes: int) -> Model:
  """Builds the model that a config's `model` part describes; see `create`."""
  given = config.to_dict()
  name, _ = given.pop("name"), given.pop("input_range")  # not the model's
  return create(name, num_classes=num_classes, **given)


def _create_bit(name, num_classes, given):
  """A ResNet has few of a ViT's fields; the others must be at their default."""
  defaults = {field.name: field.default for field in dataclasses.fields(ViT)}
  known = {field.name for field in dataclasses.fields(bit.BiT)}
  for key, value in given.items():
    if key not in known and value and value != defaults[key]:
      raise ValueError(f"{key}={value!r} means nothing to the ResNet {name}.")
  given = {key: value for key, value in given.items() if key in known}
  return bit.create(name, num_classes=num_classes, **given)
