"""Checks that yield figures, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from testkit import worlds
from testkit.figures import Figure, NotRunError, Run


def measured(
    check: Callable[..., Iterator[Figure]], arguments: Sequence[Any], folder: Path, seconds: float
) -> list[Figure]:
    """What a check yields in a process of its own, at full size where there is an accelerator.

    Args:
        check: is called with a `Run` and the arguments.
        arguments: of the check.
        folder: of the `Run`.
        seconds: how long it may take; twice that on the CPU.

    Raises:
        NotRunError: something that it needs is missing here.
    """
    full = torch.accelerator.is_available()
    run = Run("accelerator" if full else "cpu", full, folder)
    environ = {"HF_HUB_OFFLINE": "1"} | ({"ACCELERATE_USE_CPU": "false"} if full else {})
    timeout = seconds * (1 if full else 2)
    [figures] = worlds.run(_figures, 1, check, run, arguments, environ=environ, timeout=timeout)
    if isinstance(figures, str):
        raise NotRunError(figures)
    return list(figures)


def _figures(
    check: Callable[..., Iterator[Figure]], run: Run, arguments: Sequence[Any]
) -> list[Figure] | str:
    """What a check yields, or why it does not run."""
    try:
        return list(check(run, *arguments))
    except NotRunError as error:
        return str(error)
