"""Which failure of a machine is the first, and whether it is a consequence of another machine's."""

import json
import os

import pytest

from accel_state.launching.machines.failures import FailureCause, first_failure, read_errors
from accel_state.launching.ranks.worker import write_error

OWN, UNKNOWN, PEER = FailureCause

# As torch 2.13 and this project say it.
LOST = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:3",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited",
    "torch.distributed.DistNetworkError: recvValue failed on SocketImpl(fd=5): failed to recv, got 0 bytes",
    "accel_state.errors.CollectiveMismatchError: collective #22, gather at t.py:9, failed: rank 0 is gone (exited)",
    "CollectiveMismatchError: gather cannot complete: the store of this world is gone, and rank 0, which hosts it",
)
TIMED_OUT = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation"
)


@pytest.mark.parametrize(
    ("code", "error", "program", "cause"),
    [
        *((1, error, False, PEER) for error in LOST),
        (1, TIMED_OUT, False, UNKNOWN),
        (1, "CollectiveMismatchError: ranks disagree about collective #3:\n  rank 0: gather", False, OWN),
        (1, "ValueError: wrong", False, OWN),
        (3, "", False, OWN),  # it ended with that code on purpose
        (3, "", True, UNKNOWN),
        (75, "", True, OWN),
        (-9, "", False, OWN),
        (-6, "", False, UNKNOWN),
        (-15, "", True, OWN),
    ],
)
def test_what_an_end_says_about_its_cause(code, error, program, cause):
    failure = first_failure({4: code}, {4: (1, error)} if error else {}, program=program)
    assert (failure.rank, failure.code, failure.cause) == (4, code if code > 0 else 128 - code, cause)
    assert failure.error == error.split("\n")[0]


def test_the_cause_is_before_its_consequences_whatever_came_first():
    # Rank 1 has ended; rank 0, for which it waited, has written its error and is still ending.
    errors = {0: (5, "ValueError: wrong"), 1: (9, LOST[0])}
    assert first_failure({1: 1}, errors).rank == 0
    assert first_failure({0: 1, 1: 1, 2: -9}, errors).rank == 2, "a crash leaves no time"
    assert first_failure({2: 1, 3: 1}, {2: (8, "KeyError: 1"), 3: (7, "KeyError: 2")}).rank == 3
    assert first_failure({2: 0}, {}) is None


def raised(make):
    try:
        make()
    except Exception as error:
        return error


def lost_then_own():
    try:
        raise RuntimeError("Connection closed by peer")
    except RuntimeError:
        raise KeyError("in the handler") from None


def own_then_lost():
    try:
        raise ValueError("the first")
    finally:
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    ("make", "message", "cause"),
    [
        (lost_then_own, "KeyError: 'in the handler'", PEER),
        (own_then_lost, "RuntimeError: Connection closed by peer", OWN),
    ],
)
def test_the_first_of_a_chain_of_errors_is_the_cause(tmp_path, make, message, cause):
    path = tmp_path / "error.json"
    write_error(path, raised(make))
    assert json.loads(path.read_text())["message"]["message"] == message  # torch reads this one
    failure = first_failure({0: 1}, read_errors({0: str(path)}))
    assert failure.cause is cause
    chained = RuntimeError("round")
    chained.__context__ = other = ValueError("and round")
    other.__cause__ = chained
    write_error(path, chained)
    assert read_errors({0: str(path)})[0][1] == "ValueError: and round"


def test_the_error_files_of_torch_are_read_and_others_are_not(tmp_path, monkeypatch):
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    errors.ErrorHandler().record_exception(ValueError("of a script that uses torch's record"))
    write_error(tmp_path / "ours", KeyError("x"))
    failure = errors.ProcessFailure(0, 1, 1, str(tmp_path / "ours"))
    assert "KeyError" in failure.message["message"], "torch reads what we write"
    (tmp_path / "text").write_text("no JSON")
    (tmp_path / "list").write_text("[1]")
    files = {0: path, 1: tmp_path / "text", 2: tmp_path / "list", 3: tmp_path / "missing"}
    found = read_errors({rank: str(file) for rank, file in files.items()})
    assert found == {0: (os.stat(path).st_mtime_ns, "ValueError: of a script that uses torch's record")}
