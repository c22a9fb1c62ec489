"""The order of records that lie many to a file; tickets only, no images."""

import dataclasses
import time

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from input_pipeline import Source, order, records

SIZES = (7, 0, 12, 30, 5, 9, 1, 16)  # 80 records in 7 files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Files 0..99 of 30 records each: "file record"."""
  root = tmp_path_factory.mktemp("files")
  for i in range(100):
    with tf.io.TFRecordWriter(f"{root}/{i}") as writer:
      for k in range(30):
        writer.write(f"{i} {k}".encode())
  return root


def source_of(folder, sizes, *, skip=0, addressed=False) -> Source:
  return Source(
    spec="test:",
    split="train",
    num_examples=sum(sizes),
    class_names=(),
    digest="",
    parse=lambda *record: {},
    name_of=str,
    pieces=records.make_pieces(
      [f"{folder}/{i}" for i in range(len(sizes))], [skip] * len(sizes), sizes
    ),
    addressed=addressed,
  )


def take(count, source, *, streams=1, local=None, part=1, start=0, buffer=20):
  """The first tickets: ids, seeds and, where they have them, records."""
  tickets = order.train_tickets(
    source,
    local or range(streams),
    streams=streams,
    part=part,
    start=start,
    seed=3,
    shuffle_buffer=buffer,
  )
  return [np.array(x) for x in zip(*tickets.take(count).as_numpy_iterator())]


def test_records_come_with_their_own_index(folder):
  source = source_of(folder, SIZES)
  firsts = np.cumsum((0, *SIZES))
  for streams in (1, 3):  # which end within files
    ids, _, data = take(160, source, streams=streams)
    for index, text in zip(ids, data):
      file, record = map(int, text.split())
      assert firsts[file] + record == index
  assert records.name_of(source.pieces, 19) == f"{folder}/3, record 0"


@pytest.mark.parametrize("buffer", [1, 2, 7, 20, 60, 1000])
def test_every_epoch_is_a_permutation_and_epochs_differ(folder, buffer):
  ids, seeds, _ = take(240, source_of(folder, SIZES), buffer=buffer)
  epochs = ids.reshape(3, 80)
  np.testing.assert_array_equal(
    np.sort(epochs, 1), np.tile(np.arange(80), (3, 1))
  )
  if buffer == 1:
    assert (epochs == np.arange(80)).all()
  else:
    assert len({tuple(epoch) for epoch in epochs}) == 3
  assert len(set(seeds)) == 240


