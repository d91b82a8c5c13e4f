"""Proving a script: its runs, and the verdict on each strategy and way."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path

from accel_bigmodel.device_maps.budget import available_host_memory
from accel_cli.proof.compare import ORDER, Mismatch, Recorded, differences
from accel_cli.proof.findings import Verdict, cause, examine, failed
from accel_cli.proof.runs import STRATEGIES, ProofJob, ProofRun, run
from accel_cli.proof.scratch import shadow
from accel_cli.proof.server import RunServer, run_server
from accel_cli.proof.ways import WAYS, Way
from accel_state.errors import LaunchError
from accel_state.launching.target import Target

__all__ = ["ProofOptions", "prove"]


@dataclass(frozen=True)
class ProofOptions:
    """What a proof runs.

    Attributes:
        strategies: names of ``STRATEGIES``.
        ways: names of ``WAYS``.
        steps: optimizer steps of each prepared optimizer.
        ranks: how many.
        double: in float64 where the script can.
        layers: blocks that a model keeps of each stack of equal ones; 0: all, if the machine's memory holds them.
        resume_with: arguments that a start after a kill has besides.
        limit: seconds that a run may take.
        devices: ranks use this machine's accelerators, instead of CPUs.
        overwrite: the script may overwrite files that are older, outside of the current folder.
    """

    strategies: Sequence[str] = ("ddp", "fsdp2")
    ways: Sequence[str] = ("written",)
    steps: int = 3
    ranks: int = 2
    double: bool = True
    layers: int = 0
    resume_with: Sequence[str] = ()
    limit: float = 600.0
    devices: bool = False
    overwrite: bool = False


def prove(
    target: Target,
    environ: Mapping[str, str],
    folder: Path,
    options: ProofOptions,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[list[Verdict], dict[str, str]]:
    """Run a script on one process and under each strategy in each way, and compare them.

    Args:
        target: the script or module, with its arguments.
        environ: the environment that the runs inherit.
        folder: an empty folder.
        options: what to run.
        tell: receives progress messages.

    Returns:
        The verdict on each strategy and way, and facts about the runs by name.

    Raises:
        LaunchError: the script fails on one process.
    """
    same = ("steps", "double", "layers", "limit", "devices", "overwrite")
    memory = available_host_memory() // options.ranks
    job = ProofJob(**{name: getattr(options, name) for name in same}, memory=memory, since=time.time())
    with run_server(environ) as server:
        proof = _Proof(server, target, environ, folder, options, tell, job)
        reference = proof.settle().recorded
        verdicts = [verdict for name in options.ways for verdict in proof.verdicts(WAYS[name])]
    facts = {
        "compared": f"{len(reference.steps)} steps on one process with those on {options.ranks} ranks",
        "precision": ", ".join(name.removeprefix("torch.") for name in reference.about["dtypes"]),
    }
    if proof.job.layers:
        why = "" if options.layers else ": the machine's memory does not hold the models as they are"
        facts["reduced"] = f"models keep {proof.job.layers} blocks of each stack of equal ones{why}"
    if proof.left_out:
        facts["left out"] = f"{', '.join(sorted(proof.left_out))}: two runs on one process differ in it"
    if reference.about["noise"]["drawn"]:
        facts["noise"] = "ranks drew that of their own rows from the same numbers as one process"
    if reference.about["noise"]["dropout"]:
        facts["dropout"] = "left out, because what it draws is of ranks and not of samples"
    return verdicts, facts


@dataclass
class _Proof:
    """The runs that were made, and what is left out of later ones.

    Attributes:
        job: of a run as the script is written.
        runs: by the strategy, the number of ranks, the flags and the job.
        refused: strategies that cannot take the model.
        numbers: names of the folders of runs.
        left_out: names of logged values that two runs on one process do not have alike.
    """

    server: RunServer
    target: Target
    environ: Mapping[str, str]
    folder: Path
    options: ProofOptions
    tell: Callable[[str], None]
    job: ProofJob
    runs: dict[tuple[str, int, Sequence[str], ProofJob], ProofRun] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=count)
    left_out: set[str] = field(default_factory=set)

    def settle(self) -> ProofRun:
        """Run the script on one process, smaller or less exact if it must be; and find out who divides batches.

        Raises:
            LaunchError: it fails.
        """
        one = self._run("one process", 1, self.job)
        if one.lacks_memory and not self.job.layers:
            self.job = replace(self.job, layers=2)
            one = self._run("one process", 1, self.job)
        if not one.ranks and not one.stuck and self.job.double:
            # Perhaps because of data in float32, which such a model does not take.
            self.job = replace(self.job, double=False)
            one = self._run("one process", 1, self.job)
        if not one.ranks:
            advice = ". Proofs run on CPUs: use accelerator.device where the script names a GPU"
            raise LaunchError(
                f"{self.target.name} has nothing to compare. On one process: {one.failure}"
                f"{advice if 'cuda' in one.failure.lower() else ''}"
            )
        plain = self._run("ddp", self.options.ranks, self.job)
        if "split_batches=True" in plain.failure or (plain.ranks and self._rows(plain) < self._rows(one)):
            job = replace(self.job, split=False)
            divided = self._run("ddp", self.options.ranks, job)
            if divided.ranks and self._rows(divided) == self._rows(one):
                self.job = job
        return one

    @staticmethod
    def _rows(run: ProofRun) -> int:
        """How many samples the first step reads."""
        return run.recorded.steps[0].rows.total()

    def verdicts(self, way: Way) -> list[Verdict]:
        """Run the script in one way under each strategy."""
        job = replace(self.job, **{**way.job, "steps": max(way.steps, self.job.steps)})
        ranks = way.ranks or self.options.ranks
        taken = [name for name in self.options.strategies if name not in self.refused]
        names = [name for name in taken if not way.only or name in way.only]
        if not names:
            return []
        one = self._run("one process", 1, job)
        reason = self._why_not(way, one)
        if reason:
            found = [Verdict(name, reason=reason) for name in names]
        elif way.resumes:
            found = [each for name in names for each in self._resumed(name, ranks, job, one.recorded)]
        else:
            found = self._compared(names, ranks, way.flags, job, one.recorded)
        self.refused |= {verdict.name for verdict in found if verdict.reason and way is WAYS["written"]}
        if way is WAYS["written"]:
            return found
        return [replace(verdict, name=f"{verdict.name}, {way.title}") for verdict in found]

    def _run(
        self,
        name: str,
        ranks: int,
        job: ProofJob,
        flags: Sequence[str] = (),
        *,
        more: Sequence[str] = (),
        files: Path | None = None,
        again: bool = False,
    ) -> ProofRun:
        if ranks == 1:  # who divides nothing
            job = replace(job, split=True)
        key = (name, ranks, (*STRATEGIES.get(name, ()), *flags), job)
        if key not in self.runs or files or again:
            self.tell(f"{name}: {self.target.name}")
            place = self.folder / str(next(self.numbers))
            job = replace(job, files=str(files or shadow(Path.cwd(), place / "files")))
            target = replace(self.target, args=(*self.target.args, *more))
            self.runs[key] = run(self.server, name, ranks, key[2], target, self.environ, place, job)
        return self.runs[key]

    def _why_not(self, way: Way, one: ProofRun) -> str:
        """Why a way says nothing about the script; empty: it does."""
        if not one.ranks:
            return f"on one process the script fails so: {one.failure}"
        if way.job.get("cut") and not (one.folder / "cut").exists():
            return "no loader of the script could be shortened"
        if "window" in way.job:
            passes = [
                len(each.ranks[0].about["steps"][0].get("losses", []))
                for each in (one, self._run("one process", 1, self.job))
            ]
            if passes[0] == passes[1]:
                return "the script has such windows, or no accumulate() block"
        return ""

    def _compared(
        self, names: Sequence[str], ranks: int, flags: Sequence[str], job: ProofJob, reference: Recorded
    ) -> list[Verdict]:
        """Under each strategy."""
        runs = [self._run(name, ranks, job, flags) for name in names]
        plain = self._run("ddp", ranks, job)
        apart = plain.recorded if plain.ranks else None

        def judged(**probes: Recorded) -> list[Verdict]:
            return [self._examined(reference, made, apart, **probes) for made in runs]

        verdicts = judged()
        wanted = {probe for verdict in verdicts for cause in verdict.findings for probe in cause.wants}
        where = {"swapped": ("ddp", ranks), "terms": ("one process", 1)}
        probes = {probe: self._run(*where[probe], replace(job, probe=probe)) for probe in sorted(wanted)}
        if probes:
            verdicts = judged(**{probe: made.recorded for probe, made in probes.items() if made.ranks})
        return verdicts

    def _examined(
        self, reference: Recorded, made: ProofRun, apart: Recorded | None = None, **probes: Recorded
    ) -> Verdict:
        """Compare, without what two runs on one process do not have alike either."""
        if not made.ranks:
            return failed(made)
        verdict = examine(reference.without(self.left_out), made.recorded, apart, **probes)
        if not verdict.has_fault:
            return verdict
        kinds = {one.kind for one in self.unsteady}
        if kinds <= {"metrics"}:
            self.left_out = {one.name for one in self.unsteady}
            return examine(reference.without(self.left_out), made.recorded, apart, **probes)
        text = f"two runs of the script on one process differ in their {min(kinds, key=ORDER.index)}"
        return replace(verdict, findings=[cause("not repeatable", text)])

    @cached_property
    def unsteady(self) -> list[Mismatch]:
        """What two runs of the script on one process do not have alike."""
        one = self._run("one process", 1, self.job).recorded
        again = self._run("one process", 1, self.job, again=True)
        return differences(one, again.recorded, one.bound) if again.ranks else []

    def _resumed(self, name: str, ranks: int, job: ProofJob, reference: Recorded) -> list[Verdict]:
        """Kill the ranks after a saved state; start again, and on one process."""
        killed = self._run(name, ranks, replace(job, kills=True))
        done = killed.saved
        if done is None:
            reason = f"it saves no state before the last of {job.steps} steps"
            return [Verdict(name, reason=reason) if killed.ranks else failed(killed)]
        rest = replace(reference, steps=reference.steps[done:])
        verdicts = []
        for label, strategy, world in (("", name, ranks), (" on one process", "one process", 1)):
            files = killed.folder / f"files {world}"
            shutil.copytree(killed.folder / "files", files, symlinks=True)
            here = files / Path.cwd().name
            later, more = replace(job, first=done, steps=job.steps - done), self.options.resume_with
            again = self._run(strategy, world, later, more=more, files=here)
            if not again.ranks:
                text = f"killed after step {done + 1}, it does not start again{label}: {again.failure}"
                verdicts.append(Verdict(name, ["losses"], [cause("does not resume", text)]))
                continue
            first = replace(reference, steps=reference.steps[:1])
            if done and not examine(first, again.recorded, None).differ:
                reason = "with these arguments the script begins again; see --resume_with"
                return [Verdict(name, reason=reason)]
            verdicts.append(replace(self._examined(rest, again), name=name + label))
        return verdicts
