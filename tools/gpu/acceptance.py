"""Acceptance of everything that needs an accelerator: one table, in at most nine minutes on one GPU.

Every test marked `gpu`, and checks with figures and goals: training, compilation, loading, offloading, saving, big
models, quantisation, collectives and speed. Each is a process of its own with a limit of time, so that one which
crashes or hangs costs its own row only. The packages need not be installed, and nothing is fetched; what cannot run
here is a row NOT RUN with the reason. Exit code: 0 if no row failed, 1 if one did, 2 if nothing ran.

    python tools/gpu/acceptance.py --output acceptance.txt     # on the machine with the accelerator
    python tools/gpu/acceptance.py --cpu --scale small         # the same logic in seconds, without one
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import child
from gpu.figures import Run
from gpu.registry import CHECKS, Check, marked_files
from gpu.runner import FAILED, NOT_RUN, Plan, Row, Runner

BUDGET = 540.0

_PROBE = """
import torch
found = torch.accelerator.current_accelerator(check_available=True)
if found is None:
    print("none")
else:
    module = torch.get_device_module(found.type)
    name = getattr(module, "get_device_name", lambda index: found.type)(0)
    print(f"{name}, {torch.accelerator.device_count()} visible")
print(torch.__version__)
"""


def probe() -> tuple[str | None, str]:
    """The accelerator's name, None if there is none, and PyTorch's version or why it cannot be imported."""
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode or len(lines) < 2:
        return None, (done.stderr.strip().splitlines() or ["no answer"])[-1]
    return (None if lines[-2] == "none" else lines[-2]), lines[-1]


def table(rows: Sequence[Row]) -> str:
    """The rows, aligned."""
    head = ("check", "figure", "value", "unit", "goal", "status", "note")
    lines = [head]
    for row in rows:
        figure = row.figure
        if figure is None:
            lines.append((row.check, "", "", "", "", row.status, row.note))
        else:
            value = f"{figure.value:.4g}" if abs(figure.value) < 1e6 else f"{figure.value:.3e}"
            lines.append((row.check, figure.name, value, figure.unit, figure.goal, row.status, row.note))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    widths[-1] = 0
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def summary(rows: Sequence[Row], seconds: float) -> str:
    """How many rows of each kind."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.status] = counts.get(row.status, 0) + 1
    return f"{', '.join(f'{count} {status}' for status, count in counts.items())}; {seconds:.0f} s"


def exit_code(rows: Sequence[Row]) -> int:
    """0: nothing failed; 1: something did; 2: nothing ran."""
    if any(row.status == FAILED for row in rows):
        return 1
    return 2 if all(row.status == NOT_RUN for row in rows) else 0


def chosen(checks: Sequence[Check], only: Sequence[str] | None) -> list[Check]:
    """The checks whose names contain one of the words.

    Raises:
        SystemExit: a word is in no name.
    """
    if only is None:
        return list(checks)
    for word in only:
        if not any(word in check.name for check in checks):
            raise SystemExit(f"--only {word}: no check has this in its name; --list shows them")
    return [check for check in checks if any(word in check.name for word in only)]


def write(path: Path | None, text: str) -> None:
    """Replace a file at once, so that it is complete whenever the program is stopped."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument(
        "--cpu", action="store_true", help="compute on the CPU: the logic, without figures that count"
    )
    made.add_argument("--scale", choices=("full", "small"), default="full")
    made.add_argument(
        "--budget", type=float, default=BUDGET, help="seconds for everything (default %(default)s)"
    )
    made.add_argument("--jobs", type=int, help="how many checks that measure no time run at once")
    made.add_argument(
        "--only", nargs="+", metavar="WORD", help="checks with one of these words in their names"
    )
    made.add_argument("--list", action="store_true", help="print the names of the checks")
    made.add_argument("--output", type=Path, help="write the table here, too, after each check")
    made.add_argument("--json", type=Path, help="write the rows here, after each check")
    for name in (
        "--child",
        "--arguments",
        "--device",
        "--folder",
    ):  # in the processes that this program starts
        made.add_argument(name, help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str] | None = None, checks: Sequence[Check] | None = None) -> int:
    """Run the acceptance.

    Args:
        argv: the command line.
        checks: instead of all that there are.
    """
    arguments = parser().parse_args(argv)
    if arguments.child is not None:
        folder = Path(arguments.folder)
        run = Run(arguments.device, arguments.scale == "full", folder / "work")
        return child.run(arguments.child, tuple(json.loads(arguments.arguments)), run, folder / "answer")
    began = time.monotonic()
    selected = chosen([*CHECKS, *marked_files()] if checks is None else checks, arguments.only)
    if arguments.list:
        print("\n".join(check.name for check in selected))
        return 0
    name, version = (None, "") if arguments.cpu else probe()
    where = "CPU" if arguments.cpu else name or "no accelerator"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    header = (
        f"{where}, {cores} cores, Python {platform.python_version()}"
        f"{f', torch {version}' if version else ''}, scale {arguments.scale}"
    )
    print(header, flush=True)
    missing = None if arguments.cpu or name is not None else f"no accelerator was found by torch {version}"

    def report(row: Row) -> None:
        what = f"{row.check}: {row.figure.name}" if row.figure else row.check
        print(f"{time.monotonic() - began:6.1f} s  {row.status:8}  {what}", flush=True)
        save()

    def save() -> None:
        text = f"{header}\n\n{table(runner.rows)}\n\n{summary(runner.rows, time.monotonic() - began)}\n"
        write(arguments.output, text)
        rows = [dataclasses.asdict(row) for row in runner.rows]
        write(arguments.json, json.dumps({"machine": header, "rows": rows}, indent=1))

    with tempfile.TemporaryDirectory(prefix="acceptance-") as scratch:
        plan = Plan(
            device="cpu" if arguments.cpu else "accelerator",
            full=arguments.scale == "full",
            budget=arguments.budget - (time.monotonic() - began),
            jobs=arguments.jobs or max(1, min(4, cores)),
            scratch=Path(scratch),
            missing=missing,
        )
        runner = Runner(plan, report)
        rows = runner.run(selected)
    save()
    for check, log in runner.logs.items():
        print(f"\n--- {check}, the end of its output\n{log}")
    print(f"\n{table(rows)}\n\n{summary(rows, time.monotonic() - began)}")
    return exit_code(rows)


if __name__ == "__main__":
    if "--child" not in sys.argv:  # leave a table behind, whoever stops the program
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main())
