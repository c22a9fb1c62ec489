"""The judge: a ViT forward pass in plain numpy, from the papers' equations.

Shares no code with `vit_jax`: loops over patches and heads, one image at a
time, in the float type of its input (use float64). Reads the published names;
the constants (LayerNorm's epsilon, GELU's tanh form) are the published code's,
as the paper states none.

What the parameter tree shows is read from it: a hybrid's stem, class token,
registers, LayerScale, `pre_logits` and `head`. What it cannot show is told.
"""

import math

import numpy as np

from tests import reference_resnet


def layer_norm(x, params):
  """Normalises the last axis by its population statistics."""
  deviation = x - np.mean(x, axis=-1, keepdims=True)
  variance = np.mean(deviation**2, axis=-1, keepdims=True)
  return deviation / np.sqrt(variance + 1e-6) * params["scale"] + params["bias"]


def gelu_tanh(x):
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x):
  return 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


GELU = {"tanh": gelu_tanh, "erf": gelu_erf}


def softmax(x):
  e = np.exp(x - np.max(x, axis=-1, keepdims=True))
  return e / np.sum(e, axis=-1, keepdims=True)


def relative_logits(q, table, num_patches):
  """Appendix D.4: what the distance of two patches adds to their logit.

  Tokens before the patches have no place and add nothing.
  """
  prefix = len(q) - num_patches
  logits = np.zeros((len(q), len(q)))
  for i in range(num_patches):
    for j in range(num_patches):
      distance = table[i - j + num_patches - 1]
      logits[prefix + i, prefix + j] = q[prefix + i] @ distance
  return logits


def attention(x, params, *, sources=None, relative_patches=0):
  """Equations 5 to 8, one head after the other. Returns values and weights.

  Args:
    x: what asks.
    params: of all heads.
    sources: what is asked, if not `x` itself.
    relative_patches: how many patches have relative positions.
  """
  sources = x if sources is None else sources
  out, weights = params["out"]["bias"], []
  for k in range(params["query"]["kernel"].shape[1]):
    q, key, v = (
      y @ params[name]["kernel"][:, k] + params[name]["bias"][k]
      for name, y in (("query", x), ("key", sources), ("value", sources))
    )  # [l, d / heads] each
    q = q / np.sqrt(q.shape[-1])
    logits = q @ key.T
    if relative_patches:
      table = params["relative_embedding"]
      logits += relative_logits(q, table, relative_patches)
    weights.append(softmax(logits))
    out = out + weights[-1] @ v @ params["out"]["kernel"][k]
  return out, np.stack(weights)


def mlp(x, params, gelu):
  hidden = x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
  hidden = GELU[gelu](hidden)
  return hidden @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]


def block(x, params, *, gelu, relative_patches):
  """Equations 2 and 3, with LayerScale if there is one."""
  scales = [params.get(f"LayerScale_{i}", {"gamma": 1.0}) for i in range(2)]
  y, weights = attention(
    layer_norm(x, params["LayerNorm_0"]),
    params["MultiHeadDotProductAttention_1"],
    relative_patches=relative_patches,
  )
  x = x + y * scales[0]["gamma"]
  y = mlp(layer_norm(x, params["LayerNorm_2"]), params["MlpBlock_3"], gelu)
  return x + y * scales[1]["gamma"], weights


def embed(image, params):
  """Equation 1 without the class token: patches row by row, projected."""
  kernel, bias = params["kernel"], params["bias"]
  ph, pw = kernel.shape[:2]
  rows, cols = image.shape[0] // ph, image.shape[1] // pw
  tokens = []
  for i in range(rows):
    for j in range(cols):
      patch = image[i * ph : (i + 1) * ph, j * pw : (j + 1) * pw]
      tokens.append(np.tensordot(patch, kernel, axes=3) + bias)
  return np.stack(tokens), (rows, cols)


