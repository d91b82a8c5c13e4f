"""One rank of the doctor's world: what it tells the store, alone and without a launcher."""

import dataclasses
import json
import os
import platform
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import accel_state
from accel_cli.doctor import rank as module
from accel_cli.doctor.links import Link
from accel_cli.doctor.rank import RankJob, main

NAMES = ["all_reduce", "broadcast", "barrier"]


class Coordinator:
    """The store, with all answers in it that a rank waits for."""

    def __init__(self):
        wait = timedelta(seconds=20)
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait, wait_for_workers=False)
        for key in ("start", "verdict", *(f"clock/0/{number}/ask" for number in range(5))):
            self.store.set(key, "")

    def run(self, rank=0, size=1, local_rank=0, timeout=20.0, cpu=True):
        job = RankJob(rank, size, local_rank, "127.0.0.1", self.store.port, timeout, cpu)
        return main([json.dumps(dataclasses.asdict(job))])

    def read(self, key):
        return json.loads(self.store.get(key))


@pytest.fixture
def coordinator():
    assert not dist.is_initialized()
    yield Coordinator()
    if dist.is_initialized():  # a rank whose coordinator has ended leaves its group to the end of its process
        dist.destroy_process_group()


@pytest.fixture
def collectives(monkeypatch):
    """Few collectives, whose outcome is known; what they do is tested beside their own module."""
    asked = []

    def check(name, device):
        asked.append((name, str(device)))
        return 0.25 * len(asked), f"wrong {name}" if name == "broadcast" else ""

    monkeypatch.setattr(module, "COLLECTIVES", dict.fromkeys(NAMES))
    monkeypatch.setattr(module, "check_collective", check)
    return asked


@pytest.fixture
def no_group(monkeypatch):
    """The arguments with which the group of all ranks is made, which then does not wait for others."""
    made = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: made.append((args, kwargs)))
    return made


def test_a_rank_tells_who_it_is_and_what_it_found(coordinator, collectives):
    before = time.time()
    assert coordinator.run() == 0
    after = time.time()
    assert not dist.is_initialized()
    assert coordinator.read("arrived/0") == {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "torch": torch.__version__,
        "accel": accel_state.__version__,
        "python": platform.python_version(),
    }
    result = coordinator.read("result/0")
    assert 0 < result.pop("compute") < after - before
    assert result == {
        "rank": 0,
        "device": "cpu",
        "backend": "gloo",
        "collectives": {
            "all_reduce": {"seconds": 0.25, "problem": ""},
            "broadcast": {"seconds": 0.5, "problem": "wrong broadcast"},
            "barrier": {"seconds": 0.75, "problem": ""},
        },
        "links": [],
    }
    assert collectives == [(name, "cpu") for name in NAMES]
    answers = [float(coordinator.store.get(f"clock/0/{number}/answer")) for number in range(5)]
    assert before <= answers[0]
    assert answers == sorted(answers)
    assert answers[-1] <= after
    assert coordinator.store.get("at/0") == b"the end"
    # connecting, three collectives, one round of links, the end
    counts = [coordinator.store.add(key, 0) for key in ("arrived", "steps", "ended")]
    assert counts == [1, 6, 1]


def test_the_first_rank_of_a_pair_reports_its_link(coordinator, collectives, no_group, monkeypatch):
    measured = []

    def measure(pair, device):
        measured.append(pair)
        return Link(*pair, latency=0.5, worst=0.75, bandwidth=8.0)

    monkeypatch.setattr(module, "measure_link", measure)
    assert coordinator.run(rank=1, size=3, local_rank=1, timeout=7.5) == 0
    assert sorted(measured) == [(0, 1), (1, 2)]  # and not that of 0 and 2
    (link,) = coordinator.read("result/1")["links"]
    assert link == {"first": 1, "second": 2, "latency": 0.5, "worst": 0.75, "bandwidth": 8.0}
    ((backend,), group) = no_group[0]
    assert (backend, group["rank"], group["world_size"]) == ("gloo", 1, 3)
    assert group["timeout"] == timedelta(seconds=7.5)


def test_only_the_first_rank_of_a_machine_is_asked_for_its_time(coordinator, collectives, no_group):
    # Nothing asks rank 3: it would wait for ever if it expected to be asked.
    assert coordinator.run(rank=3, size=1, local_rank=1) == 0
    assert not coordinator.store.check(["clock/3/0/answer"])


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError("Connection closed by peer\nException raised from\nframe"),
            "Connection closed by peer",
        ),
        (RuntimeError("\n  reset \nframe"), "reset"),
        (OSError(5, "Input/output error"), "[Errno 5] Input/output error"),
        (RuntimeError("x" * 500), "x" * 200),
        (ConnectionResetError(), "ConnectionResetError"),
        (RuntimeError("\n"), "RuntimeError"),
    ],
    ids=["lines", "empty line", "system", "long", "no text", "empty text"],
)
def test_an_error_is_reported_with_its_step(coordinator, collectives, error, told, monkeypatch):
    right = module.check_collective

    def fails(name, device):
        if name == "broadcast":
            raise error
        return right(name, device)

    monkeypatch.setattr(module, "check_collective", fails)
    assert coordinator.run() == 1
    result = coordinator.read("result/0")
    assert result["error"] == f"broadcast: {told}"
    assert list(result["collectives"]) == ["all_reduce"]  # what it found before is kept
    assert coordinator.store.get("at/0") == b"broadcast"
    assert coordinator.store.add("ended", 0) == 1


def test_a_group_that_cannot_be_made_is_reported(coordinator, collectives):
    assert coordinator.run(rank=2, size=2, local_rank=1, timeout=2.0) == 1
    assert coordinator.read("result/2")["error"].startswith("connecting all ranks: ")
    assert collectives == []


def test_a_coordinator_that_ends_first_is_exit_code_1(coordinator, collectives):
    coordinator.store.delete_key("verdict")
    began = time.monotonic()
    assert coordinator.run(timeout=1.0) == 1
    assert time.monotonic() - began >= 1.0
    assert "error" not in coordinator.read("result/0")


def test_a_store_that_does_not_answer_is_exit_code_3():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # it does not listen
        job = RankJob(0, 2, 0, "127.0.0.1", taken.getsockname()[1], 1.0, True)
        assert main([json.dumps(dataclasses.asdict(job))]) == 3


@pytest.mark.parametrize(
    ("cpu", "there", "device", "chosen"),
    [(True, True, "cpu", []), (False, False, "cpu", []), (False, True, "cpu:1", [1])],
    ids=["by flag", "no accelerator", "accelerator"],
)
def test_a_rank_uses_the_accelerator_of_its_number(
    coordinator, collectives, no_group, cpu, there, device, chosen, monkeypatch
):
    indices = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there)
    monkeypatch.setattr(torch.accelerator, "set_device_index", indices.append)
    # The CPU plays the accelerator: its tensors can be computed with here.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    assert coordinator.run(rank=1, local_rank=1, cpu=cpu) == 0
    assert coordinator.read("result/1")["device"] == device
    assert indices == chosen
    assert collectives[0] == ("all_reduce", device)
