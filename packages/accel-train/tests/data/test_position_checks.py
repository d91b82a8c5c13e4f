"""A saved position that means something else for this loader is refused before anything is changed."""

import contextlib

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from accel_state.errors import AccelError, NotAvailableError
from accel_train import MixedDataLoader, PackedDataset, TokenBatchSampler
from accel_train.data import prepare_data_loader, skip_first_batches
from accel_train.errors import DataError

SIZE = 195


class Split(IterableDataset):
    """Divides itself among workers."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, SIZE, step))


class Backwards(Sampler):
    def __iter__(self):
        return iter(range(SIZE - 1, -1, -1))

    def __len__(self):
        return SIZE


class Tracked(Dataset):
    """Map-style, and keeps a position."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def prepare(loader, ranks=1, stateful=True, **options):
    return prepare_data_loader(
        loader,
        num_processes=ranks,
        process_index=0,
        use_stateful_dataloader=stateful,
        device="cpu",
        **options,
    )


def stream(workers, batch=5, **options):
    context = "fork" if workers else None
    return DataLoader(Split(), batch, num_workers=workers, multiprocessing_context=context, **options)


def left_after(loader, batches):
    iterator = iter(loader)
    seen = [next(iterator).tolist() for _ in range(batches)]
    return seen, loader.state_dict()


KINDS = {"own part": {}, "dispatched": {"dispatch_batches": True, "put_on_device": True}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 0), (0, 2), (2, 1)])
def test_a_stream_is_not_continued_by_another_number_of_workers(kind, before, after):
    _, state = left_after(prepare(stream(before), **KINDS[kind]), 5)
    fresh = prepare(stream(after), **KINDS[kind])
    for load in (fresh.check_state_dict, fresh.load_state_dict):
        with pytest.raises(NotAvailableError, match=rf"num_workers={before}\).*num_workers={after}\)"):
            load(state)
    assert fresh.iteration == 0
    assert fresh.state_dict()["batches_yielded"] == 0  # nothing was loaded


@pytest.mark.wide(but=["3-3-dispatched"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [(2, 2), (0, 1), (1, 0), (3, 3)])
def test_the_same_workers_read_the_rest_exactly(kind, before, after):
    seen, state = left_after(prepare(stream(before), **KINDS[kind]), 7)
    fresh = prepare(stream(after, prefetch_factor=3 if after else None), **KINDS[kind])
    fresh.load_state_dict(state)
    samples = [index for batch in [*seen, *(batch.tolist() for batch in fresh)] for index in batch]
    assert sorted(samples) == list(range(SIZE))


@pytest.mark.wide
def test_skipping_by_hand_is_refused_too():
    _, state = left_after(prepare(stream(2), stateful=False), 4)
    fresh = prepare(stream(3), stateful=False)
    fresh.load_state_dict(state)
    with pytest.raises(NotAvailableError, match="num_workers=2"):
        skip_first_batches(fresh, 4)
    assert len(list(fresh)) == 39  # an epoch from its beginning means the same for any workers


@pytest.mark.wide
def test_between_epochs_anything_may_change():
    loader = prepare(stream(2))
    list(loader)
    fresh = prepare(stream(3, batch=4))
    fresh.load_state_dict(loader.state_dict())
    assert fresh.iteration == 1
    assert sorted(index for batch in fresh for index in batch.tolist()) == list(range(SIZE))


def test_drop_last_matters_where_several_workers_read():
    _, state = left_after(prepare(stream(2)), 5)
    with pytest.raises(NotAvailableError, match="with drop_last=False; with drop_last=True"):
        prepare(stream(2, drop_last=True)).load_state_dict(state)
    _, state = left_after(prepare(stream(0)), 5)
    fresh = prepare(stream(0, drop_last=True))
    fresh.load_state_dict(state)
    assert next(iter(fresh)).tolist() == [25, 26, 27, 28, 29]


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_batch_size_of_a_stream_is_exact_or_refused(ranks):
    _, state = left_after(prepare(stream(0, 6), ranks), 2)
    fresh = prepare(stream(0, 4), ranks)
    fresh.load_state_dict(state)
    assert next(iter(fresh)).tolist()[0] == 12 * ranks
    with pytest.raises(NotAvailableError, match=rf"{12 * ranks} samples.*batches of {5 * ranks} samples"):
        prepare(stream(0, 5), ranks).load_state_dict(state)


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (lambda size: DataLoader(range(SIZE), size, sampler=Backwards()), {}),
        (lambda size: DataLoader(range(SIZE), size), KINDS["dispatched"]),
        (lambda size: stream(0, size), KINDS["dispatched"]),
        (lambda size: stream(0, size), {"pre_sharded": True, "ranks": 2}),
    ],
    ids=["custom sampler", "dispatched map", "dispatched stream", "own streams"],
)
def test_a_position_in_batches_needs_the_same_batch_size(build, options):
    _, state = left_after(prepare(build(4), **options), 3)
    with pytest.raises(NotAvailableError, match="with batch size 4; the batch size is 6 now"):
        prepare(build(6), **options).load_state_dict(state)
    fresh = prepare(build(4), **options)
    fresh.load_state_dict(state)
    assert sorted(next(iter(fresh)).tolist())[0] in (12, SIZE - 16)