@pytest.mark.parametrize("streams", [1, 3, 7])
def test_streams_cover_every_record_once_an_epoch(folder, streams):
  source = source_of(folder, SIZES)
  part = -(-80 // streams)  # holds an epoch of each stream
  ids = take(part * streams, source, streams=streams, part=part)[0]
  epochs = []
  for stream, got in enumerate(ids.reshape(streams, part)):
    first, stop = order.bounds(80, stream, streams)
    assert stop - first in (80 // streams, part)
    assert sorted(got[: stop - first]) == list(range(first, stop))
    epochs.append(got[: stop - first])
  assert sorted(np.concatenate(epochs)) == list(range(80))


def test_the_order_is_fair(folder):
  # Over 80 epochs every file comes to every tenth of an epoch equally often.
  source = source_of(folder, [10] * 10, addressed=True)
  ids = take(8000, source, buffer=40)[0].reshape(80, 10, 10)
  for file in range(10):
    counts = (ids // 10 == file).sum(axis=(0, 2))
    assert (np.abs(counts - 80) < 76).all()  # four standard deviations
  # A block of two files is shuffled as a whole: half of the neighbours are of
  # the same file, and few are neighbours there.
  pairs = np.diff(ids.reshape(-1, 20), axis=1)
  assert (pairs == 1).mean() < 0.1


def test_records_of_a_file_stay_within_a_block(folder):
  # Files of 10, windows of 20: nothing else has to be in memory.
  ids = take(200, source_of(folder, [10] * 20), buffer=40)[0]
  for block in ids.reshape(10, 20) // 10:
    assert len(set(block)) == 2
  # A file of 30 and windows of 10: equal windows, one after the other.
  ids = take(60, source_of(folder, [30, 30]), buffer=20)[0]
  for number, window in enumerate(ids.reshape(6, 10) % 30):
    first = number % 3 * 10
    assert sorted(window) == list(range(first, first + 10))


def test_the_order_was_written_down_long_ago(folder):
  ids = take(12, source_of(folder, [3, 4, 5]), buffer=8)[0]
  assert ids.tolist() == GOLDEN


GOLDEN = [9, 8, 7, 10, 11, 3, 5, 4, 6, 1, 2, 0]


@settings(max_examples=5, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_position_opens_as_if_read_up_to(folder, data):
  sizes = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=9))
  streams = data.draw(st.integers(1, 3))
  if sum(sizes) < streams:
    sizes = [*sizes, 30]
  options = {
    "streams": streams,
    "part": 4,
    "buffer": data.draw(st.sampled_from([1, 2, 9, 40, 500])),
  }
  skip = data.draw(st.integers(0, 30 - max(sizes)))
  step = data.draw(st.integers(0, sum(sizes)))  # up to 4 epochs in
  source = source_of(folder, sizes, skip=skip)
  whole = take((step + 3) * 4 * streams, source, **options)
  rest = take(12 * streams, source, start=step * 4, **options)
  for got, want in zip(rest, whole):
    np.testing.assert_array_equal(got, want[step * 4 * streams :])
  # Known by index, they come in the same order with the same seeds.
  addressed = source_of(folder, sizes, addressed=True)
  for got, want in zip(take(len(whole[0]), addressed, **options), whole):
    np.testing.assert_array_equal(got, want)


def test_processes_share_the_streams(folder):
  source = source_of(folder, SIZES)
  whole = take(240, source, streams=4, part=3)[0].reshape(20, 4, 3)
  for local in (range(2), range(3, 4)):
    got = take(60 * len(local), source, streams=4, local=local, part=3)[0]
    np.testing.assert_array_equal(
      got.reshape(20, len(local), 3), whole[:, local.start : local.stop]
    )


def test_ten_to_the_eight_records_open_in_a_moment(folder):
  with tf.io.TFRecordWriter(f"{folder}/large") as writer:
    for _ in range(10_000):
      writer.write(b"")
  pieces = records.make_pieces(
    [f"{folder}/large"] * 10_000, [0] * 10_000, [10_000] * 10_000
  )
  source = dataclasses.replace(
    source_of(folder, [1]), pieces=pieces, num_examples=10**8
  )
  options = {"start": 123_456_789, "buffer": 50_000}
  seconds = []
  for _ in range(2):
    begin = time.process_time()
    (index,), *_ = take(1, source, **options)
    seconds.append(time.process_time() - begin)
  assert min(seconds) < 2, seconds  # Mostly below 1; machines differ.
  # The files of one block are enough to go on for a while.
  ids = take(1500, source, **options)[0]
  block = np.unique(ids // 10_000)
  assert len(block) == 3 and ids[0] == index
  paths = np.full(10_000, f"{folder}/nowhere")
  paths[block] = f"{folder}/large"
  source = dataclasses.replace(source, pieces=pieces._replace(paths=paths))
  np.testing.assert_array_equal(take(1500, source, **options)[0], ids)


def test_indices_too_many_to_sort_are_ordered_in_pieces(folder, monkeypatch):
  monkeypatch.setattr(order, "_SORTED_AT_ONCE", 99)
  monkeypatch.setattr(order, "_INDICES_IN_A_PIECE", 8)
  source = dataclasses.replace(
    source_of(folder, []), addressed=True, num_examples=205
  )
  options = {"streams": 2, "part": 103, "buffer": 64}
  ids = take(412, source, **options)[0].reshape(2, 2, 103)
  assert sorted(ids[0, 0][:102]) == list(range(102))
  assert sorted(ids[0, 1]) == list(range(102, 205))
  assert (ids[0] != np.arange(206).reshape(2, 103)).mean() > 0.9
  rest = take(206, source, start=103, **options)[0].reshape(2, 103)
  np.testing.assert_array_equal(rest, ids[1])


def test_a_file_that_is_too_short_is_named(folder):
  source = source_of(folder, [30, 31, 30])
  with pytest.raises(
    tf.errors.InvalidArgumentError, match="/1: the file holds"
  ):
    take(91, source)
