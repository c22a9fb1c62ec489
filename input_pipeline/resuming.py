"""What an earlier run of `write` has left, and whether this one may go on.

Before anything else a plan is stored beside the shards: what must be the same
for the shards to fit together, in a few bytes for each.
"""

import collections
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from input_pipeline import shards
from input_pipeline.inspecting import Bad
from input_pipeline.shards import Split

INDEX = "index.json"
_PLAN = ".plan.json"
_SHOWN = 10
_gfile = tf.io.gfile


def begin(out: str, splits: Mapping[str, Split], max_size: int) -> None:
  """Stores the plan, or compares it with the one that is there.

  Raises:
    ValueError: what is not as it was; or `out` has other things in it.
  """
  plan = _plan(splits, max_size)
  path = f"{out}/{_PLAN}"
  if _gfile.exists(path):
    with _gfile.GFile(path) as file:
      found = _differences(json.load(file), plan, splits)
    if found:
      more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
      listed = "\n  ".join([*found[:_SHOWN], *more])
      raise ValueError(
        f"{out} was begun with other arguments or images:\n  {listed}\n"
        "Name another folder, or remove that one."
      )
    return
  there = sorted(_gfile.listdir(out)) if _gfile.isdir(out) else []
  if there:
    raise ValueError(
      f"{out} is not empty: name another folder. In it: "
      f"{', '.join(there[:_SHOWN])}."
    )
  _gfile.makedirs(out)
  shards.write_json(path, plan)


def finished(out: str, splits: Mapping[str, Split]) -> dict[str, int]:
  """Shards and their records, if all are there; else nothing."""
  path = f"{out}/{INDEX}"
  wanted = {shard for split in splits.values() for shard in split.shards}
  if not _gfile.exists(path) or wanted - set(_gfile.listdir(out)):
    return {}
  with _gfile.GFile(path) as file:
    return json.load(file)["files"]


def kept(
  out: str, splits: Mapping[str, Split], advance: Callable[[int], None]
) -> tuple[dict[str, int], list[Bad]]:
  """Sound shards and their records, and the bad images left out of them.

  Args:
    out: where they lie.
    splits: what is wanted.
    advance: is told how many images need not be written.
  """
  counts, bad = {}, []
  there = set(_gfile.listdir(out))
  for split in splits.values():
    for shard, positions in split.shards.items():
      if shard not in there:
        continue
      names = shards.names_in(f"{out}/{shard}")
      held = set(names)
      missing = [i for i in positions if split.names[i] not in held]
      why = _why_bad(split, missing)
      wanted = [split.names[i] for i in positions if split.names[i] in held]
      if names == wanted and len(why) == len(missing):
        counts[shard] = len(names)
        bad += why
        advance(len(positions))
  return counts, bad


def _why_bad(split: Split, positions: Sequence[int]) -> list[Bad]:
  """Those of some images that are bad."""
  if not positions:
    return []
  seen = shards.read(split.source, np.array(positions, np.int64), 0)
  return [
    Bad(split.source.name_of(one.id), one.reason) for one in seen if one.reason
  ]


def _plan(splits: Mapping[str, Split], max_size: int) -> dict[str, Any]:
  """What must stay the same."""

  def digest(split: Split, positions: range) -> str:
    lines = [f"{split.names[i]} {split.stats[i]}" for i in positions]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

  return {
    "max_size": max_size,
    "splits": {
      name: {
        "folders": collections.Counter(map(os.path.dirname, split.names)),
        "shards": {x: digest(split, y) for x, y in split.shards.items()},
      }
      for name, split in splits.items()
    },
  }


def _differences(
  old: Mapping[str, Any], new: Mapping[str, Any], splits: Mapping[str, Split]
) -> list[str]:
  """Says what is not the same any more."""
  found = []
  if old["max_size"] != new["max_size"]:
    found.append(f"max_size: {old['max_size']} then, {new['max_size']} now")
  if old["splits"].keys() != new["splits"].keys():
    then, now = (", ".join(plan["splits"]) for plan in (old, new))
    return [*found, f"splits: {then} then, {now} now"]
  for name, split in splits.items():
    found += _changes(old["splits"][name], new["splits"][name], name, split)
  return found


def _changes(
  old: Mapping[str, Any], new: Mapping[str, Any], name: str, split: Split
) -> list[str]:
  """Says what has changed in a split: folders, else shards, else files."""
  then, now = old["folders"], collections.Counter(new["folders"])
  folders = [
    f"{folder}: {then.get(folder, 0)} images then, {now[folder]} now"
    for folder in sorted(then | now)
    if then.get(folder, 0) != now[folder]
  ]
  if folders:
    return folders
  then, now = old["shards"], new["shards"]
  if then.keys() != now.keys():
    return [f"{name}: {len(then)} shards then, {len(now)} now"]
  changed = [shard for shard in now if now[shard] != then[shard]]
  if not changed:
    return []
  rows = itertools.chain(*(split.shards[shard] for shard in changed))
  newest = max(rows, key=lambda i: split.stats[i][1])
  return [f"{name}: files were changed, at last {split.names[newest]}"]
