"""Files in and out: all dialects, the same bits, errors that say what it is."""

import math
import pathlib
import re
import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf

from tests.conftest import tiny_config
from tests.weight_files import (
  BLOCK,
  GOLDEN,
  POSITIONS,
  TOKEN,
  assert_same,
  flat,
  golden_model,
  npz,
  npz_bytes,
  random_params,
  shapes,
  tiny,
  traced_once,  # noqa: F401
)
from vit_jax import checkpoints, models, steps, weights
from vit_jax.models import bit
from vit_jax.weights import resizing

# Fields of the models that the golden files are of, and how near logits are.
STEM = dict(stem_width=0.5, patch_size=1)
GOLDEN_FIELDS = {
  "published_token": ({}, 1e-5),
  "published_gap": ({"classifier": "gap"}, 1e-5),
  "published_token_rep": ({"representation_size": 24}, 1e-5),
  "published_token_nonsquare": ({}, 1e-5),
  "published_hybrid": ({**STEM, "stem_blocks": (1, 2, 1)}, 2e-5),
  "published_hybrid_old_groupnorm": ({**STEM, "stem_blocks": (1, 1)}, 2e-5),
  "published_hybrid_root_only": ({**STEM, "patch_size": 4}, 2e-5),
  "bv_tok": ({}, 1e-5),
  "bv_map_scan": ({"classifier": "map"}, 1e-5),
  "bv_gap_sincos2d_rep": (
    {"classifier": "gap", "posemb": "sincos2d", "representation_size": 32},
    1e-5,
  ),
}
LINEN = {
  "LayerNorm_2": "LayerNorm_1",
  "MlpBlock_3": "MlpBlock_0",
  "MultiHeadDotProductAttention_1": "MultiHeadDotProductAttention_0",
}


def golden_size(name):
  return np.load(GOLDEN / f"{name}.io.npz")["images"].shape[1:3]


def to_linen(name):
  for published, linen in LINEN.items():
    name = name.replace(published, linen)
  return name


def load_token(path, **kwargs):
  return weights.load(str(path), golden_model(), 32, **kwargs)


# Published values.


@pytest.mark.parametrize("name", GOLDEN_FIELDS)
def test_published_files_give_published_logits(name):
  fields, tolerance = GOLDEN_FIELDS[name]
  golden = np.load(GOLDEN / f"{name}.io.npz")
  model, size = golden_model(**fields), golden_size(name)
  params = weights.load(str(GOLDEN / f"{name}.npz"), model, size)
  outputs = jax.jit(model.apply)({"params": params}, golden["images"])
  np.testing.assert_allclose(
    outputs["logits"], golden["logits"], atol=tolerance
  )
  wanted = flat(shapes(model, size))
  assert {n: leaf.shape for n, leaf in flat(params).items()} == {
    n: leaf.shape for n, leaf in wanted.items()
  }
  for leaf in flat(params).values():
    assert type(leaf) is np.ndarray and leaf.dtype == np.float32
    assert leaf.flags.writeable


@pytest.mark.parametrize("name", ["published_token", "bv_map_scan"])
def test_a_scan_gets_what_a_loop_gets_stacked(name):
  fields, _ = GOLDEN_FIELDS[name]
  loop, scan = (
    weights.load(
      str(GOLDEN / f"{name}.npz"), golden_model(**fields, scan=scan), 32
    )
    for scan in (False, True)
  )
  stacked = {**loop, "Transformer": models.stack_blocks(loop["Transformer"])}
  assert_same(scan, stacked)
  kernel = scan["Transformer"]["encoderblock"]["MlpBlock_3"]["Dense_0"][
    "kernel"
  ]
  assert type(kernel) is np.ndarray and kernel.shape == (2, 32, 64)


# Saving.


