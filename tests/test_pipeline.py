import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf

from input_pipeline import (
  DataError,
  eval_batches,
  get_source,
  loading,
  parse_ops,
  train_batches,
)
from tests.test_sources_tfrecord import write as write_records

AWKWARD = pathlib.Path(__file__).parent / "data" / "awkward"
RANDOM_OPS = parse_ops(
  "decode_and_random_crop(7, area_min=0.3)|random_crop(5)|flip_lr"
)
LIGHT_OPS = parse_ops("random_crop(5)|flip_lr")


def fake(size: int, split: str = "train", side: int = 2):
  return get_source(f"fake:{side},3,{size}", split)


def take(count: int, source, ops="", **options) -> dict[str, np.ndarray]:
  """The first batches, stacked: name -> [count, n, ...]."""
  options = {"seed": 1} | options
  batches = train_batches(source, ops, **options)
  taken = [next(batches) for _ in range(count)]
  return {key: np.stack([b[key] for b in taken]) for key in taken[0]}


def assert_equal(got: dict, want: dict):
  assert got.keys() == want.keys()
  for key in got:
    np.testing.assert_array_equal(got[key], want[key], err_msg=key)


def test_batches_have_the_promised_form():
  batch = next(train_batches(fake(10, side=6), "", batch_size=4, seed=0))
  forms = {key: (value.shape, value.dtype) for key, value in batch.items()}
  assert forms == {
    "image": ((4, 6, 6, 3), np.uint8),
    "labels": ((4, 1), np.int32),
    "mask": ((4,), np.float32),
    "id": ((4,), np.int64),
  }
  assert (batch["mask"] == 1).all()
  np.testing.assert_array_equal(batch["labels"][:, 0], batch["id"] % 3)


# The laws of order.


def test_every_epoch_is_a_permutation_and_epochs_differ():
  # Batches of 7 cross the borders of epochs of 10 without losing an example.
  ids = take(20, fake(10), batch_size=7)["id"].reshape(14, 10)
  np.testing.assert_array_equal(
    np.sort(ids, 1), np.tile(np.arange(10), (14, 1))
  )
  assert len({tuple(epoch) for epoch in ids}) == 14


def test_order_is_fair():
  # Over many epochs every example takes every place equally often.
  ids = take(3, fake(6), batch_size=2000)["id"].reshape(1000, 6)
  for place in range(6):
    counts = np.bincount(ids[:, place], minlength=6)
    assert (np.abs(counts - 1000 / 6) < 50).all()
  follows = (ids[:, :-1] + 1 == ids[:, 1:]).mean()
  assert abs(follows - 1 / 6) < 0.03


def test_order_is_the_same_in_every_process_and_differs_by_seed():
  # The numbers were written down by another process, long ago.
  assert take(2, fake(6), batch_size=6)["id"].tolist() == GOLDEN
  for seed in (0, 2, -1, 2**40):
    assert take(2, fake(6), batch_size=6, seed=seed)["id"].tolist() != GOLDEN


GOLDEN = [[4, 1, 3, 2, 0, 5], [2, 4, 1, 5, 3, 0]]


@pytest.mark.parametrize("streams", [1, 3])
def test_resume_is_exact_at_any_step(streams):
  # 14 examples, 6 a step: epochs end inside steps 2, 4, 6 (exactly) and on.
  source = fake(14, side=9)
  options = {"batch_size": 6, "streams": streams, "seed": 3}
  whole = take(11, source, RANDOM_OPS, **options)
  for step in (0, 1, 6, 7, 8):
    rest = take(2, source, RANDOM_OPS, start_step=step, **options)
    assert_equal(rest, {k: v[step : step + 2] for k, v in whole.items()})


