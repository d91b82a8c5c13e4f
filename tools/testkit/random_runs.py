"""Random runs that `testkit.random_strategies`, `random_language_models` and `random_loops` draw: trying and repeating.

PYTHONPATH=tools python -m testkit.random_runs KIND FIRST [LAST]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from testkit import worlds

__all__ = ["Kind", "describe", "difference", "failures", "main", "ranks_of"]


@dataclass(frozen=True)
class Kind:
    """A kind of runs, each of which a number draws.

    Attributes:
        name: on the command line.
        draw: the case of a number, a dataclass.
        problem_of: runs the case of a number; what is wrong with it, None: nothing.
    """

    name: str
    draw: Callable[[int], Any]
    problem_of: Callable[[int], str | None]


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


def failures(kind: Kind, numbers: Sequence[int]) -> dict[int, str]:
    """Number of a case that fails → why."""
    found: dict[int, str] = {}
    for number in numbers:
        try:
            problem = kind.problem_of(number)
        except worlds.RankError as error:
            problem = str(error)
        if problem is not None:
            found[number] = problem
    return found


def describe(kind: Kind, number: int, why: str) -> str:
    """A failure with the command that repeats it."""
    return f"PYTHONPATH=tools python -m testkit.random_runs {kind.name} {number}\n{why}"


def main() -> None:
    """Repeat the cases that the command line names; one alone is shown."""
    from testkit import random_language_models, random_loops, random_strategies

    kinds = [random_strategies.KIND, random_language_models.KIND, *random_loops.KINDS.values()]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=[kind.name for kind in kinds])
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, nargs="?")
    options = parser.parse_args()
    (kind,) = (kind for kind in kinds if kind.name == options.kind)
    numbers = range(options.first, (options.last or options.first) + 1)
    if len(numbers) == 1:
        for name, value in asdict(kind.draw(options.first)).items():
            print(f"{name:20} {value}")
    found = failures(kind, numbers)
    print(*(describe(kind, number, why) for number, why in found.items()), sep="\n\n")
    print(f"{len(numbers) - len(found)} of {len(numbers)} cases are right")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
