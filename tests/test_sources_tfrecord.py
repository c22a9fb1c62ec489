"""`tfrecord:` — what is found, what is read, what is refused."""

import json
import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from input_pipeline import DataError, eval_batches, get_source, train_batches
from input_pipeline.sources import tfrecord

COUNTS = (4, 0, 7, 3)


def example(**features) -> bytes:
  """Serializes texts and lists of integers."""

  def encode(value):
    if isinstance(value, (str, bytes)):
      value = value.encode() if isinstance(value, str) else value
      return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=value))

  found = {key.replace("__", "/"): encode(v) for key, v in features.items()}
  return tf.train.Example(
    features=tf.train.Features(feature=found)
  ).SerializeToString()


def image(value: int) -> bytes:
  return tf.io.encode_png(np.full((4, 4, 3), value % 256, np.uint8)).numpy()


def write(root, *, stem="train", counts=COUNTS, make=None) -> str:
  """Writes files whose k-th record has the image k and k % 3 labels."""
  make = make or (
    lambda k: example(image=image(k), labels=list(range(k % 3)), who=f"n{k}")
  )
  tf.io.gfile.makedirs(str(root))
  k = 0
  for number, count in enumerate(counts):
    path = f"{root}/{stem}-{number:05d}-of-{len(counts):05d}"
    with tf.io.TFRecordWriter(path) as writer:
      for _ in range(count):
        writer.write(make(k))
        k += 1
  return str(root)


def write_index(root, **entries) -> None:
  with tf.io.gfile.GFile(f"{root}/index.json", "w") as file:
    json.dump(entries, file)


def read(source, **options) -> dict[str, np.ndarray]:
  """The whole split, sorted by id."""
  batches, _ = eval_batches(
    source, "decode|resize(4)", batch_size=5, max_labels=2, **options
  )
  found = list(batches)
  whole = {key: np.concatenate([b[key] for b in found]) for key in found[0]}
  rows = np.argsort(whole["id"])
  rows = rows[whole["mask"][rows] > 0]
  return {key: value[rows] for key, value in whole.items()}


@pytest.mark.parametrize("place", ["{}", "ram://tfrecord"])
def test_images_and_labels_arrive(place, tmp_path):
  root = write(place.format(tmp_path))
  for spec in (root, f"{root}/train-?????-of-00004", f"{root}/tr*"):
    source = get_source(f"tfrecord:{spec}?classes=2", "train")
    assert source.num_examples == 14
    assert source.class_names == ("0", "1")
  got = read(source)
  assert got["id"].tolist() == list(range(14))
  assert got["image"][:, 0, 0, 0].tolist() == list(range(14))
  want = [[[-1, -1], [0, -1], [0, 1]][k % 3] for k in range(14)]
  assert got["labels"].tolist() == want
  assert source.name_of(4).endswith("train-00002-of-00004, record 0")
  # Buckets are absolute, relative paths begin at data_dir.
  if root == str(tmp_path):
    spec = f"tfrecord:{tmp_path.name}/train*?classes=2"
    assert get_source(spec, "all", str(tmp_path.parent)).num_examples == 14


def test_an_index_tells_counts_names_splits_and_features(tmp_path):
  def make(k):
    return example(image__encoded=image(k), y=[k % 2], file=f"f{k}")

  root = write(tmp_path, make=make)
  write(tmp_path, stem="test", counts=(5,), make=make)
  write_index(
    root,
    files={
      **{f"train-{i:05d}-of-00004": n for i, n in enumerate(COUNTS)},
      "test-00000-of-00001": 5,
    },
    splits={"train": "train-*", "test": "test-*"},
    class_names=["cat", "dog"],
    features={"image": "image/encoded", "labels": "y", "name": "file"},
  )
  source = get_source(f"tfrecord:{root}", "train[:80%]+test[:20%]")
  assert source.class_names == ("cat", "dog")
  assert source.num_examples == 11 + 1
  got = read(source)
  assert got["image"][:, 0, 0, 0].tolist() == [*range(11), 0]
  record = next(iter(tf.data.TFRecordDataset(str(source.pieces.paths[0]))))
  assert source.parse(tf.constant(0, tf.int64), record)["name"] == b"f0"
  assert not (tmp_path / ".record_counts.json").exists()
  with pytest.raises(ValueError, match="'tain'.*test, train.*'train'"):
    get_source(f"tfrecord:{root}", "tain")
  with pytest.raises(ValueError, match="lists no such files"):
    get_source(f"tfrecord:{root}/val*", "train")


def test_slices_go_by_position_and_may_be_added(tmp_path):
  spec = f"tfrecord:{write(tmp_path)}?classes=2"
  got = read(get_source(spec, "train[3:6]"))
  assert got["image"][:, 0, 0, 0].tolist() == [3, 4, 5]
  got = read(get_source(spec, "train[12:]+train[:50%]"))
  assert got["image"][:, 0, 0, 0].tolist() == [12, 13, *range(7)]
  assert got["id"].tolist() == list(range(9))
  with pytest.raises(ValueError, match="twice"):
    get_source(spec, "train[:8]+train[7:]")


def test_records_are_counted_once(tmp_path, monkeypatch):
  spec = f"tfrecord:{write(tmp_path)}/train*?classes=2"
  get_source(spec, "train")
  real, counted = tfrecord.records.count, []

  def count(paths):
    counted.extend(paths)
    return real(paths)

  monkeypatch.setattr(tfrecord.records, "count", count)
  assert get_source(spec, "train").num_examples == 14
  assert not counted
  # A file that has changed is counted again, and only that.
  changed = tmp_path / "train-00001-of-00004"
  with tf.io.TFRecordWriter(str(changed)) as writer:
    writer.write(example(image=image(0), labels=[0]))
  assert get_source(spec, "train").num_examples == 15
  assert counted == [str(changed)]


