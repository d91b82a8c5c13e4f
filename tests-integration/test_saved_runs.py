"""Checkpoints of earlier versions continue here, with the losses, random numbers and weights of their own runs.

``saved_runs/format-1`` was written by the version before the parts of states were gathered in one protocol, commit
b8c3452, with torch 2.13 (``xla`` with 2.9) and DeepSpeed 0.19; `testkit.saved_runs` says how. Checkpoints that are
kept are never written again: what a later version writes goes beside them.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from testkit import saved_runs

ROOT = Path(__file__).parent / "saved_runs"
NEEDS = {"deepspeed": "deepspeed", "zero3": "deepspeed", "xla": "torch_xla"}
BOUND = {"deepspeed": 1e-5, "zero3": 1e-5}
"""Engines compute in float32, whose roundings differ by processor; the others in float64."""
KEPT = [
    pytest.param(member, kind, folder, id=f"{folder.parent.parent.name}-{member}-{kind}")
    for version in sorted(ROOT.iterdir())
    for member, kind, folder in saved_runs.folders(version)
]


@pytest.mark.wide(only=["*hsdp-*", "*tp-extras", "*x tp-window", "*-fsdp2-extras", "*-ddp-window"])
@pytest.mark.parametrize(("member", "kind", "folder"), KEPT)
def test_a_kept_checkpoint_continues(member: str, kind: str, folder: Path) -> None:
    module = NEEDS.get(member)
    if module is not None and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed here; hatch run engines:{module.removeprefix('torch_')}")
    before = files_of(folder)
    assert saved_runs.differences(member, kind, folder, BOUND.get(member, 1e-9)) == []
    assert files_of(folder) == before


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Sizes and times of change."""
    return {
        str(Path(place, name)): (os.stat(Path(place, name)).st_size, os.stat(Path(place, name)).st_mtime_ns)
        for place, _, names in os.walk(folder)
        for name in names
    }


def test_every_strategy_has_three() -> None:
    found: dict[str, set[str]] = {}
    for member, kind, _ in saved_runs.folders(ROOT / "format-1"):
        found.setdefault(member, set()).add(kind)
    assert found == {member: set(saved_runs.KINDS) for member in saved_runs.RANKS}
