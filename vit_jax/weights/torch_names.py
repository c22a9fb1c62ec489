"""The names that our parameters have in timm, and in Hugging Face's files.

Tables and nothing else: which leaf is which, how it lies, and what no model of
this package can be. `torch` does the work.
"""

import re
from typing import NamedTuple


class Entry(NamedTuple):
  """A leaf under timm's name and ours.

  Attributes:
    timm: its name in timm.
    parts: our names: several where timm has leaves in one, as in `qkv`.
    layout: how timm's lies. "conv" [o, i, h, w] and "dense" [o, i] stand for
      our [h, w, i, o] and [i, o]; the rows of "heads" and the columns of "out"
      for our heads [k, d / k]; "same" for the same.
    first: where our numbers start, if there are any; timm's start at 0.
  """

  timm: str
  parts: tuple[str, ...]
  layout: str
  first: int


# Layers under timm's name and ours, in groups with their prefixes; "#" is a
# number, "a|b" are our layers where timm has them in one. Last comes the kind.
_MHA = "MultiHeadDotProductAttention"
_LAYERS = {
  ("", ""): (
    ("cls_token", "cls", "bare"),
    ("reg_token", "registers", "bare"),
    ("pos_embed", "Transformer/posembed_input/pos_embedding", "bare"),
    ("patch_embed.proj", "embedding", "conv"),
    ("norm", "Transformer/encoder_norm", "norm"),
    ("pre_logits.fc", "pre_logits", "dense"),
    ("head", "head", "dense"),
    ("patch_embed.backbone.stem.conv", "conv_root", "conv"),
    ("patch_embed.backbone.stem.norm", "gn_root", "norm"),
  ),
  ("blocks.#.", "Transformer/encoderblock_#/"): (
    ("norm1", "LayerNorm_0", "norm"),
    ("attn.qkv", f"{_MHA}_1/query|key|value", "heads"),
    ("attn.proj", f"{_MHA}_1/out", "out"),
    ("ls1.gamma", "LayerScale_0/gamma", "bare"),
    ("norm2", "LayerNorm_2", "norm"),
    ("mlp.fc1", "MlpBlock_3/Dense_0", "dense"),
    ("mlp.fc2", "MlpBlock_3/Dense_1", "dense"),
    ("ls2.gamma", "LayerScale_1/gamma", "bare"),
  ),
  ("attn_pool.", "MAPHead_0/"): (
    ("latent", "probe", "bare"),
    ("q", f"{_MHA}_0/query", "heads"),
    ("kv", f"{_MHA}_0/key|value", "heads"),
    ("proj", f"{_MHA}_0/out", "out"),
    ("norm", "LayerNorm_0", "norm"),
    ("mlp.fc1", "MlpBlock_0/Dense_0", "dense"),
    ("mlp.fc2", "MlpBlock_0/Dense_1", "dense"),
  ),
  ("patch_embed.backbone.stages.#.blocks.#.", "block#/unit#/"): (
    ("conv1", "conv1", "conv"),
    ("norm1", "gn1", "norm"),
    ("conv2", "conv2", "conv"),
    ("norm2", "gn2", "norm"),
    ("conv3", "conv3", "conv"),
    ("norm3", "gn3", "norm"),
    ("downsample.conv", "conv_proj", "conv"),
    ("downsample.norm", "gn_proj", "norm"),
  ),
}

# What the leaves of a kind of layer add to both names, and their layout.
_KINDS = {
  "bare": (("", "", "same"),),
  "norm": ((".weight", "/scale", "same"), (".bias", "/bias", "same")),
  "conv": ((".weight", "/kernel", "conv"), (".bias", "/bias", "same")),
  "dense": ((".weight", "/kernel", "dense"), (".bias", "/bias", "same")),
  "heads": ((".weight", "/kernel", "heads"), (".bias", "/bias", "heads")),
  "out": ((".weight", "/kernel", "out"), (".bias", "/bias", "same")),
}

