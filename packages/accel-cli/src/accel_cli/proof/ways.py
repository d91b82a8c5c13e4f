"""Ways of running a script in a proof, on one process and on ranks alike: as it is written, and otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["WAYS", "Way"]


@dataclass(frozen=True)
class Way:
    """One of them.

    Attributes:
        title: for the report.
        steps: at least so many optimizer steps.
        job: fields of `runs.ProofJob` that differ.
        ranks: how many ranks there are, instead of two; 0: as many as asked for.
        flags: of ``accel launch``, on ranks.
        only: strategies that it is for; empty: all.
        resumes: ranks are killed after a saved state, and start again.
    """

    title: str
    steps: int = 0
    job: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 0
    flags: Sequence[str] = ()
    only: Sequence[str] = ()
    resumes: bool = False


WAYS = {
    "written": Way("as written"),
    "window1": Way("windows of 1", job={"window": 1}),
    "window3": Way("windows of 3", job={"window": 3}),
    "epochs": Way("short epochs", steps=5, job={"cut": "even"}),
    "short": Way("short last batch", job={"cut": "odd"}),
    "bf16": Way("bf16", steps=2, job={"precision": "bf16", "double": False}),
    "fp16": Way("fp16", steps=4, job={"precision": "fp16", "double": False}),
    "recompute": Way(
        "recomputation", flags=("--fsdp_activation_checkpointing", "true"), only=("fsdp2", "ep")
    ),
    "resume": Way("resumed", steps=5, job={"cut": "even"}, resumes=True),
    "ranks4": Way("four ranks", ranks=4),
}
"""Name → way; the first is what a plain proof does, all are a thorough one."""
