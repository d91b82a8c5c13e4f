"""Loaders on meshes: ranks with one batch index read exactly the same, augmentation included."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    get_worker_info,
)

from accel_state.seeding import get_rng_state, set_rng_state
from accel_state.world.process import PartialState
from accel_train.data import prepare_data_loader, skip_first_batches
from accel_train.data.prepare import prepare_for_ranks
from accel_train.mesh import DIMENSIONS, Mesh
from accel_train.plugins import DataLoaderConfiguration
from accel_train.ranks import Ranks
from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")
SIZE = 23
EPOCHS = 3


def noisy(index, own=None):
    """A sample with augmentation from every generator."""
    extra = own.random() if own is not None else 0.0
    return torch.tensor([float(index), torch.rand(()).item(), random.random(), np.random.rand(), extra])


class Rows(Dataset):
    def __init__(self, own=None):
        self.rng = own

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return noisy(index, self.rng)


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (noisy(index) for index in range(first, SIZE, step))


class Late(Sampler):
    """Not torch's; has a generator of its own, in another state on each rank."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(PartialState().process_index)

    def __iter__(self):
        yield from torch.randperm(SIZE, generator=self.generator).tolist()

    def __len__(self):
        return SIZE


class OwnBatches(BatchSampler):
    def __iter__(self):
        yield from super().__iter__()


def own_random():
    return random.Random(PartialState().process_index)


KINDS = {
    "map": lambda: DataLoader(Rows(), 2, shuffle=True),
    "map, own generators": lambda: DataLoader(
        Rows(own_random()),
        2,
        shuffle=True,
        generator=torch.Generator().manual_seed(PartialState().process_index),
    ),
    "map, custom sampler": lambda: DataLoader(Rows(), 2, sampler=Late()),
    "map, custom batches": lambda: DataLoader(
        Rows(), batch_sampler=OwnBatches(RandomSampler(range(SIZE)), 2, False)
    ),
    "map, single samples": lambda: DataLoader(Rows(), batch_size=None, shuffle=True),
    "map, workers": lambda: DataLoader(
        Rows(), 2, shuffle=True, num_workers=2, multiprocessing_context="fork"
    ),
    "map, kept workers": lambda: DataLoader(
        Rows(), 2, shuffle=True, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    ),
    "stream": lambda: DataLoader(Stream(), 2),
    "stream, worker": lambda: DataLoader(Stream(), 2, num_workers=1, multiprocessing_context="fork"),
    "dispatched map": lambda: DataLoader(Rows(), 2, shuffle=True),
    "dispatched stream": lambda: DataLoader(Stream(), 2),
    "dispatched, workers": lambda: DataLoader(
        Rows(), 2, shuffle=True, num_workers=2, multiprocessing_context="fork"
    ),
}

MESHES = [
    (2, {"dp_shard": 2}),
    (2, {"tp": 2}),
    (2, {"pp": 2}),
    (4, {"dp_replicate": 2, "tp": 2}),
    (4, {"dp_shard": 2, "cp": 2}),
    (4, {"pp": 2, "dp_replicate": 2}),
]


def batch_ranks(degrees):
    state = PartialState(cpu=True)
    return Mesh(degrees, "cpu", state.num_processes, state.process_index).batch


def build(kind, ranks, **options):
    config = DataLoaderConfiguration(dispatch_batches="dispatched" in kind, **options)
    return prepare_for_ranks(KINDS[kind](), ranks, config, device="cpu", rng_types=["generator"])


def seed(offset=0):
    value = 7 + 31 * PartialState(cpu=True).process_index + offset
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def epochs(loader, ranks, count=EPOCHS, until=None, seen=None, ask=False):
    """This rank's real rows by epoch, and a draw of the model after each batch; stops after a batch to save."""
    seen = [] if seen is None else seen
    while loader.iteration < count:
        epoch = loader.iteration
        for step, batch in enumerate(loader):
            valid = loader.real_rows
            rows = batch if batch.dim() == 1 else batch[:valid]
            padding = batch.dim() == 1 and valid == 0
            end = loader.end_of_dataloader if ask else None
            seen.append((epoch, [] if padding else rows.tolist(), batch.tolist(), torch.rand(1).item(), end))
            if until == (epoch, step):
                return {"loader": loader.state_dict(), "rng": get_rng_state()}
    return seen