# Other names as regexes, and timm's for them, in this order: Hugging Face's,
# which are shorter in its version 5 than in the files that this writes; and
# those of a stem that is all of its ResNet.
_OTHERS = (
  (r"^(vit|deit|dinov2|dinov2_with_registers)\.", ""),
  (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
  (r"^embeddings\.position_embeddings$", "pos_embed"),
  (r"^embeddings\.register_tokens$", "reg_token"),
  (r"^embeddings\.distillation_token$", "dist_token"),
  (r"^embeddings\.(cls|mask)_token$", r"\1_token"),
  (r"^(encoder\.layer|layers)\.(?=\d)", "blocks."),
  (r"\.layernorm_before\.", ".norm1."),
  (r"\.layernorm_after\.", ".norm2."),
  (r"\.attention\.(attention\.)?([qkv])(uery|ey|alue|_proj)\.", r".attn.\2."),
  (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
  (r"\.intermediate\.dense\.", ".mlp.fc1."),
  (r"\.output\.dense\.", ".mlp.fc2."),
  (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
  (r"^layernorm\.", "norm."),
  (r"^pooler\.dense\.", "pre_logits.fc."),
  (r"^classifier\.", "head."),
  (r"^patch_embed\.backbone\.(conv|norm)\.", r"patch_embed.backbone.stem.\1."),
)

GATED = "the MLP is gated (SwiGLU, as in the giant DINOv2)"

# What no model here computes, by timm's names, and why.
REFUSED = (
  (
    r"dist_token|head_dist\..*|(cls|distillation)_classifier\..*",
    "a distilled model has a second class token, and a head for it. Take the "
    "weights that were trained without distillation",
  ),
  (
    r"fc_norm\..*",
    "the mean of the tokens is normalised (fc_norm); here it is the mean of "
    "normalised tokens, which is another number",
  ),
  (
    r"norm_pre\..*",
    "the tokens are normalised before the first block (norm_pre, as in CLIP)",
  ),
  (
    r".*\.mlp\.(w12|w3|weights_in|weights_out|gate_proj|up_proj|down_proj)\..*",
    GATED,
  ),
)


def _entries():
  for (timm_prefix, prefix), layers in _LAYERS.items():
    first = int(prefix == "block#/unit#/")
    for timm, ours, kind in layers:
      room, slash, fused = f"{prefix}{ours}".rpartition("/")
      for timm_leaf, leaf, layout in _KINDS[kind]:
        parts = (f"{room}{slash}{part}{leaf}" for part in fused.split("|"))
        name = f"{timm_prefix}{timm}{timm_leaf}"
        yield Entry(name, tuple(parts), layout, first)


_ENTRIES = tuple(_entries())
_BY_TIMM = {entry.timm: entry for entry in _ENTRIES}
# Hugging Face has in three leaves what timm has in one.
_BY_TIMM |= {
  entry.timm.replace("qkv", letter): entry._replace(parts=(part,))
  for entry in _ENTRIES
  if ".qkv." in entry.timm
  for letter, part in zip("qkv", entry.parts)
}
_BY_PART = {part: entry for entry in _ENTRIES for part in entry.parts}

_TIMM_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_NUMBER = re.compile(r"(?<=encoderblock_)\d+|(?<=^block)\d+|(?<=/unit)\d+")


def timm_name(name: str) -> str:
  """Returns timm's name for one of Hugging Face's; others stay as they are."""
  for regex, timm in _OTHERS:
    name = re.sub(regex, timm, name)
  return name


def find_timm(name: str) -> Entry | None:
  """Returns what timm's name stands for, None if it is not known."""
  entry = _BY_TIMM.get(_TIMM_NUMBER.sub("#", name))
  numbers = [int(number) for number in _TIMM_NUMBER.findall(name)]
  return entry and _numbered(entry, numbers)


def find_part(path: str) -> Entry | None:
  """Returns the entry that one of our names is a part of, None if in none."""
  entry = _BY_PART.get(_NUMBER.sub("#", path))
  numbers = [int(number) for number in _NUMBER.findall(path)]
  return entry and _numbered(entry, [n - entry.first for n in numbers])


def _numbered(entry, numbers):
  def fill(template, first):
    for number in numbers:
      template = template.replace("#", str(number + first), 1)
    return template

  parts = tuple(fill(part, entry.first) for part in entry.parts)
  return entry._replace(timm=fill(entry.timm, 0), parts=parts)