def positions(kind, params, grid, num_cls, shape):
  """What is added to the tokens: rows of class token, registers, patches.

  Args:
    kind: "learned_1d", "learned_2d", "sincos2d", or a kind that adds nothing.
    params: the tables.
    grid: (h, w) of the patches.
    num_cls: how many of the tokens before the patches are class tokens; the
      others are registers and have no position.
    shape: the tokens' [l, d].
  """
  table = np.zeros(shape)
  prefix = len(table) - grid[0] * grid[1]
  if kind == "learned_1d":
    learned = params["pos_embedding"][0]
    table[:num_cls], table[prefix:] = learned[:num_cls], learned[num_cls:]
  for i in range(grid[0]):
    for j in range(grid[1]):
      row = prefix + i * grid[1] + j
      if kind == "learned_2d":
        x, y = params["x_embedding"][0, j], params["y_embedding"][0, i]
        table[row] = np.concatenate([x, y])
      elif kind == "sincos2d":
        omega = 10_000.0 ** -np.linspace(0, 1, shape[1] // 4)
        waves = [f(p * omega) for p in (j, i) for f in (np.sin, np.cos)]
        table[row] = np.concatenate(waves)
  return table


def encode(x, params, grid, num_cls, *, posemb, posemb_at, gelu):
  """All blocks and the last LayerNorm; returns tokens and weights."""

  def add_positions(x, owner):
    tables = owner.get("posembed_input", {})
    return x + positions(posemb, tables, grid, num_cls, x.shape)

  relative_patches = grid[0] * grid[1] if posemb == "relative" else 0
  if posemb_at == "stem":
    x = add_positions(x, params)
  weights = []
  for i in range(sum(name.startswith("encoderblock_") for name in params)):
    layer = params[f"encoderblock_{i}"]
    if posemb_at == "layers":
      x = add_positions(x, layer)
    elif posemb_at == "shared":
      x = add_positions(x, params)
    x, weight = block(x, layer, gelu=gelu, relative_patches=relative_patches)
    weights.append(weight)
  return layer_norm(x, params["encoder_norm"]), np.stack(weights)


def pool(tokens, kind, params, num_patches, gelu):
  """What the head reads, of the tokens after the last norm."""
  if kind == "token":
    return tokens[0]
  if kind == "gap":
    return np.mean(tokens[-num_patches:], axis=0)
  if kind == "none":
    return tokens
  assert kind == "map"
  params = params["MAPHead_0"]
  heads = params["MultiHeadDotProductAttention_0"]
  x, _ = attention(params["probe"][0], heads, sources=tokens)
  x = x + mlp(layer_norm(x, params["LayerNorm_0"]), params["MlpBlock_0"], gelu)
  return x[0]


def look_for_classifier(params):
  if "MAPHead_0" in params:
    return "map"
  return "token" if "cls" in params else "gap"


def look_for_posemb(encoder):
  tables = encoder.get("posembed_input", {})
  if "pos_embedding" in tables:
    return "learned_1d"
  return "learned_2d" if "x_embedding" in tables else "none"


def forward(
  params, images, *, classifier="", posemb="", posemb_at="stem", gelu="tanh"
):
  """Runs the network.

  Args:
    params: the published tree.
    images: `[n, h, w, 3]`.
    classifier: "token", "gap" (over the patches), "map" or "none"; "" = "map"
      if there is a `MAPHead_0`, else "token" if there is a `cls`, else "gap".
    posemb: "learned_1d", "learned_2d", "sincos2d", "relative" or "none"; "" =
      learned if there are tables at the stem, else "none".
    posemb_at: "stem" (added once), "layers" (each block adds its own) or
      "shared" (each block adds the same).
    gelu: "tanh" or "erf".

  Returns:
    `logits`, `pre_logits`, `tokens`, and `weights` `[depth, n, heads, l, l]`.
  """
  classifier = classifier or look_for_classifier(params)
  posemb = posemb or look_for_posemb(params["Transformer"])
  outputs = {"logits": [], "pre_logits": [], "tokens": [], "weights": []}
  for image in images:
    if "conv_root" in params:
      image = reference_resnet.stem(image, params)
    patches, grid = embed(image, params["embedding"])
    before = [
      params[name][0] for name in ("cls", "registers") if name in params
    ]
    tokens, weights = encode(
      np.concatenate([*before, patches]),
      params["Transformer"],
      grid,
      num_cls=1 if "cls" in params else 0,
      posemb=posemb,
      posemb_at=posemb_at,
      gelu=gelu,
    )
    x = pool(tokens, classifier, params, len(patches), gelu)
    if "pre_logits" in params:
      layer = params["pre_logits"]
      x = np.tanh(x @ layer["kernel"] + layer["bias"])
    outputs["pre_logits"].append(x)
    if "head" in params:
      x = x @ params["head"]["kernel"] + params["head"]["bias"]
    outputs["logits"].append(x)
    outputs["tokens"].append(tokens)
    outputs["weights"].append(weights)
  outputs = {name: np.stack(values) for name, values in outputs.items()}
  outputs["weights"] = np.swapaxes(outputs["weights"], 0, 1)
  return outputs