def source_of(kind: str, root):
  """14 examples of a kind."""
  if kind == "digits":
    return get_source("digits:", "train[:14]")
  if kind == "tfrecord":
    write_records(root, counts=(4, 0, 7, 3))
    return get_source(f"tfrecord:{root}/train*?classes=2", "train")
  names = ("rgb.jpg", "grey.png", "rgb.webp", "rgb.bmp", "rgb.png")
  for i in range(14):
    (root / str(i % 3)).mkdir(exist_ok=True)
    shutil.copy(
      AWKWARD / names[i % 5], root / str(i % 3) / f"{i}_{names[i % 5]}"
    )
  return get_source(f"folder:{root}", "all")


@pytest.mark.parametrize("kind", ["digits", "folder", "tfrecord"])
def test_resume_is_exact_for_every_kind(kind, tmp_path):
  source = source_of(kind, tmp_path)
  options = {"batch_size": 4, "streams": 2, "max_labels": 2}
  options |= {"shuffle_buffer": 6}
  whole = take(14, source, RANDOM_OPS, **options)
  # Epochs have 3.5 steps: the last and first of one, and 3.5 epochs in.
  for step in (0, 1, 3, 4, 7, 12):
    rest = take(2, source, RANDOM_OPS, start_step=step, **options)
    assert_equal(rest, {k: v[step : step + 2] for k, v in whole.items()})
  for cache in ("memory", str(tmp_path / "cache")):
    rest = take(10, source, RANDOM_OPS, start_step=4, cache=cache, **options)
    assert_equal(rest, {k: v[4:] for k, v in whole.items()})
  # An example that comes again is cropped in another way.
  images = whole["image"].reshape(-1, 5, 5, 3)
  again = whole["id"].ravel() == whole["id"].ravel()[0]
  assert len(np.unique(images[again], axis=0)) > 1 or kind == "tfrecord"


def test_far_steps_cost_no_more_than_near_ones():
  ids = take(1, fake(1000), batch_size=1000, start_step=10**12)["id"]
  assert sorted(ids[0]) == list(range(1000))


def test_the_global_batch_is_the_same_on_any_number_of_processes():
  source = fake(13, side=9)
  options = {"batch_size": 8, "streams": 4}
  want = take(4, source, LIGHT_OPS, **options)
  for num_shards in (2, 4):
    parts = [
      take(4, source, LIGHT_OPS, shard=i, num_shards=num_shards, **options)
      for i in range(num_shards)
    ]
    assert_equal(
      {k: np.concatenate([p[k] for p in parts], 1) for k in want}, want
    )
  # Zero streams are as many as there are processes.
  implied = take(2, source, batch_size=8, shard=1, num_shards=2)
  spelled = take(2, source, batch_size=8, shard=1, num_shards=2, streams=2)
  assert_equal(implied, spelled)


