"""A training state that several ranks save together; ranks are threads, the files are read by safetensors."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

from accel_ckpt import CheckpointSaveError, Part, UnsupportedValueError, save_training_state
from accel_ckpt.coordination.ranks import SingleProcess
from accel_ckpt.saving.save_state import StateContent, begin_save, save_collected


class Ranks:
    """Calls a function on ranks that exchange values; returns what each returned or raised."""

    def __init__(self, *local_ranks):
        self.local_ranks = local_ranks
        self.slots = [None] * len(local_ranks)
        self.barrier = threading.Barrier(len(local_ranks), timeout=20)
        self.exchanges = 0

    def __call__(self, function):
        def call(rank):
            try:
                return function(rank, _Rank(self, rank))
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(self.local_ranks)) as pool:
            return list(pool.map(call, range(len(self.local_ranks))))


class _Rank:
    def __init__(self, ranks, rank):
        self.ranks, self.rank = ranks, rank
        self.local_rank, self.world_size = ranks.local_ranks[rank], len(ranks.local_ranks)

    def exchange(self, value):
        self.ranks.slots[self.rank] = value
        self.ranks.barrier.wait()
        found = list(self.ranks.slots)
        self.ranks.exchanges += self.rank == 0
        self.ranks.barrier.wait()
        return found


def rows(rank, weight):
    half = len(weight) // 2
    return Part(weight[rank * half :][:half], (rank * half, 0), tuple(weight.shape))


def test_two_ranks_save_one_folder_in_five_exchanges(tmp_path):
    weight, bias = torch.arange(24.0).view(4, 6), torch.ones(3)
    ranks = Ranks(0, 1)

    def save(rank, coordinator):
        return save_training_state(
            tmp_path / "c",
            models=[{"_orig_mod.w": rows(rank, weight), "_orig_mod.b": bias}],
            shared={"epoch": 3 + rank},
            per_rank={"seed": 7 + rank},
            coordinator=coordinator,
        )

    assert ranks(save) == [tmp_path / "c"] * 2
    assert ranks.exchanges == 5
    parts = [load_file(tmp_path / f"c/model-shard-0000{rank}.safetensors")["w"] for rank in (0, 1)]
    assert torch.equal(torch.cat(parts), weight)
    assert torch.equal(load_file(tmp_path / "c/model.safetensors")["b"], bias)
    assert json.loads((tmp_path / "c/state.json").read_text()) == {"epoch": 3}
    seeds = [json.loads((tmp_path / f"c/rank-0000{rank}.json").read_text()) for rank in (0, 1)]
    assert seeds == [{"seed": 7}, {"seed": 8}]
    manifest = json.loads((tmp_path / "c/manifest.json").read_text())
    assert set(manifest["files"]) == {path.name for path in (tmp_path / "c").iterdir()} - {"manifest.json"}


def test_every_node_saves_a_folder_of_its_own(tmp_path):
    """Four ranks on two nodes, which see different disks."""
    moments = {f"m{index}": torch.full((1 << 15,), float(index)) for index in range(4)}

    def save(rank, coordinator):
        return save_training_state(
            tmp_path / f"node{rank // 2}",
            models=[{"w": torch.full((2,), float(rank))}],
            shared={"o": moments},
            per_rank={"rank": rank},
            replicated=("o",),
            each_node=True,
            coordinator=coordinator,
        )

    assert Ranks(0, 1, 0, 1)(save) == [tmp_path / f"node{node}" for node in (0, 0, 1, 1)]
    for node in (0, 1):
        folder = tmp_path / f"node{node}"
        assert load_file(folder / "model.safetensors")["w"].tolist() == [2.0 * node] * 2
        own = sorted(path.name for path in folder.glob("rank-*"))
        assert own == [f"rank-0000{rank}.json" for rank in (2 * node, 2 * node + 1)]
        # The ranks of a node divide what they hold alike, so that each folder has all of it.
        files = [load_file(path) for path in sorted(folder.glob("state*.safetensors"))]
        assert sorted(name for tensors in files for name in tensors) == [f"o.m{index}" for index in range(4)]
        assert [len(tensors) for tensors in files] == [2, 2]


def test_divided_tensors_are_not_saved_on_each_node(tmp_path):
    def save(rank, coordinator):
        return save_training_state(
            tmp_path / f"node{rank}",
            models=[{"w": rows(rank, torch.ones(2, 2))}],
            shared={},
            per_rank={},
            each_node=True,
            coordinator=coordinator,
        )

    for error in Ranks(0, 0)(save):
        assert isinstance(error, UnsupportedValueError)
        assert "save without save_on_each_node" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_tensor_that_is_not_all_there(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "notes.txt").write_text("mine")

    def save(rank, coordinator):
        part = Part(torch.ones(1, 2), (rank, 0), (3, 2))  # the third row is nobody's
        return save_training_state(
            tmp_path / "c", models=[{"w": part}], shared={}, per_rank={}, coordinator=coordinator
        )

    for error in Ranks(0, 1)(save):
        assert isinstance(error, UnsupportedValueError)
        assert "w" in str(error)
    assert [path.name for path in tmp_path.rglob("*")] == ["c", "notes.txt"]


def test_one_rank_that_cannot_encode_ends_the_save_on_all(tmp_path):
    def save(rank, coordinator):
        return save_training_state(
            tmp_path / "c",
            models=[],
            shared={},
            per_rank={"x": print if rank else 1},
            coordinator=coordinator,
        )

    first, second = Ranks(0, 1)(save)
    assert isinstance(second, UnsupportedValueError)
    assert isinstance(first, CheckpointSaveError)
    assert "rank 1: UnsupportedValueError" in str(first)
    assert list(tmp_path.iterdir()) == []


def test_what_is_changed_before_the_writing_is_written(tmp_path):
    weights = {"w": torch.zeros(2)}

    def before(folder):
        assert [path.name for path in folder.iterdir() if not path.name.startswith(".")] == []
        (folder / "extra.txt").write_text("from the hook")
        weights["w"] = torch.ones(2)

    path = save_training_state(tmp_path / "c", models=[weights], shared={}, per_rank={}, before_write=before)
    assert load_file(path / "model.safetensors")["w"].tolist() == [1.0, 1.0]
    assert (path / "extra.txt").read_text() == "from the hook"
    assert "extra.txt" in json.loads((path / "manifest.json").read_text())["files"]


@pytest.mark.parametrize("size", ["ten", -1])
def test_a_size_that_is_none_is_refused_before_anything(tmp_path, size):
    called = []
    with pytest.raises(ValueError, match="size"):
        save_training_state(
            tmp_path / "c",
            models=[],
            shared={},
            per_rank={},
            max_shard_size=size,
            before_write=called.append,
        )
    assert called == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("canonical", [True, False])
def test_names_that_are_canonical_are_not_read_again(tmp_path, canonical):
    content = StateContent(
        models=[{"_orig_mod.w": torch.ones(1)}], shared={}, per_rank={}, canonical=canonical
    )
    path = save_collected(tmp_path / "c", content)
    assert list(load_file(path / "model.safetensors")) == ["_orig_mod.w" if canonical else "w"]


class Collector:
    each_node = False

    def __init__(self, mine):
        self.mine = mine

    def collect(self):
        return self.mine

    def content(self, collected):
        return StateContent(models=[], shared={"all": collected}, per_rank={"mine": self.mine})


def test_ranks_know_what_all_have_collected(tmp_path):
    Ranks(0, 1)(lambda rank, ranks: save_collected(tmp_path / "c", Collector(f"r{rank}"), ranks))
    assert json.loads((tmp_path / "c/state.json").read_text()) == {"all": ["r0", "r1"]}
    assert json.loads((tmp_path / "c/rank-00001.json").read_text()) == {"mine": "r1"}


def test_a_save_that_is_begun_is_not_there_until_it_is_complete(tmp_path):
    content = StateContent(models=[{"w": torch.ones(2)}], shared={}, per_rank={})
    transaction, plan = begin_save(tmp_path / "c", content, SingleProcess())
    assert not (tmp_path / "c").exists()
    assert transaction.complete(plan.write) == tmp_path / "c"
    assert load_file(tmp_path / "c/model.safetensors")["w"].tolist() == [1.0, 1.0]
    transaction, _ = begin_save(tmp_path / "d", content, SingleProcess())
    transaction.abort()
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_replicated_trees_are_divided_among_several_ranks_only(tmp_path, ranks):
    moments = {f"m{index}": torch.full((1 << 15,), float(index)) for index in range(4)}

    def save(rank, coordinator):
        return save_training_state(
            tmp_path / "c",
            models=[],
            shared={"o": moments},
            per_rank={},
            replicated=("o",),
            coordinator=coordinator,
        )

    assert Ranks(*range(ranks))(save) == [tmp_path / "c"] * ranks
    files = {path.name: load_file(path) for path in (tmp_path / "c").glob("state*.safetensors")}
    assert {name: len(tensors) for name, tensors in files.items()} == (
        {"state.safetensors": 4} if ranks == 1 else {"state.safetensors": 2, "state-00001.safetensors": 2}
    )
    found = {name: float(t[-1]) for tensors in files.values() for name, t in tensors.items()}
    assert found == {f"o.m{index}": float(index) for index in range(4)}
