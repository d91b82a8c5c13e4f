"""The number of an epoch is one thing for loader, samplers, dataset and workers, also when loops are left early."""

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    get_worker_info,
)

from accel_train import Accelerator
from accel_train.data import prepare_data_loader, skip_first_batches

SIZE = 40


def order(epoch):
    return torch.randperm(SIZE, generator=torch.Generator().manual_seed(epoch)).tolist()


class ByEpoch(Sampler):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return SIZE

    def __iter__(self):
        return iter(order(self.epoch))


class Stream(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(order(self.epoch))


class Augmented(Dataset):
    """Its samples depend on the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return 1000 * self.epoch + index


MAKERS = {
    "seedable": lambda: (DataLoader(range(SIZE), batch_size=2, shuffle=True), {"use_seedable_sampler": True}),
    "sampler": lambda: (DataLoader(range(SIZE), batch_size=2, sampler=ByEpoch()), {}),
    "distributed": lambda: (
        DataLoader(range(SIZE), batch_size=2, sampler=DistributedSampler(range(SIZE), 1, 0)),
        {},
    ),
    "stream": lambda: (DataLoader(Stream(), batch_size=2), {"dispatch_batches": False}),
    "dispatched": lambda: (
        DataLoader(Stream(), batch_size=2),
        {"dispatch_batches": True, "put_on_device": True, "device": torch.device("cpu")},
    ),
    "worker": lambda: (DataLoader(Stream(), batch_size=2, num_workers=1), {"dispatch_batches": False}),
    "persistent worker": lambda: (
        DataLoader(Stream(), batch_size=2, num_workers=1, persistent_workers=True),
        {"dispatch_batches": False},
    ),
    "dataset": lambda: (DataLoader(Augmented(), batch_size=2), {}),
    "dataset, persistent worker": lambda: (
        DataLoader(Augmented(), batch_size=2, num_workers=1, persistent_workers=True),
        {},
    ),
}


def prepared(kind):
    torch.manual_seed(3)
    loader, options = MAKERS[kind]()
    return prepare_data_loader(loader, num_processes=1, process_index=0, **options)


def first(loader, batches):
    rows = []
    for number, batch in enumerate(loader, start=1):
        rows += batch.tolist()
        if number == batches:
            break
    return tuple(rows)


@pytest.mark.wide(only=["dataset, persistent worker"])
@pytest.mark.parametrize("kind", MAKERS)
def test_every_loop_that_is_left_early_is_another_epoch(kind):
    loader = prepared(kind)
    loops = [first(loader, 3) for _ in range(4)]
    assert len(set(loops)) == 4
    whole = prepared(kind)
    assert [tuple(torch.cat(list(whole)).tolist()[:6]) for _ in range(4)] == loops, (
        "as epochs that were read whole"
    )
    assert loader.iteration == whole.iteration == 4


@pytest.mark.parametrize("kind", MAKERS)
def test_a_held_iterator_is_left_when_another_one_begins(kind):
    loader = prepared(kind)
    iterator = iter(loader)
    one = next(iterator).tolist()
    iterator = iter(loader)
    assert next(iterator).tolist() != one
    assert loader.iteration == 1


@pytest.mark.parametrize("kind", ["sampler", "distributed", "stream", "persistent worker", "dataset"])
def test_what_the_script_chooses_holds(kind):
    loader = prepared(kind)
    expected = [first(loader, 3) for _ in range(6)]
    loader = prepared(kind)
    found = []
    for epoch in (5, 5, 0):
        loader.set_epoch(epoch)
        found.append(first(loader, 3))
    assert found == [expected[5], expected[5], expected[0]]


@pytest.mark.parametrize("kind", ["sampler", "distributed", "stream", "persistent worker", "dataset"])
def test_a_script_may_tell_the_sampler_or_the_dataset_itself(kind):
    loader = prepared(kind)
    expected = [first(loader, 3) for _ in range(6)]
    loader = prepared(kind)
    teller = loader.sampler if hasattr(loader.sampler, "set_epoch") else loader.dataset
    teller.set_epoch(4)
    assert first(loader, 3) == expected[4]
    assert loader.iteration == 5
    assert first(loader, 3) == expected[5], "the loader counts on from there"


def test_the_rest_of_an_epoch_that_was_left_can_be_read():
    loader = prepared("sampler")
    seen = list(first(loader, 3))
    for batch in skip_first_batches(loader, 3):
        seen += batch.tolist()
    assert seen == order(0)
    assert first(loader, 1) == tuple(order(1)[:2])


def test_an_iterator_that_yields_nothing_is_no_epoch():
    loader = prepared("sampler")
    iter(loader)  # as tqdm makes one
    assert first(loader, SIZE) == tuple(order(0))
    assert loader.iteration == 1


def test_a_state_of_a_left_epoch_continues_it():
    loader = prepared("sampler")
    first(loader, 3)
    state = loader.state_dict()
    resumed = prepare_data_loader(
        DataLoader(range(SIZE), batch_size=2, sampler=ByEpoch()),
        num_processes=1,
        process_index=0,
        use_stateful_dataloader=True,
    )
    resumed.load_state_dict(state)
    assert resumed.iteration == 0
    assert torch.cat(list(resumed)).tolist() == order(0)[6:]
    assert torch.cat(list(resumed)).tolist() == order(1)


KINDS = {
    "sampler": lambda: DataLoader(range(SIZE), batch_size=4, sampler=ByEpoch()),
    "workers": lambda: DataLoader(range(SIZE), batch_size=4, shuffle=True, num_workers=2),
    "dispatched": lambda: DataLoader(range(SIZE), batch_size=4, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
}


def resumable(kind):
    return prepare_data_loader(
        KINDS[kind](),
        num_processes=1,
        process_index=0,
        use_stateful_dataloader=True,
        use_seedable_sampler=True,
        dispatch_batches=kind == "dispatched",
        device=torch.device("cpu"),
        put_on_device=True,
        data_seed=3,
    )


def gone_back(kind, back):
    """Two epochs, and what a run reads that resumes after batch 5 of the second; a bad step at batch 3 is undone."""
    loader = resumable(kind)
    seen = []
    for epoch in range(2):
        for number, batch in enumerate(loader, 1):
            seen += batch.tolist()
            if (epoch, number) == (0, 2):
                first_epoch = loader.state_dict()
            if (epoch, number) == (1, 2):
                second_epoch = loader.state_dict()
            if (epoch, number) == (1, 3) and back:
                loader.load_state_dict(second_epoch if back == "a batch" else first_epoch)
            if (epoch, number) == (1, 5):
                saved = loader.state_dict()
    seen += torch.cat(list(loader)).tolist()
    resumed = resumable(kind)
    resumed.load_state_dict(saved)
    return seen, torch.cat(list(resumed)).tolist(), torch.cat(list(resumed)).tolist()


@pytest.mark.wide(only=["workers-an epoch"])
@pytest.mark.parametrize("back", ["a batch", "an epoch"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_goes_on_after_a_load_saves_where_it_is(kind, back):
    """Not where the loaded state was: the batches in between would be read again."""
    assert gone_back(kind, back) == gone_back(kind, None)


def test_a_script_that_counts_by_the_loader_and_skips_by_its_state_loses_no_epoch():
    loader = prepared("seedable")
    for _ in loader:
        state = loader.state_dict()  # the last one is of the last batch
    following = torch.cat(list(loader)).tolist()
    resumed = prepared("seedable")
    resumed.load_state_dict(state)
    assert resumed.iteration == 1
    rest = skip_first_batches(resumed, state["batches_yielded"])
    assert torch.cat(list(rest)).tolist() == following


class OfWorker(Augmented):
    def __getitem__(self, index):
        info = get_worker_info()
        return int(info.dataset is self)


def test_workers_that_stay_see_the_dataset_itself():
    loader = prepare_data_loader(
        DataLoader(OfWorker(), batch_size=SIZE, num_workers=1, persistent_workers=True),
        num_processes=1,
        process_index=0,
    )
    assert [batch.tolist() for _ in range(2) for batch in loader] == [[1] * SIZE] * 2


@pytest.mark.parametrize("dispatch", [False, True])
def test_an_iterator_that_is_kept_for_a_first_batch_does_not_hold_the_epoch(dispatch):
    loader = prepare_data_loader(
        DataLoader(Augmented(), sampler=ByEpoch(), batch_size=4),
        device=torch.device("cpu"),
        put_on_device=True,
        dispatch_batches=dispatch,
    )
    kept = iter(loader)
    next(kept)
    found = []
    for _ in range(3):
        for batch in loader:
            found.append((batch // 1000).unique().tolist())
            break
    assert found == [[1], [2], [3]]
    next(kept)  # it goes on, and what was left meanwhile counts
    assert loader.iteration == 4


def test_seeds_of_64_bits_continue_with_the_epoch():
    torch.manual_seed(-1)  # as large as seeds of torch.seed() can be
    loader = prepare_data_loader(
        DataLoader(range(SIZE), shuffle=True, batch_size=SIZE), use_seedable_sampler=True
    )
    assert [next(iter(loader)).tolist() for _ in range(2)] == [order(-1), order(0)]


def test_loaders_that_share_a_dataset_count_their_own_epochs():
    data = Augmented()
    train, other = Accelerator().prepare(*(DataLoader(data, batch_size=SIZE) for _ in range(2)))
    found = []
    for _ in range(3):
        found += [(batch // 1000).unique().tolist() for batch in train]
        for _ in range(3):
            list(other)
    assert found == [[0], [1], [2]]
    data.set_epoch(20)  # by the script
    found = [(batch // 1000).unique().tolist() for batch in train]
    assert found == [[20]]
