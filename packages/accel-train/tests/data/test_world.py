"""Loaders that read on every rank, in worlds of real ranks."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_state.seeding import set_seed
from accel_state.world.process import PartialState
from accel_train.data import prepare_data_loader, skip_first_batches
from testkit import worlds
from testkit.samples import Numbers

pytestmark = pytest.mark.usefixtures("kept_ranks")


class Custom(Sampler):
    """Not torch's, and shuffled by a generator of its own."""

    def __init__(self, n):
        self.n = n
        self.generator = torch.Generator()

    def __iter__(self):
        return iter(torch.randperm(self.n, generator=self.generator).tolist())

    def __len__(self):
        return self.n


class CustomBatches(BatchSampler):
    def __iter__(self):
        yield from super().__iter__()


class LengthBatches:
    """Batches of varying size, without a batch size."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        start, size = 0, 1
        while start < self.n:
            yield list(range(start, min(start + size, self.n)))
            start, size = start + size, size % 3 + 1


LOADERS = {
    "sequential": lambda n: DataLoader(range(n), batch_size=2),
    "shuffle": lambda n: DataLoader(range(n), batch_size=2, shuffle=True),
    "own generator": lambda n: DataLoader(
        range(n),
        batch_size=2,
        shuffle=True,
        generator=torch.Generator().manual_seed(PartialState().process_index),
    ),
    "replacement": lambda n: DataLoader(
        range(n), batch_size=2, sampler=RandomSampler(range(n), replacement=True, num_samples=n + 1)
    ),
    "subset": lambda n: DataLoader(range(n), batch_size=2, sampler=SubsetRandomSampler(range(n // 2 + 1))),
    "weighted": lambda n: DataLoader(
        range(n), batch_size=2, sampler=WeightedRandomSampler([1.0 + i for i in range(n)], n)
    ),
    "custom sampler": lambda n: DataLoader(range(n), batch_size=2, sampler=Custom(n)),
    "custom batch sampler": lambda n: DataLoader(
        range(n), batch_sampler=CustomBatches(RandomSampler(range(n)), 3, False)
    ),
    "skipping": lambda n: skip_first_batches(DataLoader(range(-2, n), batch_size=2), 1),
    "varying batches": lambda n: DataLoader(range(n), batch_sampler=LengthBatches(n)),
    "stream": lambda n: DataLoader(Numbers(n), batch_size=2),
    "dispatched stream": lambda n: DataLoader(Numbers(n), batch_size=2),
    "no batching": lambda n: DataLoader([torch.tensor([i]) for i in range(n)], batch_size=None, shuffle=True),
}


def real_samples(kind, n):
    """The real samples of this rank and its steps, by epoch; and this rank's next own random number."""
    state = PartialState(cpu=True)
    torch.manual_seed(31 * state.process_index)  # ranks draw differently
    loader = prepare_data_loader(
        LOADERS[kind](n), device=state.device, put_on_device=True, rng_types=["generator"],
        dispatch_batches=kind == "dispatched stream",
    )  # fmt: skip
    epochs = []
    for _ in range(2):
        mine, steps = [], 0
        for batch in loader:
            valid = loader.valid_rows()
            mine += batch.tolist()[: len(batch) if valid is None else valid[state.process_index]]
            steps += 1
        assert loader.end_of_dataloader
        epochs.append((mine, steps))
    return epochs, torch.rand(1).item()


def drawn_alone(kind, n):
    """What one process yields whose generators are rank 0's: the oracle, by plain torch."""
    torch.manual_seed(0)
    loader = LOADERS[kind](n)
    return [sorted(int(i) for batch in loader for i in batch.flatten()) for _ in range(2)]


def all_kinds(n):
    return {kind: real_samples(kind, n) for kind in LOADERS}


@pytest.fixture(scope="module", params=[(2, 7), (3, 7), (4, 11)], ids="{0[0]} ranks".format)
def world(request):
    """All loaders in one world, since worlds cost more than what happens in them."""
    ranks, n = request.param
    return n, worlds.run(all_kinds, ranks, n)


@pytest.mark.parametrize("kind", LOADERS)
def test_t3_every_sample_of_the_sampler_arrives_once(kind, world):
    n, answers = world
    results = [answer[kind] for answer in answers]
    for epoch in range(2):
        together = sorted(i for epochs, _ in results for i in epochs[epoch][0])
        if kind in ("replacement", "subset", "weighted"):
            assert together == drawn_alone(kind, n)[epoch]
        else:
            assert together == list(range(n))
        assert len({epochs[epoch][1] for epochs, _ in results}) == 1
    # The ranks' own streams stay their own: augmentation differs.
    assert len({draw for _, draw in results}) == len(results)


def shuffled_order(n):
    state = PartialState(cpu=True)
    torch.manual_seed(13 + state.process_index)
    loader = prepare_data_loader(DataLoader(range(n), batch_size=2, shuffle=True))
    return [batch.tolist() for _ in range(2) for batch in loader]


def test_the_global_order_is_the_one_process_order():
    torch.manual_seed(13)
    plain = DataLoader(range(8), batch_size=2, shuffle=True)
    expected = [batch.tolist() for _ in range(2) for batch in plain]
    for ranks in (2, 4):
        results = worlds.run(shuffled_order, ranks, 8)
        assert [batch for step in zip(*results, strict=True) for batch in step] == expected


