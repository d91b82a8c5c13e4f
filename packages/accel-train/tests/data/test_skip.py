import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from accel_train.data import (
    ActiveLoaders,
    DataLoaderDispatcher,
    DataLoaderShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    SkipDataLoader,
    prepare_data_loader,
    skip_first_batches,
)
from accel_train.errors import ArgumentTypeError, DataError
from testkit.samples import Numbers


class Reading(list):
    """Notes what is read."""

    def __init__(self, *args):
        super().__init__(*args)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


def lists(loader):
    return [batch.tolist() for batch in loader]


def prepare(loader, ranks=1, rank=0, **options):
    return prepare_data_loader(loader, num_processes=ranks, process_index=rank, **options)


def test_skip_batch_sampler():
    base = BatchSampler(range(16), 4, False)
    skipping = SkipBatchSampler(base, 2)
    assert list(skipping) == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert (len(skipping), skipping.total_length) == (2, 4)
    assert list(SkipBatchSampler(skipping, 1)) == [[12, 13, 14, 15]]
    assert list(SkipBatchSampler(base, 9)) == []
    assert len(SkipBatchSampler(base, 9)) == 0


def test_skip_data_loader():
    loader = SkipDataLoader(list(range(16)), batch_size=4, skip_batches=2)
    assert lists(loader) == lists(loader) == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert len(loader) == 2
    assert lists(SkipDataLoader(Numbers(3), batch_size=4, skip_batches=2)) == []


def test_a_loader_that_skips_answers_as_a_prepared_one():
    loader = SkipDataLoader(list(range(18)), batch_size=4, skip_batches=2)
    answers = [(loader.end_of_dataloader, loader.batches_left, loader.remainder) for _ in loader]
    assert answers == [(False, 2, 2), (False, 1, 2), (True, 0, 2)]


