"""The agent of a machine, alone: what it says when the others do not come, and its health probe."""

from __future__ import annotations

import datetime
import os
import pickle
import signal
import socket
import subprocess
import sys
import time

import pytest

from accel_state.launching.machines.agent import read_state
from accel_state.launching.machines.health import find_faults
from accel_state.launching.ports import reserve_port

torch = pytest.importorskip("torch")


def agent(*own, words):
    command = [sys.executable, "-m", "accel_state.launching.machines.agent", *own, "--", *words, "script.py"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("place", ["--master-addr=127.0.0.1 --master-port={} --nnodes=2 --node-rank=1"])
def test_a_machine_that_does_not_answer_is_named(place):
    with reserve_port() as port:
        done = agent("--connect-timeout=1", words=place.format(port).split())
    assert done.returncode == 1
    assert f"127.0.0.1:{port} did not answer within 1 s" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "place",
    [
        "--master-addr=127.0.0.1 --master-port={} --nnodes=2 --node-rank=1",
        "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{} --rdzv-id=x --nnodes=2",
    ],
)
def test_another_program_at_the_port_is_named(place):
    with socket.socket() as other:  # takes connections, and never answers
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = agent("--connect-timeout=5", words=place.format(port).split())
    assert done.returncode == 1
    assert f"something listens at 127.0.0.1:{port}, but it does not answer as a launcher" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.wide
def test_a_name_without_an_address_is_named():
    place = "--master-addr=no.such.host.invalid --master-port=1 --nnodes=2 --node-rank=1"
    done = agent("--connect-timeout=1", words=place.split())
    assert done.returncode == 1
    assert "no.such.host.invalid" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX systems")
@pytest.mark.parametrize(
    ("number", "place"),
    [
        (signal.SIGINT, "--master-addr=127.0.0.1 --master-port={} --nnodes=2 --node-rank=0"),
        (signal.SIGTERM, "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{} --rdzv-id=x --nnodes=2"),
    ],
)
def test_a_signal_ends_it_while_it_waits_for_other_machines(number, place, tmp_path):
    with reserve_port() as port:
        pass
    words = ["--connect-timeout=100", "--", *place.format(port).split(), "script.py"]
    process = subprocess.Popen(
        [sys.executable, "-m", "accel_state.launching.machines.agent", *words],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    until = time.monotonic() + 60
    while not listens(port):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert [folder.name[:12] for folder in tmp_path.iterdir()] == ["accel-agent-"]
    process.send_signal(number)
    assert process.communicate(timeout=20) == (None, "")
    assert process.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.full
def test_those_that_came_are_named():
    with reserve_port() as port:
        pass
    place = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=x --nnodes=2"
    done = agent("--connect-timeout=2", words=place.split())
    assert done.returncode == 1
    assert (
        f"not all machines reached 127.0.0.1:{port} within 2 s (1 of 2 arrived: {socket.gethostname()})"
        in done.stderr
    )


def test_a_healthy_machine_has_no_faults():
    assert list(find_faults(1, cpu=True)) == []


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has accelerators")
def test_missing_accelerators_are_a_fault():
    assert [fault for fault in find_faults(2, cpu=False) if "2 accelerators" in fault]


def test_a_wrong_product_is_a_fault(monkeypatch):
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda size, value, **about: full(size, value * 1.5, **about))
    assert any("computes wrongly" in fault for fault in find_faults(1, cpu=True))


class Code:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return os.system, ("exit 3",)


def test_the_state_of_a_rendezvous_is_read_and_no_code_of_it_runs():
    dynamic = pytest.importorskip("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    state = dynamic._RendezvousState()
    node = dynamic._NodeDesc("host", 1, 2)
    state.complete = True
    state.participants[node] = 0
    state.wait_list.add(node)
    state.last_heartbeats[node] = state.deadline = datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC)
    found = read_state(pickle.dumps(state))
    assert (found.complete, found.closed, found.participants) == (True, False, {node: 0})
    state.wait_list.add(Code())
    with pytest.raises(pickle.UnpicklingError, match=r"holds posix\.system, which is no part of its state"):
        read_state(pickle.dumps(state))