def everything(degrees):
    ranks = batch_ranks(degrees)
    found = {}
    for kind in KINDS:
        seed()
        loader = build(kind, ranks)
        found[kind] = epochs(loader, ranks, 2), len(loader) if "stream" not in kind else None
    return ranks.index, found


def one_process_order(kind):
    """The samples of the first epoch by plain torch, from rank 0's generators; what is read moves the second."""
    torch.manual_seed(7)
    return [int(row[0]) for batch in KINDS[kind]() for row in batch.view(-1, 5)]


@pytest.fixture(
    scope="module", params=MESHES, ids=lambda mesh: " x ".join(f"{k} {v}" for k, v in mesh[1].items())
)
def mesh(request):
    world, degrees = request.param
    return worlds.run(everything, world, degrees, timeout=120)


@pytest.mark.wide(only=["dp_shard 2-*", "pp 2-*", "dp_replicate 2 x tp 2-*", "pp 2 x dp_replicate 2-*"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_one_index_read_the_same_and_all_indexes_everything(kind, mesh):
    of_index: dict[int, list] = {}
    for index, found in mesh:
        of_index.setdefault(index, []).append(found[kind])
    for same in of_index.values():
        for seen, length in same:
            batches = [(epoch, real, whole) for epoch, real, whole, _, _ in seen]
            assert batches == [(epoch, real, whole) for epoch, real, whole, _, _ in same[0][0]]
            assert length is None or 2 * length == len(seen)
    shares = [same[0][0] for _, same in sorted(of_index.items())]
    assert len({len(share) for share in shares}) == 1
    for epoch in range(2):
        rows = [
            row
            for step in zip(*(share for share in shares), strict=True)
            if step[0][0] == epoch
            for part in step
            for row in ([part[1]] if part[1] and not isinstance(part[1][0], list) else part[1])
        ]
        assert sorted(int(row[0]) for row in rows) == list(range(SIZE))
        if epoch == 0 and ("stream" in kind or kind in ("map", "map, workers", "dispatched map")):
            assert [int(row[0]) for row in rows] == one_process_order(kind)
        noise = [tuple(row[1:4]) for row in rows]
        assert len(set(noise)) == SIZE  # between samples, and so between indexes, augmentation differs


def test_the_model_draws_for_itself(mesh):
    """Dropout of ranks that read alike may differ, as their seeds do."""
    for kind in KINDS:
        draws = [tuple(draw for _, _, _, draw, _ in found[kind][0]) for _, found in mesh]
        assert len(set(draws)) == len(draws), kind


def resumed(degrees, kinds):
    """Of each kind: the uninterrupted run, and one that was saved, and continued by new objects."""
    ranks = batch_ranks(degrees)
    found = {}
    for kind in kinds:
        for stateful in (True, False):
            for place in ((0, 1), (1, 2)):
                for ask in (False, True):
                    seed()
                    whole = epochs(build(kind, ranks, use_stateful_dataloader=stateful), ranks, ask=ask)
                    seed()
                    parts: list = []
                    loader = build(kind, ranks, use_stateful_dataloader=stateful)
                    saved = epochs(loader, ranks, until=place, seen=parts, ask=ask)
                    seed(1000)
                    fresh = build(kind, ranks, use_stateful_dataloader=stateful)
                    fresh.load_state_dict(saved["loader"])
                    set_rng_state(saved["rng"])
                    if not stateful:
                        rest = skip_first_batches(fresh, place[1] + 1)
                        epochs(rest, ranks, place[0] + 1, seen=parts, ask=ask)
                    epochs(fresh, ranks, seen=parts, ask=ask)
                    found[kind, stateful, place, ask] = whole == parts
    return found


@pytest.mark.parametrize(
    ("world", "degrees"),
    [(2, {"tp": 2}), pytest.param(4, {"dp_shard": 2, "tp": 2}, marks=pytest.mark.full)],
    ids=str,
)
@pytest.mark.full
def test_a_resumed_run_reads_and_draws_what_the_uninterrupted_one_does(world, degrees):
    kinds = [kind for kind in KINDS if "kept" not in kind and "stream, worker" not in kind]
    for found in worlds.run(resumed, world, degrees, kinds, timeout=240):
        assert [case for case, same in found.items() if not same] == []


def moved(degrees, kind, folder, resume):
    """Three steps of an epoch, saved by each rank; or the rest of it, by the ranks of another mesh."""
    ranks = batch_ranks(degrees)
    seed(500 if resume else 0)
    loader = build(kind, ranks, use_stateful_dataloader=True)
    if resume:
        number = ranks.rank if (folder / f"{ranks.rank}.pt").exists() else 0
        loader.load_state_dict(torch.load(folder / f"{number}.pt", weights_only=False))
    seen = []
    for step, batch in enumerate(loader):
        seen.append([int(row[0]) for row in batch[: loader.real_rows]])
        if not resume and step == 2:
            torch.save(loader.state_dict(), folder / f"{ranks.rank}.pt")
            break
    return ranks.index, seen


@pytest.mark.wide(but=["dp x tp to dp-map", "dp to pp-*"])
@pytest.mark.parametrize("kind", ["map", "map, custom sampler", "map, custom batches", "dispatched map"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, {"dp_shard": 2, "tp": 2}), (2, {"dp_shard": 2})),
        ((2, {"tp": 2}), (4, {"dp_shard": 2, "cp": 2})),
        ((2, {"dp_shard": 2}), (2, {"pp": 2})),
    ],
    ids=["dp x tp to dp", "tp to dp x cp", "dp to pp"],
)
def test_a_state_is_loaded_by_another_number_of_batch_ranks(tmp_path, kind, before, after):
    samples: list[int] = []
    for (world, degrees), resume in ((before, False), (after, True)):
        answers = worlds.run(moved, world, degrees, kind, tmp_path, resume)
        for index, seen in answers:
            assert seen == dict(reversed(answers))[index]  # the first rank's of this index
        shares = [seen for _, seen in sorted(dict(answers).items())]
        samples += [row for step in zip(*shares, strict=True) for part in step for row in part]
    assert sorted(samples) == list(range(SIZE))


