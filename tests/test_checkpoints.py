"""Checkpoints: complete or absent, refused where they do not fit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax import checkpoints, steps, trees


def state_at(step, shape=(8,)):
  params = {"head": {"kernel": jnp.full(shape, float(step))}}
  opt_state = {"count": jnp.int32(step), "mu": jax.tree.map(jnp.copy, params)}
  return steps.TrainState(jnp.int32(step), params, opt_state, {})


def abstract(state, sharding=None):
  sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding
    ),
    state,
  )


def meta_at(step, values=None, best=""):
  return {
    "step": step,
    "values": values or {},
    "guard": {"seed": 0},
    "config": {"checkpoint": {"best": best}},
  }


def save(directory, accuracies, keep=2, keep_every=0, best=""):
  with checkpoints.Checkpoints(
    directory, keep=keep, keep_every=keep_every, best=best
  ) as saver:
    for step, accuracy in accuracies.items():
      values = {"test/top1": accuracy}
      saver.save(state_at(step), meta_at(step, values, best))
    saver.wait()
  return directory


def accept(meta):
  del meta


def steps_of(directory):
  return sorted(checkpoints.steps_in(directory))


def test_best_and_newest_are_kept_by_their_own_rules(tmp_path):
  scores = {1: 0.9, 2: 0.8, 3: float("nan"), 4: 0.6}
  save(tmp_path, scores, keep=2, best="test/top1")
  assert steps_of(tmp_path) == [1, 3, 4]
  assert checkpoints.locate(str(tmp_path)).name == "4"
  assert checkpoints.locate(str(tmp_path), "best").name == "1"
  # Another process remembers what was best.
  save(tmp_path, {5: 0.7, 6: 0.5}, keep=1, best="test/top1")
  assert steps_of(tmp_path) == [1, 6]


def test_keep_every_keeps_for_good(tmp_path):
  save(tmp_path, dict.fromkeys(range(1, 8), 0.5), keep=1, keep_every=3)
  assert steps_of(tmp_path) == [3, 6, 7]


def test_restoring_gives_the_same_bits_on_any_number_of_devices(tmp_path):
  def placed(state, count):
    mesh = Mesh(np.array(jax.devices()[:count]), ("fsdp",))

    def place(leaf):
      spec = PartitionSpec(*["fsdp"] * leaf.ndim)
      return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(place, state)

  for saved, wanted in ((8, 1), (1, 8), (8, 2)):
    directory = tmp_path / f"{saved}to{wanted}"
    state = placed(state_at(3), saved)
    with checkpoints.Checkpoints(
      directory, keep=1, keep_every=0, best=""
    ) as saver:
      saver.save(state, meta_at(3))
    target = placed(state_at(0), wanted)
    shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      target,
    )
    restored, _ = checkpoints.restore_latest(directory, shapes, accept)
    for path, leaf in trees.flatten(restored).items():
      np.testing.assert_array_equal(leaf, trees.flatten(state)[path])
      assert leaf.sharding == trees.flatten(target)[path].sharding


def test_what_is_not_complete_is_skipped_with_one_warning_each(
  tmp_path, warnings
):
  save(tmp_path, {10: 0.5})
  (tmp_path / "20").mkdir()
  (tmp_path / "30.orbax-checkpoint-tmp").mkdir()
  state, _ = checkpoints.restore_latest(tmp_path, abstract(state_at(0)), accept)
  assert int(state.step) == 10
  assert len(warnings()) == 2
  assert "20" in warnings()[0]
  # The run goes on, saves the very step that was broken, and finds it again.
  save(tmp_path, {20: 0.5})
  assert steps_of(tmp_path) == [10, 20]


@pytest.mark.parametrize("victim", ["params/manifest.ocdbt", "params", "meta"])
def test_a_half_written_newest_step_is_skipped(tmp_path, warnings, victim):
  save(tmp_path, {10: 0.5, 20: 0.5})
  path = tmp_path / "20" / victim
  if path.is_dir():
    path.rename(tmp_path / "20" / "gone")
  else:
    path.write_bytes(path.read_bytes()[:5])
  state, meta = checkpoints.restore_latest(
    tmp_path, abstract(state_at(0)), accept
  )
  assert int(state.step) == meta["step"] == 10
  assert len(warnings()) == 1
  assert (tmp_path / "20.incomplete").exists()


def test_with_nothing_to_fall_back_on_nothing_is_touched(tmp_path):
  save(tmp_path, {10: 0.5})
  (tmp_path / "10" / "params" / "manifest.ocdbt").write_bytes(b"")
  with pytest.raises(ValueError, match="None of these checkpoints can be read"):
    checkpoints.restore_latest(tmp_path, abstract(state_at(0)), accept)
  assert (tmp_path / "10").exists()


def test_another_tree_shape_or_dtype_is_refused_with_the_list(tmp_path):
  save(tmp_path, {10: 0.5})
  wanted = abstract(state_at(0, shape=(9,)))
  with pytest.raises(
    checkpoints.Misfit, match=r"stored \(8,\).*expected \(9,\)"
  ):
    checkpoints.restore_latest(tmp_path, wanted, accept)
  wanted = abstract(state_at(0))
  half = jax.ShapeDtypeStruct((8,), jnp.bfloat16, sharding=wanted.step.sharding)
  opt_state = wanted.opt_state | {"mu": {"head": {"kernel": half}}}
  wanted = dataclasses.replace(wanted, opt_state=opt_state)
  with pytest.raises(checkpoints.Misfit, match="float32, expected .* bfloat16"):
    checkpoints.restore_latest(tmp_path, wanted, accept)


def test_a_save_is_on_disk_or_an_error_never_skipped(tmp_path):
  """Orbax by itself skips steps older than the newest, without a word."""
  save(tmp_path, {10: 0.5}, keep=9)
  save(tmp_path, {5: 0.5, 10: 0.5}, keep=9)
  assert steps_of(tmp_path) == [5, 10]


def test_a_donated_state_does_not_change_what_is_saved(tmp_path):
  """The arrays are copied before `save` returns, though it writes later."""
  bump = jax.jit(
    lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0
  )
  state = state_at(1, shape=(1 << 20,))
  with checkpoints.Checkpoints(
    tmp_path, keep=9, keep_every=0, best=""
  ) as saver:
    for step in range(1, 6):
      saver.save(state, meta_at(step))
      state = bump(state)
  for step, path in checkpoints.steps_in(tmp_path).items():
    kernel = checkpoints.restore_item(
      path, "params", abstract(state_at(0, shape=(1 << 20,))).params
    )["head"]["kernel"]
    assert float(kernel[0]) == float(kernel[-1]) == step


def test_locate_finds_run_checkpoints_and_step(tmp_path):
  save(tmp_path / "checkpoints", {1: 0.5, 2: 0.5})
  for place in (".", "checkpoints"):
    assert checkpoints.locate(str(tmp_path / place)).name == "2"
  step = tmp_path / "checkpoints" / "1"
  assert checkpoints.locate(str(step)) == checkpoints.locate(str(tmp_path), "1")
  with pytest.raises(ValueError, match="No step 3 in .*1, 2"):
    checkpoints.locate(str(tmp_path), "3")
  with pytest.raises(ValueError, match="No complete checkpoint in"):
    checkpoints.locate(str(tmp_path / "elsewhere"))
  with pytest.raises(ValueError, match="none is the best"):
    checkpoints.locate(str(tmp_path), "best")


def test_a_damaged_meta_on_the_only_step_is_refused_not_restarted(tmp_path):
  save(tmp_path, {10: 0.5})
  (tmp_path / "10" / "meta" / "metadata").write_text("")
  with pytest.raises(ValueError, match="None of these checkpoints can be read"):
    checkpoints.restore_latest(tmp_path, abstract(state_at(0)), accept)
  assert (tmp_path / "10" / "params").exists()


def test_the_same_step_may_break_twice(tmp_path):
  save(tmp_path, {10: 0.5})
  for _ in range(2):
    (tmp_path / "20").mkdir()
    checkpoints.restore_latest(tmp_path, abstract(state_at(0)), accept)
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    "10",
    "20.incomplete",
    "20.incomplete1",
  ]


def test_an_evaluation_may_follow_a_save_that_is_still_on_its_way(tmp_path):
  with checkpoints.Checkpoints(
    tmp_path, keep=1, keep_every=0, best=""
  ) as saver:
    state = state_at(1, shape=(1 << 22,))
    saver.save(state, meta_at(1))
    saver.save(state, meta_at(1, {"test/top1": 0.5}))
  meta = checkpoints.read_meta(tmp_path / "1")
  assert meta["values"] == {"test/top1": 0.5}


def test_of_equals_the_earliest_is_the_best(tmp_path):
  save(tmp_path, {1: 0.5, 2: 0.9, 3: 0.9, 4: 0.9}, keep=1, best="test/top1")
  assert steps_of(tmp_path) == [2, 4]
  assert checkpoints.locate(str(tmp_path), "best").name == "2"