def synchronized(kinds):
    state = PartialState(cpu=True)
    torch.manual_seed(state.process_index)
    generator = torch.Generator().manual_seed(state.process_index)
    loader = prepare_data_loader(
        DataLoader(range(4), batch_size=1, shuffle=True, generator=generator), rng_types=kinds
    )
    iterator = iter(loader)
    after_begin = (torch.rand(1).item(), torch.rand(1, generator=generator).item())
    del iterator
    return after_begin


def test_chosen_generators_are_made_equal_when_an_epoch_begins():
    one, two = worlds.run(synchronized, 2, ["generator"])
    assert one[0] != two[0]
    assert one[1] == two[1]
    one, two = worlds.run(synchronized, 2, ["torch"])
    assert one[0] == two[0]
    assert one[1] != two[1]


def empties():
    state = PartialState(cpu=True)
    device = {"device": state.device, "put_on_device": True}
    lengths = []
    for loader in (
        prepare_data_loader(DataLoader([], batch_size=2)),
        prepare_data_loader(DataLoader(Numbers(0), batch_size=2), **device),
        prepare_data_loader(DataLoader(Numbers(0), batch_size=2), dispatch_batches=False, **device),
        prepare_data_loader(DataLoader(range(3), batch_size=2, drop_last=True)),
    ):
        lengths.append(len(list(loader)))
        assert loader.end_of_dataloader
    return lengths


def test_empty_loaders_yield_nothing_and_nobody_hangs():
    assert worlds.run(empties, 3) == [[0, 0, 0, 0]] * 3


class Broken(list):
    def __getitem__(self, index):
        if index == 3:
            raise LookupError("sample 3 is broken")
        return index


def one_fails():
    PartialState(cpu=True)
    loader = prepare_data_loader(DataLoader(Broken(range(8)), batch_size=2))
    seen = []
    try:
        seen.extend(batch.tolist() for batch in loader)
    except LookupError as error:
        return str(error), loader.ledger.live
    return seen


def test_a_dataset_that_fails_on_one_rank_fails_there_with_its_own_error():
    one, two = worlds.run(one_fails, 2)
    assert one == [[0, 1], [4, 5]]
    assert two == ("sample 3 is broken", [])


def uneven():
    PartialState(cpu=True)
    loader = prepare_data_loader(DataLoader(range(9), batch_size=2), even_batches=False)
    return [batch.tolist() for batch in loader], len(loader), loader.may_be_uneven, loader.may_pad


def test_uneven_batches_on_request():
    assert worlds.run(uneven, 2) == [
        ([[0, 1], [4, 5], [8]], 3, True, False),
        ([[2, 3], [6, 7]], 2, True, False),
    ]


class Noise(Dataset):
    """Augments with every generator."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)


def noise_of_ranks(stateful):
    """Per kind of loader: the noise of every sample of two epochs, and whether global generators stay alike."""
    state = PartialState(cpu=True)
    answers = {}
    for workers, generator, seed in itertools.product(
        (0, 2, "stay"), (False, True), ("same", "device", None)
    ):
        if seed is None:
            torch.seed(), np.random.seed(), random.seed()
        else:
            set_seed(1, device_specific=seed == "device")
        options = {} if workers == 0 else {"num_workers": 2, "persistent_workers": workers == "stay"}
        if workers:
            options["multiprocessing_context"] = "fork"
        if generator:
            options["generator"] = torch.Generator().manual_seed(5)
        loader = prepare_data_loader(
            DataLoader(Noise(), batch_size=2, shuffle=True, **options), use_stateful_dataloader=stateful
        )
        rows = torch.cat([batch for _ in range(2) for batch in loader]).tolist()
        answers[workers, generator, seed] = rows, (random.random(), np.random.rand(), torch.rand(()).item())
    return state.process_index, answers


@pytest.mark.wide(but=["False"])
@pytest.mark.parametrize("stateful", [False, True])
def test_augmentation_differs_between_ranks_that_read_different_samples(stateful):
    (_, one), (_, other) = worlds.run(noise_of_ranks, 2, stateful)
    for case in one:
        for column in range(3):
            numbers = [row[column] for row in one[case][0] + other[case][0]]
            assert len(set(numbers)) == len(numbers), case
        if case[2] == "same":  # what a script decides by them is the same on all ranks
            assert one[case][1] == other[case][1], case


def exact_noise():
    """A run, and one that continues it after five batches."""
    PartialState(cpu=True)
    set_seed(1)

    def make():
        return prepare_data_loader(
            DataLoader(Noise(), batch_size=2, shuffle=True), use_stateful_dataloader=True
        )

    loader, rows = make(), []
    for number, batch in enumerate(loader):
        rows.append(batch.tolist())
        if number == 1:
            state = loader.state_dict()
    resumed = make()
    set_seed(7)
    resumed.load_state_dict(state)
    return rows[2:], [batch.tolist() for batch in resumed]


def test_augmentation_of_a_rank_continues_exactly():
    for rest, resumed in worlds.run(exact_noise, 2):
        assert rest == resumed
        assert len(rest) == 2


def first_of_a_large_seed():
    PartialState()
    torch.manual_seed(-1)
    loader = prepare_data_loader(
        DataLoader(range(40), shuffle=True, batch_size=20), use_seedable_sampler=True
    )
    return next(iter(loader)).tolist()


def test_ranks_share_seeds_of_64_bits():
    first, second = worlds.run(first_of_a_large_seed, 2)
    assert first + second == torch.randperm(40, generator=torch.Generator().manual_seed(-1)).tolist()
