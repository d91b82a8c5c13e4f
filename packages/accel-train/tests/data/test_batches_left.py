"""How many batches are left: counted, never fetched."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from accel_state.world.process import PartialState
from accel_train.data import prepare_data_loader, skip_first_batches
from testkit import worlds
from testkit.samples import Numbers


class Sized(Numbers):
    def __len__(self):
        return self.n


class Unsized(Sampler):
    def __iter__(self):
        return iter(range(10))


class OwnBatches(BatchSampler):
    def __iter__(self):
        yield from super().__iter__()


def prepare(loader, ranks=1, rank=0, **options):
    return prepare_data_loader(loader, num_processes=ranks, process_index=rank, **options)


def counted(loader):
    """What is left after each batch, by the loader; and by counting what came."""
    said = [loader.batches_left for _ in loader]
    return said, list(range(len(said) - 1, -1, -1))


@given(
    kind=st.sampled_from(["shuffle", "custom batches", "no batching", "stream"]),
    n=st.integers(0, 40),
    size=st.integers(1, 5),
    ranks=st.integers(1, 4),
    split=st.booleans(),
    even=st.booleans(),
    drop_last=st.booleans(),
    skip=st.integers(0, 4),
)
def test_the_number_is_exact(kind, n, size, ranks, split, even, drop_last, skip):
    size = size * ranks if split else size
    builds = {
        "shuffle": lambda: (
            DataLoader(range(n), size, shuffle=True, drop_last=drop_last)
            if n
            else DataLoader(range(0), size, drop_last=drop_last)
        ),
        "custom batches": lambda: DataLoader(
            range(n + 1), batch_sampler=OwnBatches(RandomSampler(range(n + 1)), size, drop_last)
        ),
        "no batching": lambda: DataLoader(torch.arange(n), batch_size=None),
        "stream": lambda: DataLoader(Sized(n), size, drop_last=drop_last),
    }
    split = split and kind != "no batching"
    for rank in range(ranks):
        loader = prepare(builds[kind](), ranks, rank, split_batches=split, even_batches=even)
        for current in (skip_first_batches(loader, skip), loader):
            said, true = counted(current)
            if kind == "custom batches" and ranks > 1 and split and not even and not drop_last:
                true = [None] * len(true)  # whether the last batch has a part for each rank is not known
            assert said == true
            assert current.batches_left == 0


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["map", "custom", "stream"])
def test_a_resumed_loader_counts_what_is_left(kind, ranks):
    def build():
        data = Sized(23) if kind == "stream" else range(23)
        plain = DataLoader(data, 2)
        if kind == "custom":
            plain = DataLoader(data, batch_sampler=OwnBatches(RandomSampler(data), 2, False))
        return prepare(plain, ranks, 0, use_stateful_dataloader=True)

    loader = build()
    iterator = iter(loader)
    next(iterator), next(iterator)
    left, state = loader.batches_left, loader.state_dict()
    fresh = build()
    fresh.load_state_dict(state)
    assert counted(fresh) == (list(range(left - 1, -1, -1)),) * 2


def test_it_is_not_known_without_a_length():
    for loader in (
        prepare(DataLoader(Numbers(5), 2)),
        prepare(DataLoader(range(10), 2, sampler=Unsized())),
        prepare(DataLoader(range(10), 2, sampler=Unsized()), 2, 0),
        prepare(DataLoader(Sized(5), 2, num_workers=2, multiprocessing_context="fork")),
    ):
        assert {loader.batches_left for _ in loader} == {None}
    one = prepare(DataLoader(Sized(5), 2, num_workers=1, multiprocessing_context="fork"))
    assert counted(one) == ([2, 1, 0],) * 2


def test_a_length_that_was_too_small_is_not_believed_any_longer():
    class Wrong(Unsized):
        def __len__(self):
            return 4

    loader = prepare(DataLoader(range(10), 2, sampler=Wrong()))
    assert [loader.batches_left for _ in loader] == [1, 0, None, None, None]


def test_there_is_no_number_where_nothing_is_iterated():
    loader = prepare(DataLoader(range(6), 2))
    assert loader.batches_left is None
    iterator = iter(loader)
    assert loader.batches_left == 3
    next(iterator)
    assert loader.batches_left == 2
    del iterator
    assert loader.batches_left is None


def test_asking_reads_nothing_ahead():
    data = Sized(9)
    loader = prepare(DataLoader(data, 2))
    iterator = iter(loader)
    next(iterator)
    before = torch.get_rng_state()
    assert loader.batches_left == 4
    assert data.read == 2
    assert torch.equal(torch.get_rng_state(), before)


def dispatched():
    state = PartialState(cpu=True)
    found = {}
    for name, build in {
        "map": lambda: DataLoader(range(11), 2),
        "drop last": lambda: DataLoader(range(11), 2, drop_last=True),
        "stream": lambda: DataLoader(Sized(11), 2),
        "only rank 0 has data": lambda: DataLoader(range(11 if state.process_index == 0 else 1), 2),
        "unsized": lambda: DataLoader(Numbers(11), 2),
    }.items():
        for split in (False, True):
            loader = prepare_data_loader(
                build(), device=state.device, put_on_device=True, dispatch_batches=True, split_batches=split
            )
            found[name, split] = counted(loader), counted(skip_first_batches(loader, 1))
    return found


def test_rank_0_counts_for_all_where_it_dispatches():
    one, two = worlds.run(dispatched, 2)
    assert one == two
    for (name, _), counts in one.items():
        for said, true in counts:
            assert said == ([None] * (len(true) - 1) + [0] if name == "unsized" else true), name


def test_uneven_ranks_count_their_own():
    assert [
        counted(prepare(DataLoader(range(9), 2), 2, rank, even_batches=False))[0] for rank in range(2)
    ] == [[2, 1, 0], [1, 0]]