@pytest.mark.parametrize("streams", [1, 3, 7])
@pytest.mark.parametrize(
  "split", ["train", "train[100:900]", "train[:80%]+train[90%:]"]
)
def test_streams_cover_every_example_once_an_epoch(streams, split):
  source = fake(1000, split)
  size = source.num_examples
  part = -(-size // streams)  # one step holds an epoch of each stream
  ids = take(1, source, batch_size=part * streams, streams=streams)["id"]
  epochs = []
  for stream, got in enumerate(ids.reshape(streams, part)):
    count = (stream + 1) * size // streams - stream * size // streams
    assert count in (size // streams, part)
    epochs.append(got[:count])
  assert sorted(np.concatenate(epochs)) == list(range(size))


def test_slices_deliver_their_own_examples():
  whole, _ = eval_batches(fake(20, side=4), "", batch_size=20)
  want = next(whole)["image"]
  got = take(1, fake(20, "train[5:15]", side=4), batch_size=10)
  np.testing.assert_array_equal(got["image"][0], want[5 + got["id"][0]])


def test_threads_do_not_change_the_stream(monkeypatch):
  source = fake(50, side=9)
  want = take(5, source, LIGHT_OPS, batch_size=16)
  for cores in (1, 7):
    monkeypatch.setattr(loading, "_num_cores", lambda cores=cores: cores)
    assert_equal(take(5, source, LIGHT_OPS, batch_size=16), want)
  for chunk in (1, 3):
    monkeypatch.setattr(loading, "_CHUNK", chunk)
    assert_equal(take(5, source, LIGHT_OPS, batch_size=16, prefetch=0), want)


def test_slow_examples_keep_their_place(monkeypatch):
  def ops(features):
    seed = features["seed"]
    work = tf.where(seed % 3 == 0, 2_000_000, 1)
    draws = tf.random.stateless_uniform([work], tf.stack([seed, 0]))
    nothing = tf.cast(tf.reduce_max(draws) > 1, tf.uint8)
    return features | {"image": features["image"] + nothing}

  monkeypatch.setattr(loading, "_CHUNK", 1)
  monkeypatch.setattr(loading, "_num_cores", lambda: 8)
  got = take(20, fake(50), ops, batch_size=1)
  assert_equal(got, take(20, fake(50), batch_size=1))


def test_examples_of_a_batch_are_cropped_independently():
  # Of one image all copies are cropped in their own way.
  images = take(1, fake(1, side=24), "random_crop(4)", batch_size=40)["image"]
  assert len(np.unique(images[0].reshape(40, -1), axis=0)) > 30


# Evaluation.


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("share", [1, 3, 7, 16])
def test_evaluation_counts_every_example_once(share, num_shards):
  source = fake(10, side=4)
  size = share * num_shards
  passes = [
    eval_batches(source, "", batch_size=size, shard=i, num_shards=num_shards)
    for i in range(num_shards)
  ]
  assert {length for _, length in passes} == {-(-10 // size)}
  shards = [list(iterator) for iterator, _ in passes]
  assert {len(batches) for batches in shards} == {-(-10 // size)}
  # The global batches, one after the other.
  ids, masks, labels, images = (
    np.concatenate([batch[key] for step in zip(*shards) for batch in step])
    for key in ("id", "mask", "labels", "image")
  )
  assert len(ids) == -(-10 // size) * size
  np.testing.assert_array_equal(ids[:10], np.arange(10))
  np.testing.assert_array_equal(labels[:10, 0], np.arange(10) % 3)
  np.testing.assert_array_equal(masks, np.arange(len(ids)) < 10)
  assert (ids[10:] == -1).all() and (labels[10:] == -1).all()
  assert images[:10].any(axis=(1, 2, 3)).all() and not images[10:].any()


def test_evaluation_starts_afresh_at_each_call():
  source = fake(5)
  first, _ = eval_batches(source, "", batch_size=2)
  next(first)
  second, _ = eval_batches(source, "", batch_size=2)
  assert next(second)["id"].tolist() == [0, 1]
  assert next(first)["id"].tolist() == [2, 3]


# What is refused.


@pytest.fixture
def bad_folder(tmp_path):
  def make(name: str):
    (tmp_path / "a").mkdir()
    for i in range(20):
      shutil.copy(AWKWARD / "rgb.png", tmp_path / "a" / f"{i}.png")
    if name:
      shutil.copy(AWKWARD / name, tmp_path / "a" / f"bad_{name}")
    return get_source(f"folder:{tmp_path}", "all")

  return make


@pytest.mark.parametrize(
  "name, reason",
  [
    ("empty.jpg", "empty"),
    ("not_an_image.jpg", "Unknown image file format"),
    ("truncated.jpg", "Invalid JPEG data"),
  ],
)
def test_a_bad_image_is_named(bad_folder, name, reason):
  source = bad_folder(name)
  for ops in ("decode|resize(4)", "decode_and_random_crop(4)"):
    if name == "truncated.jpg" and "random" in ops:
      continue  # a window may well lie in the part that is there
    with pytest.raises(DataError, match=f"a/bad_{name}: .*{reason}") as error:
      take(21, source, ops, batch_size=2, start_step=5)
    assert "{{" not in str(error.value) and "[Op" not in str(error.value)
  batches, _ = eval_batches(source, "decode|resize(4)", batch_size=4)
  with pytest.raises(DataError, match=f"a/bad_{name}: "):
    list(batches)


def test_batches_before_a_bad_image_are_delivered(bad_folder):
  source = bad_folder("empty.jpg")
  bad = next(i for i in range(21) if "/bad_" in source.name_of(i))
  batches, _ = eval_batches(source, "decode|resize(4)", batch_size=1)
  got = [next(batches)["id"][0] for _ in range(bad)]
  assert got == list(range(bad))
  with pytest.raises(DataError):
    next(batches)


def test_a_vanished_or_small_image_is_named(bad_folder):
  source = bad_folder("one_pixel.png")
  with pytest.raises(
    DataError, match="bad_one_pixel.png: the image is smaller"
  ):
    take(11, source, "decode|random_crop(4)", batch_size=2)
  path = source.name_of(3)
  pathlib.Path(path).unlink()
  with pytest.raises(DataError, match=path):
    take(11, source, "decode|resize(4)", batch_size=2)


@pytest.mark.parametrize(
  "options, words",
  [
    ({"batch_size": 9, "streams": 2}, "batch_size is 9.*streams.*8 or 10"),
    ({"batch_size": 0}, "batch_size is 0"),
    ({"batch_size": 12, "streams": 3, "num_shards": 2}, "streams is 3.*2 or 4"),
    ({"batch_size": 8, "num_shards": 2, "shard": 2}, r"shard is 2.*0\.\.1"),
    ({"batch_size": 8, "start_step": -1}, "start_step is -1"),
    ({"batch_size": 8, "streams": -1}, "streams is -1"),
    ({"batch_size": 8, "shuffle_buffer": 0}, "shuffle_buffer is 0"),
    ({"batch_size": 8, "prefetch": -1}, "prefetch is -1"),
    ({"batch_size": 8, "max_labels": 0}, "max_labels is 0"),
    ({"batch_size": 8, "max_bad_share": -0.1}, "max_bad_share is -0.1"),
    ({"batch_size": 8, "on_error": "skp"}, "'skp'.*raise, skip.*'skip'"),
    ({"batch_size": 8, "cache": "gs://x"}, "'gs://x'.*'memory' or a folder"),
    ({"batch_size": 8, "cache": "x", "service": "y"}, "exclude each other"),
    ({"batch_size": 8, "service": "a:1"}, "'a:1'.*grpc://HOST:PORT"),
    ({"batch_size": 22, "streams": 11}, "11 streams cannot share 10 examples"),
  ],
)
def test_bad_options_are_refused_at_once(options, words):
  with pytest.raises(ValueError, match=words):
    train_batches(fake(10), "", **({"seed": 0} | options))


@pytest.mark.parametrize(
  "options, words",
  [
    ({"batch_size": 3, "num_shards": 2}, "batch_size is 3.*2 or 4"),
    ({"batch_size": 4, "num_shards": 2, "shard": -1}, "shard is -1"),
  ],
)
def test_bad_options_of_evaluation(options, words):
  with pytest.raises(ValueError, match=words):
    eval_batches(fake(10), "", **options)


@pytest.mark.parametrize("make", ["train", "eval"])
@pytest.mark.parametrize(
  "ops, words",
  [
    ("", "'' leave the image encoded: begin with decode"),
    ("decode", r"'decode' give images of different sizes.*resize\(SIZE\)"),
    ("decode|resize_small(4)", "different sizes"),
    ("nonsense", "Unknown op"),
  ],
)
def test_ops_must_give_images_of_one_size(bad_folder, make, ops, words):
  source = bad_folder("")
  with pytest.raises(ValueError, match=words):
    if make == "train":
      train_batches(source, ops, batch_size=2, seed=0)
    else:
      eval_batches(source, ops, batch_size=2)


def test_images_must_be_uint8():
  def to_float(features):
    return features | {"image": tf.cast(features["image"], tf.float32)}

  with pytest.raises(ValueError, match="float32, not uint8"):
    train_batches(fake(4), to_float, batch_size=2, seed=0)
