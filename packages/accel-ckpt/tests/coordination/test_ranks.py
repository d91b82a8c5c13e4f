"""Ranks agree: one failure is everybody's failure."""

import os
import threading

import pytest
import torch

from accel_ckpt import (
    CheckpointError,
    CheckpointSaveError,
    SingleProcess,
    open_training_state,
    run_together,
    save_training_state,
)
from accel_ckpt.coordination.ranks import MainProcess


class Threads:
    """Ranks that are threads of this process: the protocol, without a process group."""

    def __init__(self, world_size, locals_=None):
        self.barrier = threading.Barrier(world_size, timeout=20)
        self.slots = [None] * world_size
        self.world_size = world_size
        self.locals = locals_ or list(range(world_size))

    def of(self, rank):
        outer = self

        class Rank:
            world_size = outer.world_size
            local_rank = outer.locals[rank]

            def exchange(self, value):
                outer.slots[rank] = value
                outer.barrier.wait()
                result = list(outer.slots)
                outer.barrier.wait()
                return result

        Rank.rank = rank
        return Rank()

    def run(self, function):
        results = [None] * self.world_size

        def target(rank):
            try:
                results[rank] = function(self.of(rank))
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def test_results_are_shared():
    results = Threads(3).run(lambda c: run_together(lambda: c.rank * 10, c, doing="x"))
    assert results == [[0, 10, 20]] * 3
    assert run_together(lambda: 1, SingleProcess(), doing="x") == [1]


@pytest.mark.parametrize(
    ("options", "kind"), [({}, CheckpointError), ({"error": CheckpointSaveError}, CheckpointSaveError)]
)
def test_one_failure_is_everybody_s(options, kind):
    def fail(coordinator):
        def work():
            if coordinator.rank == 1:
                raise ZeroDivisionError("no")

        run_together(work, coordinator, doing="dividing", **options)

    first, second, third = Threads(3).run(fail)
    assert isinstance(second, ZeroDivisionError)
    for error in (first, third):
        assert type(error) is kind
        assert "dividing failed on another rank" in str(error)
        assert "rank 1: ZeroDivisionError: no" in str(error)


def save(coordinator, path, step=1, bad_rank=None, **options):
    return save_training_state(
        path,
        models=[{"w": torch.full((3,), float(step))}] if coordinator.local_rank == 0 else [],
        shared={"step": step} if coordinator.local_rank == 0 else {},
        per_rank={"rng": coordinator.rank if coordinator.rank != bad_rank else object()},
        coordinator=coordinator,
        **options,
    )


@pytest.mark.parametrize("bad_rank", [0, 1, 2])
def test_a_failing_rank_leaves_the_previous_checkpoint(tmp_path, bad_rank):
    assert Threads(3).run(lambda c: save(c, tmp_path / "c")) == [tmp_path / "c"] * 3
    errors = Threads(3).run(lambda c: save(c, tmp_path / "c", 2, bad_rank))
    for rank, error in enumerate(errors):
        assert "['rng'] is of type builtins.object" in str(error)
        assert rank == bad_rank or f"rank {bad_rank}: UnsupportedValueError" in str(error)
    assert open_training_state(tmp_path / "c").shared["step"] == 1
    assert os.listdir(tmp_path) == ["c"]


def test_t8_every_file_has_one_writer(tmp_path):
    writers = []

    from accel_ckpt.disk import Disk

    class Recording(Disk):
        def open_new(self, path):
            writers.append(path.name)
            return super().open_new(path)

    Threads(3).run(lambda c: save(c, tmp_path / "c", disk=Recording()))
    assert sorted(writers) == sorted(set(writers))
    checkpoint = open_training_state(tmp_path / "c")
    assert [checkpoint.per_rank(r)["rng"] for r in range(3)] == [0, 1, 2]
    assert checkpoint.manifest.ranks == (0, 1, 2)
    assert checkpoint.manifest.world_size == 3


def test_each_node_saves_its_own_folder(tmp_path):
    world = Threads(4, [0, 1, 0, 1])
    results = world.run(lambda c: save(c, tmp_path / f"node{c.rank // 2}" / "c", each_node=True))
    assert not [r for r in results if isinstance(r, BaseException)], results
    for node, ranks in ((0, (0, 1)), (1, (2, 3))):
        checkpoint = open_training_state(tmp_path / f"node{node}" / "c")
        assert checkpoint.manifest.ranks == ranks
        assert checkpoint.manifest.world_size == 4
        assert torch.equal(checkpoint.models[0]["w"], torch.ones(3))
        assert checkpoint.per_rank(ranks[1])["rng"] == ranks[1]


def test_each_node_on_a_shared_file_system_is_an_error(tmp_path):
    errors = Threads(2, [0, 0]).run(lambda c: save(c, tmp_path / "c", each_node=True))
    assert any("share this file system" in str(error) for error in errors)
    assert all(isinstance(error, CheckpointSaveError) for error in errors)


def test_ranks_with_different_folders_are_an_error(tmp_path):
    errors = Threads(2).run(lambda c: save(c, tmp_path / str(c.rank)))
    assert all("different folders" in str(error) for error in errors)


def test_a_folder_that_a_rank_does_not_see_is_an_error(tmp_path):
    def run(coordinator):
        if coordinator.rank == 1:
            # It hears of another folder, and so does not see that of rank 0, as with a disk of its own.
            original = coordinator.exchange

            def exchange(value):
                result = original(value)
                return ["not-the-token", *result[1:]] if result[1:] == [None] else result

            coordinator.exchange = exchange
        return save(coordinator, tmp_path / "c")

    first, second = Threads(2).run(run)
    assert "not visible here" in str(second)
    assert "rank 1: CheckpointSaveError" in str(first)
    assert os.listdir(tmp_path) == []


def test_the_main_process_saves_alone_what_a_larger_world_loads(tmp_path):
    folder = save_training_state(
        tmp_path / "state",
        models=[{"w": torch.ones(3)}],
        shared={"optimizer": {"m": torch.zeros(1 << 16)}},
        per_rank={"rng": 7},
        replicated=["optimizer"],
        coordinator=MainProcess(4),
    )
    checkpoint = open_training_state(folder)
    assert checkpoint.manifest.world_size == 4
    assert checkpoint.manifest.ranks == (0,)
    assert checkpoint.per_rank(0)["rng"] == 7
    assert checkpoint.per_rank(3, allow_missing=True) is None
    assert torch.equal(checkpoint.shared["optimizer"]["m"], torch.zeros(1 << 16))
