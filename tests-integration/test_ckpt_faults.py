"""What goes wrong around a save on real file systems: what was saved before is there, and the error says why."""

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import time
import warnings

import pytest
import torch

from accel_ckpt import (
    Checkpointer,
    CheckpointSaveError,
    complete_checkpoints,
    open_training_state,
    prune_checkpoints,
    save_training_state,
)
from accel_ckpt.disk import Disk
from testkit import worlds

SIZE = 300_000  # elements; with the optimizer's copy 2.4 MB a checkpoint


def save(path, step, rank=0, **options):
    return save_training_state(
        path,
        models=[{"w": torch.full((SIZE,), float(step))}],
        shared={"step": step, "moment": torch.full((SIZE,), -float(step))},
        per_rank={"rng": torch.tensor([step, rank])},
        **options,
    )


def check(path, ranks=1):
    checkpoint = open_training_state(path)
    checkpoint.verify()
    step = checkpoint.shared["step"]
    assert torch.equal(checkpoint.models[0]["w"], torch.full((SIZE,), float(step)))
    assert torch.equal(checkpoint.shared["moment"], torch.full((SIZE,), -float(step)))
    assert [checkpoint.per_rank(rank)["rng"].tolist() for rank in range(ranks)] == [
        [step, r] for r in range(ranks)
    ]
    return step


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB, room for one checkpoint."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(small_disk):
    save(small_disk / "checkpoint_1", 1)
    with pytest.raises(
        CheckpointSaveError, match=r"checkpoint_2 failed: .*No space left on device"
    ) as caught:
        save(small_disk / "checkpoint_2", 2)
    message = re.search(
        r"unchanged\. This rank writes 2\.40 MB, 1\.\d\d MB were free for all ranks on the disk of .*small\. "
        r"A save needs .*total_limit",
        str(caught.value),
    )
    assert message, str(caught.value)
    assert os.listdir(small_disk) == ["checkpoint_1"]  # the half-written one takes no room
    assert check(small_disk / "checkpoint_1") == 1
    with pytest.raises(CheckpointSaveError, match="No space left"):
        save(small_disk / "checkpoint_1", 2)  # replacing needs the room of both for a moment
    assert check(small_disk / "checkpoint_1") == 1


def test_a_full_disk_on_one_of_two_ranks(small_disk):
    def work(folder):
        from accel_state import PartialState

        rank = PartialState().process_index
        save(pathlib.Path(folder) / "checkpoint_1", 1, rank)
        with pytest.raises(CheckpointSaveError, match=r"No space left"):
            save(pathlib.Path(folder) / "checkpoint_2", 2, rank)

    worlds.run(work, 2, str(small_disk))
    assert os.listdir(small_disk) == ["checkpoint_1"]
    assert check(small_disk / "checkpoint_1", 2) == 1


class Vanishing(Disk):
    """Removes a folder at the n-th write, as another process would."""

    def __init__(self, folder, number):
        self.folder, self.left = folder, number

    def write(self, descriptor, data):
        self.left -= 1
        if self.left == 0:
            for path in [self.folder, *self.folder.parent.glob(f".{self.folder.name}.saving-*")]:
                shutil.rmtree(path, ignore_errors=True)
        return super().write(descriptor, data)


@pytest.mark.parametrize("number", [1, 3, 6])
def test_the_folder_vanishes_while_it_is_written(tmp_path, number):
    save(tmp_path / "checkpoint_1", 1)
    target = tmp_path / "checkpoint_2"
    with pytest.raises(CheckpointSaveError, match=r"checkpoint_2 failed: .*No such file or directory"):
        save(target, 2, disk=Vanishing(target, number))
    assert os.listdir(tmp_path) == ["checkpoint_1"]
    assert check(tmp_path / "checkpoint_1") == 1


def test_the_parent_vanishes_while_it_is_written(tmp_path):
    class Gone(Disk):
        def rename(self, source, target):
            shutil.rmtree(target.parent)
            super().rename(source, target)

    with pytest.raises(CheckpointSaveError, match="No such file or directory"):
        save(tmp_path / "run" / "checkpoint_1", 1, disk=Gone())
    assert not os.listdir(tmp_path)
    save(tmp_path / "run" / "checkpoint_1", 1)
    assert check(tmp_path / "run" / "checkpoint_1") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as somebody without permission")
def test_permission_denied(tmp_path):
    def work(folder):
        os.setuid(65534)  # nobody
        with pytest.raises(CheckpointSaveError, match="Permission denied"):
            save(pathlib.Path(folder) / "checkpoint_2", 2)
        return check(pathlib.Path(folder) / "checkpoint_1")

    save(tmp_path / "checkpoint_1", 1)
    for folder in (tmp_path, *list(tmp_path.parents)[:3]):
        # Added to what there is: the last one is the folder of everybody's temporary files.
        folder.chmod(folder.stat().st_mode | 0o055)
    assert worlds.run(work, 1, str(tmp_path)) == [1]
    assert os.listdir(tmp_path) == ["checkpoint_1"]


def train(folder, name, rounds, ready):
    """One of two trainings that know nothing of each other."""
    folder = pathlib.Path(folder)
    warnings.simplefilter("error")  # nothing of the other one may look like a leftover
    ready.wait()
    for step in range(rounds):
        save(folder / f"{name}_{step}", step)
        save(folder / "same", step)
        with contextlib.suppress(FileNotFoundError):  # the other one pruned it first
            prune_checkpoints(folder, 2, f"{name}_")


def test_two_trainings_write_to_one_directory(tmp_path):
    context = worlds.context()
    ready = context.Barrier(2)
    rounds = 12
    processes = [
        context.Process(target=train, args=(str(tmp_path), name, rounds, ready)) for name in ("a", "b")
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):  # a reader beside them sees complete ones only
        for name in ("a", "b"):
            for path in complete_checkpoints(tmp_path, f"{name}_"):
                with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
                    check(path)
        time.sleep(0.001)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert check(tmp_path / "same") == rounds - 1
    for name in ("a", "b"):
        assert [check(path) for path in complete_checkpoints(tmp_path, f"{name}_")] == [
            rounds - 2,
            rounds - 1,
        ]
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_two_checkpointers_do_not_mix_their_steps(tmp_path):
    Checkpointer(tmp_path).save(1, {"run": "a"})
    with pytest.raises(CheckpointSaveError, match="step_1 exists"):
        Checkpointer(tmp_path).save(1, {"run": "b"})
    state = {"run": None}
    Checkpointer(tmp_path).load(state)
    assert state == {"run": "a"}


@pytest.mark.filterwarnings("ignore:a save that did not finish")
def test_the_clock_goes_backwards(tmp_path):
    now = time.time()
    for step, when in ((1, now + 1e6), (2, now), (3, now - 1e6), (4, 0)):
        path = save(tmp_path / f"checkpoint_{step}", step)
        for inside in (*path.iterdir(), path):
            os.utime(inside, (when, when))
    dead = tmp_path / f".checkpoint_5.saving-0123456789ab@{os.uname().nodename}"
    dead.mkdir()
    os.utime(dead, (now + 1e6, now + 1e6))  # from the future
    assert [path.name for path in complete_checkpoints(tmp_path)] == [
        f"checkpoint_{step}" for step in (1, 2, 3, 4)
    ]
    save(tmp_path / "checkpoint_5", 5)
    assert not dead.exists()
    prune_checkpoints(tmp_path, 2)
    assert [check(path) for path in complete_checkpoints(tmp_path)] == [4, 5]
