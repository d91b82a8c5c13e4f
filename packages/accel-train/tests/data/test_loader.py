"""What every prepared loader answers, and how its iterations begin and end."""

import gc
import pickle
import weakref

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from accel_state.errors import StateError
from accel_train.data import ActiveLoaders, DataLoaderShard, prepare_data_loader, skip_first_batches
from accel_train.data.sampling.batches import ShardedBatchSampler
from accel_train.errors import DataError
from testkit.samples import Numbers


class Failing(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise ValueError("sample 5 is broken")
        return index


def prepare(loader, ranks=1, rank=0, **options):
    return prepare_data_loader(loader, num_processes=ranks, process_index=rank, **options)


KINDS = {
    "map": (lambda: DataLoader(range(10), batch_size=3), {}),
    "stream": (lambda: DataLoader(Numbers(10), batch_size=3), {}),
    "dispatch": (
        lambda: DataLoader(Numbers(10), batch_size=3),
        {"dispatch_batches": True, "put_on_device": True, "device": torch.device("cpu")},
    ),
}


@pytest.fixture(params=KINDS)
def make(request):
    build, options = KINDS[request.param]
    return lambda **more: prepare(build(), **{**options, **more})


def test_is_a_torch_loader(make):
    loader = make()
    assert isinstance(loader, DataLoader)
    with pytest.raises(AttributeError):
        _ = type(loader).base_dataloader


def test_end_of_dataloader_on_every_epoch(make):
    loader = make()
    assert loader.end_of_dataloader is False
    for _ in range(2):
        ends = [loader.end_of_dataloader for _ in loader]
        assert ends == [False, False, False, True]
        assert loader.end_of_dataloader is True  # until the next epoch begins
    iterator = iter(loader)
    assert loader.end_of_dataloader is False
    next(iterator)
    assert loader.end_of_dataloader is False


def test_looking_ahead_loses_nothing(make):
    loader = make()
    seen = []
    for batch in loader:
        for _ in range(3):
            _ = loader.end_of_dataloader
        seen += batch.tolist()
    assert seen == list(range(10))


def test_iterations_are_counted(make):
    loader = make()
    assert loader.iteration == 0
    list(loader)
    assert loader.iteration == 1
    for _ in loader:
        assert loader.iteration == 1
        break
    assert loader.iteration == 2  # the next loop has another number, and so another order
    list(loader)
    assert loader.iteration == 3


def test_ledger_hears_of_every_iteration(make):
    ledger = ActiveLoaders()
    loader = make(ledger=ledger)
    assert ledger.active is None
    for _ in loader:
        assert ledger.active is loader
        assert ledger.interleaved() == []
    assert ledger.active is None


def test_t4_a_loop_left_early_releases_its_loader(make):
    ledger = ActiveLoaders()
    train, evaluation = make(ledger=ledger), make(ledger=ledger)
    ends = []
    for step, _ in enumerate(train):
        for _ in evaluation:
            assert ledger.active is evaluation
            if step % 2:
                break
        assert ledger.active is train
        assert ledger.live == [train]
        ends.append(ledger.active.end_of_dataloader)
    assert ends == [False, False, False, True]
    assert ledger.live == []


@pytest.mark.wide(only=["stream"])
def test_t4_a_loop_left_by_an_exception_releases_its_loader(make):
    ledger = ActiveLoaders()
    loader = make(ledger=ledger)

    def loop():
        for _ in loader:
            raise KeyError

    with pytest.raises(KeyError):
        loop()
    gc.collect()  # pytest keeps the traceback no longer than the block
    assert ledger.live == []


def test_zip_begins_both_before_either_yields(make):
    ledger = ActiveLoaders()
    one, two = make(ledger=ledger), make(ledger=ledger)
    for _ in zip(one, two, strict=True):
        assert ledger.active is two
        assert ledger.interleaved() == [one]
    assert ledger.live == []


def test_held_iterators():
    ledger = ActiveLoaders()
    loader = prepare(DataLoader(range(6), batch_size=2), ledger=ledger)
    first = iter(loader)
    assert next(first).tolist() == [0, 1]
    second = iter(loader)
    assert next(second).tolist() == [0, 1]
    assert next(first).tolist() == [2, 3]
    del second
    assert ledger.is_live(loader)
    assert next(first).tolist() == [4, 5]
    assert next(first, None) is None
    assert next(first, None) is None
    assert ledger.live == []
    assert loader.iteration == 1


def test_an_iterator_can_be_closed():
    ledger = ActiveLoaders()
    loader = prepare(DataLoader(range(6), batch_size=2), ledger=ledger)
    iterator = iter(loader)
    next(iterator)
    iterator.close()
    assert ledger.live == []
    assert loader.iteration == 1


def test_a_failing_dataset_ends_the_iteration_with_its_own_error():
    ledger = ActiveLoaders()
    loader = prepare(DataLoader(Failing(), batch_size=2), ledger=ledger)
    seen = []
    with pytest.raises(ValueError, match="sample 5 is broken"):
        seen.extend(batch.tolist() for batch in loader)
    assert seen == [[0, 1], [2, 3]]
    assert ledger.live == []


def test_a_failure_found_while_looking_ahead_is_raised_in_its_turn():
    class Broken(IterableDataset):
        def __iter__(self):
            yield 0
            yield 1
            raise ValueError("broken")

    loader = prepare(DataLoader(Broken(), batch_size=1))
    seen = []
    with pytest.raises(ValueError, match="broken"):
        seen.extend((batch.item(), loader.end_of_dataloader) for batch in loader)
    assert seen == [(0, False), (1, False)]


def test_empty_loaders_yield_nothing():
    for loader in (
        prepare(DataLoader([], batch_size=2)),
        prepare(DataLoader([], batch_size=2), 2, 1),
        prepare(DataLoader(Numbers(0), batch_size=2)),
        prepare(DataLoader(Numbers(0), batch_size=2), 2, 1),
    ):
        assert list(loader) == []
        assert loader.end_of_dataloader is True
        assert loader.iteration == 1


@pytest.mark.wide(but=["map"])
def test_loaders_are_collected(make):
    ledger = ActiveLoaders()
    loader = make(ledger=ledger)
    for _ in loader:
        break
    list(loader)
    alive = weakref.ref(loader)
    del loader
    gc.collect()
    assert alive() is None
    assert ledger.live == []


def test_loaders_are_collected_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        loader = prepare(DataLoader(Numbers(10), batch_size=3))
        for _ in loader:
            _ = loader.end_of_dataloader
        alive = weakref.ref(loader)
        del loader
        assert alive() is None
    finally:
        gc.enable()


def test_loaders_pickle():
    for ranks in (1, 2):
        loader = prepare(
            DataLoader(range(10), batch_size=3, shuffle=True), ranks, 0, device=torch.device("cpu")
        )
        iterator = iter(loader)
        next(iterator)
        list(loader)
        copy = pickle.loads(pickle.dumps(loader))
        assert type(copy) is DataLoaderShard
        assert copy.iteration == loader.iteration
        assert copy.device == loader.device
        assert len(list(copy)) == len(loader)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("n", "expected"), [(10, 4), (12, 0), (3, 3)])
