"""The judge: a ViT forward pass in plain numpy, from the paper's equations.

Shares no code with `vit_jax`: loops over patches and heads, one image at a
time, in the float type of its input (use float64). Reads the published names;
the constants (LayerNorm's epsilon, GELU's tanh form) are the published code's,
as the paper states none.
"""

import numpy as np


def layer_norm(x, params):
  """Normalises the last axis by its population statistics."""
  deviation = x - np.mean(x, axis=-1, keepdims=True)
  variance = np.mean(deviation**2, axis=-1, keepdims=True)
  return deviation / np.sqrt(variance + 1e-6) * params["scale"] + params["bias"]


def gelu(x):
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x):
  e = np.exp(x - np.max(x, axis=-1, keepdims=True))
  return e / np.sum(e, axis=-1, keepdims=True)


def attention(x, params):
  """Equations 5 to 8, one head after the other. Returns values and weights."""
  heads = params["query"]["kernel"].shape[1]
  out, weights = params["out"]["bias"], []
  for k in range(heads):
    q, key, v = (
      x @ params[name]["kernel"][:, k] + params[name]["bias"][k]
      for name in ("query", "key", "value")
    )  # [l, d / heads] each
    weights.append(softmax(q @ key.T / np.sqrt(q.shape[-1])))
    out = out + weights[-1] @ v @ params["out"]["kernel"][k]
  return out, np.stack(weights)


def mlp(x, params):
  hidden = x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
  return gelu(hidden) @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]


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
  return np.stack(tokens)


def forward(params, images):
  """Runs the network.

  Args:
    params: the published tree; a class token is used if there is a `cls`, a
      position table, a `pre_logits` layer and a `head` likewise.
    images: `[n, h, w, 3]`.

  Returns:
    `logits`, `pre_logits`, `tokens`, and `weights` `[depth, n, heads, l, l]`.
  """
  encoder = params["Transformer"]
  outputs = {"logits": [], "pre_logits": [], "tokens": [], "weights": []}
  for image in images:
    x = embed(image, params["embedding"])
    if "cls" in params:
      x = np.concatenate([params["cls"][0], x])
    if "posembed_input" in encoder:
      x = x + encoder["posembed_input"]["pos_embedding"][0]
    weights = []
    for i in range(sum(name.startswith("encoderblock_") for name in encoder)):
      block = encoder[f"encoderblock_{i}"]
      y, weight = attention(
        layer_norm(x, block["LayerNorm_0"]),
        block["MultiHeadDotProductAttention_1"],
      )
      weights.append(weight)
      x = x + y
      x = x + mlp(layer_norm(x, block["LayerNorm_2"]), block["MlpBlock_3"])
    tokens = layer_norm(x, encoder["encoder_norm"])
    x = tokens[0] if "cls" in params else np.mean(tokens, axis=0)
    if "pre_logits" in params:
      layer = params["pre_logits"]
      x = np.tanh(x @ layer["kernel"] + layer["bias"])
    outputs["pre_logits"].append(x)
    if "head" in params:
      x = x @ params["head"]["kernel"] + params["head"]["bias"]
    outputs["logits"].append(x)
    outputs["tokens"].append(tokens)
    outputs["weights"].append(np.stack(weights))
  outputs = {name: np.stack(values) for name, values in outputs.items()}
  outputs["weights"] = np.swapaxes(outputs["weights"], 0, 1)
  return outputs
