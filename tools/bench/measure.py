"""What the benchmarks share: flags, turns of contenders, medians with their spread, tables.

To import it puts ``tools/`` on the path, so that a benchmark runs as a file and finds the test kit.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent))

T = TypeVar("T")


def parser_of(about: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with a flag for each keyword.

    Args:
        about: the docstring of the benchmark, which ``--help`` shows.
        defaults: by name of the flag. Of a list, the flag takes some; words are those of the list.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        several = isinstance(default, list)
        kind = type(default[0] if several else default)
        options = {"nargs": "+", "choices": default if kind is str else None} if several else {}
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, **options)
    return parser


def flags(about: str | None, **defaults: Any) -> argparse.Namespace:
    """What the command line says; see ``parser_of``."""
    return parser_of(about, **defaults).parse_args()


def installed(packages: Iterable[str]) -> list[str]:
    """Those of some packages that are installed; the others are named."""
    found = []
    for package in packages:
        if importlib.util.find_spec(package) is None:
            print(f"{package}: NOT RUN, the package is not installed")
        else:
            found.append(package)
    return found


def turns(contenders: Mapping[str, Callable[[], T]], rounds: int, warm: int = 1) -> dict[str, list[T]]:
    """What each contender returns in every round, by name.

    Args:
        contenders: take turns; the order changes from round to round.
        rounds: that count.
        warm: rounds before these.
    """
    found: dict[str, list[T]] = {name: [] for name in contenders}
    for number in range(-warm, rounds):
        for name in contenders if number % 2 else reversed(contenders):
            answer = contenders[name]()
            if number >= 0:
                found[name].append(answer)
    return found


def seconds(call: Callable[[], object], times: int = 1) -> float:
    """Seconds of a call, the mean of some."""
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The ratio of each round."""
    return [a / b for a, b in zip(mine, theirs, strict=True)]


def median_ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(ratios(mine, theirs))


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """The median, and the range."""
    return f"{statistics.median(values):{form}} [{min(values):{form}}-{max(values):{form}}]"


def quartiles(values: Sequence[float], form: str = ".2f") -> str:
    """The median, and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}} [{low:{form}}-{high:{form}}]"


def table(heads: Sequence[object], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """Print a table of Markdown."""
    print(f"\n{title}\n" if title else "", end="\n" if title else "")
    for row in (heads, ["---"] * len(heads), *rows):
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def samples_table(title: str, samples: Mapping[str, Mapping[str, Sequence[float]]], *, across: bool) -> None:
    """Print medians with their ranges.

    Args:
        title: above the table.
        samples: values of rounds, by contender and figure.
        across: a column for each contender; otherwise a row.
    """
    figures = list(dict.fromkeys(figure for found in samples.values() for figure in found))

    def cell(contender: str, figure: str) -> str:
        values = samples[contender].get(figure)
        if not values:
            return ""
        middle = statistics.median(values)
        return spread(values, ".0f" if middle > 100 or middle == 0 else ".3g")

    if across:
        table(["figure", *samples], [[f, *(cell(name, f) for name in samples)] for f in figures], title)
    else:
        table(["", *figures], [[name, *(cell(name, f) for f in figures)] for name in samples], title)


def same_training(
    runs: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    steps: int,
    warm: int = 0,
    rtol: float,
    atol: float,
) -> dict[str, list[float]]:
    """Seconds of a step in every round, by name, on each rank; checks that "ours" and "torch" have the same losses.

    Args:
        runs: each takes a step, and returns its loss.
        rounds: how often each has its turn.
        steps: of a turn.
        warm: steps before the first round.
        rtol: of losses.
        atol: of losses.
    """
    import torch
    import torch.distributed as dist

    losses = {name: [run() for _ in range(warm)] for name, run in runs.items()}

    def timed(name: str) -> float:
        dist.barrier()
        began = time.perf_counter()
        losses[name] += [runs[name]() for _ in range(steps)]
        dist.barrier()
        return (time.perf_counter() - began) / steps

    found = turns({name: lambda name=name: timed(name) for name in runs}, rounds, warm=0)
    torch.testing.assert_close(losses["ours"], losses["torch"], rtol=rtol, atol=atol)
    return found


def forget(folder: Path) -> None:
    """Take the files of a folder out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def read_all(files: Iterable[Path], visit: Callable[[memoryview], object] = len) -> None:
    """Read files once, into the same memory; ``visit`` is given what was read."""
    import mmap

    buffer = memoryview(mmap.mmap(-1, 1 << 24))
    for path in sorted(files):
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                visit(buffer[:count])