def test_no_dimension_of_a_mesh_is_named_in_data():
    """Data knows which ranks read different samples, and not why."""
    import re
    from pathlib import Path

    import accel_train.data

    words = re.compile(rf"""["'](?:{"|".join(DIMENSIONS)})["']|device_mesh\[""")
    for file in Path(accel_train.data.__file__).parent.rglob("*.py"):
        assert not words.search(file.read_text()), file


def foreign_mesh(names, shape):
    from torch.distributed.device_mesh import init_device_mesh

    PartialState(cpu=True)
    seed()
    found = init_device_mesh("cpu", shape, mesh_dim_names=names)
    loader = prepare_data_loader(KINDS["map"](), torch_device_mesh=found)
    assert loader.torch_device_mesh is found
    return [batch.tolist() for _ in range(2) for batch in loader]


def test_a_mesh_of_the_script_in_any_order_of_dimensions():
    first, second, third, fourth = worlds.run(foreign_mesh, 4, ("tp", "dp"), (2, 2))
    assert first == third
    assert second == fourth
    assert first != second


def test_ranks_say_whether_several_are_alike():
    assert not Ranks.of_world(4, 2).repeats
    alike = Ranks(2, 1, None, (0, 1, 0, 1), 3)
    assert alike.repeats
    assert not alike.is_first
    assert Ranks(2, 1, None, (0, 1, 0, 1), 1).is_first
