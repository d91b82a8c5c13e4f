import math
import multiprocessing
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from accel_train.data import (
    ActiveLoaders,
    DataLoaderDispatcher,
    DataLoaderShard,
    SeedableRandomSampler,
    ShardedBatchSampler,
    get_sampler,
    prepare_data_loader,
)
from accel_train.data.iterable import IterableDatasetShard
from accel_train.errors import ArgumentTypeError, DataError

CPU = torch.device("cpu")


def prepare(loader, ranks=2, rank=0, **options):
    return prepare_data_loader(loader, num_processes=ranks, process_index=rank, **options)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def collate(samples):
    return torch.tensor(samples) + 100


def init_worker(worker_id):
    pass


@pytest.mark.parametrize("dataset", [range(12), Stream()])
@pytest.mark.parametrize("ranks", [1, 2])
def test_everything_that_is_not_about_samples_is_kept(dataset, ranks):
    context = multiprocessing.get_context("fork")
    generator = torch.Generator()
    loader = DataLoader(
        dataset, batch_size=2, num_workers=1, collate_fn=collate, pin_memory=False, timeout=30,
        worker_init_fn=init_worker, multiprocessing_context=context, generator=generator, prefetch_factor=3,
        persistent_workers=True, in_order=ranks == 2,
    )  # fmt: skip
    prepared = prepare(loader, ranks)
    for name in (
        "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
        "generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
    ):  # fmt: skip
        assert getattr(prepared, name) == getattr(loader, name), name


@pytest.mark.parametrize(("ranks", "options"), [(2, {}), (1, {"use_stateful_dataloader": True})])
def test_batches_stay_in_order_where_their_place_has_a_meaning(ranks, options):
    loader = DataLoader(range(8), num_workers=1, in_order=False)
    with pytest.warns(UserWarning, match="in_order=False was changed"):
        assert prepare(loader, ranks, **options).in_order
    assert not prepare(loader, 1).in_order


def test_pinning_is_kept():
    assert prepare(DataLoader(range(4), pin_memory=True)).pin_memory


def test_one_process_keeps_the_sampler_and_the_batch_size():
    loader = DataLoader(range(10), batch_size=3, shuffle=True, drop_last=True)
    prepared = prepare(loader, 1)
    assert prepared.batch_sampler is loader.batch_sampler
    assert prepared.sampler is loader.sampler
    assert (prepared.batch_size, prepared.drop_last) == (3, True)
    assert len(prepared) == len(loader)


def test_a_prepared_loader_is_returned_and_joins_the_ledger():
    prepared = prepare(DataLoader(range(4)))
    ledger = ActiveLoaders()
    assert prepare(prepared, ledger=ledger) is prepared
    assert prepared.ledger is ledger


@pytest.mark.parametrize("wrong", [None, [1, 2], iter([1]), "loader"])
def test_something_else_than_a_loader_is_refused(wrong):
    with pytest.raises(ArgumentTypeError, match=type(wrong).__name__):
        prepare(wrong)


def test_options_that_cannot_be_are_refused():
    with pytest.raises(DataError, match="put_on_device=True"):
        prepare(DataLoader(range(4)), dispatch_batches=True)
    with pytest.raises(DataError, match="needs a device"):
        prepare(DataLoader(range(4)), put_on_device=True)
    with pytest.raises(DataError, match=r"0\.\.1, got 2"):
        prepare(DataLoader(range(4)), 2, 2)


@pytest.mark.parametrize("dataset", [range(12), Stream()])
def test_split_batches_wants_a_divisible_batch_size(dataset):
    with pytest.raises(DataError, match="batch size is 3"):
        prepare(DataLoader(dataset, batch_size=3), split_batches=True)
    with pytest.raises(DataError, match="None"):
        prepare(DataLoader(dataset, batch_size=None), split_batches=True)
    with pytest.raises(DataError, match="None"):
        prepare(DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]]), split_batches=True)


def test_when_batches_are_dispatched():
    def kind(dataset, **options):
        return type(prepare(DataLoader(dataset, batch_size=2), device=CPU, **options))

    assert kind(Stream()) is DataLoaderShard
    assert kind(Stream(), put_on_device=True) is DataLoaderDispatcher
    assert kind(Stream(), put_on_device=True, dispatch_batches=False) is DataLoaderShard
    assert kind(range(4), put_on_device=True) is DataLoaderShard
    assert kind(range(4), put_on_device=True, dispatch_batches=True) is DataLoaderDispatcher


