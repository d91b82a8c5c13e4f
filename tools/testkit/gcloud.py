"""A `gcloud` for tests: it records its arguments, and runs the command of `ssh` here, once for each machine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

__all__ = ["install", "recorded"]

_SCRIPT = """\
#!{python}
import json, os, subprocess, sys

words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(words) + "\\n")
if "--command" not in words or {machines} == 0:
    sys.exit(int(os.environ.get("GCLOUD_EXIT", 0)))
command = words[words.index("--command") + 1]
hosts = ",".join(["127.0.0.1"] * {machines})
machines = range({machines}) if "--worker" in words else [None]
running = []
for index in machines:
    place = {{}} if index is None else {{"TPU_WORKER_ID": str(index), "TPU_WORKER_HOSTNAMES": hosts}}
    # As ssh: the text goes to a shell, and nothing of the accelerate variables of this machine arrives there.
    there = {{k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}}
    running.append(subprocess.Popen(["bash", "-c", command], env={{**there, **place}}))
sys.exit(next((code for code in [process.wait() for process in running] if code), 0))
"""


def install(folder: Path, machines: int = 0, python: str = sys.executable) -> dict[str, str]:
    """Put `gcloud`, `sudo` and `python3` into a folder.

    Args:
        folder: for the programs and their log.
        machines: machines of the pod; 0: commands are recorded only.
        python: what `python3` is on the machines.

    Returns:
        The environment of this process, with the folder first on PATH.
    """
    folder.mkdir(parents=True, exist_ok=True)
    programs = {
        "gcloud": _SCRIPT.format(python=sys.executable, log=str(folder / "log"), machines=machines),
        "python3": f'#!/bin/sh\nexec "{python}" "$@"\n',
        "sudo": '#!/bin/sh\nexec "$@"\n',
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def recorded(folder: Path) -> list[list[str]]:
    """The arguments of every call, in order."""
    log = folder / "log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