def test_an_order_drawn_at_once_continues_with_any_batch_size_and_workers():
    _, state = left_after(prepare(DataLoader(range(SIZE), 4)), 3)
    fresh = prepare(DataLoader(range(SIZE), 7, num_workers=1, multiprocessing_context="fork"))
    fresh.load_state_dict(state)
    assert next(iter(fresh)).tolist() == list(range(12, 19))


def test_another_kind_of_loader_is_refused():
    _, state = left_after(prepare(stream(0)), 3)
    with pytest.raises(DataError, match="counts local_batches, but this loader counts base_batches"):
        prepare(stream(0), **KINDS["dispatched"]).load_state_dict(state)
    with pytest.raises(DataError, match="counts local_batches, but this loader counts samples"):
        prepare(DataLoader(range(SIZE), 5)).load_state_dict(state)


def test_a_dataset_that_keeps_its_position_in_workers_needs_as_many():
    def build(workers):
        context = "fork" if workers else None
        return prepare(DataLoader(Tracked(), 5, num_workers=workers, multiprocessing_context=context))

    _, state = left_after(build(2), 3)
    with pytest.raises(NotAvailableError, match="num_workers=2"):
        build(3).load_state_dict(state)


@pytest.mark.parametrize("finished", [False, True])
def test_another_number_of_generators_is_found_before_anything_is_changed(finished):
    saver = prepare(DataLoader(range(6), 2, shuffle=True, generator=torch.Generator().manual_seed(3)))
    iterator = iter(saver)
    for _ in range(3 if finished else 1):
        next(iterator)
    state = saver.state_dict()
    without = prepare(DataLoader(range(6), 2, shuffle=True))
    before = without.state_dict()
    for load in (without.check_state_dict, without.load_state_dict):
        with pytest.raises(DataError, match=r"had 1 own random generators .* this one has 0\. Build"):
            load(state)
    assert without.iteration == 0
    assert without.state_dict() == before


# Data of another length


class Endless(Sampler):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class Shorter(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class Counted(Shorter):
    def __len__(self):
        return self.size


def own():
    return torch.Generator().manual_seed(1)


LOADERS = {
    "shuffled": lambda size: DataLoader(range(size), 2, shuffle=True),
    "shuffled by its own generator": lambda size: DataLoader(range(size), 2, shuffle=True, generator=own()),
    "in order": lambda size: DataLoader(range(size), 2),
    "with replacement": lambda size: DataLoader(
        range(size), 2, sampler=RandomSampler(range(size), replacement=True, generator=own())
    ),
    "fewer samples": lambda size: DataLoader(
        range(99), 2, sampler=RandomSampler(range(99), num_samples=size, generator=own())
    ),
    "subset": lambda size: DataLoader(range(99), 2, sampler=SubsetRandomSampler(range(size), own())),
    "weighted": lambda size: DataLoader(
        range(99), 2, sampler=WeightedRandomSampler([1.0] * 99, size, generator=own())
    ),
    "iterated sampler": lambda size: DataLoader(range(99), 2, sampler=Endless(size)),
    "batch sampler": lambda size: DataLoader(range(99), batch_sampler=BatchSampler(Endless(size), 2, False)),
    "single samples": lambda size: DataLoader(range(size), batch_size=None, shuffle=True),
    "stream": lambda size: DataLoader(Shorter(size), 2),
    "counted stream": lambda size: DataLoader(Counted(size), 2),
    "tokens": lambda size: DataLoader(
        range(size), batch_sampler=TokenBatchSampler([3] * size, 6), collate_fn=torch.tensor
    ),
    "packed": lambda size: DataLoader(
        PackedDataset([[1, 2, 3]] * size, [3] * size, 3), 2, collate_fn=torch.tensor
    ),
}
PREFIXES_CONTINUE = (
    "iterated sampler",
    "batch sampler",
    "stream",
)  # nobody knows that they have become longer
READERS = {
    "one rank": {},
    "ranks": {"ranks": 2},
    "rank 0": {"dispatch_batches": True, "put_on_device": True},
}


def left(kind, size, ranks, batches):
    loader = prepare(LOADERS[kind](size), **READERS[ranks])
    loop = iter(loader)
    for _ in range(batches):
        next(loop)
    return loader.state_dict()


def load_and_read(loader, state):
    loader.load_state_dict(state)
    return next(iter(loader))


@pytest.mark.wide(only=["*-41"])
@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [10, 41])
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("ranks", READERS)
def test_data_of_another_length_is_refused_inside_an_epoch(ranks, kind, size):
    state = left(kind, 40, ranks, 7)
    again = prepare(LOADERS[kind](size), **READERS[ranks])
    if size > 40 and kind in PREFIXES_CONTINUE:
        again.load_state_dict(state)
        whole = [*prepare(LOADERS[kind](size), **READERS[ranks])]
        assert repr([*again]) == repr(whole[7:])
        return
    with pytest.raises(DataError, match=rf"40.*\b{size}\b|before the saved position"):
        load_and_read(again, state)
    same = prepare(LOADERS[kind](40), **READERS[ranks])
    same.load_state_dict(state)
    assert len([*same]) == len([*prepare(LOADERS[kind](40), **READERS[ranks])]) - 7


