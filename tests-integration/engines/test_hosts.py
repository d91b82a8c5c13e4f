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


def both(hosts: list[Host], folder: Path, *words: str) -> tuple[list[subprocess.Popen[str]], list[Path]]:
    """Launch `faults.py` on the first two hosts; the last word is its argument."""
    logs = [folder / f"{number}.log" for number in range(2)]
    started = [
        host.launch(log, *common(hosts), "--machine_rank", str(number), *words, script="faults.py")
        for number, (host, log) in enumerate(zip(hosts, logs, strict=False))
    ]
    return started, logs


def codes(launchers: list[subprocess.Popen[str]]) -> list[int]:
    return [launcher.wait(PATIENCE) for launcher in launchers]


HANGS = {
    "sleep": (("--step_timeout", "15"), "no rank of any machine has made progress for 15 s (--step_timeout)"),
    "save": (("--checkpoint_timeout", "8"), "been saving for more than 8 s (--checkpoint_timeout)"),
    "absent": (("--start_timeout", "25"), "not joined the other ranks within 25 s (--start_timeout)"),
}


@pytest.mark.parametrize("fault", HANGS)
def test_the_rank_that_hangs_is_first_in_one_report_and_all_hosts_end(
    hosts: list[Host], tmp_path: Path, fault: str
) -> None:
    flags, why = HANGS[fault]
    launchers, logs = both(hosts, tmp_path, *flags, fault)
    assert codes(launchers) == [124, 124], [log.read_text() for log in logs]
    report, other = (log.read_text() for log in logs)
    assert why in report
    assert "where" not in other
    table = report.splitlines()
    head = next(number for number, line in enumerate(table) if line.startswith("machine "))
    assert table[head + 1].split()[:2] == [hosts[1].name, "3"], report
    assert {line.split()[0] for line in table[head + 2 : head + 4]} == {hosts[0].name, hosts[1].name}
    assert f"rank 3 on {hosts[1].name} differs from the others" in report
    assert "time.sleep(600)" in report.split("rank 3 is in no collective, at")[1].split("\nrank")[0]


def test_a_hang_is_restarted(hosts: list[Host], tmp_path: Path) -> None:
    launchers, logs = both(hosts, tmp_path, "--step_timeout", "15", "--max_restarts", "1", "sleep")
    assert codes(launchers) == [124, 124], [log.read_text() for log in logs]
    assert logs[0].read_text().count("differs from the others") == 2
    assert all(log.read_text().count("trains on") == 4 for log in logs)


@pytest.mark.parametrize("backend", ["static", "c10d"])
@pytest.mark.parametrize(
    ("rank", "fault", "code"), [("3", "raise", 1), ("0", "raise", 1), ("3", "kill", 137)]
)
def test_the_host_that_fails_first_has_its_code_and_the_other_76(
    hosts: list[Host], tmp_path: Path, backend: str, rank: str, fault: str, code: int
) -> None:
    # The rendezvous of c10d chooses the order of the hosts.
    launchers, logs = both(hosts, tmp_path, "--rdzv_backend", backend, f"{fault}:{rank}")
    ends = dict(zip(codes(launchers), (log.read_text() for log in logs), strict=True))
    assert sorted(ends) == sorted([code, 76]), ends
    assert f"rank {rank} failed first, with exit code {code}" in ends[code]
    host = hosts[[log.read_text() for log in logs].index(ends[code])]
    assert f"rank {rank} on {host.name} failed first, with exit code {code}" in ends[76]


def test_hosts_with_errors_of_their_own_keep_their_codes(hosts: list[Host], tmp_path: Path) -> None:
    launchers, logs = both(hosts, tmp_path, "raise:0,3")
    assert codes(launchers) == [1, 1], [log.read_text() for log in logs]


@pytest.mark.parametrize("backend", ["static", "c10d"])
@pytest.mark.parametrize("dies", [0, 1])
def test_the_host_that_remains_ends_with_76(
    hosts: list[Host], tmp_path: Path, backend: str, dies: int
) -> None:
    launchers, logs = both(hosts, tmp_path, "--rdzv_backend", backend, "none")
    for log in logs:
        wait_for(log, "trains on", 2)
    hosts[dies].die()
    assert launchers[1 - dies].wait(PATIENCE) == 76, logs[1 - dies].read_text()
    assert "another machine failed first" in logs[1 - dies].read_text()


def test_hosts_without_a_network_end(hosts: list[Host], tmp_path: Path) -> None:
    launchers, logs = both(hosts, tmp_path, "--step_timeout", "8", "none")
    for log in logs:
        wait_for(log, "trains on", 2)
    subprocess.run(["ip", "-n", hosts[1].name, "link", "set", "eth0", "down"], check=True)
    assert codes(launchers) == [76, 76], [log.read_text() for log in logs]
    assert f"{hosts[1].name} does not answer" in logs[0].read_text()
    assert "the machine that hosts the store of this run does not answer" in logs[1].read_text()
    for log, own in zip(logs, ("ranks 0 and 1", "ranks 2 and 3"), strict=True):
        assert f"{own} wait in " in log.read_text()


@pytest.mark.parametrize("stopped", [(0,), (1,), (0, 1)])
def test_preempted_hosts_all_end_with_75(hosts: list[Host], tmp_path: Path, stopped: tuple[int, ...]) -> None:
    launchers, logs = both(hosts, tmp_path, "preempted")
    for log in logs:
        wait_for(log, "trains on", 2)
    for number in stopped:
        launchers[number].send_signal(signal.SIGTERM)
    assert codes(launchers) == [75, 75], [log.read_text() for log in logs]


def test_the_slow_rank_is_named_with_its_host(hosts: list[Host], tmp_path: Path) -> None:
    launchers, logs = both(hosts, tmp_path, "--straggler_report", "slow")
    assert codes(launchers) == [0, 0], [log.read_text() for log in logs]
    report = logs[0].read_text()
    rows = [line.split() for line in report.splitlines() if line.split()[2:3] == ["60"]]
    assert [row[:2] for row in rows] == [[hosts[rank // 2].name, str(rank)] for rank in range(4)], report
    assert f"slowest: rank 3 on {hosts[1].name}, " in report
    assert "slowest" not in logs[1].read_text()


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
