"""Every configuration key, with its default and a word on what it does.

A recipe calls `base()` and changes lines. The result is locked: a key that is
not here is an error that names the nearest one. Defaults are the simplest case;
the papers' values live in the recipes.

Durations are strings: "240" or "10k" (updates), "300ep" (epochs), "5%" (of the
whole run), "1Mex" (training examples). Off is "0", 0, "" or (); never None.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict


def base() -> ConfigDict:
  """Returns all keys with their defaults, locked."""
  config = ConfigDict()

  config.seed = 0  # Initial weights, data order, dropout and mixup.
  config.total = "10ep"  # Length of the run.
  config.image_size = (224,)  # Pixels: (side,) or (height, width).
  config.accumulate = 1  # Parts into which a batch is cut to save memory.
  config.ema = 0.0  # Decay of averaged weights (0.9999); 0 keeps none.

  config.objective = "supervised"  # | "masked_patch", which reads no labels.
  config.loss = "softmax"  # "softmax" | "sigmoid" (sum over the classes).
  config.label_smoothing = 0.0  # Share a of the target: (1 - a) y + a / c.
  config.mixup = 0.0  # Beta(a, a) of the mixing weight; 0 is off.
  config.cutmix = 0.0  # The same for pasted boxes; with both on, a coin.

  config.lr_grid = ()  # Learning rates to choose from; then config.optim.lr.
  config.lr_splits = ("train[:90%]", "train[90%:]")  # To train and to judge on.

  config.log_every = "50"  # Updates between two rows of metrics.jsonl.
  config.profile = ""  # "START:STOP": updates to trace for TensorBoard.
  config.resume_from = ""  # Full state of another run, for a new workdir.
  config.init_from = ""  # Weights only: .npz, .safetensors, a run; "?": needed.
  config.init_head = "reset"  # "reset": a new head | "keep": the stored one.
  config.init_resize = (
    "bicubic"  # | "bilinear" | "bilinear_corners": positions.
  )
  config.init_patch = "keep"  # "resize": to a model with other patches.

  config.model = ConfigDict()
  config.model.name = "B/16"  # Variant and patch; "R50+B/16", "R50x1".
  config.model.width = 0  # Width, depth, mlp_dim and num_heads: 0 is the
  config.model.depth = 0  # variant's own.
  config.model.mlp_dim = 0
  config.model.num_heads = 0
  config.model.classifier = "token"  # "token" | "gap" | "map".
  config.model.representation_size = 0  # Hidden tanh layer before the head.
  config.model.posemb = "learned_1d"  # or learned_2d, sincos2d, relative, none.
  config.model.posemb_at = "stem"  # "stem" | "layers" | "shared".
  config.model.registers = 0  # Tokens that stand for no patch.
  config.model.dropout = 0.0
  config.model.attention_dropout = 0.0
  config.model.stochastic_depth = 0.0  # Rate in the last block; 0 in the first.
  config.model.layer_scale = 0.0  # Initial factor of a branch (1e-4); 0: none.
  config.model.gelu = "tanh"  # "tanh" | "erf", of weights from PyTorch.
  config.model.head_bias = 0.0  # Initial bias of the head (-10 with sigmoid).
  config.model.stem_width = 0.0  # A hybrid's ResNet: 1.0 is 64 channels, and
  config.model.stem_blocks = ()  # its stages' units; 0, (): what the name says.
  config.model.input_range = "-1,1"  # "-1,1" | "0,1" | "imagenet".
  config.model.dtype = "float32"  # Of the computation; weights stay float32.
  config.model.scan = False  # Blocks as one scanned loop: compiles faster.
  config.model.remat = "none"  # "dots" | "full": time for memory; "full:4" does
  # so in the first 4 blocks alone.

  config.masked_patch = ConfigDict()  # Of the objective of that name.
  config.masked_patch.share = 0.5  # Of the patches, whose content is predicted.
  config.masked_patch.mask = 0.8  # Of those, how many become the mask,
  config.masked_patch.random = 0.1  # or another patch; the rest stay.
  config.masked_patch.target = "mean_color"  # | "small_patch" | "pixels".

  config.input = ConfigDict()
  config.input.source = ""  # "folder:PATH", "tfds:NAME", "tfrecord:GLOB", …
  config.input.split = "train"  # Slices too: "train[:90%]".
  config.input.data_dir = ""  # Where relative sources are looked for.
  config.input.ops = "decode|resize({size})"  # {size} is image_size.
  config.input.batch_size = 512  # Global: over all devices and hosts.
  config.input.streams = 0  # Logical data streams; 0: as many as processes.
  config.input.shuffle_buffer = 50_000  # Examples; 1: in the split's order.
  config.input.prefetch = 2  # Batches on the devices ahead of the step.
  config.input.max_labels = 1  # Of an example; more where the source has more.
  config.input.on_error = "raise"  # "skip": replace and count bad images.
  config.input.max_bad_share = 0.01  # Of the images; "skip" stops beyond it.
  config.input.cache = ""  # Where records are kept: "memory" or a local folder.
  config.input.service = ""  # "grpc://HOST:PORT" of a tf.data service.

  config.optim = ConfigDict()
  config.optim.name = "adamw"  # "adamw" | "sgd" | "adafactor".
  config.optim.lr = 1e-3
  config.optim.schedule = "cosine"  # or "linear", "rsqrt", "constant".
  config.optim.warmup = "0"  # Linear, from 0.
  config.optim.cooldown = "0"  # Linear, to 0, over the last updates.
  config.optim.end_lr = 0.0  # Where "linear" ends.
  config.optim.timescale = "10k"  # Of "rsqrt".
  config.optim.weight_decay = 0.0  # Decoupled, multiplied by the learning rate.
  config.optim.decay_paths = (".*kernel",)  # The only leaves that decay.
  config.optim.decay_multipliers = ()  # As `multipliers`, of the decay.
  config.optim.clip = 0.0  # Largest global norm of the gradient.
  config.optim.sam_rho = 0.0  # Reach of sharpness-aware steps; 0 is off.
  config.optim.b1 = 0.9  # Adam, Adafactor.
  config.optim.b2 = 0.999  # Of Adafactor, the most its decay grows to.
  config.optim.eps = 1e-8
  config.optim.momentum = 0.9  # SGD.
  config.optim.moment_dtype = "float32"  # "bfloat16" halves the first moment.
  config.optim.multipliers = ()  # ((path regex, factor), …), first match wins.
  config.optim.freeze = ()  # Path regexes of the parameters that stay.

  config.optim.zero = True  # Moments in parts over the data devices (ZeRO-1).

  config.mesh = ConfigDict()  # Devices along each axis; one may be -1.
  config.mesh.data = -1  # Copies of the model.
  config.mesh.fsdp = 1  # Parts of every weight, gathered when used.
  config.mesh.model = 1  # Parts of every head and MLP (tensor parallel).
  config.mesh.dcn = 1  # Slices, each of the size that the others make.

  config.evals = ConfigDict()  # name -> evaluator(…)

  config.checkpoint = ConfigDict()
  config.checkpoint.every = "1k"
  config.checkpoint.keep = 2  # The newest ones.
  config.checkpoint.keep_every = "0"  # Kept for good.
  config.checkpoint.best = ""  # "NAME/top1": its best step is kept as well.
  config.checkpoint.allow_change = False  # Resume although the guard objects.
  return config.lock()


def parse_arg(arg: str, *, model: str, dataset: str) -> tuple[str, str]:
  """Splits what stands behind a recipe's colon: "L/16,cifar10".

  Args:
    arg: "MODEL,DATASET"; either may be left out. Only the first comma counts, a
      data set may hold more ("mu/4,fake:16,3,100").
    model: where none is given.
    dataset: where none is given.

  Returns:
    The model's name and the data set.
  """
  first, _, rest = (arg or "").partition(",")
  return first or model, rest or dataset


# JFT-300M is private: these are one's own records, in a folder below
# `input.data_dir`, or wherever --config.input.source=tfrecord:… says.
JFT = "tfrecord:jft/train-*?classes=18291"
IMAGENET21K = "tfrecord:imagenet21k/train-*?classes=21843"
# What a few-shot probe reads while pre-training.
IMAGENET_PROBE = dict(
  source="tfds:imagenet2012",
  train_split="train[:65000]",
  split="validation",
  shots=(5, 10),
)


def pick(choices: Mapping[str, Any], name: str, what: str) -> Any:
  """Returns what a name stands for.

  Args:
    choices: name -> value.
    name: from a recipe's argument.
    what: what it is the name of, for the error.

  Raises:
    ValueError: there is no such name; lists them, with the nearest.
  """
  if name in choices:
    return choices[name]
  near = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.4)
  hint = f" Did you mean {near[0]!r}?" if near else ""
  raise ValueError(
    f"There is no {what} {name!r} here, but {', '.join(choices)}.{hint}"
  )


def imagenet_evals() -> dict[str, ConfigDict]:
  """Returns entries of `config.evals` for training on ImageNet's first 99 %.

  Choices are made on `minival`, the rest of the training images; `val` is for
  the result.
  """
  ops = "decode|resize_small({side*8/7})|central_crop({size})"
  return {
    "minival": evaluator(split="train[99%:]", ops=ops, every="5%"),
    "val": evaluator(split="validation", ops=ops, every="5%"),
  }


def evaluator(*, kind: str = "classification", **changes) -> ConfigDict:
  """Returns one entry of `config.evals`, locked, with `changes` made."""
  config = ConfigDict()
  config.kind = kind  # | "fewshot"; "" switches the evaluator off.
  config.source = ""  # "": the training source, its data_dir included.
  config.split = "test"
  config.ops = "decode|resize({size})"
  config.cache = ""  # As `input.cache`; what is kept serves all passes.
  config.batch_size = 512  # Global.
  config.every = "0"  # "0": only at the end of the run.
  config.weights = ""  # "params" | "ema"; "": the averages where there are any.
  # A linear probe has keys of its own, also while it is switched off. The
  # defaults are big_vision's.
  if kind == "fewshot" or "shots" in changes:
    config.ops = "decode|resize({size*8/7})|central_crop({size})"
    config.train_split = "train"  # Where the few examples come from.
    config.shots = (1, 5, 10, 25)  # Examples of each class.
    config.seeds = (0, 1, 2)  # Draws of examples; accuracies are means.
    config.strengths = (1024.0,)  # Of the ridge; the first is the headline.
    config.representation = "pre_logits"  # | "tokens", the mean of the patches.
  config.lock()
  config.update(changes)
  return config


def vtab(**changes) -> ConfigDict:
  """Returns what `config.vtab` has in a sweep, locked, with `changes` made.

  Beside it stands `config.mode`: "finetune", or "linear" for a probe on frozen
  features.
  """
  config = ConfigDict()
  config.protocol = "paper"  # Named in results; the recipe says what it is.
  config.preset = "bit_vit"  # | "task_adaptation": how images are prepared.
  config.stage = "final"  # | "select": val200 alone, test stays unread.
  config.lrs = ()  # To choose from in place of optim.lr.
  config.totals = ()  # To choose from in place of total.
  config.probe = "ridge"  # | "logistic", in the mode "linear".
  config.strengths = ()  # Of the probe, to choose from; (): its usual ones.
  config.batch_size = 512  # Global, of evaluations.
  config.lock()
  config.update(changes)
  return config
