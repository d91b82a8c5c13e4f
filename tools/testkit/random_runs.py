"""Random runs that `testkit.random_strategies` and `testkit.random_language_models` draw: trying and repeating them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from types import ModuleType
from typing import Any

import torch

from testkit import worlds

__all__ = ["describe", "difference", "failures", "main", "ranks_of", "repeat"]


def ranks_of(degrees: Mapping[str, int] | None) -> int:
    """The processes of a layout; `ep_size` counts ranks of the other degrees."""
    return math.prod(degree for name, degree in (degrees or {}).items() if name != "ep_size")


def difference(found: Any, wanted: Any, bound: float) -> str | None:
    """How values differ by more than a relative bound, or a tenth of it; None: they do not."""
    try:
        torch.testing.assert_close(found, wanted, rtol=bound, atol=bound / 10)
    except AssertionError as error:
        return str(error)
    return None


def failures(kind: ModuleType, numbers: Sequence[int]) -> dict[int, str]:
    """Number of a case that fails → why.

    Args:
        kind: the module that draws cases.
        numbers: which cases.
    """
    found: dict[int, str] = {}
    for number in numbers:
        try:
            problem = kind.problem_of(number)
        except worlds.RankError as error:
            problem = str(error)
        if problem is not None:
            found[number] = problem
    return found


def describe(kind: ModuleType, number: int, why: str) -> str:
    """A failure with the command that repeats it."""
    return f"PYTHONPATH=tools python -m testkit.random_runs {_name(kind)} {number}\n{why}"


def _name(kind: ModuleType) -> str:
    return kind.__name__.rpartition(".")[2]


def repeat(
    about: str | None, kinds: Iterable[str], run: Callable[[str, range], dict[int, str]], draw: Any
) -> None:
    """Repeat the cases that the command line names as ``KIND FIRST [LAST]``, and end the program.

    Args:
        about: the docstring of the module.
        kinds: of cases.
        run: number of a case that fails → how to repeat it, and why, for a kind and numbers.
        draw: the case of a kind and a number, which is shown if it is the only one.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("kind", choices=[*kinds])
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, nargs="?")
    options = parser.parse_args()
    numbers = range(options.first, (options.last or options.first) + 1)
    if len(numbers) == 1:
        for name, value in asdict(draw(options.kind, options.first)).items():
            print(f"{name:20} {value}")
    found = run(options.kind, numbers)
    print(*found.values(), f"{len(numbers) - len(found)} of {len(numbers)} cases are right", sep="\n\n")
    raise SystemExit(bool(found))


def main() -> None:
    """Repeat cases: `python -m testkit.random_runs <module> <first> [<last>]`."""
    from testkit import random_language_models, random_strategies

    kinds = {_name(kind): kind for kind in (random_strategies, random_language_models)}

    def run(name: str, numbers: range) -> dict[int, str]:
        found = failures(kinds[name], numbers)
        return {number: describe(kinds[name], number, why) for number, why in found.items()}

    repeat(__doc__, kinds, run, lambda name, number: kinds[name].Case.draw(number))


if __name__ == "__main__":
    main()
