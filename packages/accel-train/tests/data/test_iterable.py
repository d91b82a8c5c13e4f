import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_train.data import IterableDatasetShard, prepare_data_loader
from accel_train.errors import DataError
from testkit.samples import Numbers


class Sized(Numbers):
    def __len__(self):
        return self.n


class ByWorker(Numbers):
    """Each worker yields its own part."""

    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id, self.n, info.num_workers))


def ranks(loader, world=2, **options):
    return [
        prepare_data_loader(
            loader, num_processes=world, process_index=rank, dispatch_batches=False, **options
        )
        for rank in range(world)
    ]


@pytest.mark.parametrize(
    ("n", "split", "drop_last", "expected"),
    [
        (10, False, False, [[0, 1, 2, 3, 8, 9, 0, 1], [4, 5, 6, 7, 2, 3, 4, 5]]),
        (10, True, False, [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 0, 1]]),
        (3, True, False, [[0, 1], [2, 0]]),
        (3, False, False, [[0, 1, 2, 0], [1, 2, 0, 1]]),
        (10, False, True, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (8, False, False, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (0, False, False, [[], []]),
    ],
)
def test_distribution_over_two_ranks(n, split, drop_last, expected):
    shares = [IterableDatasetShard(Sized(n), 4, drop_last, 2, rank, split) for rank in range(2)]
    assert [list(share) for share in shares] == expected
    assert [len(share) for share in shares] == [len(part) for part in expected]


def test_a_length_is_only_promised_when_there_is_one():
    with pytest.raises(TypeError):
        len(IterableDatasetShard(Numbers(3), 2, False, 2, 0))


def test_a_batch_size_that_cannot_be_split_is_refused():
    with pytest.raises(DataError, match="3"):
        IterableDatasetShard(Numbers(3), 3, False, 2, 0, split_batches=True)


def test_epochs_reach_the_dataset_or_its_generator():
    class Seeded(Numbers):
        generator = torch.Generator()

        def __iter__(self):
            return iter(torch.randperm(self.n, generator=self.generator).tolist())

    shares = [IterableDatasetShard(Seeded(8), 2, False, 2, rank) for rank in range(2)]
    epochs = []
    for epoch in (0, 1, 0):
        for share in shares:
            share.set_epoch(epoch)
        epochs.append([list(share) for share in shares])
    assert sorted(epochs[0][0] + epochs[0][1]) == list(range(8))
    assert epochs[0] == epochs[2] != epochs[1]

    class Told(Numbers):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    told = Told(4)
    loader = prepare_data_loader(DataLoader(told, batch_size=2), num_processes=2, process_index=0)
    list(loader)
    list(loader)
    assert told.epoch == 1


@given(
    n=st.integers(0, 30),
    size=st.integers(1, 4),
    world=st.integers(1, 4),
    drop_last=st.booleans(),
    split=st.booleans(),
)
def test_t3_padding_of_a_shared_stream_is_known(n, size, world, drop_last, split):
    """Accelerate keeps the duplicates of a stream that every rank reads: 10 samples are gathered as 12."""
    base = size * world if split else size
    loader = DataLoader(Numbers(n), batch_size=base, drop_last=drop_last)
    seen, steps = [], []
    for rank, share in enumerate(ranks(loader, world, split_batches=split)):
        count = 0
        for batch in share:
            valid = share.valid_rows()
            rows = len(batch) if valid is None else valid[rank]
            assert share.batch_rows in (None, len(batch))
            seen += batch[:rows].tolist()
            count += 1
        steps.append(count)
    whole = (
        n // (size * world) * size * world
        if drop_last and world > 1
        else n // base * base
        if drop_last
        else n
    )
    assert sorted(seen) == list(range(whole))
    assert len(set(steps)) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_t3_padding_is_known_when_workers_read(workers):
    loader = DataLoader(ByWorker(11), batch_size=2, num_workers=workers)
    seen = []
    for rank, share in enumerate(ranks(loader)):
        for batch in share:
            valid = share.valid_rows()
            seen += batch[: len(batch) if valid is None else valid[rank]].tolist()
        assert share.collate_fn is loader.collate_fn
    assert sorted(seen) == list(range(11))


def test_streams_that_do_not_batch():
    class Batches(IterableDataset):
        def __iter__(self):
            return iter([{"x": torch.arange(size), "name": "abc"} for size in (3, 2, 4)])

    shares = ranks(DataLoader(Batches(), batch_size=None))
    seen = [[(batch["x"].tolist(), batch["name"]) for batch in share] for share in shares]
    assert seen == [
        [([0, 1, 2], "abc"), ([0, 1, 2, 3], "abc")],
        [([0, 1], "abc"), ([0, 1, 2], "abc")],
    ]
    assert shares[0].batch_rows is None
    assert shares[1].valid_rows()[1] == 0
    assert shares[1].valid_rows()[0] >= 4


class OfDatasetsLibrary(IterableDataset):
    """The part of `datasets.IterableDataset` that sharding needs."""

    def __init__(self, files, distributed=None):
        self.files = files
        self._distributed = distributed

    @property
    def num_shards(self):
        return len(self.files)

    def shard(self, num_shards, index):
        return OfDatasetsLibrary(self.files[index::num_shards])

    def __iter__(self):
        return itertools.chain(*self.files)


OfDatasetsLibrary.__module__ = "datasets.iterable_dataset"


class Distributed:
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size


def test_files_of_the_datasets_library_are_shared_out_as_files():
    files = [[0, 1, 2], [3, 4], [5, 6, 7, 8]]
    shares = ranks(DataLoader(OfDatasetsLibrary(files), batch_size=2))
    seen = [[batch.tolist() for batch in share] for share in shares]
    assert seen == [[[0, 1], [2, 5], [6, 7], [8]], [[3, 4]]]
    assert all(share.may_be_uneven and not share.may_pad for share in shares)
    assert all(share.valid_rows() is None for share in shares)

    few = ranks(DataLoader(OfDatasetsLibrary(files[:1]), batch_size=2))
    assert [[batch.tolist() for batch in share] for share in few] == [[[0, 1]], [[2, 0]]]


def test_t23_presharded_streams_are_not_sharded_again():
    everything = list(range(12))

    class Mine(IterableDataset):
        def __init__(self, rank):
            self.rank = rank

        def __iter__(self):
            return iter(everything[self.rank :: 2])

    declared, detected = [], []
    for rank in range(2):
        options = {"num_processes": 2, "process_index": rank}
        own = prepare_data_loader(DataLoader(Mine(rank), batch_size=4), pre_sharded=True, **options)
        declared += [index for batch in own for index in batch.tolist()]
        node = OfDatasetsLibrary([everything[rank::2]], Distributed(rank, 2))
        # Put on a device, a stream would be dispatched by default: rank 0's part only.
        device = {"device": torch.device("cpu"), "put_on_device": True}
        own = prepare_data_loader(DataLoader(node, batch_size=4), **device, **options)
        detected += [index for batch in own for index in batch.tolist()]
        assert own.may_be_uneven
        assert not own.may_pad
    assert sorted(declared) == sorted(detected) == everything

    for node in (OfDatasetsLibrary([everything], Distributed(0, 3)), OfDatasetsLibrary([everything])):
        shares = ranks(DataLoader(node, batch_size=3))
        assert sorted(i for share in shares for batch in share for i in batch.tolist()) == everything

    with pytest.raises(DataError, match="sharded already"):
        prepare_data_loader(
            DataLoader(Mine(0), batch_size=4), pre_sharded=True, dispatch_batches=True, **device, **options
        )


def test_t23_a_declaration_beats_detection():
    node = OfDatasetsLibrary([list(range(8))], Distributed(0, 2))
    loader = prepare_data_loader(
        DataLoader(node, batch_size=2), num_processes=2, process_index=1, pre_sharded=False
    )
    assert [batch.tolist() for batch in loader] == [[2, 3], [6, 7]]
