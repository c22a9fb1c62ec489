"""Models by name: `create("B/16", num_classes=1000)`."""

import dataclasses
import re
from typing import Any

from vit_jax import trees
from vit_jax.models.blocks import stack_blocks, unstack_blocks
from vit_jax.models.fields import check_image_size
from vit_jax.models.vit import PARAM_AXES, VARIANTS, ViT

__all__ = [
  "PARAM_AXES",
  "VARIANTS",
  "ViT",
  "check_image_size",
  "create",
  "stack_blocks",
  "unstack_blocks",
]

# Fields of a ViT that may be given to `create` (the rest are Linen's own).
FIELDS = tuple(
  field.name
  for field in dataclasses.fields(ViT)
  if field.name not in ("parent", "name", "num_classes")
)


def create(name: str, *, num_classes: int | None, **overrides: Any) -> ViT:
  """Builds the model of a name.

  Args:
    name: variant/patch: "B/16", "mu/4"; "S/16x8" has patches 16 high, 8 wide.
    num_classes: classes of the head; 0 = no head.
    **overrides: fields of `ViT` to change. A `width`, `depth`, `mlp_dim`,
      `num_heads` or `patch_size` of 0 or () leaves what the name says.

  Returns:
    The module; it holds no arrays.

  Raises:
    ValueError: unknown variant or override (with the list and the nearest), or
      a field value that cannot be.
  """
  match = re.fullmatch(r"(.+)/(\d+)(?:x(\d+))?", name)
  if not match:
    raise ValueError(
      f"Model name {name!r} is not of the form variant/patch, such as 'B/16'; "
      f"variants: {', '.join(VARIANTS)}."
    )
  variant, height, width = match.groups()
  if variant not in VARIANTS:
    raise ValueError(
      f"Unknown model variant {variant!r}; there are {', '.join(VARIANTS)}."
      + trees.nearest(variant, VARIANTS)
    )
  for key in overrides:
    if key not in FIELDS:
      raise ValueError(
        f"Unknown model field {key!r}; there are {', '.join(FIELDS)}."
        + trees.nearest(key, FIELDS)
      )
  fields = {
    **VARIANTS[variant],
    "patch_size": (int(height), int(width or height)),
  }
  for key, value in overrides.items():
    if key not in fields or value not in (0, (), None):
      fields[key] = value
  return ViT(num_classes=num_classes or 0, **fields)