@pytest.mark.parametrize("name", [n for n in GOLDEN_FIELDS if n[0] == "p"])
def test_saving_a_published_file_gives_it_again(tmp_path, name):
  fields, _ = GOLDEN_FIELDS[name]
  published = dict(np.load(GOLDEN / f"{name}.npz"))
  params = weights.load(
    str(GOLDEN / f"{name}.npz"), golden_model(**fields), golden_size(name)
  )
  weights.save(str(tmp_path / "a.npz"), params)
  again = dict(np.load(tmp_path / "a.npz"))
  assert again.keys() == published.keys()
  for key, leaf in published.items():
    if re.search(r"(^|/)gn[^/]*/", key):
      leaf = leaf.reshape(-1)  # Older files keep it in four dimensions.
    np.testing.assert_array_equal(again[key], leaf, err_msg=key)
    assert again[key].dtype == np.float32


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_saving_and_loading_returns_the_same_bits(tmp_path, suffix, scan):
  model = tiny(scan=scan, depth=3)
  params = random_params(model, (8, 12))
  path = str(tmp_path / "new" / f"a{suffix}")
  on_devices = jax.tree.map(jnp.asarray, params)
  weights.save(path, on_devices, grid=(2, 3))
  assert_same(weights.load(path, model, (8, 12)), params)
  if suffix == ".npz":
    assert not [name for name in np.load(path) if "encoderblock/" in name]
  assert [p.name for p in (tmp_path / "new").iterdir()] == [f"a{suffix}"]
  if suffix == ".npz":  # No date, so the same leaves are the same bytes.
    dates = {info.date_time for info in zipfile.ZipFile(path).infolist()}
    assert dates == {(1980, 1, 1, 0, 0, 0)}
  weights.save(str(tmp_path / f"b{suffix}"), params, grid=(2, 3))
  assert (tmp_path / f"b{suffix}").read_bytes() == pathlib.Path(
    path
  ).read_bytes()


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_grid_that_is_not_square_travels_with_the_file(tmp_path, suffix):
  model = tiny()
  params = random_params(model, (8, 32))  # 2x8 patches: 16, as of 4x4.
  path = str(tmp_path / f"a{suffix}")
  weights.save(path, params, grid=(2, 8))
  assert weights.open(path).grid == (2, 8)
  assert_same(weights.load(path, model, (8, 32)), params)
  square = weights.load(path, model, 16)
  assert not np.array_equal(flat(square)[POSITIONS], flat(params)[POSITIONS])
  weights.save(path, random_params(model, 16), grid=(4, 4))
  told = suffix == ".safetensors"  # The published names have no room for it.
  assert weights.open(path).grid == ((4, 4) if told else ())


def test_bfloat16_is_saved_as_float32(tmp_path):
  params = {"cls": jnp.full((1, 1, 2), 1.5, jnp.bfloat16)}
  weights.save(str(tmp_path / "a.npz"), params)
  assert np.load(tmp_path / "a.npz")["cls"].dtype == np.float32


def test_a_failed_save_leaves_what_was_there(tmp_path):
  path = tmp_path / "a.npz"
  params = random_params(tiny(), 8)
  weights.save(str(path), params)
  before = path.read_bytes()

  class Broken:
    shape = (1,)

    def __array__(self, *_, **__):
      raise RuntimeError("device lost")

  with pytest.raises(RuntimeError, match="device lost"):
    weights.save(str(path), {**params, "z": Broken()})
  assert path.read_bytes() == before
  assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]


def test_saving_refuses_other_suffixes_and_other_grids(tmp_path, warnings):
  params = random_params(tiny(), (8, 12))
  with pytest.raises(ValueError, match=r"a\.ckpt.*\.npz.*\.safetensors"):
    weights.save(str(tmp_path / "a.ckpt"), params)
  with pytest.raises(ValueError, match="6 positions, the grid 2x4 has 8"):
    weights.save(str(tmp_path / "a.npz"), params, grid=(2, 4))
  assert not list(tmp_path.iterdir()) and not warnings()
  weights.save(str(tmp_path / "a.npz"), params)
  assert "no square" in warnings()[0] and "grid=(h, w)" in warnings()[0]


def test_a_place_where_no_file_can_be_is_named(tmp_path):
  (tmp_path / "a").write_text("a file, not a directory")
  path = str(tmp_path / "a" / "b.npz")
  with pytest.raises(ValueError, match=re.escape(path)):
    weights.save(path, random_params(tiny(), 8))


# Where files lie and what they are.


def test_files_in_memory_and_in_buckets_are_read_and_written():
  path = "ram://bucket/weights/a.npz"
  params = random_params(tiny(), 8)
  weights.save(path, params)
  assert_same(weights.load(path, tiny(), 8), params)
  assert tf.io.gfile.listdir("ram://bucket/weights") == ["a.npz"]
  with pytest.raises(ValueError, match="nothing at ram://bucket/other.npz"):
    weights.open("ram://bucket/other.npz")


