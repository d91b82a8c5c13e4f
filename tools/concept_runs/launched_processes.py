"""Which process starts which, and who listens on which port, from launches on this machine.

Two launchers with ``--num_machines 2`` imitate two machines, as in the guide on several machines.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from testkit import worlds

SCRIPT = """
import json, os, sys
import psutil
from accel_train import Accelerator

accelerator = Accelerator(cpu=True)
accelerator.wait_for_everyone()

def about(process):
    ports = [c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return {"pid": process.pid, "command": process.cmdline(), "ports": sorted(set(ports))}

me = psutil.Process()
above = [process.pid for process in me.parents()]
chain = [about(process) for process in [me, *me.parents()[: above.index(int(sys.argv[2]))]]]
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
facts = {"chain": chain, "environment": {name: os.environ[name] for name in names}}
with open(f"{sys.argv[1]}/{accelerator.process_index}.json", "w") as file:
    json.dump(facts, file)
accelerator.wait_for_everyone()
"""


def record() -> dict[str, Any]:
    """By number of machines: the processes of each launch."""
    return {"one machine": _launched(1), "two machines": _launched(2)}


def _launched(machines: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="accel-concepts-") as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT, encoding="utf-8")
        port = worlds.free_port()
        flags = ["--cpu", "--num_processes", str(2 * machines), "--main_process_port", str(port)]
        if machines > 1:
            flags += ["--num_machines", str(machines), "--main_process_ip", "127.0.0.1"]
        launchers = [
            subprocess.Popen(
                [sys.executable, "-m", "accel_cli", "launch", *flags,
                 *(["--machine_rank", str(machine)] if machines > 1 else []),
                 str(script), folder, str(psutil.Process().pid)],
                stdout=subprocess.DEVNULL,
            )
            for machine in range(machines)
        ]  # fmt: skip
        statuses = [launcher.wait(timeout=120) for launcher in launchers]
        if any(statuses):
            raise RuntimeError(f"accel launch ended with {statuses}, expected 0: see its output above")
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2 * machines)]
    found = []
    for launcher in launchers:
        mine = [rank for rank in ranks if launcher.pid in [process["pid"] for process in rank["chain"]]]
        found.append(_machine(mine, launcher.pid, port))
    return {"machines": found}


def _machine(ranks: list[dict[str, Any]], launcher: int, port: int) -> dict[str, Any]:
    """The launcher, what is between it and the ranks, and the ranks."""
    chain = ranks[0]["chain"]
    end = [process["pid"] for process in chain].index(launcher)
    above = [
        {"command": _words(process["command"]), "listens": _ports(process["ports"], port)}
        for process in reversed(chain[1 : end + 1])
    ]
    return {
        "above": above,
        "ranks": [
            {name.lower(): int(value) for name, value in rank["environment"].items() if name != "MASTER_PORT"}
            | {
                "listens": _ports(rank["chain"][0]["ports"], port),
                "master_port": _ports([int(rank["environment"]["MASTER_PORT"])], port)[0],
            }
            for rank in ranks
        ],
    }


def _words(command: list[str]) -> str:
    """The module of a command, without its place on this machine."""
    return command[command.index("-m") + 1] if "-m" in command else Path(command[0]).name


def _ports(ports: list[int], main: int) -> list[str]:
    return sorted("main_process_port" if one == main else "a free port" for one in ports)
