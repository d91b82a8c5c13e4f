"""Running the rehearsal of one rank in a separate process."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_state.config.launch import LaunchConfig
from accel_state.errors import ConfigError
from accel_state.launching.plan import World, plan_rank
from accel_state.launching.ranks.command import run_command
from accel_state.launching.target import Target

__all__ = ["Rehearsed", "chosen_ranks", "rehearse_rank"]

_OFF = {"CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"}
"""The rank computes on the CPU, and a tracker that a script starts itself logs nothing."""


@dataclass(frozen=True)
class Rehearsed:
    """The result of rehearsing one rank.

    Attributes:
        rank: the global rank.
        found: the report of the process; see ``accel_cli.rehearsal.child``.
        output: the output of the script.
    """

    rank: int
    found: Mapping[str, Any]
    output: str


def chosen_ranks(text: str, size: int, flag: str = "--ranks") -> list[int]:
    """Parse ``--ranks``: numbers, ``last``, and ranges such as ``0-3``, with commas between.

    Args:
        text: the text as typed.
        size: ranks of the world.
        flag: the flag that had it, for messages.

    Raises:
        ConfigError: a word is none of these, or names a rank that the world does not have.
    """
    ranks: set[int] = set()
    for word in (part.strip() for part in text.split(",")):
        low, dash, high = word.replace("last", str(size - 1)).partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ConfigError(
                f"{flag} {text!r} has {word!r}; pass ranks such as 0,1,last, or a range such as 0-3"
            )
        first, last = int(low), int(high if dash else low)
        if first > last:
            raise ConfigError(
                f"{flag} {text!r} has {word!r}, which ends before it begins; pass {last}-{first}"
            )
        if last >= size:
            raise ConfigError(
                f"{flag} {text!r} names rank {last}, but a world of {size} has the ranks 0 to {size - 1}"
            )
        ranks.update(range(first, last + 1))
    return sorted(ranks)


def rehearse_rank(
    config: LaunchConfig,
    target: Target,
    world: World,
    rank: int,
    environ: Mapping[str, str],
    *,
    steps: int,
    show_output: bool,
) -> Rehearsed:
    """Run the script as one rank.

    Args:
        config: as resolved; the rank computes on the CPU.
        target: the script or module.
        world: number and distribution of the ranks.
        rank: global rank.
        environ: the environment that it inherits.
        steps: optimizer steps after which the rehearsal ends.
        show_output: show the script's output, on standard error.
    """
    with tempfile.TemporaryDirectory(prefix="accel-rehearse-") as folder:
        report, printed = Path(folder) / "report.json", Path(folder) / "output"
        argv = (
            sys.executable, "-m", "accel_cli.rehearsal.child", str(report), target.kind, target.name, *target.args,
        )  # fmt: skip
        spec = plan_rank(config, argv, world, rank, environ)
        variables = spec.environment(environ) | _OFF | {"ACCELERATE_REHEARSAL": str(steps)}
        with printed.open("wb") as file:
            code = run_command(argv, variables, output=sys.stderr.buffer if show_output else file)
        output = printed.read_text(errors="replace")
        if code in (-2, 130):
            raise KeyboardInterrupt
        if not report.exists():
            return Rehearsed(rank, _died(code), output)
        return Rehearsed(rank, json.loads(report.read_text()), output)


def _died(code: int) -> dict[str, Any]:
    how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
    hint = ", as a system without free memory does" if code == -9 else ""
    error = {"type": "", "message": f"the process {how}{hint} before it could report", "traceback": ""}
    return {"ended": "failure", "error": error, "seconds": 0.0, "memory": {}, "sections": None, "notes": [],
            "groups": [], "entered": [], "messages": [], "given": {}}  # fmt: skip
