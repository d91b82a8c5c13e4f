"""The runs of a proof: the script on one process, and on ranks under each strategy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from accel_cli.proof.compare import RankRecord, Recorded
from accel_cli.proof.server import RunServer
from accel_state.config.codec import rank_environment
from accel_state.config.flags import parse_flags
from accel_state.config.merge import resolve
from accel_state.launching.target import Target

__all__ = ["SEED", "STRATEGIES", "ProofJob", "ProofRun", "run"]

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

_NO_MEMORY = ("not enough memory: you tried to allocate", "MemoryError", "Cannot allocate memory", "SIGKILL")
# Of a frame in a traceback, and of one that `faulthandler` writes.
_PLACE = re.compile(r'File "(.+)", line (\d+)(?:,? in (\S+))?')
_INSTALLED = re.compile(r"/(site-packages|lib/python[^/]*|accel_\w+)/|^<")


@dataclass(frozen=True)
class ProofJob:
    """What a run does to the script; the child and the recorder of its `Accelerator` read it.

    Attributes:
        steps: optimizer steps after which it ends.
        double: in float64, where the script does not say otherwise.
        precision: mixed precision, instead of the script's.
        split: ranks divide the batches of loaders; else the script divides them.
        probe: ``swapped``: ranks have each other's samples; ``terms``: terms of losses are recorded; empty: neither.
        window: micro-batches of an ``accumulate()`` window; 0: the script's.
        cut: the data of loaders: ``even``: two batches, but one sample less where they do not train; ``odd``: one
            sample less everywhere; empty: the script's.
        kills: end by a signal at the first step after a saved state.
        first: how many steps were taken before, by a run that was killed.
        layers: blocks that a model keeps of each stack of equal ones; 0: all.
        limit: seconds that it may take.
        memory: bytes that each process may allocate.
        devices: on accelerators, instead of CPUs.
        since: time of the proof's start; files that are older are not overwritten.
        overwrite: but with this.
        files: the folder that stands for the current one.
    """

    steps: int
    double: bool = True
    precision: str = "no"
    split: bool = True
    probe: str = ""
    window: int = 0
    cut: str = ""
    kills: bool = False
    first: int = 0
    layers: int = 0
    limit: float = 600.0
    memory: int = 1 << 62
    devices: bool = False
    since: float = 0.0
    overwrite: bool = False
    files: str = ""


@dataclass(frozen=True)
class ProofRun:
    """One run.

    Attributes:
        name: the strategy, or ``one process``.
        ranks: their records; none if the script failed before the end of its steps.
        output: of the script.
        code: its exit code.
        folder: of the run.
        stuck: where it was at the end of its time; empty: it ended before.
    """

    name: str
    ranks: Sequence[RankRecord]
    output: str
    code: int
    folder: Path
    stuck: str = ""

    @property
    def failure(self) -> str:
        """The last line of the output that says why the run has no records; empty if it has."""
        if self.ranks:
            return ""
        if self.stuck:
            return self.stuck
        if not self.code:
            return (
                "the script ends before the first step of an optimizer that accelerator.prepare() was given"
            )
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [place for place, line in enumerate(lines) if "Error" in line.split(":")[0]]
        if not errors:
            return (lines or [f"exit code {self.code}"])[-1]
        place = _place("\n".join(lines[: errors[-1]]), -1)
        said = " ".join(lines[errors[-1] : errors[-1] + 1 + lines[errors[-1]].endswith(":")])
        return f"{said} ({place})" if place else said

    @cached_property
    def recorded(self) -> Recorded:
        """The records of all ranks together; there are some."""
        return Recorded.of(self.name, self.ranks)

    @property
    def lacks_memory(self) -> bool:
        """Whether the run failed because the machine has not enough memory."""
        return not self.ranks and (self.code == -9 or any(sign in self.output for sign in _NO_MEMORY))

    @property
    def saved(self) -> int | None:
        """After how many steps a run that was to be killed had saved a state; None: it had not."""
        path = self.folder / "saved.json"
        return int(json.loads(path.read_text())) if path.exists() else None


def run(
    server: RunServer,
    name: str,
    ranks: int,
    flags: Sequence[str],
    target: Target,
    environ: Mapping[str, str],
    folder: Path,
    job: ProofJob,
) -> ProofRun:
    """Run the script once.

    Args:
        server: forks its processes.
        name: of the run.
        ranks: processes.
        flags: of ``accel launch``.
        target: the script or module, with its arguments.
        environ: what it inherits.
        folder: of this run.
        job: what else.

    Raises:
        ConfigError: the flags do not fit each other.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, config, output = folder / "job.json", folder / "config.yaml", folder / "output"
    path.write_text(json.dumps(asdict(job)))
    config.write_text("compute_environment: LOCAL_MACHINE\n")  # nothing of the user's own
    words = ["--num_processes", str(ranks), "--mixed_precision", job.precision, *flags]
    words += [] if job.devices else ["--cpu"]
    variables = rank_environment(resolve(str(config), environ, parse_flags(words)).local(), environ)
    variables |= {"ACCELERATE_PROOF": str(path), "WANDB_MODE": "disabled", "GLOO_SOCKET_IFNAME": "lo"}
    code = server([target.kind, target.name, *target.args], ranks, variables, output)
    found = [folder / f"rank-{rank}.json" for rank in range(ranks)]
    complete = code == 0 and all(path.exists() for path in found)
    records = [_read(path) for path in found] if complete else []
    said = output.read_text(errors="replace")
    return ProofRun(name, records, said, code, folder, _stuck(folder, job.limit))


def _stuck(folder: Path, limit: float) -> str:
    """Where the script was at the end of its time."""
    for path in sorted(folder.glob("stuck-*")):
        if stack := path.read_text():
            return f"not at its end after {limit:g} s (--limit), but at {_place(stack, 0) or 'a line of a package'}"
    return ""


def _place(stack: str, innermost: int) -> str:
    """The innermost line that is in no installed package; empty: there is none."""
    places = [place for place in _PLACE.findall(stack) if not _INSTALLED.search(place[0])]
    if not places:
        return ""
    file, line, function = places[innermost]
    return f"{Path(file).name}:{line}" + (f" in {function}" if function else "")


def _read(path: Path) -> RankRecord:
    from safetensors.torch import load_file

    return RankRecord(json.loads(path.read_text()), load_file(path.with_suffix(".safetensors")))