def test_a_sampler_of_batches_is_shared_out():
    sampler = BatchSampler(SequentialSampler(range(10)), 2, False)
    ranks = [prepare(DataLoader(torch.arange(10), batch_size=None, sampler=sampler), 2, r) for r in range(2)]
    assert [[batch.tolist() for batch in rank] for rank in ranks] == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [0, 1]],
    ]
    assert ranks[1].valid_rows() == (2, 0)
    assert get_sampler(ranks[0]) is sampler.sampler


def test_t23_a_distributed_sampler_is_not_shared_out_again():
    seen = []
    for rank in range(2):
        sampler = DistributedSampler(range(11), 2, rank, shuffle=False)
        loader = prepare(DataLoader(range(11), batch_size=2, sampler=sampler), 2, rank)
        assert loader.get_sampler() is sampler
        assert not isinstance(loader.batch_sampler, ShardedBatchSampler)
        assert loader.may_pad
        assert not loader.may_be_uneven
        for batch in loader:
            valid = loader.valid_rows()
            seen += batch[: len(batch) if valid is None else valid[rank]].tolist()
    assert sorted(seen) == list(range(11))
    other = DistributedSampler(range(12), 3, 0, shuffle=False)
    loader = prepare(DataLoader(range(12), batch_size=1, sampler=other), 2, 1)
    assert [batch.item() for batch in loader] == [3, 9]


class Mesh:
    """The part of a DeviceMesh that says which ranks read the same data."""

    def __init__(self, **sizes):
        self.mesh_dim_names = tuple(sizes)
        self.mesh = torch.arange(math.prod(sizes.values())).reshape(*sizes.values())


@pytest.mark.parametrize(
    "sizes",
    [{"dp_shard": 2, "cp": 1, "tp": 2}, {"pp": 2, "dp_replicate": 2}, {"sp": 2, "dp_shard": 2}],
    ids=lambda sizes: " x ".join(sizes),
)
def test_ranks_that_differ_in_another_dimension_than_the_batch_read_the_same(sizes):
    mesh = Mesh(**sizes)
    seen = [
        torch.cat(list(prepare(DataLoader(range(8), batch_size=2), 4, rank, torch_device_mesh=mesh))).tolist()
        for rank in range(4)
    ]
    first, second = ((0, 1), (2, 3)) if "tp" in sizes else ((0, 2), (1, 3))
    assert [seen[rank] for rank in first] == [[0, 1, 4, 5]] * 2
    assert [seen[rank] for rank in second] == [[2, 3, 6, 7]] * 2


