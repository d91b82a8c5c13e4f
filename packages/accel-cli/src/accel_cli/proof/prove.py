"""Proving a script: its runs, and the verdict on each strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from accel_cli.proof.compare import Recorded
from accel_cli.proof.findings import Verdict, examine, failed
from accel_cli.proof.runs import STRATEGIES, ProofRun, run
from accel_state.errors import LaunchError
from accel_state.launching.target import Target

__all__ = ["prove"]

_RANKS = 2


def prove(
    target: Target,
    environ: Mapping[str, str],
    folder: Path,
    *,
    strategies: Sequence[str],
    steps: int,
    double: bool,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[list[Verdict], dict[str, str]]:
    """Run a script on one process and under each strategy, and compare them.

    Args:
        target: the script or module, with its arguments.
        environ: the environment that the runs inherit.
        folder: an empty folder.
        strategies: names of ``STRATEGIES``.
        steps: optimizer steps of each prepared optimizer.
        double: in float64 where the script can.
        tell: receives progress messages.

    Returns:
        The verdict on each strategy, and facts about the runs by name.

    Raises:
        LaunchError: the script fails on one process.
    """

    def start(name: str, ranks: int, flags: Sequence[str], exact: bool, probe: str = "") -> ProofRun:
        tell(f"{name}: {target.name}")
        place = folder / f"{name.replace(' ', '-')}-{'double' if exact else 'single'}{probe}"
        return run(name, ranks, flags, target, environ, place, steps=steps, double=exact, probe=probe)

    one = start("one process", 1, (), double)
    if not one.ranks and double:  # such as data in float32, which a model in float64 does not take
        double = False
        one = start("one process", 1, (), double)
    if not one.ranks:
        raise LaunchError(
            f"{target.name} fails on one process, or ends before its first {steps} steps with a prepared optimizer: "
            f"{one.failure}"
        )
    reference = Recorded.of(one)
    runs = {
        name: start(name, _RANKS, STRATEGIES[name], double) for name in dict.fromkeys(["ddp", *strategies])
    }
    recorded = {name: Recorded.of(made) for name, made in runs.items() if made.ranks}
    apart = recorded.get("ddp")

    def judged(**probes: Recorded) -> list[Verdict]:
        return [
            examine(reference, recorded[name], apart, **probes) if name in recorded else failed(runs[name])
            for name in strategies
        ]

    verdicts = judged()
    wanted = {probe for verdict in verdicts for cause in verdict.findings for probe in cause.wants}
    kinds = {"swapped": ("ddp", _RANKS, STRATEGIES["ddp"]), "terms": ("one process", 1, ())}
    probes = {probe: start(*kinds[probe], double, probe) for probe in sorted(wanted)}
    if probes:
        verdicts = judged(**{probe: Recorded.of(made) for probe, made in probes.items() if made.ranks})
    facts = {
        "compared": f"{len(reference.steps)} steps on one process with those on {_RANKS} ranks",
        "precision": ", ".join(name.removeprefix("torch.") for name in reference.about["dtypes"]),
    }
    if reference.about["noise"]["drawn"]:
        facts["noise"] = "ranks drew that of their own rows from the same numbers as one process"
    if reference.about["noise"]["attention"]:
        facts["dropout"] = "that of attention was left out, because its kernels draw for all ranks alike"
    return verdicts, facts
