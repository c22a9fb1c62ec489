"""timm's and Hugging Face's weights: their logits are the judge.

`golden/torch_*` were made by timm 1.0.31 and transformers 5.24.0 on PyTorch
2.13.0 (CPU), every parameter drawn from a normal distribution of deviation 0.2
(around 1 for one-dimensional weights). The `.safetensors` are state dicts, the
`.io.npz` images `[2, h, w, 3]` and outputs. Arguments, unless the table below
says more:

timm `VisionTransformer`: img_size 32, patch_size 8, embed_dim 32, depth 2,
  num_heads 4, mlp_ratio 2, num_classes 7.
`timm_hybrid`, `timm_stem`: embed_dim 16, depth 1; HybridEmbed around
  ResNetV2(layers=(1,), width_factor=0.5, preact=False, stem_type="same",
  conv_layer=partial(StdConv2dSame, eps=1e-8)) with patch_size 1, around
  create_resnetv2_stem(3, 32, the same three) with patch_size 4.
transformers: hidden_size 32, num_hidden_layers 2, num_attention_heads 4,
  image_size 32, patch_size 8, intermediate_size 64 or mlp_ratio 2,
  layer_norm_eps 1e-6; the files are those of `save_pretrained`, but
  `hf_vit_v5` (one layer) is the `state_dict()` of version 5.
"""

import collections
import json
import logging
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from vit_jax import models, trees
from vit_jax.weights import torch
from vit_jax.weights.leaf import in_memory

GOLDEN = pathlib.Path(__file__).parent / "golden"
WIDE = {"width": 32, "depth": 2, "num_heads": 4, "mlp_dim": 64}
THIN = {"width": 16, "depth": 1, "num_heads": 4, "mlp_dim": 32}
NO_HEAD = {"num_classes": 0}
GOLDENS = {
  "timm_token": {},
  "timm_gap": {"classifier": "gap"},  # class_token=False, fc_norm=False
  "timm_map": {"classifier": "map"},  # class_token=False
  # no_embed_class=True, init_values=1e-4; timm_dinov2 has reg_tokens=4 as well
  "timm_deit3": {"layer_scale": 1e-4},
  "timm_dinov2": {"layer_scale": 1e-4, "registers": 4, **NO_HEAD},
  # reg_tokens=2, img_size=(32, 48): positions for all tokens, a grid of 4x6
  "timm_registers": {"registers": 2},
  "timm_hybrid": {**THIN, "stem_width": 0.5, "stem_blocks": (1,)},
  "timm_stem": {**THIN, "stem_width": 0.5, "patch_size": 4},
  "hf_vit": {},  # ViTForImageClassification
  "hf_vit_v5": {"depth": 1},
  "hf_vit_pooler": {"representation_size": 32, **NO_HEAD},  # ViTModel
  "hf_dinov2": {"layer_scale": 1.0, **NO_HEAD},  # Dinov2Model
  "hf_dinov2_registers": {"layer_scale": 1.0, "registers": 4, **NO_HEAD},
}
# timm_registers is written in another form: it has a test of its own.
TIMM = [
  name
  for name in GOLDENS
  if name.startswith("timm_") and name != "timm_registers"
]


def make_model(name, **fields):
  fields = {"num_classes": 7, "gelu": "erf", **WIDE, **GOLDENS[name], **fields}
  patch = 1 if "stem_blocks" in fields else 8
  return models.create(f"mu/{patch}", **fields)


def stored(name):
  arrays = load_file(GOLDEN / f"torch_{name}.safetensors")
  return {key: in_memory(array) for key, array in arrays.items()}


def grid_of(name):
  return (4, 6) if name == "timm_registers" else ()


def to_ours(flat, **how):
  """The leaves under our names; there is nothing to complain of."""
  ours, complaints = torch.from_torch(flat, heads=4, **how)
  assert not complaints
  return ours


def read(flat):
  """Reads leaves and checks what they said of themselves."""
  arrays = {}
  for name, leaf in flat.items():
    arrays[name] = leaf.read()
    assert arrays[name].shape == leaf.shape, name
    assert arrays[name].dtype == leaf.dtype, name
  return arrays


def nested(flat):
  tree = {}
  for path, array in read(flat).items():
    *rooms, leaf = path.split("/")
    room = tree
    for key in rooms:
      room = room.setdefault(key, {})
    room[leaf] = jnp.asarray(array)
  return tree