def order(loader):
    return [index for batch in loader for index in batch.tolist()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_seedable_sampler(ranks):
    def make(**options):
        loader = DataLoader(range(20), batch_size=2, shuffle=True)
        prepared = prepare(loader, ranks, use_seedable_sampler=True, **options)
        assert isinstance(loader.sampler, RandomSampler)
        assert not isinstance(loader.sampler, SeedableRandomSampler)  # the user's loader is left alone
        assert isinstance(prepared.get_sampler(), SeedableRandomSampler)
        return prepared

    torch.manual_seed(42)
    one = make()
    epochs = [order(one) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    one.set_epoch(0)
    assert order(one) == epochs[0]
    torch.manual_seed(42)
    torch.rand(3)  # draws in between change nothing
    assert order(make()) == epochs[0]
    assert order(make(data_seed=42)) == epochs[0]
    assert order(make(data_seed=7)) != epochs[0]
    torch.manual_seed(43)
    assert order(make()) != epochs[0]
    one = make(data_seed=5)
    one.set_epoch(2)
    third = order(one)
    one = make(data_seed=5)
    assert [order(one) for _ in range(3)][2] == third


def test_seedable_sampler_in_its_place():
    loader = prepare(DataLoader(range(20), batch_size=2, shuffle=True), use_seedable_sampler=True)
    assert isinstance(loader.batch_sampler.batch_sampler.sampler, SeedableRandomSampler)
    sampler = BatchSampler(RandomSampler(range(10)), 2, False)
    loader = prepare(
        DataLoader(torch.arange(10), batch_size=None, sampler=sampler), use_seedable_sampler=True
    )
    assert isinstance(loader.get_sampler(), SeedableRandomSampler)
    ordered = prepare(DataLoader(range(20), batch_size=2), use_seedable_sampler=True)
    assert isinstance(ordered.get_sampler(), SequentialSampler)


def test_the_generator_to_be_synchronized():
    generator = torch.Generator()
    kinds = ["torch", "generator"]
    with_own = prepare(DataLoader(range(4), shuffle=True, generator=generator), rng_types=kinds)
    assert with_own.synchronized_generator is generator
    assert with_own.rng_types == kinds
    without = prepare(DataLoader(range(4), shuffle=True), rng_types=kinds)
    assert without.synchronized_generator is None
    assert without.rng_types == ["torch"]
    assert kinds == ["torch", "generator"]

    class Custom(BatchSampler):
        def __iter__(self):
            return super().__iter__()

    custom = DataLoader(range(4), batch_sampler=Custom(RandomSampler(range(4)), 2, False))
    assert prepare(custom, rng_types=kinds).synchronized_generator is custom.batch_sampler.sampler.generator


class Squares(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return index * index


@given(
    n=st.integers(0, 50),
    size=st.integers(1, 6),
    ranks=st.integers(1, 4),
    split=st.booleans(),
    even=st.booleans(),
    drop_last=st.booleans(),
)
def test_length_is_the_number_of_batches(n, size, ranks, split, even, drop_last):
    size = size * ranks if split else size
    for rank in range(ranks):
        loader = prepare(
            DataLoader(Squares(n), batch_size=size, drop_last=drop_last),
            ranks,
            rank,
            split_batches=split,
            even_batches=even,
        )
        batches = list(loader)
        assert len(loader) == len(batches)


def test_t23_a_part_of_another_number_of_parts_is_warned_about():
    sampler = DistributedSampler(range(12), 4, 1, shuffle=False)
    with pytest.warns(UserWarning, match="DistributedSampler yields one of 4 parts.*among 2 ranks"):
        prepare(DataLoader(range(12), sampler=sampler))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(DataLoader(range(12), sampler=DistributedSampler(range(12), 1, 0)))
        prepare(DataLoader(range(12), sampler=sampler), pre_sharded=False)
        mine = prepare(DataLoader(range(12), sampler=sampler), pre_sharded=True)
    assert [batch.item() for batch in mine] == [1, 5, 9]


def test_t23_shards_of_other_libraries_are_not_shared_out_again():
    shards = pytest.importorskip("transformers.trainer_pt_utils")
    seen = []
    for rank in range(2):
        dataset = shards.IterableDatasetShard(Stream(), batch_size=2, num_processes=2, process_index=rank)
        loader = prepare(DataLoader(dataset, batch_size=2), 2, rank)
        assert loader.may_be_uneven
        seen.append([batch.tolist() for batch in loader])
    expected = [
        list(
            DataLoader(
                shards.IterableDatasetShard(Stream(), 2, num_processes=2, process_index=rank), batch_size=2
            )
        )
        for rank in range(2)
    ]
    assert seen == [[batch.tolist() for batch in batches] for batches in expected]


def test_a_shard_made_by_hand_wants_its_own_batch_size():
    shard = IterableDatasetShard(Stream(), batch_size=4, num_processes=2, process_index=0)
    with pytest.raises(DataError, match=r"gives a rank 4 samples at a time.*batch_size is 2"):
        prepare(DataLoader(shard, batch_size=2))
    assert prepare(DataLoader(shard, batch_size=4)).total_batch_size == 8


def test_what_a_loader_of_another_class_overrides_is_not_lost_silently():
    class Doubling(DataLoader):
        def __iter__(self):
            return (2 * batch for batch in super().__iter__())

    class Named(DataLoader):
        def __init__(self, data, **options):
            super().__init__(data, **options)

    with pytest.warns(UserWarning, match=r"Doubling overrides __iter__.*collate_fn"):
        prepare(Doubling(range(4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(Named(range(4)))
