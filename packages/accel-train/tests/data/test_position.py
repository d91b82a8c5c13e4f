"""A saved position that means something else for this loader is refused before anything is changed."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from accel_state.errors import NotAvailableError
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [(2, 2), (0, 1), (1, 0), (3, 3)])
def test_the_same_workers_read_the_rest_exactly(kind, before, after):
    seen, state = left_after(prepare(stream(before), **KINDS[kind]), 7)
    fresh = prepare(stream(after, prefetch_factor=3 if after else None), **KINDS[kind])
    fresh.load_state_dict(state)
    samples = [index for batch in [*seen, *(batch.tolist() for batch in fresh)] for index in batch]
    assert sorted(samples) == list(range(SIZE))


def test_skipping_by_hand_is_refused_too():
    _, state = left_after(prepare(stream(2), stateful=False), 4)
    fresh = prepare(stream(3), stateful=False)
    fresh.load_state_dict(state)
    with pytest.raises(NotAvailableError, match="num_workers=2"):
        skip_first_batches(fresh, 4)
    assert len(list(fresh)) == 39  # an epoch from its beginning means the same for any workers


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