@pytest.mark.parametrize("name", GOLDENS)
def test_the_same_outputs_as_in_pytorch(name):
  io = dict(np.load(GOLDEN / f"torch_{name}.io.npz"))
  images = jnp.asarray(io.pop("images"))
  model = make_model(name)
  params = nested(to_ours(stored(name), grid=grid_of(name)))
  abstract = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
  assert not trees.differences(params, abstract)
  outputs = jax.jit(model.apply)({"params": params}, images)
  for key, expected in io.items():
    np.testing.assert_allclose(outputs[key], expected, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", TIMM)
def test_back_to_timm_are_the_names_and_bits(name):
  before = read(stored(name))
  after = read(torch.to_timm(to_ours(stored(name))))
  added = {"timm_deit3": 1, "timm_dinov2": 1 + 4}  # Had rows for patches only.
  if name in added:
    rows, after["pos_embed"] = np.split(
      after["pos_embed"], [added[name]], axis=1
    )
    assert not rows.any()
  assert after.keys() == before.keys()
  for key, array in before.items():
    np.testing.assert_array_equal(after[key], array, err_msg=key)


def test_registers_are_written_with_positions_of_zeros():
  ours = to_ours(stored("timm_registers"), grid=(4, 6))
  written = torch.to_timm(ours)
  table = written["pos_embed"].read()
  assert table.shape == (1, 1 + 2 + 4 * 6, 32)
  assert table[:, 0].any() and not table[:, 1:3].any()
  io = np.load(GOLDEN / "torch_timm_registers.io.npz")
  images = jnp.asarray(io["images"])
  params = nested(to_ours(written, wanted=(4, 6)))
  model = make_model("timm_registers")
  outputs = jax.jit(model.apply)({"params": params}, images)
  np.testing.assert_allclose(outputs["logits"], io["logits"], atol=1e-5)


def test_hugging_face_becomes_timm():
  theirs = read(stored("hf_vit"))
  written = read(torch.to_timm(to_ours(stored("hf_vit"))))
  assert written.keys() == stored("timm_token").keys()
  attention = "vit.encoder.layer.1.attention.attention"
  np.testing.assert_array_equal(
    written["blocks.1.attn.qkv.weight"],
    np.concatenate(
      [theirs[f"{attention}.{x}.weight"] for x in ("query", "key", "value")]
    ),
  )


def timm_forward(state, images, heads, gelu):
  """timm's ViT with a class token, from its own names, in numpy."""

  def linear(x, name):
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

  def norm(x, name):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x * state[f"{name}.weight"] + state[f"{name}.bias"]

  def attention(x, name):
    qkv = linear(x, f"{name}.qkv").reshape(len(x), 3, heads, -1)
    q, k, v = qkv.transpose(1, 2, 0, 3)  # [k, l, d / k] each
    weights = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]))
    y = weights / weights.sum(-1, keepdims=True) @ v
    return linear(y.swapaxes(0, 1).reshape(x.shape), f"{name}.proj")

  kernel = state["patch_embed.proj.weight"]  # [o, i, h, w]
  size, logits = kernel.shape[-1], []
  for image in images:
    h, w = (side // size for side in image.shape[:2])
    patches = image.reshape(h, size, w, size, 3)
    x = np.einsum("apbqi,oipq->abo", patches, kernel).reshape(h * w, -1)
    x = x + state["patch_embed.proj.bias"]
    x = np.concatenate([state["cls_token"][0], x]) + state["pos_embed"][0]
    for i in range(sum(name.endswith("qkv.bias") for name in state)):
      block = f"blocks.{i}"
      x = x + attention(norm(x, f"{block}.norm1"), f"{block}.attn")
      y = gelu(linear(norm(x, f"{block}.norm2"), f"{block}.mlp.fc1"))
      x = x + linear(y, f"{block}.mlp.fc2")
    logits.append(linear(norm(x, "norm")[0], "head"))
  return np.stack(logits)


def test_published_weights_give_their_logits_under_timms_names():
  erf = np.vectorize(math.erf)
  judged = np.load(GOLDEN / "torch_timm_token.io.npz")
  logits = timm_forward(
    read(stored("timm_token")),
    judged["images"],
    heads=4,
    gelu=lambda x: x * (1 + erf(x / np.sqrt(2))) / 2,
  )
  np.testing.assert_allclose(logits, judged["logits"], atol=1e-5)  # The judge.

  def gelu(x):  # Google's models have the tanh form.
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2

  for name in ("token", "token_nonsquare"):
    weights = dict(np.load(GOLDEN / f"published_{name}.npz"))
    flat = {path: in_memory(array) for path, array in weights.items()}
    io = np.load(GOLDEN / f"published_{name}.io.npz")
    state = read(torch.to_timm(flat))
    logits = timm_forward(state, io["images"], 4, gelu)
    np.testing.assert_allclose(logits, io["logits"], atol=1e-5, err_msg=name)


def test_leaves_are_read_when_asked_for_and_fused_ones_once():
  reads = collections.Counter()

  def counted(name, leaf):
    def values():
      reads[name] += 1
      return leaf.read()

    return leaf._replace(read=values)

  flat = {key: counted(key, leaf) for key, leaf in stored("timm_map").items()}
  ours = to_ours(flat)
  back = torch.to_timm(ours)
  assert not reads
  read(back)
  assert reads == dict.fromkeys(flat, 1)


def test_which_files_are_pytorchs():
  assert all(torch.is_torch(stored(name)) for name in GOLDENS)
  published = np.load(GOLDEN / "published_token.npz")
  assert not torch.is_torch(published.files)
  assert not torch.is_torch([])


def test_unknown_names_are_kept(caplog):
  flat = stored("hf_dinov2")
  extra = {"blocks.0.attn.q_norm.weight": in_memory(np.ones(8))}
  with caplog.at_level(logging.INFO, "vit_jax"):
    logging.getLogger("vit_jax").propagate = True
    ours = to_ours(flat | extra)
  assert extra.items() <= ours.items()
  assert not any("mask" in name for name in ours)
  assert "embeddings.mask_token" in caplog.text


def leaves(*names):
  return {name: in_memory(np.zeros((2, 2))) for name in names}


@pytest.mark.parametrize(
  "name, reason",
  [
    ("dist_token", "second class token"),
    ("head_dist.weight", "second class token"),
    ("deit.embeddings.distillation_token", "second class token"),
    ("distillation_classifier.bias", "second class token"),
    ("fc_norm.weight", "fc_norm"),
    ("norm_pre.bias", "CLIP"),
    ("blocks.0.mlp.w12.weight", "SwiGLU"),
    ("dinov2.encoder.layer.3.mlp.weights_in.weight", "SwiGLU"),
    ("encoder.layer.3.mlp.gate_proj.weight", "SwiGLU"),
  ],
)
def test_other_architectures_are_refused(name, reason):
  with pytest.raises(ValueError, match=reason) as error:
    torch.from_torch(stored("timm_token") | leaves(name), heads=4)
  assert name in str(error.value)


def test_a_gated_mlp_under_the_names_of_a_plain_one_is_refused():
  flat = stored("timm_token")
  flat["blocks.0.mlp.fc1.weight"] = in_memory(np.zeros((128, 32)))
  with pytest.raises(ValueError, match=r"SwiGLU.*fc1\.weight \(128, 32\)"):
    torch.from_torch(flat, heads=4)


def test_heads_must_divide_the_width():
  _, complaints = torch.from_torch(stored("timm_map"), heads=5)
  assert complaints == ["num_heads=5 does not divide the file's width 32."]


def test_positions_for_another_grid_are_refused():
  flat = stored("timm_registers")
  _, (complaint,) = torch.from_torch(flat, heads=4, grid=(4, 4))
  assert "27 rows, 3 or 0 of them before the grid; the grid 4x4" in complaint


def test_what_timm_has_no_place_for_is_listed():
  flat = dict(np.load(GOLDEN / "published_token_rep.npz"))
  places = leaves("Transformer/posembed_input/x_embedding")
  flat = {path: in_memory(array) for path, array in flat.items()} | places
  with pytest.raises(ValueError, match="representation_size=0") as error:
    torch.to_timm(flat)
  for path in ("pre_logits/kernel", "pre_logits/bias", *places):
    assert path in str(error.value)


def described(**fields):
  model = models.create("mu/8", num_classes=2, **fields)
  return torch.metadata(
    model, image_size=(32, 48), input_range="-1,1", classes=("cat", "dog")
  )


def test_metadata_says_how_timm_computes_the_same():
  texts = described(classifier="gap", mlp_dim=60, width=44, layer_scale=0.1)
  assert all(isinstance(text, str) for text in texts.values())
  assert json.loads(texts["classes"]) == ["cat", "dog"]
  assert (texts["gelu"], texts["layer_norm_eps"]) == ("tanh", "1e-6")
  arguments = json.loads(texts["timm"])
  assert arguments["img_size"] == [32, 48]
  assert (arguments["global_pool"], arguments["fc_norm"]) == ("avg", False)
  assert arguments["act_layer"] == "gelu_tanh"
  assert int(44 * arguments["mlp_ratio"]) == 60 != int(44 * (60 / 44))


def test_positions_in_each_layer_are_refused():
  with pytest.raises(ValueError, match="posemb_at='shared'"):
    described(posemb_at="shared")


def test_a_resnet_is_refused():
  model = models.create("R50x1", num_classes=2)
  with pytest.raises(ValueError, match="Only ViTs"):
    torch.metadata(model, image_size=(32, 32), input_range="-1,1", classes=())