def test_counts_are_kept_elsewhere_if_need_be(tmp_path, monkeypatch, caplog):
  root = write(tmp_path / "data")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  (tmp_path / "data" / ".record_counts.json").mkdir()  # Cannot be replaced.
  real = tfrecord._gfile.exists
  monkeypatch.setattr(
    tfrecord._gfile, "exists", lambda p: "data/." not in p and real(p)
  )
  source = get_source(f"tfrecord:{root}/train*?classes=2", "train")
  assert source.num_examples == 14
  (kept,) = (tmp_path / "cache" / "vit_jax").iterdir()
  assert json.loads(kept.read_text())["train-00003-of-00004"][1] == 3
  assert "could not be kept" not in caplog.text


def test_the_digest_knows_contents_but_not_the_place(tmp_path):
  here = get_source(f"tfrecord:{write(tmp_path / 'a')}?classes=2", "train")
  there = get_source(f"tfrecord:{write(tmp_path / 'b')}?classes=2", "train")
  assert here.digest == there.digest
  part = get_source(f"tfrecord:{tmp_path}/a?classes=2", "train[:9]")
  more = get_source(f"tfrecord:{tmp_path}/a?classes=3", "train")
  write(tmp_path / "c", counts=(4, 0, 8, 2))
  other = get_source(f"tfrecord:{tmp_path}/c?classes=2", "train")
  assert len({s.digest for s in (here, part, more, other)}) == 4


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_evaluation_counts_every_example_once(num_shards, tmp_path):
  source = get_source(f"tfrecord:{write(tmp_path)}?classes=2", "train[:-1]")
  ids, lengths = [], set()
  for shard in range(num_shards):
    batches, length = eval_batches(
      source,
      "decode|resize(4)",
      batch_size=4,
      shard=shard,
      num_shards=num_shards,
      max_labels=2,
    )
    found = list(batches)
    lengths |= {length, len(found)}
    for batch in found:
      real = batch["mask"] > 0
      assert (batch["image"][real][:, 0, 0, 0] == batch["id"][real]).all()
      assert (batch["id"][~real] == -1).all()
      assert (batch["labels"][~real] == -1).all()
      ids += batch["id"][real].tolist()
  assert sorted(ids) == list(range(13)) and lengths == {4}


@pytest.mark.parametrize(
  "spec, words",
  [
    ("", "needs files: tfrecord:GLOB"),
    ("{}/train*", "number of classes is unknown.*index.json.*classes=1000"),
    ("{}/train*?classes=many", "classes=many must be a number"),
    ("{}/train*?class=2", "Unknown option 'class'.*did you mean 'classes'"),
    ("{}/tran*?classes=2", "tran.*no such files. In .*train-00000-of-00004"),
    (
      "{}/no/train*?classes=2&labels=who",
      "no/ does not exist. A record .*'image' .*'who' .*0..1, .*write",
    ),
    ("{}?classes=2&image=imag", "no feature 'imag'.*image=.*'image'"),
    ("{}?classes=2&labels=who", "'who' .*is a bytes_list.*must be a int64"),
    ("{}?classes=2&name=labels", "'labels' .*is a int64_list"),
  ],
)
def test_what_is_refused(spec, words, tmp_path):
  with pytest.raises(ValueError, match=words):
    get_source(f"tfrecord:{spec.format(write(tmp_path))}", "train")


def test_an_unknown_split_says_how_to_name_more(tmp_path):
  spec = f"tfrecord:{write(tmp_path)}?classes=2"
  with pytest.raises(ValueError, match="all, train.*'splits' in an index.json"):
    get_source(spec, "test")


@pytest.mark.parametrize(
  "text, words",
  [
    ("{", "index.json is no JSON object"),
    ('{"file": {}}', "key 'file'.*did you mean 'files'"),
    ('{"files": {}}', "lists no files"),
    (
      '{"files": {"train-00000-of-00004": 4}, "class_names": ["a"],'
      ' "num_classes": 2}',
      "2 classes by one count, but index.json names 1",
    ),
  ],
)
def test_a_broken_index(text, words, tmp_path):
  root = write(tmp_path)
  (tmp_path / "index.json").write_text(text)
  with pytest.raises(ValueError, match=words):
    get_source(f"tfrecord:{root}", "train")


# What goes wrong later.


def fail(source, **options) -> str:
  options = {"shuffle_buffer": 6, "max_labels": 2} | options
  with pytest.raises(DataError) as error:
    batches = train_batches(
      source, "decode|resize(4)", batch_size=7, seed=0, **options
    )
    for _ in range(2):
      next(batches)
  return str(error.value)


def test_bad_records_are_named(tmp_path):
  root = write(tmp_path)
  source = get_source(f"tfrecord:{root}?classes=2", "train")
  assert "record 1: max_labels is 1, but the example has 2 labels" in fail(
    source, max_labels=1
  )
  source = get_source(f"tfrecord:{root}?classes=1", "train")
  assert "a label is outside of 0..0" in fail(source)
  source = get_source(f"tfrecord:{root}?classes=2&image=who", "train")
  assert "record" in fail(source) and "Unknown image" in fail(source)


@pytest.mark.parametrize("buffer", [6, 50])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_files_are_named(damage, buffer, tmp_path):
  root = write(tmp_path)
  source = get_source(f"tfrecord:{root}?classes=2", "train")
  path = pathlib.Path(str(source.pieces.paths[1]))
  data = bytearray(path.read_bytes())
  if damage == "flip":
    data[len(data) // 2] ^= 255
  path.write_bytes(data[: len(data) // 2] if damage == "cut" else data)
  if damage == "remove":
    os.remove(path)
  assert str(path) in fail(source, shuffle_buffer=buffer)
