"""What a model does that none of its leaves shows.

A run and a file of ours say these things, as texts under the names of the
fields; a published file says none of them.
"""

from collections.abc import Mapping

from vit_jax import models

# Fields of a ViT; a ResNet has none of them.
_FIELDS = ("gelu", "posemb", "posemb_at", "num_heads")


def of(model: models.Model, input_range: str) -> dict[str, str]:
  """Returns the facts of a model and of the images that it was trained on.

  Args:
    model: its fields are read.
    input_range: of the images' values; see `vit_jax.images.INPUT_RANGES`.
  """
  facts = {"input_range": input_range}
  for field in _FIELDS:
    if hasattr(model, field):
      facts[field] = str(getattr(model, field))
  return facts


def differences(about: Mapping[str, str], model: models.Model) -> list[str]:
  """Compares what is known of stored leaves with a model.

  Args:
    about: facts of the stored leaves; those that it lacks match.
    model: the target.

  Returns:
    One line for each field that differs, with both values and the config's key.
  """
  wanted = of(model, "")
  return [
    f"different   {field}: stored {about[field]!r}, expected "
    f"{wanted[field]!r} (--config.model.{field})"
    for field in _FIELDS
    if about.keys() & wanted.keys() & {field} and about[field] != wanted[field]
  ]