def test_the_content_says_what_a_file_is(tmp_path):
  expected = load_token(TOKEN)
  (tmp_path / "a.safetensors").write_bytes(TOKEN.read_bytes())
  assert_same(load_token(tmp_path / "a.safetensors"), expected)
  safetensors.numpy.save_file(dict(np.load(TOKEN)), tmp_path / "b.npz")
  assert_same(load_token(tmp_path / "b.npz"), expected)
  np.savez_compressed(tmp_path / "c", **np.load(TOKEN))
  assert_same(load_token(tmp_path / "c.npz"), expected)


def test_a_safetensors_file_is_what_its_own_library_reads(tmp_path):
  path = tmp_path / "a.safetensors"
  weights.save(str(path), load_token(TOKEN), about={"gelu": "tanh"})
  tensors = safetensors.numpy.load_file(path)
  assert tensors["blocks.1.attn.qkv.weight"].shape == (96, 32)
  np.testing.assert_array_equal(
    tensors["head.weight"], np.load(TOKEN)["head/kernel"].T
  )
  with safetensors.safe_open(path, "numpy") as file:
    about = {"gelu": "tanh", "position_rows": "1"}
    assert file.metadata() == {"format": "pt", **about}
  assert weights.open(str(path)).about == {"format": "pt", **about}


@pytest.mark.parametrize(
  ("dtype", "tolerance"), [("float16", 1e-3), (">f4", 0), ("float64", 0)]
)
def test_other_floats_become_float32(tmp_path, dtype, tolerance):
  published = dict(np.load(TOKEN))
  path = npz(
    tmp_path / "a.npz", {n: leaf.astype(dtype) for n, leaf in published.items()}
  )
  for name, leaf in flat(load_token(path)).items():
    assert leaf.dtype == np.float32 and leaf.dtype.isnative
    np.testing.assert_allclose(leaf, published[name], rtol=tolerance, atol=1e-6)


def test_bfloat16_comes_back_from_two_bytes_of_anything(tmp_path):
  exact = {
    name: jnp.asarray(leaf, jnp.bfloat16)
    for name, leaf in np.load(TOKEN).items()
  }
  path = npz(tmp_path / "a.npz", {n: np.asarray(x) for n, x in exact.items()})
  assert np.load(path)["cls"].dtype == np.dtype("V2")
  safetensors.numpy.save_file(
    {n: np.asarray(x) for n, x in exact.items()}, tmp_path / "a.safetensors"
  )
  for found in (load_token(path), load_token(tmp_path / "a.safetensors")):
    assert_same(found, {n: np.asarray(x, np.float32) for n, x in exact.items()})


HTML = b"<!DOCTYPE html><html><body>404: Not Found</body></html>"


@pytest.mark.parametrize(
  ("content", "what"),
  [
    (b"", "it is empty"),
    (HTML, "it begins with '<!DOCTYPE html><html><bo"),
    (
      TOKEN.read_bytes()[: TOKEN.stat().st_size // 2],
      "a part of it is missing",
    ),
    (b"PK" + TOKEN.read_bytes()[5000:], "a part of it is missing"),
  ],
  ids=["empty", "html", "half", "middle"],
)
def test_what_is_no_archive_is_called_so(tmp_path, content, what):
  path = tmp_path / "a.npz"
  path.write_bytes(content)
  with pytest.raises(ValueError, match="not an .npz archive") as error:
    load_token(path)
  for text in (str(path), f"({len(content)} bytes)", what):
    assert text in str(error.value)


def test_damaged_and_strange_archives_are_refused(tmp_path):
  path = tmp_path / "a.npz"
  for name in ("head/bias", "embedding/kernel"):  # Found at once; when read.
    content = bytearray(TOKEN.read_bytes())
    values = np.load(TOKEN)[name].tobytes()
    content[content.index(values) + len(values) - 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path}: {name}.npy.*CRC"):
      load_token(path)
  npz(path, {"head/kernel": np.array(["a", None])})
  with pytest.raises(ValueError, match="head/kernel.npy holds object"):
    weights.open(str(path))
  with tf.io.gfile.GFile(str(path), "wb") as file:
    file.write(npz_bytes({"a": np.zeros(1)}).replace(b"a.npy", b"a.pkl"))
  with pytest.raises(ValueError, match="not an .npz archive.*'a.pkl'.*PyTorch"):
    weights.open(str(path))


def test_damaged_safetensors_files_are_refused(tmp_path):
  path = tmp_path / "a.safetensors"
  content = safetensors.numpy.save({"a": np.zeros((4, 4), np.float32)})
  for damaged, what in (
    (content[:-1], "cut off"),
    (content[:20], "header cannot be read"),
    (content.replace(b"F32", b"F31"), "holds F31; there are F64"),
    (content.replace(b"shape", b"shade"), "header cannot be read.*shape"),
  ):
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=what) as error:
      weights.open(str(path))
    assert str(path) in str(error.value)


