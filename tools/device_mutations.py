"""Leave out each call that orders streams or keeps memory, in turn, and count what the simulated device notices.

    hatch run mutations                   # all
    hatch run mutations --list
    hatch run mutations accel_train.data  # of some modules

A call that is left out without a failing test is a survivor. Those with a known reason are in ``HARMLESS``. Tests and
the processes that they start import a copy of the sources.

Where the value of a call is used it becomes what it was called on (``leaf.pin_memory()`` becomes ``leaf``), otherwise
the call is gone; ``pin_memory=True`` becomes False.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from accel_cli.migration.source import PythonSource

ROOT = Path(__file__).parents[1]
CALLS = {"wait_event", "wait_stream", "record_stream", "synchronize", "record", "record_event", "pin_memory"}
KEYWORDS = {"pin_memory"}
RECEIVERS = {"_schedule", "_states"}
"""Objects whose method ``record`` has nothing to do with events."""

TESTS = {
    "accel_train.data": [
        "packages/accel-train/tests/data/test_transfer.py",
        "tests-integration/test_simulated_devices.py",
    ],
    "accel_ckpt": [
        "packages/accel-ckpt/tests/saving/test_staging.py",
        "tests-integration/test_simulated_devices.py",
    ],
    "accel_bigmodel": [
        "packages/accel-bigmodel/tests/streaming/test_transfer.py",
        "packages/accel-bigmodel/tests/test_dispatch_gpu.py",
        "tests-integration/test_simulated_streaming.py",
    ],
}
"""Which tests would notice, by the beginning of the module."""

HARMLESS = {
    "accel_cli.doctor.collectives": "waits for a clock to be right; only a speed would be wrong",
    "accel_cli.doctor.links": "waits for a clock to be right; only a speed would be wrong",
}
"""Modules of which a survivor is expected, and why."""


@dataclass(frozen=True)
class Site:
    """A call in our sources.

    Attributes:
        path: the file, from the root of the repository.
        line: of the call.
        place: its column, or the name of its argument.
        text: the line.
        without: the file without the call.
    """

    path: Path
    line: int
    place: str
    text: str
    without: str

    @property
    def module(self) -> str:
        return ".".join(self.path.with_suffix("").parts[3:])

    @property
    def name(self) -> str:
        return f"{self.module}:{self.line}:{self.place}"


def sites() -> Iterator[Site]:
    """Every call that orders streams or keeps memory, in the order of the sources."""
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        text = path.read_text()
        if any(name in text for name in CALLS | KEYWORDS):
            yield from _sites_in(path.relative_to(ROOT), text)


def _sites_in(path: Path, text: str) -> Iterator[Site]:
    source = PythonSource(text)
    unused = {node.value for node in ast.walk(source.tree) if isinstance(node, ast.Expr)}

    def site(node: ast.expr, place: str, instead: str) -> Site:
        changed = PythonSource(text)
        changed.replace(*source.span(node), instead)
        return Site(path, node.lineno, place, text.splitlines()[node.lineno - 1].strip(), changed.replaced())

    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in CALLS and _is_meant(called):
            instead = "pass" if node in unused else source.between(*source.span(called.value))
            yield site(node, str(node.col_offset), instead)
        for keyword in node.keywords:
            value = keyword.value
            if keyword.arg in KEYWORDS and isinstance(value, ast.Constant) and value.value is True:
                yield site(value, keyword.arg, "False")


def _is_meant(function: ast.Attribute) -> bool:
    receiver = function.value
    return not (isinstance(receiver, ast.Attribute) and receiver.attr in RECEIVERS)


def tests_of(site: Site) -> list[str]:
    """Files of tests that may notice what is left out at ``site``; none for modules without any."""
    return next((tests for start, tests in TESTS.items() if site.module.startswith(start)), [])


def notices(site: Site, tests: list[str]) -> tuple[bool, str]:
    """Whether a test fails without the call, and the last line of pytest."""
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "gpu or simulated",
        "--device", "npu:4", *tests,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="accel-mutations-") as folder:
        copy = Path(folder)
        shutil.copytree(
            ROOT / "packages", copy / "packages", ignore=shutil.ignore_patterns("tests", "__pycache__")
        )
        (copy / site.path).write_text(site.without)
        paths = os.pathsep.join(map(str, (*copy.glob("packages/*/src"), ROOT / "tools")))
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    last = run.stdout.strip().splitlines()[-1] if run.stdout.strip() else run.stderr.strip()[-200:]
    if run.returncode not in (0, 1):
        raise SystemExit(
            f"pytest ended with {run.returncode} for {site.name}:\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
        )
    return run.returncode == 1, last


def main() -> int:
    """Print a line for each site, and the score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="beginnings of modules; all by default")
    parser.add_argument("--list", action="store_true", help="only list the calls")
    options = parser.parse_args()
    chosen = [s for s in sites() if not options.modules or s.module.startswith(tuple(options.modules))]
    if options.list:
        for site in chosen:
            print(f"{site.name:60} {site.text}")
        return 0
    found = survivors = expected = 0
    for site in chosen:
        began, tests = time.monotonic(), tests_of(site)
        if site.module in HARMLESS:
            expected += 1
            print(f"left    {site.name:58} {HARMLESS[site.module]}", flush=True)
            continue
        noticed, last = notices(site, tests) if tests else (False, "no test runs this on a device")
        found, survivors = found + noticed, survivors + (not noticed)
        verdict, seconds = "noticed" if noticed else "SURVIVES", time.monotonic() - began
        print(f"{verdict:8} {site.name:58} {site.text}  ({seconds:.0f} s; {last})", flush=True)
    print(f"{found} of {found + survivors} noticed; {expected} left out for a reason")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
