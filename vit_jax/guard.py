"""What a run must keep to be the same run, and what may change.

Every checkpoint says, as JSON, what its run is. A run that goes on under
another clock (data, batch, seed) or another model would not be exact, and is
refused.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("vit_jax")

Meta = dict[str, Any]


def describe(config: Any, source: Any, streams: int) -> Meta:
  """Returns what a checkpoint says of its run, as JSON values.

  Args:
    config: the resolved config.
    source: the training source.
    streams: of the run's first start, where the config leaves it open.
  """
  model = as_json(config.model)
  del model["remat"]  # Trades memory for time and changes no number.
  return {
    "version": 1,
    "guard": {
      "seed": config.seed,
      "batch_size": config.input.batch_size,
      "streams": config.input.streams or streams,
      "ops": config.input.ops,
      "image_size": list(config.image_size),
      "shuffle_buffer": config.input.shuffle_buffer,
      "on_error": config.input.on_error,
      "max_labels": config.input.max_labels,
      "split": config.input.split,
      "num_examples": source.num_examples,
      "class_names": list(source.class_names),
      "digest": source.digest,
      "objective": config.objective,
      "masked_patch": as_json(config.masked_patch),
      "loss": config.loss,
      "ema": config.ema,
      "model": model,
    },
    "config": as_json(config),
  }


def check(saved: Meta, current: Meta, *, allow: bool) -> None:
  """Refuses to continue a run under another clock or model.

  Args:
    saved: the checkpoint's meta.
    current: what this start would save.
    allow: `config.checkpoint.allow_change`: warn instead.

  Raises:
    ValueError: lists each guarded value that differs, saved and now.
  """
  old, new = _flat(saved["guard"]), _flat(current["guard"])
  # A value that older checkpoints do not have yet was then at its default.
  new = {key: value for key, value in new.items() if key in old}
  changed = changes(old, new)
  if changed and not allow:
    raise ValueError(
      "This run was started with other values, so it cannot go on exactly:\n  "
      + "\n  ".join(changed)
      + "\nSet them back, use another --workdir, or accept the change with "
      "--config.checkpoint.allow_change=True."
    )
  if changed:
    log.warning("Going on with changed values:\n  %s", "\n  ".join(changed))
  log_changes(saved["config"], current["config"])


def log_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
  """Says which values of a run's config are others now."""
  differences = changes(old, new)
  if differences:
    log.info("Changed in the config:\n  %s", "\n  ".join(differences))


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """Returns "KEY: was X, is Y" for all that differs in two nested dicts."""
  old, new = _flat(old), _flat(new)
  return [
    f"{key}: was {old.get(key)!r}, is {new.get(key)!r}"
    for key in sorted(old.keys() | new.keys())
    if old.get(key) != new.get(key)
  ]


def _flat(values: Mapping, prefix=""):
  flat: dict[str, Any] = {}
  for key, value in values.items():
    if isinstance(value, Mapping):
      flat |= _flat(value, f"{prefix}{key}.")
    else:
      flat[prefix + key] = value
  return flat


def as_json(config: Any) -> dict[str, Any]:
  """A config as JSON gives it back: with lists in place of tuples."""
  return json.loads(json.dumps(config.to_dict()))