def test_a_missing_file_names_what_may_be_given(tmp_path):
  with pytest.raises(ValueError, match=r"b\.npz\. Give an \.npz or .*workdir"):
    load_token(tmp_path / "b.npz")
  with pytest.raises(ValueError, match="No complete checkpoint"):
    load_token(tmp_path)


# Runs.


def save_run(workdir, params, ema, size=(8,), **model):
  config = tiny_config(**{"model.name": "mu/4", "image_size": size, **model})
  meta = {
    "step": 3,
    "values": {},
    "guard": {"class_names": ["a", "b", "c"]},
    "config": config.to_dict(),
  }
  with checkpoints.Checkpoints(
    workdir / "checkpoints", keep=2, keep_every=0, best=""
  ) as saver:
    for step in (2, 3):
      scaled = jax.tree.map(lambda leaf, s=step: jnp.asarray(leaf) * s, params)
      state = steps.TrainState(
        jnp.int32(step), scaled, {"count": jnp.int32(step)}, ema
      )
      saver.save(state, meta)


@pytest.mark.parametrize("scan", [False, True])
def test_runs_load_by_any_of_their_paths(tmp_path, scan):
  model = models.create("mu/4", num_classes=3, scan=scan)
  params = random_params(model, 8)
  save_run(tmp_path, params, {}, **{"model.scan": scan})
  expected = jax.tree.map(lambda leaf: 3 * leaf, params)
  for path in (".", "checkpoints", "checkpoints/3"):
    found = weights.load(str(tmp_path / path), model, 8)
    assert_same(found, expected)
    assert all(type(leaf) is np.ndarray for leaf in flat(found).values())
  older = weights.load(str(tmp_path), model, 8, step="2")
  assert_same(older, jax.tree.map(lambda leaf: 2 * leaf, params))
  other = weights.load(str(tmp_path), model.clone(scan=not scan), 8)
  assert len(flat(other)) == len(flat(params))


def test_a_runs_average_is_taken_where_it_kept_one(tmp_path):
  model = models.create("mu/4", num_classes=3)
  params, ema = (random_params(model, 8, seed) for seed in (0, 1))
  save_run(tmp_path / "a", params, jax.tree.map(jnp.asarray, ema))
  path = str(tmp_path / "a")
  assert_same(weights.load(path, model, 8), ema)
  raw = weights.load(path, model, 8, weights="params")
  assert_same(raw, jax.tree.map(lambda leaf: 3 * leaf, params))
  save_run(tmp_path / "b", params, {})
  with pytest.raises(ValueError, match="holds no 'ema' weights, but params"):
    weights.load(str(tmp_path / "b"), model, 8, weights="ema")


def test_a_run_tells_what_no_leaf_shows(tmp_path, caplog):
  caplog.set_level("WARNING")
  model = models.create("mu/4", num_classes=3, gelu="erf")
  fields = {"model.gelu": "erf", "model.input_range": "0,1"}
  save_run(tmp_path, random_params(model, 8), {}, **fields)
  caplog.clear()
  about = weights.open(str(tmp_path)).about
  assert (about["gelu"], about["input_range"]) == ("erf", "0,1")
  weights.load(str(tmp_path), model, 8)
  assert not caplog.records  # Of ours or of Orbax.
  with pytest.raises(ValueError, match="gelu: stored 'erf', expected 'tanh'"):
    weights.load(str(tmp_path), model.clone(gelu="tanh"), 8)


def test_a_run_tells_its_grid(tmp_path):
  model = models.create("mu/4", num_classes=3)
  params = random_params(model, (8, 32))
  save_run(tmp_path, params, {}, size=(8, 32))
  assert weights.open(str(tmp_path)).grid == (2, 8)
  square = weights.load(str(tmp_path), model, 16)
  assert not np.array_equal(
    flat(square)[POSITIONS], 3 * flat(params)[POSITIONS]
  )


