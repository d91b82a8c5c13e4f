"""What the command costs: help, completion, plans, launching one and two processes, and the launcher's own memory.

Every measurement is a fresh process; contenders take turns, round after round. The table shows medians; launches are
shown over `python x.py` of the same round. That every rank really ran is checked.

    hatch run bench:cli
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from measure import flags, installed, quartiles, table, turns

NOTHING = "import os\nos.write(1, b'ran\\n')\n"
WORLD = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size() == 2
os.write(1, b"ran\\n")
dist.destroy_process_group()
"""
WAITING = "import os, time\nos.write(1, b'ran\\n')\ntime.sleep(1.5)\n"


def command(name: str) -> list[str]:
    """The installed console script, or the module where the packages are only on the path."""
    script = Path(sys.executable).with_name(name)
    if script.exists():
        return [str(script)]
    module = {"accel": "accel_cli", "torchrun": "torch.distributed.run", "accelerate": "accelerate"}[name]
    return [sys.executable, "-m", module]


def contenders() -> dict[str, Callable[[int, Path], list[str]]]:
    """Name to a function that makes the command from a number of processes and a script."""
    found: dict[str, Callable[[int, Path], list[str]]] = {
        "accel": lambda n, script: [
            *command("accel"),
            "launch",
            "--cpu",
            "--num_processes",
            str(n),
            str(script),
        ],
        "torchrun": lambda n, script: [
            *command("torchrun"),
            "--standalone",
            f"--nproc_per_node={n}",
            str(script),
        ],
    }
    if installed(["accelerate"]):
        # On the CPU its own launcher starts one process whatever is asked for, so two go through --multi_gpu.
        found["accelerate"] = lambda n, script: [
            *command("accelerate"), "launch", *(["--cpu"] if n == 1 else ["--multi_gpu"]),
            "--num_processes", str(n), "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
            "--main_process_port", "0", str(script),
        ]  # fmt: skip
    return found


def environment(folder: Path) -> dict[str, str]:
    """Ours with a cache of bytecode, as installed packages have, and no configuration file."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {
        "PYTHONPYCACHEPREFIX": str(folder / "pycache"),
        "XDG_CONFIG_HOME": str(folder / "home"),
        "ACCELERATE_USE_CPU": "true",
    }


def timed(words: list[str], environ: dict[str, str], ranks: int | None = None) -> float:
    """Seconds that a command takes; it must succeed, and each rank must say that it ran."""
    began = time.perf_counter()
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    elapsed = time.perf_counter() - began
    if done.returncode != 0 or (ranks is not None and done.stdout.count("ran\n") != ranks):
        sys.exit(f"{words} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return elapsed


def peak_memory(words: list[str], environ: dict[str, str]) -> float:
    """Largest resident size of the launcher itself, in MB, while its ranks run."""
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        time.sleep(0.2)
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        process.stdout.read()
    return int(peak.split()[1]) / 1000


def show(title: str, samples: Mapping[str, Sequence[float]], unit: str) -> None:
    """A table of medians and quartiles."""
    table(["", unit], [[name, quartiles(values, ".3f")] for name, values in samples.items()], title)


def measure_times(folder: Path, rounds: int) -> None:
    environ = environment(folder)
    nothing, world = folder / "nothing.py", folder / "world.py"
    nothing.write_text(NOTHING)
    world.write_text(WORLD)
    launchers = contenders()
    plain = [sys.executable, str(nothing)]

    def round_of(name: str, make: Callable[[int, Path], list[str]]) -> list[float]:
        base = timed(plain, environ, 1)
        return [
            base,
            timed([*command(name), "--help"], environ),
            timed(make(1, nothing), environ, 1) - base,
            timed(make(2, nothing), environ, 2) - base,
            timed(make(2, world), environ, 2),
        ]

    # The round that does not count fills the caches.
    found = turns(
        {name: lambda name=name, make=make: round_of(name, make) for name, make in launchers.items()}, rounds
    )
    titles = (
        "python x.py, where x.py does nothing, beside each",
        "--help",
        "launch of 1 process that does nothing, over python x.py",
        "launch of 2 processes that do nothing, over python x.py",
        "launch of 2 processes that import torch and all-reduce once, whole time",
    )
    for at, title in enumerate(titles):
        show(title, {name: [values[at] for values in samples] for name, samples in found.items()}, "s")


def measure_answers(folder: Path, rounds: int) -> None:
    """What the command answers without starting anything: completion of a key, plans, the configuration."""
    environ = environment(folder)
    script = folder / "nothing.py"
    script.write_text(NOTHING)
    accel = command("accel")
    typed = {"accel la": 1, "accel launch --nu": 2, "accel launch --mixed_precision ": 3, "accel config ": 2}
    answers = {
        f"completion of {words!r}": (
            accel, {"_ACCEL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(place)}
        )
        for words, place in typed.items()
    }  # fmt: skip
    answers["launch --help"] = ([*accel, "launch", "--help"], {})
    answers["config show"] = ([*accel, "config", "show"], {})
    answers["plans of 1,000 ranks (--dry-run)"] = (
        [*accel, "launch", "--cpu", "--num_processes", "1000", "--dry-run", str(script)], {}
    )  # fmt: skip
    calls = {
        name: lambda words=words, more=variables: timed(words, environ | more)
        for name, (words, variables) in answers.items()
    }
    show("answers without a start", turns(calls, rounds), "s")


def measure_memory(folder: Path, rounds: int) -> None:
    if not Path("/proc/self/status").exists():
        print("\nmemory of the launcher: NOT RUN, it is read from /proc")
        return
    environ = environment(folder)
    waiting = folder / "waiting.py"
    waiting.write_text(WAITING)
    launchers = contenders()
    calls = {
        name: lambda make=make: peak_memory(make(2, waiting), environ) for name, make in launchers.items()
    }
    show("peak memory of the launcher's process with 2 ranks", turns(calls, rounds, warm=0), "MB")


def main() -> None:
    rounds = flags(__doc__, rounds=9).rounds
    with tempfile.TemporaryDirectory(prefix="accel-bench-") as folder:
        measure_times(Path(folder), rounds)
        measure_answers(Path(folder), rounds)
        measure_memory(Path(folder), max(3, rounds // 3))


if __name__ == "__main__":
    main()
