"""The paper's questions, asked of scikit-learn's 1797 digits, with plots.

    pip install 'vit-jax[quickstart,viz]'
    python benchmarks/digits_study.py --workdir=runs/study --plots=docs/study

Small models from scratch, several seeds of each, and for every question a JSON
line for each setting: position embeddings (the paper's Table 8), class token
against mean and their learning rates (its figure 9), depth against width
(figure 8), amounts of data with and without a ResNet's stem (figures 4 and 5),
and fine-tuning at twice the resolution. Runs that are done are kept in the
workdir and not repeated; `--only=positions` asks one question.

A digit has 8x8 pixels and is shown at 16, so that patches of 4 pixels make 16
tokens. The recipe is `configs/digits.py` at a third of its length.
"""

import contextlib
import io
import json
import logging
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import tensorflow as tf
from absl import app, flags
from absl import logging as absl_logging

from configs import digits
from vit_jax import train, weights

_WORKDIR = flags.DEFINE_string("workdir", "runs/study", "Where runs are kept.")
_PLOTS = flags.DEFINE_string("plots", "", "Folder for plots; none if empty.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each setting.", 1)
_TOTAL = flags.DEFINE_string("total", "450", "Length of each, as config.total.")
_ONLY = flags.DEFINE_list("only", [], "Questions; all of them if empty.")

Settings = dict[str, dict[str, Any]]  # setting -> changes in the config


def positions() -> Settings:
  """Every kind at the stem, and what is learned also in every layer."""
  kinds = ("none", "learned_1d", "learned_2d", "sincos2d", "relative")
  settings: Settings = {kind: {"model.posemb": kind} for kind in kinds}
  for place in ("layers", "shared"):
    for kind in ("learned_1d", "learned_2d"):
      changes = {"model.posemb": kind, "model.posemb_at": place}
      settings[f"{kind}, {place}"] = changes
  return settings


def pooling() -> Settings:
  """How the tokens become one vector, each way at several learning rates."""
  return {
    f"{classifier}, lr {rate:g}": {
      "model.classifier": classifier,
      "optim.lr": rate,
    }
    for classifier in ("token", "gap")
    for rate in (0.0005, 0.002, 0.008)
  }


def shape() -> Settings:
  """Depth and width, around 4 blocks of 64."""
  shapes = [(depth, 64) for depth in (1, 2, 4, 8)]
  shapes += [(4, width) for width in (16, 32, 128)]
  return {
    f"{depth} blocks of {width}": {
      "model.depth": depth,
      "model.width": width,
      "model.mlp_dim": 4 * width,
    }
    for depth, width in shapes
  }


def data() -> Settings:
  """Parts of the training data, with as many updates as for all of it."""
  stems: Settings = {
    "ViT": {},
    "hybrid": {
      "model.name": "mu/1",
      "model.stem_width": 0.5,
      "model.stem_blocks": (1,),
    },
  }
  return {
    f"{stem}, {share} %": {**changes, "input.split": f"train[:{share}%]"}
    for stem, changes in stems.items()
    for share in (5, 10, 30, 100)
  }


def resolution() -> Settings:
  """Patches of 2 pixels: small, large, and large after having seen small."""
  patches = {"model.name": "mu/2"}
  small = {**patches, "image_size": (8,)}
  large = {**patches, "image_size": (16,)}
  # A quarter of the length at a quarter of the rate, from the first setting.
  tuned = {**large, "init_from": "8 pixels", "init_head": "keep"}
  return {"8 pixels": small, "16 pixels": large, "8, then 16": tuned}


QUESTIONS = {
  question.__name__: question
  for question in (positions, pooling, shape, data, resolution)
}


def main(argv: list[str]) -> None:
  del argv
  tf.config.set_visible_devices([], "GPU")
  absl_logging.set_verbosity(absl_logging.ERROR)
  logging.getLogger("vit_jax").setLevel(logging.ERROR)
  for name in _ONLY.value or QUESTIONS:
    # Runs of another length are others: they are not to be taken for these.
    root = pathlib.Path(_WORKDIR.value).absolute() / _TOTAL.value / name
    results = {}
    for setting, changes in QUESTIONS[name]().items():
      results[setting] = result(root, setting, changes)
      line = {"benchmark": "digits_study", "question": name, "setting": setting}
      print(json.dumps(line | results[setting]), flush=True)
    if _PLOTS.value:
      plot(name, results, pathlib.Path(_PLOTS.value))


def result(root: pathlib.Path, setting: str, changes: dict) -> dict[str, Any]:
  """Trains one setting with every seed: its size, and accuracies in percent."""
  accuracies = []
  for seed in range(_SEEDS.value):
    workdir = root / setting / str(seed)
    config = digits.get_config()
    config.update({"total": _TOTAL.value, "seed": seed, "log_every": "0"})
    config.evals.test.every = config.checkpoint.every = "0"
    config.update_from_flattened_dict(changes)
    if config.init_from:
      config.init_from = str(root / config.init_from / str(seed))
      config.total = str(int(_TOTAL.value) // 4)
      config.optim.lr /= 4
    print(f"{root.name}: {setting}, seed {seed}", file=sys.stderr, flush=True)
    with contextlib.redirect_stdout(io.StringIO()):
      train.run(config, str(workdir))
    jax.clear_caches()
    summary = json.loads((workdir / "summary.json").read_text())
    accuracies.append(100 * summary["final"]["test/top1"]["value"])
  leaves = weights.open(str(workdir)).leaves
  return {
    "params": sum(int(np.prod(leaf.shape)) for leaf in leaves.values()),
    "top1": round(float(np.mean(accuracies)), 2),
    "deviation": round(float(np.std(accuracies, ddof=min(1, seed))), 2),
    "seeds": len(accuracies),
  }


def plot(name: str, results: dict[str, dict], folder: pathlib.Path) -> None:
  """Draws NAME.svg: accuracy and its deviation over seeds for each setting."""
  import matplotlib

  matplotlib.use("svg")
  matplotlib.rcParams["svg.hashsalt"] = "vit_jax"  # The same file each time.
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(
    figsize=(6, 0.6 + 0.32 * len(results)), layout="constrained"
  )
  rows = list(reversed(results))
  axes.errorbar(
    [results[row]["top1"] for row in rows],
    rows,
    xerr=[results[row]["deviation"] for row in rows],
    fmt="o",
    capsize=3,
  )
  axes.set_xlabel(f"top-1 on the test digits, %, over {_SEEDS.value} seeds")
  axes.grid(axis="x", alpha=0.4)
  folder.mkdir(parents=True, exist_ok=True)
  figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
  pyplot.close(figure)


if __name__ == "__main__":
  app.run(main)
