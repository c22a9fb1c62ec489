"""Keeping records close by, going past bad images, several labels."""

import logging
import pathlib
import resource
import shutil

import numpy as np
import pytest
import tensorflow as tf

from input_pipeline import (
  DataError,
  caching,
  eval_batches,
  get_source,
  records,
  train_batches,
)
from tests.test_sources_tfrecord import example, image, write

AWKWARD = pathlib.Path(__file__).parent / "data" / "awkward"
OPS = "decode|resize(6)|random_crop(5)|flip_lr"
BAD = (3, 9, 11)


def take(count, source, ops=OPS, **options) -> dict[str, np.ndarray]:
  """The first batches, stacked: name -> [count, n, ...]."""
  options = {"batch_size": 6, "seed": 1, "shuffle_buffer": 6} | options
  batches = train_batches(source, ops, **options)
  taken = [next(batches) for _ in range(count)]
  return {key: np.stack([b[key] for b in taken]) for key in taken[0]}


def assert_equal(got, want):
  assert got.keys() == want.keys()
  for key in got:
    np.testing.assert_array_equal(got[key], want[key], err_msg=key)


def make_source(kind, root, bad=BAD):
  """20 examples, of which some are bad; labels are the id modulo 3."""
  if kind == "tfrecord":
    spec = write(
      root,
      counts=(5, 5, 5, 5),
      make=lambda k: example(
        image=b"" if k in bad else image(k), labels=[k % 3]
      ),
    )
    return get_source(f"tfrecord:{spec}/train*?classes=3", "train")
  for k in range(20):
    (root / str(k % 3)).mkdir(exist_ok=True)
    name = "empty.jpg" if k in bad else "rgb.png"
    shutil.copy(AWKWARD / name, root / str(k % 3) / f"{k}_{name}")
  return get_source(f"folder:{root}", "all")


def is_bad(source) -> np.ndarray:
  """[20] bool, by id."""
  if source.addressed:
    return np.array(["empty" in source.name_of(i) for i in range(20)])
  return np.isin(np.arange(20), BAD)


# on_error="skip".

SKIP = {"on_error": "skip", "max_bad_share": 1.0}


