"""How processes find each other and notice an end, with only one at hand."""

import json
import socket
import threading
import types

import jax
import pytest
from jax._src import distributed

from vit_jax import guard, hosts, watch

CLUSTER = (
  "SLURM_STEP_NODELIST",
  "SLURM_NTASKS",
  "OMPI_COMM_WORLD_SIZE",
)


@pytest.fixture
def asked(monkeypatch):
  """The arguments of each call of `jax.distributed.initialize`."""
  for name in CLUSTER:
    monkeypatch.delenv(name, raising=False)
  calls = []
  monkeypatch.setattr(
    jax.distributed,
    "initialize",
    lambda *args, **kwargs: calls.append((args, kwargs)),
  )
  return calls


def test_a_single_process_starts_nothing(asked):
  hosts.connect()
  assert asked == []
  assert not hosts.several()
  assert hosts.first()
  assert hosts.from_first("x", lambda: (1, 2)) == (1, 2)
  assert hosts.gather("x", "mine") == ["mine"]
  hosts.agree("x", 1, guard.changes)
  hosts.barrier("x")
  hosts.leave()


@pytest.mark.parametrize(
  ("variables", "found"),
  [
    ({"SLURM_STEP_NODELIST": "a[1-4]", "SLURM_NTASKS": "4"}, True),
    ({"SLURM_STEP_NODELIST": "a1", "SLURM_NTASKS": "1"}, False),
    ({"SLURM_NTASKS": "4"}, False),  # In a batch script, outside of srun.
    ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
    ({"OMPI_COMM_WORLD_SIZE": "1"}, False),
  ],
)
def test_the_machine_is_asked(asked, monkeypatch, variables, found):
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  hosts.connect(detect=False)
  assert asked == []
  hosts.connect()
  assert len(asked) == found
  if found:
    assert asked[0][0] == ()  # JAX finds out who is where.


def test_explicit_processes_ask_nobody(asked, monkeypatch):
  monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
  hosts.connect("host:1234", 2, 1)
  ((args, kwargs),) = asked
  assert args == ("host:1234", 2, 1)
  assert kwargs["cluster_detection_method"] == "deactivate"


@pytest.mark.parametrize(
  ("args", "message"),
  [
    (("host:1234", 2), "--process_id=-1: give all three"),
    (("", 2, 0), "--coordinator_address=''.*give all three"),
    (
      ("host:1234", 2, 2),
      "--process_id=2 of --num_processes=2: ids are 0 to 1",
    ),
    (("host", 2, 0), "has no port; write HOST:PORT"),
  ],
)
def test_refused_before_anything_is_started(asked, args, message):
  with pytest.raises(ValueError, match=message):
    hosts.connect(*args)
  assert asked == []


class Store:
  """The coordination service's store, of one process."""

  def __init__(self):
    self.values = {}

  def key_value_set(self, key, value, allow_overwrite=False):
    if key in self.values and not allow_overwrite:
      raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
    self.values[key] = value

  def key_value_dir_get(self, key):
    return [(k, v) for k, v in self.values.items() if k.startswith(f"{key}/")]

  def blocking_key_value_get(self, key, timeout):
    del timeout
    if key not in self.values:
      raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: nothing came")
    return self.values[key]


@pytest.fixture
def process(monkeypatch):
  """Makes this process one of three, with a store of its own."""

  def be(index, store):
    monkeypatch.setattr(
      distributed,
      "global_state",
      types.SimpleNamespace(
        client=store,
        process_id=index,
        num_processes=3,
        coordinator_address="127.0.0.1:1",
      ),
    )

  return be


def test_the_odd_process_is_named_with_what_differs(process, monkeypatch):
  store, here = Store(), socket.gethostname()
  store.values["vit_jax/host/0"] = "alpha"
  process(0, store)
  monkeypatch.setattr(hosts, "_numbers", iter((5,)))
  hosts.agree("the config", {"seed": 0}, guard.changes)
  process(2, store)
  monkeypatch.setattr(hosts, "_numbers", iter((5,)))
  with pytest.raises(ValueError) as error:
    hosts.agree("the config", {"seed": 1}, guard.changes)
  assert "do not agree on the config" in str(error.value)
  assert f"process 2 ({here}) differs from process 0 (alpha)" in str(
    error.value
  )
  assert "seed: was 0, is 1" in str(error.value)


def test_a_process_that_does_not_answer_is_named(process):
  process(0, Store())
  with pytest.raises(ValueError, match=r"process 1 \(host unknown\) did not"):
    hosts.gather("the weather", "good")


def test_silence_is_noticed_and_told_once(process, monkeypatch):
  now = [0.0]
  monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
  store = Store()
  process(0, store)
  mine = watch.Watch()
  store.values["vit_jax/host/2"] = "omega"
  for beat in range(100):
    now[0] += 1
    for index in (0, 1, *((2,) if beat < 20 else ())):
      store.key_value_set(f"vit_jax/beat/{index}", f"{beat}", True)
    mine._look()
    if "vit_jax/stop" in store.values:
      break
  assert now[0] == pytest.approx(20 + watch.SILENCE, abs=2)
  status, text = json.loads(store.values["vit_jax/stop"])
  assert status == hosts.LOST
  assert "process 2 (omega) is gone: no sign of life for 3" in text
  mine.tell(1, "another reason")  # The first word counts.
  assert json.loads(store.values["vit_jax/stop"])[1] == text
  assert mine._listen() == [status, text]


def test_a_closed_door_is_not_an_open_one(process, monkeypatch):
  process(1, Store())
  mine = watch.Watch()
  with socket.socket() as server:
    server.bind(("127.0.0.1", 0))
    server.listen()
    port = server.getsockname()[1]
    distributed.global_state.coordinator_address = f"127.0.0.1:{port}"
    assert mine._door_opens()
  assert not mine._door_opens()
  # Which ends this process, once the store is silent as well.
  ends = []
  monkeypatch.setattr(watch, "end", lambda *args: ends.append(args))
  monkeypatch.setattr(watch.time, "sleep", lambda _: None)
  thread = threading.Thread(target=mine._notice_hanging)
  thread.start()
  thread.join(10)
  ((status, text),) = ends
  assert status == hosts.LOST
  assert "process 0" in text and "is gone" in text