def test_remainder(n, expected, drop_last):
    loader = prepare(DataLoader(range(n), batch_size=3, drop_last=drop_last), 2, 0)
    assert [loader.remainder for _ in loader] == [-1 if drop_last else expected] * len(loader)


def test_remainder_is_of_the_sampler_not_of_the_dataset():
    sampler = RandomSampler(range(10), replacement=True, num_samples=7)
    loader = prepare(DataLoader(range(10), batch_size=2, sampler=sampler), 2, 0)
    assert loader.remainder == 3
    assert prepare(DataLoader(Numbers(10), batch_size=3), 2, 0).remainder == -1


def test_sizes_over_all_ranks():
    loader = prepare(DataLoader(range(10), batch_size=3), 2, 0)
    assert (loader.total_batch_size, loader.total_dataset_length, loader.batch_size) == (6, 10, 3)
    split = prepare(DataLoader(range(10), batch_size=4), 2, 0, split_batches=True)
    assert (split.total_batch_size, split.total_dataset_length, split.batch_size) == (4, 10, 2)
    stream = prepare(DataLoader(Numbers(10), batch_size=3), 2, 0)
    assert stream.total_batch_size == 6


def test_padding_and_unevenness_are_declared():
    def flags(**options):
        loader = prepare(DataLoader(range(10), batch_size=3, **options.pop("loader", {})), 2, 0, **options)
        return loader.may_pad, loader.may_be_uneven

    assert flags() == (True, False)
    assert flags(even_batches=False) == (False, True)
    assert flags(loader={"drop_last": True}) == (False, False)
    assert flags(loader={"drop_last": True}, even_batches=False) == (False, False)
    assert flags(pre_sharded=True) == (False, True)
    alone = prepare(DataLoader(range(10), batch_size=3))
    assert (alone.may_pad, alone.may_be_uneven) == (False, False)


def test_even_batches_of_a_prepared_loader_can_be_overridden():
    loader = prepare(DataLoader(range(10), batch_size=3), 2, 1)
    assert [batch.tolist() for batch in loader] == [[3, 4, 5], [9, 0, 1]]
    loader.batch_sampler.even_batches = False
    assert [batch.tolist() for batch in loader] == [[3, 4, 5], [9]]
    assert loader.may_be_uneven
    assert loader.valid_rows() is None
    loader.batch_sampler.even_batches = True
    assert [batch.tolist() for batch in loader] == [[3, 4, 5], [9, 0, 1]]


class Epochs:
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch


class EpochSampler(Epochs, RandomSampler):
    pass


class EpochBatchSampler(Epochs, BatchSampler):
    pass


class EpochDataset(Epochs, list):
    pass