# Dialects: a golden file under other names loads to the same bits.


@pytest.mark.parametrize(
  "prefix",
  [
    "params/",
    "opt/target/",
    "params/img/",
    "img/",
    "target/",
    "opt/target/params/",
  ],
)
@pytest.mark.parametrize("rename", [str, to_linen], ids=["published", "linen"])
def test_prefixes_and_linens_numbers(tmp_path, caplog, prefix, rename):
  leaves = dict(np.load(TOKEN))
  others = {
    "opt/state/step": np.int64(7),
    "opt/state/param_states/head/kernel/grad_ema": np.zeros(3),
    "params/txt/Encoder_0/encoderblock_0/LayerNorm_0/scale": np.ones(3),
    "params/txt/head/kernel": np.ones(3),
    "params/t": np.zeros(1),
    "params/b": np.zeros(1),
  }
  groups = "opt/ (2), params/b (1), params/t (1), params/txt/ (2)"
  if prefix != "params/img/":
    others = {n: x for n, x in others.items() if n.startswith("opt")}
    groups = "opt/ (2)"
  named = {prefix + rename(name): leaf for name, leaf in leaves.items()}
  caplog.set_level("INFO", "vit_jax")
  assert_same(load_token(npz(tmp_path / "a.npz", {**others, **named})), leaves)
  assert f"beside the parameters: {groups}." in caplog.text


@pytest.mark.parametrize("prefix", ["", "params/"])
def test_what_no_training_code_writes_is_unexpected(tmp_path, prefix):
  leaves = {prefix + name: leaf for name, leaf in np.load(TOKEN).items()}
  strangers = ("junk/w", "params2/head/kernel", "params/t", "steps")
  strangers = {name: np.zeros(3) for name in strangers}
  path = npz(tmp_path / "a.npz", {**leaves, **strangers, "step": np.ones(())})
  with pytest.raises(ValueError, match=r"model \(4 leaves\)") as error:
    load_token(path)
  for name in strangers:
    assert f"unexpected  {name.removeprefix(prefix)}: (3,)" in str(error.value)


def test_two_trees_of_parameters_are_refused(tmp_path):
  leaves = dict(np.load(TOKEN))
  both = {
    prefix + name: leaf
    for prefix in ("params/", "opt/target/")
    for name, leaf in leaves.items()
  }
  with pytest.raises(
    ValueError, match="more than one tree.*'params/'"
  ) as error:
    load_token(npz(tmp_path / "a.npz", both))
  assert "under 'opt/target/'" in str(error.value)
  assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("stacked", [False, True], ids=["loop", "scan"])
@pytest.mark.parametrize("where", ["", "Transformer/"])
def test_big_visions_positions_get_a_class_row(tmp_path, where, stacked):
  leaves = {to_linen(n): leaf for n, leaf in np.load(TOKEN).items()}
  table = leaves.pop(POSITIONS)
  expected = dict(np.load(TOKEN))
  expected[POSITIONS] = np.concatenate(
    [np.zeros_like(table[:, :1]), table[:, 1:]], axis=1
  )
  leaves[f"{where}pos_embedding"] = table[:, 1:]
  if stacked:
    blocks = [n for n in leaves if "encoderblock_0" in n]
    for name in blocks:
      both = [leaves.pop(name), leaves.pop(name.replace("k_0", "k_1", 1))]
      leaves[name.replace("encoderblock_0", "encoderblock")] = np.stack(both)
  assert_same(load_token(npz(tmp_path / "a.npz", leaves)), expected)


def test_old_positions_keep_the_class_row_that_they_have(tmp_path):
  leaves = dict(np.load(TOKEN))
  leaves["Transformer/pos_embedding"] = leaves.pop(POSITIONS)
  assert_same(load_token(npz(tmp_path / "a.npz", leaves)), dict(np.load(TOKEN)))


def test_the_guess_of_a_class_row():
  counts = (1, 2, 4, 5, 16, 17, 49, 50, 144, 145, 196, 197, 256, 257, 576, 577)
  for count in counts:
    square = math.isqrt(count) ** 2 == count
    rows = resizing.rows_before(count, (1, 0), known=(), wanted=())
    assert rows == (not square)