@pytest.mark.parametrize("kind", ["folder", "tfrecord"])
def test_bad_images_are_replaced_and_counted(kind, tmp_path, caplog):
  (tmp_path / "bad").mkdir()
  (tmp_path / "good").mkdir()
  source = make_source(kind, tmp_path / "bad")
  bad = is_bad(source)
  logging.getLogger("input_pipeline").propagate = True
  got = take(20, source, streams=2, **SKIP)
  assert got["skipped"].dtype == np.int32
  assert not bad[got["id"]].any()
  assert got["skipped"].sum() == 6 * bad.sum()  # in 6 epochs
  for index in bad.nonzero()[0]:
    assert f"bad image: {source.name_of(index)}" in caplog.text
  # Replaced from the same stream, labels and all; the others stay in place.
  streams = np.repeat([[[0, 1]]], 3, axis=-1).reshape(1, 6)
  np.testing.assert_array_equal(got["id"] // 10, np.tile(streams, (20, 1)))
  kept = got["skipped"] == 0
  if kind == "tfrecord":
    np.testing.assert_array_equal(got["labels"][..., 0], got["id"] % 3)
    clean = make_source(kind, tmp_path / "good", bad=())
    want = take(20, clean, streams=2)
    for key, value in want.items():
      np.testing.assert_array_equal(got[key][kept], value[kept], err_msg=key)
    assert bad[want["id"][~kept]].all()


@pytest.mark.parametrize("kind", ["folder", "tfrecord"])
def test_replacements_do_not_depend_on_the_start(kind, tmp_path):
  source = make_source(kind, tmp_path)
  options = {"streams": 2, **SKIP}
  whole = take(12, source, **options)
  rest = take(3, source, start_step=9, **options)
  assert_equal(rest, {k: v[9:] for k, v in whole.items()})
  kept = take(12, source, cache="memory", **options)
  assert_equal(kept, whole)
  shares = [
    take(12, source, shard=i, num_shards=2, **options) for i in range(2)
  ]
  assert_equal(
    {k: np.concatenate([s[k] for s in shares], 1) for k in whole}, whole
  )


def test_too_many_bad_images_stop_the_run(tmp_path):
  source = make_source("folder", tmp_path)
  # Three of 20 in each epoch: 15 %.
  take(30, source, on_error="skip", max_bad_share=0.2)
  with pytest.raises(DataError, match="max_bad_share = 0.1 .*empty.jpg"):
    take(30, source, on_error="skip", max_bad_share=0.1)


def test_what_cannot_be_replaced_or_read_is_named(tmp_path):
  source = make_source("folder", tmp_path, bad=range(20))
  with pytest.raises(DataError, match="empty.jpg: Input is empty"):
    take(1, source, **SKIP)
  # A file that has gone is no bad image: the disk may be failing.
  pathlib.Path(source.name_of(0)).unlink()
  source = get_source(f"folder:{tmp_path}", "all")
  for k in range(source.num_examples):
    shutil.copy(AWKWARD / "rgb.png", source.name_of(k))
  pathlib.Path(source.name_of(5)).unlink()
  with pytest.raises(DataError, match=source.name_of(5)):
    take(9, source, **SKIP)


# cache.


@pytest.mark.parametrize("cache", ["memory", "disk"])
@pytest.mark.parametrize("kind", ["folder", "tfrecord"])
def test_what_is_kept_is_not_read_again(kind, cache, tmp_path, monkeypatch):
  root = tmp_path / "data"
  root.mkdir()
  source = make_source(kind, root, bad=())
  want = take(20, source)
  cache = str(tmp_path / "cache") if cache == "disk" else cache
  options = {"batch_size": 6, "seed": 1, "shuffle_buffer": 6}
  batches = train_batches(source, OPS, cache=cache, **options)
  evaluation = {"batch_size": 8, "cache": cache}
  ops = "decode|resize(5)"
  first = [x["image"] for x in eval_batches(source, ops, **evaluation)[0]]
  shutil.rmtree(root)
  taken = [next(batches) for _ in range(20)]
  assert_equal({k: np.stack([b[k] for b in taken]) for k in want}, want)
  again = [x["image"] for x in eval_batches(source, ops, **evaluation)[0]]
  np.testing.assert_array_equal(first, again)
  if cache != "memory":  # Another start finds it there.
    monkeypatch.setattr(caching, "bytes_per_record", lambda _: 0)
    assert_equal(take(20, source, cache=cache), want)


def test_each_process_keeps_its_own_share(tmp_path):
  source = make_source("tfrecord", tmp_path, bad=())
  for shard in range(2):
    options = {"shard": shard, "num_shards": 2, "streams": 4, "batch_size": 8}
    got = take(9, source, cache=f"{tmp_path}/cache", **options)
    assert_equal(got, take(9, source, **options))
  sizes = [f.stat().st_size for f in (tmp_path / "cache").glob("*.records")]
  data = sum(f.stat().st_size for f in tmp_path.glob("train*"))
  assert len(sizes) == 2 and sum(sizes) == data - 20 * 16  # frames of TFRecord


def test_a_kept_file_that_was_not_finished_is_written_anew(tmp_path):
  source = make_source("tfrecord", tmp_path, bad=())
  want = take(5, source, cache=f"{tmp_path}/cache")
  (index,) = (tmp_path / "cache").glob("*.npz")
  index.unlink()
  index.with_suffix(".records").write_bytes(b"half")
  assert_equal(take(5, source, cache=f"{tmp_path}/cache"), want)


# Memory.


def test_small_data_is_held_once(tmp_path, caplog, monkeypatch):
  noise = np.random.default_rng(0).bytes(20_000)

  def make(k):
    return example(image=image(k) + noise, labels=[0])

  write(tmp_path, counts=(250,) * 4, make=make)
  source = get_source(f"tfrecord:{tmp_path}/train*?classes=1", "train")
  logging.getLogger("input_pipeline").propagate = True
  caplog.set_level(logging.INFO)
  batches = train_batches(
    source, "decode|resize(4)", batch_size=250, seed=0, shuffle_buffer=50_000
  )
  assert "keeping about 20.1 MB in memory" in caplog.text
  peaks = []
  for _ in range(20):
    for _ in range(4):
      next(batches)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
  # In kB; one epoch more held would be 20,000.
  assert peaks[-1] - peaks[4] < 10_000
  monkeypatch.setattr(caching, "memory_limit", lambda: 19_000_000)
  for options in ({}, {"cache": "memory"}, {"shuffle_buffer": 980}):
    with pytest.raises(ValueError, match="holding .*19.0 MB of memory here"):
      take(1, source, **({"shuffle_buffer": 50_000} | options))
  monkeypatch.setattr(caching, "memory_limit", lambda: 9_000_000)
  take(1, source, shuffle_buffer=400)
  assert "shuffling holds about 8.0 MB" in caplog.text


def test_sizes_for_people():
  sizes = (0, 999, 12_340_000, 2_500_000_000, 5 * 10**12)
  shown = [caching.show_bytes(size) for size in sizes]
  assert shown == ["0.0 kB", "1.0 kB", "12.3 MB", "2.5 GB", "5000.0 GB"]
  assert caching.memory_limit() > 10**8


# Labels.


def test_labels_are_padded_to_max_labels(tmp_path):
  source = get_source(f"tfrecord:{write(tmp_path)}/train*?classes=2", "train")
  for width in (2, 5):
    got = take(3, source, max_labels=width)
    assert got["labels"].shape == (3, 6, width)
    for index, labels in zip(got["id"].ravel(), got["labels"].reshape(18, -1)):
      count = index % 3
      want = [*range(count), *[-1] * (width - count)]
      assert labels.tolist() == want
  digits = get_source("digits:", "train[:9]")
  got = take(1, digits, "decode", max_labels=3)["labels"]
  assert got.shape == (1, 6, 3) and (got[..., 1:] == -1).all()


def test_counting_agrees_with_reading(tmp_path):
  write(tmp_path, counts=(3, 0, 5))
  paths = sorted(map(str, tmp_path.glob("train*")))
  assert records.count(paths).tolist() == [3, 0, 5]
  pieces = records.make_pieces(paths, [0] * 3, [3, 0, 5])
  sizes = [len(x.numpy()) for x in tf.data.TFRecordDataset(paths)]
  assert abs(records.mean_bytes(pieces) - np.mean(sizes)) < 10
