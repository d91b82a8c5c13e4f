"""Runs over several hosts, which are network namespaces of this machine. Run as root with `hatch run engines:hosts`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit import hosts as hosts_of_a_network
from testkit.hosts import Network

HERE = Path(__file__).parent
PORT = "29600"
PATIENCE = 120.0


class Host(hosts_of_a_network.Host):
    """A host on which tests run `accel launch`."""

    def launch(self, log: Path, *words: str, script: str = "steps.py") -> subprocess.Popen[str]:
        """Start `accel launch` on this host; its output goes to ``log``."""
        command = [
            sys.executable,
            "-m",
            "accel_cli",
            "launch",
            "--cpu",
            *words[:-1],
            str(HERE / script),
            words[-1],
        ]
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        with log.open("a") as stream:
            return self.start(command, environ, stream.fileno())


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with Network(Host) as network:
        yield [network.add() for _ in range(3)]


def common(hosts: list[Host], *words: str, machines: int = 2) -> tuple[str, ...]:
    place = ("--main_process_ip", hosts[0].address, "--main_process_port", PORT)
    return ("--num_machines", str(machines), "--num_processes", str(2 * machines), *place, *words)


def wait_for(log: Path, text: str, count: int = 1) -> None:
    until = time.monotonic() + PATIENCE
    while log.read_text().count(text) < count:
        assert time.monotonic() < until, f"{text!r} is not in {log.name}:\n{log.read_text()}"
        time.sleep(0.1)


def finish(launcher: subprocess.Popen[str], log: Path) -> str:
    assert launcher.wait(PATIENCE) == 0, log.read_text()
    return log.read_text()


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_run_over_two_hosts(hosts: list[Host], tmp_path: Path, backend: str) -> None:
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    started = [
        host.launch(
            logs[number], *common(hosts), "--rdzv_backend", backend, "--machine_rank", str(number), "3"
        )
        for number, host in enumerate(hosts[:2])
    ]
    outputs = [finish(launcher, log) for launcher, log in zip(started, logs, strict=True)]
    for output, host in zip(outputs, hosts, strict=False):
        assert output.count(f"of [0, 1, 2, 3] on {host.name}") == 4, output  # two ranks, first and last step


def test_a_killed_host_is_restarted(hosts: list[Host], tmp_path: Path) -> None:
    words = (*common(hosts), "--rdzv_backend", "c10d", "--max_restarts", "3", "150")
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    first, second = (host.launch(log, *words) for host, log in zip(hosts[:2], logs, strict=False))
    wait_for(logs[0], "first step", 2)
    hosts[1].die()
    assert second.returncode == -signal.SIGKILL
    second = hosts[1].launch(logs[1], *words)
    outputs = [finish(first, logs[0]), finish(second, logs[1])]
    assert outputs[0].count("first step") == 4, outputs[0]  # two ranks, before and after the death
    assert all(output.count("last step") == 2 for output in outputs), outputs


def test_a_spare_host_takes_the_place_of_a_dead_one(hosts: list[Host], tmp_path: Path) -> None:
    words = (*common(hosts), "--spares", "1", "150")
    logs = [tmp_path / f"{number}.log" for number in range(3)]
    first, _ = (host.launch(log, *words) for host, log in zip(hosts[:2], logs, strict=False))
    wait_for(logs[0], "first step", 2)
    spare = hosts[2].launch(logs[2], *words)
    time.sleep(8)  # it has joined the rendezvous and waits there
    assert "first step" not in logs[2].read_text()
    hosts[1].die()
    outputs = [finish(first, logs[0]), finish(spare, logs[2])]
    assert all(
        output.count(f"of [0, 1, 2, 3] on {host.name}") >= 4
        for output, host in zip(outputs, hosts[::2], strict=True)
    )


def test_a_spare_host_that_is_not_needed_ends_with_the_run(hosts: list[Host], tmp_path: Path) -> None:
    words = (*common(hosts), "--spares", "1", "60")
    logs = [tmp_path / f"{number}.log" for number in range(3)]
    started = [host.launch(log, *words) for host, log in zip(hosts, logs, strict=True)]
    outputs = [finish(launcher, log) for launcher, log in zip(started, logs, strict=True)]
    assert sum("was a spare machine" in output for output in outputs) == 1, outputs


def test_a_host_more_joins_an_elastic_run(hosts: list[Host], tmp_path: Path) -> None:
    words = ("--nnodes", "1:2", "--num_processes", "4", *common(hosts)[4:], "--max_restarts", "3")
    words = (*words, "--rdzv_conf", "last_call_timeout=1", "150")
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    first = hosts[0].launch(logs[0], *words)
    wait_for(logs[0], "of [0, 1] on", 2)
    second = hosts[1].launch(logs[1], *words)
    outputs = [finish(first, logs[0]), finish(second, logs[1])]
    assert all(output.count("of [0, 1, 2, 3]") == 4 for output in outputs), outputs


def test_a_host_that_does_not_answer_is_named(hosts: list[Host], tmp_path: Path) -> None:
    log = tmp_path / "log"
    began = time.monotonic()
    launcher = hosts[1].launch(log, *common(hosts), "--machine_rank", "1", "--connect_timeout", "3", "3")
    assert launcher.wait(60) == 1
    assert time.monotonic() - began < 30
    assert f"{hosts[0].address}:{PORT} did not answer within 3 s" in log.read_text()


def examine(host: Host, *words: str) -> subprocess.Popen[str]:
    """Start `accel doctor` on this host."""
    command = [sys.executable, "-m", "accel_cli", "doctor", "--cpu", *words]
    return host.start(command, {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}, subprocess.PIPE)


def doctors(hosts: list[Host], *words: str) -> list[str]:
    machines = len(hosts)
    place = common(hosts, *words, machines=machines)
    place = ("--num_machines", str(machines), "--num_processes", str(machines), *place[4:])
    started = [examine(host, *place, "--machine_rank", str(number)) for number, host in enumerate(hosts)]
    return [process.communicate(timeout=PATIENCE)[0] for process in started]


def spoil(host: Host, *words: str) -> None:
    done = subprocess.run(
        ["ip", "netns", "exec", host.name, "tc", "qdisc", "add", "dev", "eth0", "root", "netem", *words],
        capture_output=True,
        text=True,
    )
    if "qdisc kind is unknown" in done.stderr:
        pytest.skip("this kernel has no netem (module sch_netem), which makes links slow or lossy")
    assert done.returncode == 0, done.stderr


def test_doctor_finds_healthy_hosts_right(hosts: list[Host]) -> None:
    outputs = doctors(hosts)
    assert "3 ranks on 3 hosts have the same" in outputs[0], outputs[0]
    assert "10 are right by gloo" in outputs[0]
    assert "machines differ by at most" in outputs[0]
    assert "is slow" not in outputs[0]
    assert "machine 0 (10.77.0.1) has the report" in outputs[1]


def test_doctor_names_slow_links(hosts: list[Host]) -> None:
    spoil(hosts[2], "delay", "60ms")
    report = doctors(hosts)[0]
    lines = [line for line in report.splitlines() if "is slow" in line]
    assert len(lines) == 2, report
    assert all(f"rank 2 ({hosts[2].name}) is slow: latency" in line for line in lines), report


def test_doctor_names_links_that_lose_packets(hosts: list[Host]) -> None:
    spoil(hosts[2], "loss", "20%")
    report = doctors(hosts)[0]
    lines = [line for line in report.splitlines() if "is slow" in line]
    assert lines, report
    assert all(f"rank 2 ({hosts[2].name}) is slow" in line for line in lines), report
    assert any("packets are lost" in line for line in lines), report


def test_doctor_names_a_host_that_does_not_answer(hosts: list[Host]) -> None:
    subprocess.run(["ip", "-n", hosts[2].name, "link", "set", "eth0", "down"], check=True)
    outputs = doctors(hosts, "--timeout", "20")
    assert "rank 2 of 3 did not arrive within 20 s: machine 2 of 3 is missing" in outputs[0], outputs[0]
    assert "machine 0 did not answer at 10.77.0.1" in outputs[2], outputs[2]