@pytest.mark.wide(only=["*-41"])
@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [10, 41])
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("ranks", READERS)
def test_data_of_another_length_is_welcome_after_an_epoch(ranks, kind, size):
    loader = prepare(LOADERS[kind](40), **READERS[ranks])
    assert len([*loader])
    again = prepare(LOADERS[kind](size), **READERS[ranks])
    again.load_state_dict(loader.state_dict())
    assert again.iteration == 1
    assert len([*again]) == len([*prepare(LOADERS[kind](size), **READERS[ranks])])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["shuffled by its own generator", "fewer samples", "subset", "stream"])
def test_an_epoch_of_other_data_can_begin_again(kind):
    state = left(kind, 40, "one rank", 7)
    again = prepare(LOADERS[kind](10), stateful=False)
    again.load_state_dict(state)
    with pytest.warns(UserWarning, match="trained on again"):
        assert len([*again]) == 5


@pytest.mark.timeout(60)
def test_batches_of_other_data_are_not_skipped():
    state = left("shuffled", 40, "one rank", 7)
    again = prepare(LOADERS["shuffled"](30), stateful=False)
    again.load_state_dict(state)
    with pytest.raises(DataError, match=r"40, and has 30 now"):
        skip_first_batches(again, 7)


@pytest.mark.timeout(60)
def test_a_source_of_a_mixture_with_other_data():
    def mixture(size):
        loaders = {"a": LOADERS["shuffled"](40), "b": LOADERS["shuffled by its own generator"](size)}
        return MixedDataLoader(
            {name: prepare(loader) for name, loader in loaders.items()},
            {"a": 1, "b": 1},
            stop="first_exhausted",
        )

    saved = mixture(40)
    loop = iter(saved)
    for _ in range(12):
        next(loop)
    state = saved.state_dict()
    for size in (10, 30, 41):
        with pytest.raises(DataError, match=rf"40, and has {size} now"):
            mixture(size).load_state_dict(state)


@pytest.mark.wide(only=["*-rank 0-*", "base_*"])
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("ranks", READERS)
@pytest.mark.parametrize(
    "where", ["samples", "base_batches", "local_batches", "pulled", "drawn", "ahead", "ranks"]
)
def test_no_count_of_a_state_is_believed(ranks, kind, where):
    """A crafted count ends in an error or in an epoch, soon."""
    state = left(kind, 40, ranks, 7)
    holder = {"drawn": state["draw"], "ahead": state["ahead"], "ranks": state}.get(where, state["position"])
    key = {"ahead": "batches"}.get(where, where)
    if key not in holder:
        pytest.skip("this kind has no such count")
    holder[key] = 1 << 60
    again = prepare(LOADERS[kind](40), **READERS[ranks])
    with contextlib.suppress(AccelError):
        again.load_state_dict(state)
        assert len([*again]) <= 40