@pytest.mark.parametrize("ranks", [1, 2])
def test_set_epoch_reaches_samplers_and_the_dataset(ranks):
    dataset = EpochDataset(range(10))
    sampler = EpochSampler(dataset)
    batch_sampler = EpochBatchSampler(sampler, 2, False)
    loader = prepare(DataLoader(dataset, batch_sampler=batch_sampler), ranks, 0)
    loader.set_epoch(4)
    assert (sampler.epoch, batch_sampler.epoch, dataset.epoch) == (4, 4, 4)
    list(loader)
    list(loader)
    assert (sampler.epoch, dataset.epoch, loader.iteration) == (5, 5, 6)

    loader = prepare(DataLoader(dataset, batch_size=2), ranks, 0)
    list(loader)
    list(loader)
    assert dataset.epoch == 1


def test_the_sampler_can_be_read_and_replaced():
    for ranks in (1, 2):
        sampler, other = RandomSampler(range(10)), RandomSampler(range(4))
        loader = prepare(DataLoader(range(10), batch_size=2, sampler=sampler), ranks, 0)
        assert loader.get_sampler() is sampler
        loader.set_sampler(other)
        assert loader.get_sampler() is other
        assert loader.sampler is other
        assert max(torch.cat(list(loader)).tolist()) < 4
    bare = prepare(DataLoader(range(10), batch_size=None, sampler=sampler), 2, 0)
    assert bare.get_sampler() is sampler
    bare.set_sampler(other)
    assert (
        max(torch.stack(list(bare)).tolist() if isinstance(next(iter(bare)), torch.Tensor) else list(bare))
        < 4
    )


def test_a_custom_batch_sampler_stays_inside():
    class Custom(BatchSampler):
        pass

    custom = Custom(RandomSampler(range(10)), 2, False)
    loader = prepare(DataLoader(range(10), batch_sampler=custom), 2, 0)
    assert isinstance(loader.batch_sampler, ShardedBatchSampler)
    assert loader.batch_sampler.batch_sampler is custom


def test_a_loop_within_a_loop_over_one_loader(make):
    """What a loader says is about the batch that the asking loop holds."""
    loader = make()
    alone = [(loader.valid_rows(), loader.batch_rows) for _ in loader]
    said = []
    for outer, _ in enumerate(loader):
        for inner, _ in enumerate(loader):
            if inner == outer:
                break
        said.append((loader.valid_rows(), loader.batch_rows))
    assert said == alone
    said = []
    for _ in loader:
        list(loader)
        said.append((loader.valid_rows(), loader.batch_rows))
        assert loader.end_of_dataloader == (len(said) == len(alone))
    assert said == alone
    assert loader.end_of_dataloader
    assert loader.ledger.live == []


def test_iterators_in_turn_over_one_loader():
    loader = prepare(DataLoader(range(7), batch_size=2), ranks=2)
    one, two = iter(loader), iter(loader)
    next(one), next(one), next(two)
    assert loader.valid_rows() is None
    assert loader.end_of_dataloader is False
    list(one)
    assert loader.valid_rows() is None  # two is at its first batch still
    next(two)
    assert loader.valid_rows() == (2, 1)


def test_a_device_can_be_named():
    loader = prepare(DataLoader(range(4), batch_size=2), device="cpu", put_on_device=True)
    assert loader.device == torch.device("cpu")
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert DataLoaderShard(range(4), device="cpu").device == torch.device("cpu")


def test_a_dataset_that_raises_stop_iteration_on_one_of_several_ranks():
    class Stopping(Failing):
        def __getitem__(self, index):
            if index == 3:
                raise StopIteration
            return index

    def seen(ranks):
        return [
            batch.tolist()
            for batch in prepare(DataLoader(Stopping(), batch_size=1), ranks=ranks, rank=ranks - 1)
        ]

    plain = [batch.tolist() for batch in DataLoader(Stopping(), batch_size=1)]
    assert seen(1) == plain == [[0], [1], [2]]
    with pytest.raises(DataError, match=r"Reading batch 1 .* raised StopIteration"):
        seen(2)


@pytest.mark.parametrize("skip", [0, 1])
def test_a_strategy_cuts_its_part_out_of_every_batch(skip):
    loader = prepare_data_loader(DataLoader(TensorDataset(torch.arange(12).view(4, 3)), batch_size=2))
    loader.shard_batch = lambda batch: [tensor[:, 1:] for tensor in batch]
    seen = [batch.tolist() for (batch,) in skip_first_batches(loader, skip)]
    assert seen == [[[1, 2], [4, 5]], [[7, 8], [10, 11]]][skip:]


def test_the_loader_that_torch_iterates_is_itself(make):
    loader = make()
    assert loader.base_dataloader is loader
    with pytest.raises(AttributeError):
        _ = type(loader).base_dataloader


def test_gradient_state_is_that_of_the_accelerator(make):
    from accel_train import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(10), batch_size=3))
    assert loader.gradient_state is accelerator.gradient_state
    with pytest.raises(StateError, match="no Accelerator"):
        _ = make().gradient_state