@pytest.mark.parametrize("prefix", ["", "MAPHead_0/"])
def test_old_map_heads_find_their_place(tmp_path, prefix):
  # Older still than Linen: one number for all layers of a module.
  older = {"LayerNorm_0": "LayerNorm_1", "MlpBlock_0": "MlpBlock_2"}
  path = GOLDEN / "bv_map_scan.npz"
  leaves = {}
  for name, leaf in np.load(path).items():
    if "MAPHead_0/" in name:
      name = name.replace("MAPHead_0/", prefix)
      for new, old in older.items():
        name = name.replace(new, old)
    leaves[name.removeprefix("params/")] = leaf
  model = golden_model(classifier="map")
  found = weights.load(npz(tmp_path / "a.npz", leaves), model, 32)
  assert_same(found, weights.load(str(path), model, 32))


def test_two_leaves_of_one_name_are_refused(tmp_path):
  leaves = dict(np.load(TOKEN))
  name = f"{BLOCK}LayerNorm_2/scale"
  leaves[to_linen(name)] = leaves[name]
  with pytest.raises(ValueError, match="LayerNorm_1/scale.*LayerNorm_2/scale"):
    load_token(npz(tmp_path / "a.npz", leaves))


def test_refusals_of_pytorchs_files_say_which(tmp_path):
  path = str(tmp_path / "a.safetensors")
  weights.save(path, load_token(TOKEN))
  with pytest.raises(ValueError, match="does not divide .* 32") as error:
    weights.load(path, golden_model(num_heads=5, width=40), 32)
  # Beside all that does not fit.
  assert f"{path} does not fit the model (37 leaves)" in str(error.value)


def test_published_resnets_load(tmp_path):
  model = bit.BiT(num_classes=3, blocks=(1, 2), width_factor=0.5)
  params = random_params(model, 32)
  published = {}
  for name, leaf in flat(params).items():
    norm = name.rpartition("/")[0].endswith(("gn1", "gn2", "gn3", "head"))
    norm = norm and "conv_head" not in name
    for ours, theirs in (
      (r"root_block/conv_root", "resnet/root_block/standardized_conv2d"),
      (r"(block.*)/conv_proj", r"resnet/\1/a/proj/standardized_conv2d"),
      (r"(block.*)/conv1", r"resnet/\1/a/standardized_conv2d"),
      (r"(block.*)/conv2", r"resnet/\1/b/standardized_conv2d"),
      (r"(block.*)/conv3", r"resnet/\1/c/standardized_conv2d"),
      (r"(block.*)/gn1", r"resnet/\1/a/group_norm"),
      (r"(block.*)/gn2", r"resnet/\1/b/group_norm"),
      (r"(block.*)/gn3", r"resnet/\1/c/group_norm"),
      (r"norm-pre-head", "resnet/group_norm"),
      (r"conv_head", "resnet/head/conv2d"),
    ):
      name = re.sub(f"^{ours}/", f"{theirs}/", name)
    if norm:
      name = name.replace("scale", "gamma").replace("/bias", "/beta")
      leaf = leaf.reshape(1, 1, 1, -1)
    if name == "resnet/head/conv2d/kernel":
      leaf = leaf[None, None]
    published[name] = leaf
  assert all(name.startswith("resnet/") for name in published)
  path = npz(tmp_path / "a.npz", published)
  assert_same(weights.load(path, model, 32), params)
  weights.save(str(tmp_path / "b.npz"), params)
  saved = np.load(tmp_path / "b.npz")
  assert saved.keys() == published.keys()
  for name, leaf in published.items():
    shape = (-1,) if "group_norm" in name else leaf.shape
    np.testing.assert_array_equal(saved[name], leaf.reshape(shape))


# Cost.

LOADING = """
import resource, sys
from vit_jax import models, weights
model = models.create("S/16", num_classes=10, scan=sys.argv[2] == "scan")
def peak():
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
weights.plan(weights.open(sys.argv[1]), model, 224)  # Traces, reads no data.
before = peak()
params = weights.load(sys.argv[1], model, 224)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  ("file", "target"), [("loop", "scan"), ("scan", "loop")]
)
def test_loading_takes_little_more_memory_than_the_parameters(
  tmp_path, file, target
):
  model = models.create("S/16", num_classes=10, scan=file == "scan")
  path = npz(tmp_path / "a.npz", flat(random_params(model, 224)))
  run = subprocess.run(
    [sys.executable, "-c", LOADING, path, target],
    check=True,
    capture_output=True,
    text=True,
  )
  size = pathlib.Path(path).stat().st_size
  assert int(run.stdout) < 1.5 * size
