"""Compile the extension of the simulated device, once for each state of its sources, of torch and of the compiler."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

__all__ = ["BuildError", "built", "compiler"]

SOURCES = Path(__file__).with_name("csrc")
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w"]


class BuildError(RuntimeError):
    """The simulated device cannot be compiled here."""


def compiler() -> str:
    """The C++ compiler of this machine: the one that ``CXX`` names, or ``c++``.

    Raises:
        BuildError: there is none.
    """
    name = os.environ.get("CXX", "c++")
    found = shutil.which(name)
    if found is None:
        raise BuildError(f"no C++ compiler {name!r} was found; install one (Debian: g++), or name it by CXX")
    return found


def built(module: str) -> Path:
    """The extension as a file, compiled if it is not in the cache; other processes wait for the first one.

    Raises:
        BuildError: there is no compiler, or it failed; with its output.
    """
    import torch

    program = compiler()
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(
        "\n".join([torch.__version__, version, module, *FLAGS, str(sysconfig.get_python_version())]).encode()
    )
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = _cache() / digest.hexdigest()[:16]
    target = folder / f"{module}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(program, module, target)
    return target


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accel-testkit"


def _compile(program: str, module: str, target: Path) -> None:
    import torch
    from torch.utils import cpp_extension

    folders = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    flags = [
        *FLAGS, f"-DTORCH_EXTENSION_NAME={module}", "-DTORCH_API_INCLUDE_EXTENSION_H",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *(f"-I{each}" for each in folders),
    ]  # fmt: skip
    libraries = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects, running = [], []
        for source in sorted(SOURCES.glob("*.cpp"), key=lambda each: -each.stat().st_size):
            objects.append(f"{scratch}/{source.stem}.o")
            running.append([program, *flags, "-c", str(source), "-o", objects[-1]])
        _run_all(running, os.cpu_count() or 1)
        finished = f"{scratch}/{target.name}"
        link = [
            program, "-shared", "-o", finished, *objects, f"-L{libraries}", f"-Wl,-rpath,{libraries}",
            "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python",
        ]  # fmt: skip
        _run_all([link], 1)
        os.replace(finished, target)


def _run_all(commands: list[list[str]], at_once: int) -> None:
    waiting, running = list(commands), []
    while waiting or running:
        while waiting and len(running) < at_once:
            command = waiting.pop(0)
            running.append(
                (command, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            )
        command, process = running.pop(0)
        output = process.communicate()[0].decode(errors="replace")
        if process.returncode:
            for _, other in running:
                other.kill()
            raise BuildError(
                f"the simulated device could not be compiled: {' '.join(command)}\n{output[-8000:]}"
            )


if __name__ == "__main__":
    print(built("simulated_device_extension"))
