"""The judge of the convolutional models: their forward passes in plain numpy.

Shares no code with `vit_jax`. Works in the float type of its input (use
float64), on one image `[h, w, c]` at a time, and reads the published names. The
hybrids' stem and the BiT ResNet look alike and differ in every constant; both
are here, one after the other, each written out.
"""

import numpy as np


def conv(x, kernel, stride, padding):
  """Sums over the places of the kernel; `padding` is ((top, bottom), …)."""
  x = np.pad(x, (*padding, (0, 0)))
  height, width = kernel.shape[:2]
  rows = (x.shape[0] - height) // stride + 1
  cols = (x.shape[1] - width) // stride + 1
  y = np.zeros((rows, cols, kernel.shape[3]), x.dtype)
  for i in range(height):
    for j in range(width):
      seen = x[i : i + stride * rows : stride, j : j + stride * cols : stride]
      y += seen[:rows, :cols] @ kernel[i, j]
  return y


def max_pool(x, padding, fill):
  """The largest of 3 by 3 at every second place."""
  x = np.pad(x, (*padding, (0, 0)), constant_values=fill)
  rows, cols = ((side - 3) // 2 + 1 for side in x.shape[:2])
  y = np.empty((rows, cols, x.shape[2]), x.dtype)
  for i in range(rows):
    for j in range(cols):
      y[i, j] = x[2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max((0, 1))
  return y


def same(x, size, stride):
  """Padding for ceil(side / stride) outputs; an odd one goes to the end."""
  padding = []
  for side in x.shape[:2]:
    outputs = -(-side // stride)
    total = max((outputs - 1) * stride + size - side, 0)
    padding.append((total // 2, total - total // 2))
  return padding


def group_norm(x, params, epsilon):
  """Normalises 32 groups of neighbouring channels over all places."""
  groups = np.split(x, 32, axis=-1)
  groups = [(g - g.mean()) / np.sqrt(g.var() + epsilon) for g in groups]
  return np.concatenate(groups, axis=-1) * params["scale"] + params["bias"]


def relu(x):
  return np.maximum(x, 0)


# The hybrids' stem: convolution, normalisation, ReLU; "SAME" padding.


def stem_conv(x, params, stride=1):
  kernel = params["kernel"]
  kernel = (kernel - kernel.mean((0, 1, 2))) / (kernel.std((0, 1, 2)) + 1e-5)
  return conv(x, kernel, stride, same(x, kernel.shape[0], stride))


def stem_unit(x, params, stride):
  def norm(x, name):
    return group_norm(x, params[name], 1e-6)

  y = relu(norm(stem_conv(x, params["conv1"]), "gn1"))
  y = relu(norm(stem_conv(y, params["conv2"], stride), "gn2"))
  y = norm(stem_conv(y, params["conv3"]), "gn3")
  if "conv_proj" in params:
    x = norm(stem_conv(x, params["conv_proj"], stride), "gn_proj")
  return relu(x + y)


def stem(image, params):
  """Features `[h, w, c]`; reads from the tree how many units there are."""
  x = stem_conv(image, params["conv_root"], 2)
  x = relu(group_norm(x, params["gn_root"], 1e-6))
  x = max_pool(x, same(x, 3, 2), -np.inf)
  for i in range(sum(name.startswith("block") for name in params)):
    stage = params[f"block{i + 1}"]
    for j in range(len(stage)):
      stride = 2 if i > 0 and j == 0 else 1
      x = stem_unit(x, stage[f"unit{j + 1}"], stride)
  return x


# BiT: normalisation, ReLU, convolution; equal padding on both sides.


def bit_conv(x, params, stride=1):
  kernel = params["kernel"]
  kernel = kernel - kernel.mean((0, 1, 2))
  kernel = kernel / np.sqrt((kernel**2).mean((0, 1, 2)) + 1e-10)
  return conv(x, kernel, stride, [(kernel.shape[0] // 2,) * 2] * 2)


def bit_unit(x, params, stride):
  def activate(x, name):
    return relu(group_norm(x, params[name], 1e-5))

  y = activate(x, "gn1")
  if "conv_proj" in params:
    x = bit_conv(y, params["conv_proj"], stride)
  y = activate(bit_conv(y, params["conv1"]), "gn2")
  y = activate(bit_conv(y, params["conv2"], stride), "gn3")
  return x + bit_conv(y, params["conv3"])


def bit(params, images):
  """Runs BiT; returns `logits`, `pre_logits` and `tokens`."""
  outputs = {"logits": [], "pre_logits": [], "tokens": []}
  for image in images:
    x = bit_conv(image, params["root_block"]["conv_root"], 2)
    x = max_pool(x, [(1, 1)] * 2, 0)
    for i in range(sum(name.startswith("block") for name in params)):
      stage = params[f"block{i + 1}"]
      for j in range(len(stage)):
        stride = 2 if i > 0 and j == 0 else 1
        x = bit_unit(x, stage[f"unit{j + 1:02d}"], stride)
    x = relu(group_norm(x, params["norm-pre-head"], 1e-5))
    tokens = x.reshape(-1, x.shape[-1])
    x = tokens.mean(0)
    outputs["tokens"].append(tokens)
    outputs["pre_logits"].append(x)
    if "conv_head" in params:
      x = x @ params["conv_head"]["kernel"] + params["conv_head"]["bias"]
    outputs["logits"].append(x)
  return {name: np.stack(values) for name, values in outputs.items()}
