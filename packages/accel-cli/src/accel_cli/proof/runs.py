"""The runs of a proof: the script on one process, and on ranks under each strategy."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_state.launching.ranks.command import run_command
from accel_state.launching.target import Target

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SEED", "STRATEGIES", "ProofRun", "RankRecord", "run"]

SEED = 1_234_567_891
"""Of a script that sets none."""

STRATEGIES: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "fsdp2": ("--use_fsdp", "--fsdp_version", "2"),
    "tp": ("--use_parallelism_config", "--parallelism_config_tp_size", "2"),
    "cp": ("--use_parallelism_config", "--parallelism_config_cp_size", "2"),
    "ep": ("--use_fsdp", "--use_parallelism_config", "--parallelism_config_dp_shard_size", "2",
           "--parallelism_config_ep_size", "2"),
    "pp": ("--use_parallelism_config", "--parallelism_config_pp_size", "2"),
}  # fmt: skip
"""Name → the flags of ``accel launch`` for two ranks."""


@dataclass(frozen=True)
class RankRecord:
    """What one rank recorded; see ``accel_train.proof.recorder``."""

    about: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class ProofRun:
    """One run.

    Attributes:
        name: the strategy, or ``one process``.
        ranks: their records; none if the script failed before the end of its steps.
        output: of the script.
        code: its exit code.
    """

    name: str
    ranks: Sequence[RankRecord]
    output: str
    code: int

    @property
    def failure(self) -> str:
        """The last line of the output that says why the run has no records; empty if it has."""
        if self.ranks:
            return ""
        if not self.code:
            return "the script ended without a step of a prepared optimizer"
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [place for place, line in enumerate(lines) if "Error" in line.split(":")[0]]
        if not errors:
            return (lines or [f"exit code {self.code}"])[-1]
        return " ".join(lines[errors[-1] : errors[-1] + 1 + lines[errors[-1]].endswith(":")])


def run(
    name: str,
    ranks: int,
    flags: Sequence[str],
    target: Target,
    environ: Mapping[str, str],
    folder: Path,
    *,
    steps: int,
    double: bool,
    probe: str = "",
) -> ProofRun:
    """Run the script once.

    Args:
        name: of the run.
        ranks: processes.
        flags: of ``accel launch``.
        target: the script or module, with its arguments.
        environ: what it inherits.
        folder: of this run, which does not exist yet.
        steps: optimizer steps after which it ends.
        double: in float64, where the script does not say otherwise.
        probe: "swapped": ranks have each other's samples; "terms": terms of losses are recorded.
    """
    folder.mkdir(parents=True)
    job = folder / "job.json"
    job.write_text(json.dumps({"steps": steps, "double": double, "probe": probe}))
    argv = [
        sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_processes", str(ranks), *flags, "-m",
        "accel_cli.proof.child", target.kind, target.name, *target.args,
    ]  # fmt: skip
    variables = {**environ, "ACCELERATE_PROOF": str(job), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    with (folder / "output").open("wb") as file:
        code = run_command(tuple(argv), variables, output=file)
    output = (folder / "output").read_text(errors="replace")
    found = [folder / f"rank-{rank}.json" for rank in range(ranks)]
    complete = code == 0 and all(path.exists() for path in found)
    return ProofRun(name, [_read(path) for path in found] if complete else [], output, code)


def _read(path: Path) -> RankRecord:
    from safetensors.torch import load_file

    return RankRecord(json.loads(path.read_text()), load_file(path.with_suffix(".safetensors")))
