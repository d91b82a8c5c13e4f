"""Jobs of every engine, executed by a stand-in: what `accel launch --submit` writes is what runs.

Run with ``hatch run engines:submissions`` as root: machines are network namespaces. Each row is an engine; each test is
a promise of the contract. The weights of a job that was disturbed are those of a run that nothing happened to.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from testkit.hosts import Host, Network
from testkit.job_stand_in import Engine, StandIn
from testkit.kubernetes_stand_in import kubernetes_engine
from testkit.task_stand_in import Dstack, SkyPilot

SCRIPT = Path(__file__).parent / "submitted.py"
STEPS = "40"


@dataclass(frozen=True)
class Writer:
    """An engine whose jobs are executed.

    Attributes:
        engine: its value of ``--submit``.
        flags: further flags; ``{shared}`` is the folder that the machines share.
        read: reads what is printed by ``--dry_run``.
        retries: it can count failures apart from preemptions.
        in_place: after an exit code that is not 0 the containers stay, and start the launcher again.
    """

    engine: str
    flags: tuple[str, ...]
    read: Callable[[str, str], Engine]
    retries: bool = True
    in_place: bool = False


def kubernetes(kind: str, *, retries: bool = True) -> Writer:
    flags = ("--submit_kind", kind, "--submit_image", "image", "--submit_volumes", "runs:{shared}")
    flags += ("--submit_signal_time", "60")
    return Writer(
        "kubernetes", flags, lambda text, _: kubernetes_engine([*yaml.safe_load_all(text)]), retries
    )


WRITERS: Mapping[str, Writer] = {
    "Job": kubernetes("Job"),
    "JobSet": kubernetes("JobSet"),
    "TrainJob": kubernetes("TrainJob"),
    "VolcanoJob": kubernetes("VolcanoJob", retries=False),
    "SkyPilot": Writer("skypilot", (), lambda text, shared: SkyPilot(yaml.safe_load(text), shared)),
    "dstack": Writer(
        "dstack",
        ("--submit_signal_time", "60"),
        lambda text, shared: Dstack(yaml.safe_load(text), shared),
        in_place=True,
    ),
}
every = pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
with_retries = pytest.mark.parametrize(
    "writer",
    [one for one in WRITERS.values() if one.retries],
    ids=[n for n, one in WRITERS.items() if one.retries],
)


def launch(*words: str) -> str:
    command = [sys.executable, "-m", "accel_cli", "launch", "--cpu", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, torch.Tensor]:
    """The weights of the same training on one machine, without any engine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    launch("--num_processes", "2", str(SCRIPT), str(folder), STEPS)
    return weights(folder)


def weights(folder: Path) -> Mapping[str, torch.Tensor]:
    found: Mapping[str, torch.Tensor] = torch.load(folder / "weights.pt", weights_only=True)
    return found


@pytest.fixture
def submitted(tmp_path: Path) -> Iterator[Callable[..., StandIn]]:
    """Writes a job of two machines, and starts it."""
    shared = tmp_path / "shared"
    shared.mkdir()

    def start(writer: Writer, *flags: str, crash: tuple[str, ...] = ()) -> StandIn:
        own = [word.format(shared=shared) for word in writer.flags]
        world = ("--num_machines", "2", "--num_processes", "2", "--resume")
        words = ("--submit", writer.engine, "--dry_run", *own, *world, *flags)
        text = launch(*words, str(SCRIPT), str(shared / "run"), STEPS, *crash)
        job = StandIn(writer.read(text, str(shared)), network, tmp_path / "job")
        job.start()
        return job

    with Network(Host) as network:
        yield start


def equal(folder: Path, expected: Mapping[str, torch.Tensor]) -> bool:
    found = weights(folder / "job" / "claims" / "runs" / "run")
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


@every
def test_a_job_trains_one_world_to_its_end(writer, submitted, undisturbed, tmp_path):
    job = submitted(writer)
    assert job.run().end == "done", job.told()
    assert (job.starts, job.engine.counted) == ({0: 1, 1: 1}, 0), job.told()
    assert "2 ranks from step 0" in job.log(0)
    assert equal(tmp_path, undisturbed)


@every
@pytest.mark.parametrize("number", [0, 1])
def test_a_preempted_job_saves_and_goes_on_without_counting(writer, submitted, undisturbed, tmp_path, number):
    job = submitted(writer)
    job.wait_for(0, "step 15\n")
    job.preempt(number)
    assert job.run().end == "done", job.told()
    told = [number] if writer.in_place else [0, 1]
    assert all("exit code 75" in job.log(machine) for machine in told), job.told()
    assert (min(job.starts.values()), job.engine.counted if writer.retries else 0) == (2, 0), job.told()
    assert equal(tmp_path, undisturbed)


@with_retries
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_crash_costs_one_try(writer, submitted, undisturbed, tmp_path, rank):
    job = submitted(writer, "--submit_retries", "1", crash=(rank, "15", "1"))
    assert job.run().end == "done", job.told()
    expected = (1, 0) if writer.in_place else (2, 1)
    assert (min(job.starts.values()), job.engine.counted) == expected, job.told()
    assert "2 ranks from step 10" in job.log(0)
    assert equal(tmp_path, undisturbed)


@every
def test_a_job_out_of_retries_fails(writer, submitted):
    retries = ("--submit_retries", "1") if writer.retries else ()
    job = submitted(writer, *retries, crash=("1", "15", "5"))
    decision = job.run()
    assert decision.end == "failed", job.told()
    assert job.log(1).count("a planted crash") >= (2 if writer.retries else 1)
    assert min(job.starts.values()) == (2 if writer.retries and not writer.in_place else 1), job.told()


@every
@pytest.mark.parametrize("number", [0, 1])
def test_a_job_that_loses_a_machine_goes_on(writer, submitted, undisturbed, tmp_path, number):
    job = submitted(writer)
    job.wait_for(0, "step 15\n")
    job.lose(number)
    assert job.run().end == "done", job.told()
    # A pod that is back before the others have ended finds their failure, leaves with 76 and comes again.
    assert (min(job.starts.values()), job.engine.counted if writer.retries else 0) == (2, 0), job.told()
    assert "2 ranks from step 10" in job.log(0)
    assert equal(tmp_path, undisturbed)


def test_an_elastic_job_keeps_the_pods_that_are_left(submitted, tmp_path):
    """Only an indexed Job replaces pods one by one; the launcher of the first one goes on."""
    job = submitted(WRITERS["Job"], "--min_machines", "1", "--max_restarts", "3")
    job.wait_for(0, "step 15\n")
    job.lose(1)
    assert job.run().end == "done", job.told()
    assert (job.starts[0], job.engine.counted) == (1, 0), job.told()
    assert job.starts[1] > 1
    assert f"done after step {STEPS}" in job.told()