@pytest.mark.parametrize("data", [list(range(20)), Numbers(20)])
def test_a_loader_that_skips_continues_where_its_state_says(data):
    def make():
        return SkipDataLoader(data, 1, True, batch_size=4)

    loader = make()
    batches = iter(loader)
    assert next(batches).tolist() == [4, 5, 6, 7]
    other = make()
    other.load_state_dict(loader.state_dict())
    assert lists(other) == [[8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]


@pytest.mark.parametrize("data", [list(range(20)), Numbers(20)])
def test_a_loader_that_skips_can_be_prepared_and_skipped_further(data):
    loader = SkipDataLoader(data, 2, batch_size=4)
    assert lists(prepare(loader)) == [[8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]
    assert lists(prepare(skip_first_batches(loader, 1))) == [[12, 13, 14, 15], [16, 17, 18, 19]]
    assert lists(skip_first_batches(prepare(loader), 2)) == [[16, 17, 18, 19]]


def test_plain_loaders_stay_plain():
    plain = skip_first_batches(DataLoader(list(range(16)), batch_size=4), 2)
    assert type(plain) is DataLoader
    assert lists(plain) == [[8, 9, 10, 11], [12, 13, 14, 15]]
    stream = skip_first_batches(DataLoader(Numbers(16), batch_size=4), 2)
    assert type(stream) is SkipDataLoader
    assert lists(skip_first_batches(stream, 1)) == [[12, 13, 14, 15]]
    bare = skip_first_batches(DataLoader(torch.arange(4), batch_size=None), 3)
    assert lists(bare) == [3]


KINDS = {
    "map": (lambda: DataLoader(list(range(22)), batch_size=3), {}),
    "stream": (lambda: DataLoader(Numbers(22), batch_size=3), {}),
    "dispatch": (
        lambda: DataLoader(list(range(22)), batch_size=3),
        {"dispatch_batches": True, "put_on_device": True, "device": torch.device("cpu")},
    ),
    "dispatched stream": (
        lambda: DataLoader(Numbers(22), batch_size=3),
        {"dispatch_batches": True, "put_on_device": True, "device": torch.device("cpu")},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_prepared_loaders_stay_what_they_are(kind, ranks):
    build, options = KINDS[kind]
    if "dispatch" in kind and ranks > 1:
        return  # needs a world: see test_resume
    for rank in range(ranks):
        ledger = ActiveLoaders()
        generator = torch.Generator()
        loader = prepare(
            build(), ranks, rank, ledger=ledger, rng_types=["torch"], non_blocking=True,
            use_stateful_dataloader=True, **options,
        )  # fmt: skip
        loader.__dict__["generator"] = generator
        loader.iteration = 3
        expected = lists(loader)[2:]
        loader.iteration = 3
        skipping = skip_first_batches(loader, 2)
        assert type(skipping) is (DataLoaderDispatcher if "dispatch" in kind else DataLoaderShard)
        assert skipping.iteration == 3
        for name in (
            "device", "rng_types", "generator", "use_stateful_dataloader", "_non_blocking", "_drop_last",
            "ledger", "ranks", "synchronized_generator", "batch_size", "drop_last",
        ):  # fmt: skip
            assert getattr(skipping, name) == getattr(loader, name), name
        seen = []
        for batch in skipping:
            assert ledger.active is skipping
            seen.append((batch.tolist(), skipping.end_of_dataloader, skipping.valid_rows()))
        assert [rows for rows, _, _ in seen] == expected
        assert [end for _, end, _ in seen] == [False] * (len(seen) - 1) + [True]
        if kind in ("map", "stream") and ranks == 2:
            assert seen[-1][2] == (3, 1)
        assert lists(skip_first_batches(skipping, 1)) == expected[1:]
        if kind in ("map", "dispatch"):
            assert len(skipping) == len(expected)


def test_nothing_is_read_for_what_is_left_out():
    data = Reading(range(100))
    loader = prepare(DataLoader(data, batch_size=2), 2, 1)
    skipping = skip_first_batches(loader, 20)
    assert lists(skipping) == [[82, 83], [86, 87], [90, 91], [94, 95], [98, 99]]
    assert data.read == [82, 83, 86, 87, 90, 91, 94, 95, 98, 99]


def test_the_rest_of_a_shuffled_epoch_follows():
    for seed in range(3):
        torch.manual_seed(seed)
        loader = prepare(DataLoader(range(20), batch_size=3, shuffle=True))
        whole = lists(loader)
        torch.manual_seed(seed)
        loader = prepare(DataLoader(range(20), batch_size=3, shuffle=True))
        assert lists(skip_first_batches(loader, 2)) == whole[2:]


def test_t5_the_loader_goes_on_with_the_next_epoch_after_the_skipping_one():
    def make():
        return prepare(
            DataLoader(range(20), batch_size=3, shuffle=True), use_seedable_sampler=True, data_seed=9
        )

    whole = make()
    epochs = [lists(whole) for _ in range(4)]
    resumed = make()
    resumed.set_epoch(1)
    assert lists(skip_first_batches(resumed, 4)) == epochs[1][4:]
    assert resumed.iteration == 2
    assert lists(resumed) == epochs[2]
    assert lists(resumed) == epochs[3]


def test_the_epoch_of_the_sampler_is_not_reset():
    sampler = SeedableRandomSampler(range(8), data_seed=1)
    sampler.set_epoch(5)
    skip_first_batches(prepare(DataLoader(range(8), sampler=sampler)), 2)
    assert sampler.epoch == 5


def test_what_cannot_be_skipped():
    with pytest.raises(DataError, match="-1"):
        skip_first_batches(DataLoader(range(3)), -1)

    loader = prepare(DataLoader(range(8), batch_size=2), use_stateful_dataloader=True)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    loader.load_state_dict(state)
    with pytest.raises(DataError, match="would skip twice"):
        skip_first_batches(loader, 1)


def test_skipping_loaders_keep_a_random_sampler_in_reach():
    loader = prepare(DataLoader(range(8), batch_size=2, shuffle=True), 2, 0)
    assert isinstance(skip_first_batches(loader, 1).get_sampler(), RandomSampler)


def test_lengths_count_what_is_left_of_a_stream():
    class Sized(Numbers):
        def __len__(self):
            return self.n

    for dispatch in (False, None):
        loader = prepare(
            DataLoader(Sized(11), batch_size=2),
            device=torch.device("cpu"),
            put_on_device=True,
            dispatch_batches=dispatch,
        )
        skipped = skip_first_batches(loader, 2)
        assert (len(loader), len(skipped), len(lists(skipped))) == (6, 4, 4)
        assert len(skip_first_batches(skipped, 9)) == 0


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
@pytest.mark.parametrize("dataset", [range(10), Numbers(10)])
def test_loaders_made_by_hand_skip_what_they_are_told(kind, dataset):
    loader = kind(dataset, skip_batches=3, batch_size=2)
    assert lists(loader) == [[6, 7], [8, 9]]
    if isinstance(dataset, range):
        assert len(loader) == 2


def test_a_skipping_stream_is_prepared_as_it_is_or_not_at_all():
    stream = skip_first_batches(DataLoader(Numbers(9), batch_size=2), 2)
    assert lists(prepare(stream)) == lists(stream) == [[4, 5], [6, 7], [8]]
    with pytest.raises(DataError, match=r"skips 2 batches.*skip_first_batches\(prepared"):
        prepare(stream, 2)


@pytest.mark.parametrize("wrong", [2.5, "3", None])
def test_only_whole_numbers_of_batches_are_skipped(wrong):
    with pytest.raises(ArgumentTypeError, match="num_batches must be a whole number, got"):
        skip_first_batches(prepare(DataLoader(range(4))), wrong)
