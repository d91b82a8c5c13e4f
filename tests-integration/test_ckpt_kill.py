"""``kill -9`` at random moments of a save: the newest complete checkpoint loads and is what was saved."""

import contextlib
import os
import pathlib
import random
import signal
import threading
import time

import pytest
import torch

from accel_ckpt import complete_checkpoints, open_training_state, prune_checkpoints, save_training_state
from accel_ckpt.disk import Disk
from testkit import worlds

# 200 kills take a minute on an idle machine, and six beside other programs.
MOMENTS = [20, pytest.param(200, marks=[pytest.mark.full, pytest.mark.timeout(1200)])]
SIZE = 100_000  # elements: a few MB, so that a save takes long enough to be hit


class PlainDisk(Disk):
    """A file system that cannot exchange names."""

    def exchange(self, first, second):
        return False


def values(step):
    return torch.arange(SIZE, dtype=torch.float32) * (step + 1)


def save(path, step, rank=0, **options):
    return save_training_state(
        path,
        models=[{"w": values(step)}],
        shared={"step": step, "moment": values(-step)},
        per_rank={"rng": torch.tensor([step, rank])},
        **options,
    )


def check(path, ranks=1):
    checkpoint = open_training_state(path)
    checkpoint.verify()
    step = checkpoint.shared["step"]
    assert torch.equal(checkpoint.models[0]["w"], values(step))
    assert torch.equal(checkpoint.shared["moment"], values(-step))
    assert [checkpoint.per_rank(r)["rng"].tolist() for r in range(ranks)] == [[step, r] for r in range(ranks)]
    return step


def series(folder, pipe, exchanges):
    """New folders with pruning, and one folder that is replaced again and again."""
    folder = pathlib.Path(folder)
    options = {} if exchanges else {"disk": PlainDisk()}
    step = max((check(path) for path in complete_checkpoints(folder)), default=0)
    while True:
        step += 1
        save(folder / f"checkpoint_{step}", step, **options)
        prune_checkpoints(folder, 2)
        save(folder / "checkpoint_0", step, **options)
        pipe.send(step)


@pytest.mark.filterwarnings("ignore:a save that did not finish", "ignore:a save was interrupted")
@pytest.mark.parametrize("exchanges", [pytest.param(True, marks=pytest.mark.full), False])
@pytest.mark.parametrize("moments", MOMENTS)
def test_one_process(tmp_path, exchanges, moments):
    context = worlds.context()
    generator = random.Random(0)
    interrupted = 0
    for _ in range(moments):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=series, args=(str(tmp_path), theirs, exchanges))
        process.start()
        theirs.close()
        ours.recv()
        started = time.monotonic()
        reported = ours.recv()
        time.sleep(generator.uniform(0, time.monotonic() - started))  # some moment of the next two saves
        process.kill()
        process.join()
        with contextlib.suppress(EOFError):  # what it managed to report since
            while True:
                reported = ours.recv()
        interrupted += any(".saving-" in name or ".previous-" in name for name in os.listdir(tmp_path))
        found = {path.name: check(path) for path in complete_checkpoints(tmp_path)}
        assert found, os.listdir(tmp_path)
        assert max(found.values()) >= reported  # what was reported as saved is there
        assert all(name in ("checkpoint_0", f"checkpoint_{step}") for name, step in found.items())
    print(f"{interrupted} of {moments} kills left a temporary folder")
    assert interrupted > 0
    save(tmp_path / "checkpoint_1000", 1000)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def two_ranks(folder, victim, delay):
    from accel_state import PartialState

    rank = PartialState().process_index
    step = check(pathlib.Path(folder) / "c", 2) if (pathlib.Path(folder) / "c").exists() else 0
    PartialState().wait_for_everyone()
    if rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        step += 1
        save(pathlib.Path(folder) / "c", step, rank)


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:a save that did not finish", "ignore:a save was interrupted")
@pytest.mark.parametrize("moments", MOMENTS)
def test_two_ranks_with_either_killed(tmp_path, moments):
    generator = random.Random(1)
    last = 0
    for moment in range(moments):
        with pytest.raises(worlds.RankError):
            worlds.run(two_ranks, 2, str(tmp_path), moment % 2, generator.uniform(0.0, 0.15))
        if (tmp_path / "c").exists():
            step = check(tmp_path / "c", 2)
            assert step >= last
            last = step
    assert last > 0
