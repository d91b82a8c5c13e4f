"""One process: a prepared loader is the plain one, bit for bit, whatever draws random numbers."""

import itertools

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
)

from accel_train.data import prepare_data_loader


class Noisy(Dataset):
    """Draws from torch's generator for every sample, as augmentation does."""

    def __len__(self):
        return 21

    def __getitem__(self, index):
        return torch.tensor([float(index), torch.rand(()).item()])


class NoisyStream(IterableDataset):
    def __iter__(self):
        order = torch.randperm(21)
        return (torch.tensor([float(i), torch.rand(()).item()]) for i in order)


class LazySampler(Sampler):
    """Draws each index when it is asked for, from torch's own generator."""

    def __iter__(self):
        for _ in range(21):
            yield int(torch.randint(21, ()).item())

    def __len__(self):
        return 21


class EagerBatches:
    """Draws when its iterator is created."""

    def __iter__(self):
        return iter(torch.randperm(21).split(4))


def generator():
    return torch.Generator().manual_seed(5)


LOADERS = {
    "sequential": lambda: DataLoader(Noisy(), batch_size=4),
    "shuffle": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
    "shuffle, drop last": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True, drop_last=True),
    "shuffle, own generator": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True, generator=generator()),
    "sampler, own generator": lambda: DataLoader(
        Noisy(), batch_size=7, sampler=RandomSampler(Noisy(), generator=generator())
    ),
    "replacement": lambda: DataLoader(
        Noisy(), batch_size=4, sampler=RandomSampler(Noisy(), replacement=True, num_samples=70)
    ),
    "subset": lambda: DataLoader(Noisy(), batch_size=4, sampler=SubsetRandomSampler(range(3, 20))),
    "weighted": lambda: DataLoader(
        Noisy(), batch_size=4, sampler=WeightedRandomSampler([1.0, 2, 3], 17, replacement=True)
    ),
    "lazy sampler": lambda: DataLoader(Noisy(), batch_size=4, sampler=LazySampler()),
    "eager batch sampler": lambda: DataLoader(Noisy(), batch_sampler=EagerBatches()),
    "batch sampler": lambda: DataLoader(
        Noisy(), batch_sampler=BatchSampler(RandomSampler(Noisy()), 4, False)
    ),
    "no batching": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "sampler of batches": lambda: DataLoader(
        torch.arange(21.0), batch_size=None, sampler=BatchSampler(RandomSampler(range(21)), 4, False)
    ),
    "stream": lambda: DataLoader(NoisyStream(), batch_size=4),
    "stream, no batching": lambda: DataLoader(NoisyStream(), batch_size=None),
    "workers": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(
        Noisy(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "stream, workers": lambda: DataLoader(NoisyStream(), batch_size=4, num_workers=1),
}


def follow(loader, leave_early):
    """Three epochs with draws of the training step in between."""
    seen = []
    for epoch in range(3):
        for count, batch in enumerate(loader):
            seen.append(batch)
            seen.append(torch.rand(2))
            if leave_early and epoch == 1 and count == 2:
                break
        seen.append(torch.rand(1))
    return seen


@pytest.mark.wide(only=["workers-True", "stream, workers-*"])
@pytest.mark.parametrize("leave_early", [False, True])
@pytest.mark.parametrize("kind", LOADERS)
def test_bit_for_bit(kind, leave_early):
    torch.manual_seed(11)
    expected = follow(LOADERS[kind](), leave_early)
    torch.manual_seed(11)
    loader = LOADERS[kind]()
    prepared = prepare_data_loader(
        loader, device=torch.device("cpu"), put_on_device=True, num_processes=1, process_index=0,
        dispatch_batches=False, rng_types=["generator"],
    )  # fmt: skip
    got = follow(prepared, leave_early)
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_dispatch_of_one_process_is_the_plain_loader():
    torch.manual_seed(11)
    expected = follow(LOADERS["stream"](), False)
    torch.manual_seed(11)
    prepared = prepare_data_loader(
        LOADERS["stream"](), device=torch.device("cpu"), put_on_device=True, num_processes=1, process_index=0
    )
    got = follow(prepared, False)
    assert all(torch.equal(a, b) for a, b in itertools.zip_longest(got, expected))


@pytest.mark.wide(only=["workers"])
@pytest.mark.parametrize("kind", [name for name in LOADERS if "stream" not in name and "lazy" not in name])
def test_asking_for_the_end_changes_nothing(kind):
    """Gradient accumulation asks at every step; where the end is counted, no index is drawn earlier for "
    "it."""

    def steps(loader):
        seen = []
        for _ in range(2):
            for batch in loader:
                seen += [batch, torch.rand(1)]
                ends.append(getattr(loader, "end_of_dataloader", None))
        return seen

    ends = []
    torch.manual_seed(2)
    expected = steps(LOADERS[kind]())
    ends.clear()
    torch.manual_seed(2)
    got = steps(prepare_data_loader(LOADERS[kind](), num_processes=1, process_index=0))
    assert all(torch.equal(a, b) for a, b in itertools.zip_longest(got, expected))
    epoch = len(ends) // 2
    assert ends == ([False] * (epoch - 1) + [True]) * 2


def test_shuffled_epochs_are_those_of_torchs_permutation():
    """An oracle without any loader: the seed drawn from torch's generator, and its permutation."""
    torch.manual_seed(8)
    torch.empty((), dtype=torch.int64).random_()  # the base seed of the workers
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    order = torch.randperm(21, generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(8)
    loader = prepare_data_loader(
        DataLoader(range(21), batch_size=4, shuffle=True), num_processes=1, process_index=0
    )
    assert torch.cat(list(loader)).tolist() == order.tolist()
    assert loader.state_dict()["finished"]
