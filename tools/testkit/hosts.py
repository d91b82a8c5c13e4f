"""Hosts that are network namespaces of this machine, on one bridge. Needs root and the programs ip and unshare."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

__all__ = ["Host", "Network"]


class Host:
    """A network namespace with one interface, on a bridge with the others, and a host name of its own.

    Attributes:
        name: its name, and that of its namespace.
        address: its address.
        launchers: what has been started there.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.launchers: list[subprocess.Popen[str]] = []

    def start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        stream: int | None = None,
        *,
        hostname: str | None = None,
        before: Sequence[Sequence[str]] = (),
        folder: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a program on this host; the process is the program itself, which gets its signals.

        Args:
            command: the program and its arguments.
            environ: its environment.
            stream: where its output goes.
            hostname: name of the host for it.
            before: commands that run before it, where it alone sees what they mount.
            folder: its current folder.
        """
        lines = [["hostname", hostname or self.name], *before]
        inside = "\n".join(["set -e", *(shlex.join(line) for line in lines), 'exec "$@"'])
        words = [
            "ip",
            "netns",
            "exec",
            self.name,
            "unshare",
            "--uts",
            "--mount",
            "bash",
            "-c",
            inside,
            "start",
        ]
        errors = None if stream is None else subprocess.STDOUT
        started = subprocess.Popen(
            [*words, *command], env=dict(environ), stdout=stream, stderr=errors, text=True, cwd=folder
        )
        self.launchers.append(started)
        return started

    def die(self) -> None:
        """Kill every process of this host, as a power cut does."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        for launcher in self.launchers:
            launcher.wait(10)


AnyHost = TypeVar("AnyHost", bound=Host)


class Network(Generic[AnyHost]):
    """A bridge, and the hosts that are added to it.

    Args:
        kind: class of the hosts.

    Attributes:
        hosts: those that it has.
    """

    def __init__(self, kind: type[AnyHost]) -> None:
        self.kind = kind
        self.hosts: list[AnyHost] = []
        self.name = f"accel{os.getpid()}"

    def __enter__(self) -> Network[AnyHost]:
        _ip("netns", "add", self.name)
        _ip("-n", self.name, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self.name, "link", "set", "bridge", "up")
        return self

    def add(self) -> AnyHost:
        """A host more."""
        number = len(self.hosts)
        host = self.kind(f"{self.name}h{number}", f"10.77.0.{number + 1}")
        self.hosts.append(host)
        peer = ("type", "veth", "peer", "name", "eth0", "netns", host.name)
        _ip("netns", "add", host.name)
        _ip("-n", self.name, "link", "add", host.name[5:], *peer)
        _ip("-n", self.name, "link", "set", host.name[5:], "master", "bridge", "up")
        _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
        _ip("-n", host.name, "link", "set", "eth0", "up")
        _ip("-n", host.name, "link", "set", "lo", "up")
        return host

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.die()
            subprocess.run(["ip", "netns", "del", host.name], check=False)
        subprocess.run(["ip", "netns", "del", self.name], check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
