"""A loader that is saved, and loaded into a fresh one, yields what the interrupted one would have yielded."""

import copy
import itertools
import pickle
import random
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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

from accel_state.errors import NotAvailableError
from accel_state.seeding import get_rng_state, set_rng_state
from accel_state.world.process import PartialState
from accel_train.data import prepare_data_loader, skip_first_batches
from accel_train.errors import DataError
from testkit import worlds
from testkit.samples import Numbers

SIZE = 23


class Shuffled(IterableDataset):
    """Draws its order from torch's generator when it is first read."""

    def __iter__(self):
        yield from torch.randperm(SIZE).tolist()


class Custom(Sampler):
    """Draws from torch's own generator, when its first index is asked for."""

    def __iter__(self):
        yield from torch.randperm(SIZE).tolist()

    def __len__(self):
        return SIZE


class Eager(Custom):
    def __iter__(self):
        return iter(torch.randperm(SIZE).tolist())


class OfPython(Custom):
    """Draws from Python's generator."""

    def __iter__(self):
        order = list(range(SIZE))
        random.shuffle(order)
        yield from order


class Lazy(Custom):
    """Draws each index when it is asked for it, between the draws of the training step."""

    def __iter__(self):
        for _ in range(SIZE):
            yield int(torch.randint(SIZE, (1,)))


class OwnNumpy(Custom):
    """Has a generator of its own that goes on from epoch to epoch."""

    def __init__(self):
        self.rng = np.random.default_rng(3)

    def __iter__(self):
        return iter(self.rng.permutation(SIZE).tolist())


class LazyNumpy(OwnNumpy):
    """Draws each index from its own generator when it is asked for it, and once more at the end."""

    def __iter__(self):
        for _ in range(SIZE):
            yield int(self.rng.integers(SIZE))
        self.rng.integers(SIZE)


class Counting(Custom):
    """Says itself where it is: at which epoch."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        yield from ((index + self.epoch) % SIZE for index in range(SIZE))

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


class Augmenting(IterableDataset):
    """Draws when it is read."""

    def __iter__(self):
        for i in range(SIZE):
            yield i + torch.rand(1)[0] + random.random() + np.random.rand()


class OwnGenerator(IterableDataset):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        yield from torch.randperm(SIZE, generator=self.generator).tolist()


class NoisyRows(Dataset):
    """Map-style, draws from everywhere when it is read."""

    def __init__(self, own=True):
        self.rng = random.Random(5) if own else None

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        own = self.rng.random() if self.rng else 0.0
        return index + torch.rand(1)[0] + random.random() + np.random.rand() + own


class CustomBatches(BatchSampler):
    def __iter__(self):
        yield from super().__iter__()


def _own():
    return torch.Generator().manual_seed(3)


DATA = range(SIZE)
LOADERS = {
    "sequential": lambda: DataLoader(DATA, batch_size=2),
    "shuffle": lambda: DataLoader(DATA, batch_size=2, shuffle=True),
    "own generator": lambda: DataLoader(DATA, batch_size=2, shuffle=True, generator=_own()),
    "sampler's own generator": lambda: DataLoader(
        DATA, batch_size=2, sampler=RandomSampler(DATA, generator=_own())
    ),
    "own generator, full batches": lambda: DataLoader(range(24), 2, shuffle=True, generator=_own()),
    "own generator, replacement": lambda: DataLoader(
        DATA, 2, sampler=RandomSampler(DATA, replacement=True, num_samples=90, generator=_own())
    ),
    "drop last": lambda: DataLoader(range(25), 2, shuffle=True, drop_last=True, generator=_own()),
    "replacement": lambda: DataLoader(
        DATA, batch_size=2, sampler=RandomSampler(DATA, replacement=True, num_samples=SIZE)
    ),
    "subset": lambda: DataLoader(DATA, batch_size=2, sampler=SubsetRandomSampler(DATA)),
    "weighted": lambda: DataLoader(
        DATA, batch_size=2, sampler=WeightedRandomSampler([1.0 + i for i in DATA], SIZE)
    ),
    "custom": lambda: DataLoader(DATA, batch_size=2, sampler=Custom()),
    "custom, eager": lambda: DataLoader(DATA, batch_size=2, sampler=Eager()),
    "of python": lambda: DataLoader(DATA, batch_size=2, sampler=OfPython()),
    "lazy": lambda: DataLoader(DATA, batch_size=2, sampler=Lazy()),
    "own numpy": lambda: DataLoader(DATA, batch_size=2, sampler=OwnNumpy()),
    "drawing at each index": lambda: DataLoader(DATA, batch_size=2, sampler=LazyNumpy()),
    "custom batches, own generator": lambda: DataLoader(
        range(24), batch_sampler=CustomBatches(RandomSampler(range(24), generator=_own()), 2, False)
    ),
    "counting": lambda: DataLoader(DATA, batch_size=2, sampler=Counting()),
    "noisy rows": lambda: DataLoader(NoisyRows(), batch_size=2, shuffle=True),
    "augmenting stream": lambda: DataLoader(Augmenting(), batch_size=2),
    "stream's own generator": lambda: DataLoader(OwnGenerator(), batch_size=2),
    "custom batches": lambda: DataLoader(DATA, batch_sampler=CustomBatches(RandomSampler(DATA), 2, False)),
    "no batching": lambda: DataLoader(torch.arange(SIZE), batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(Numbers(SIZE), batch_size=2),
    "shuffled stream": lambda: DataLoader(Shuffled(), batch_size=2),
    "workers": lambda: DataLoader(
        DATA, batch_size=2, shuffle=True, num_workers=2, multiprocessing_context="fork"
    ),
    "lazy, workers": lambda: DataLoader(
        DATA, batch_size=2, sampler=Lazy(), num_workers=2, multiprocessing_context="fork"
    ),
    "own generator, workers": lambda: DataLoader(
        range(24), batch_size=2, shuffle=True, generator=_own(), num_workers=2, multiprocessing_context="fork"
    ),
    "kept workers": lambda: DataLoader(
        DATA, 2, sampler=Custom(), num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    ),
    "noisy rows, workers": lambda: DataLoader(
        NoisyRows(own=False), 2, shuffle=True, num_workers=2, multiprocessing_context="fork"
    ),
    "stream, worker": lambda: DataLoader(
        Numbers(SIZE), batch_size=2, num_workers=1, multiprocessing_context="fork"
    ),
}
SEEDABLE = {"use_seedable_sampler": True}
KINDS = {kind: (kind, {}) for kind in LOADERS} | {
    "seedable": ("shuffle", SEEDABLE),
    "dispatched": ("shuffle", {"dispatch_batches": True, "put_on_device": True}),
    "dispatched, lazy": ("lazy", {"dispatch_batches": True, "put_on_device": True}),
    "dispatched, augmenting stream": (
        "augmenting stream",
        {"dispatch_batches": True, "put_on_device": True},
    ),
    "dispatched stream": ("stream", {"dispatch_batches": True, "put_on_device": True}),
    "split": ("shuffle", {"split_batches": True}),
    "split, own generator": ("own generator, full batches", {"split_batches": True}),
    "dispatched, own generator": (
        "own generator, full batches",
        {"dispatch_batches": True, "put_on_device": True},
    ),
}


def with_workers(loader, workers):
    """The same loader with another number of worker processes."""
    options = {name: getattr(loader, name) for name in ("collate_fn", "generator")}
    if loader.batch_sampler is None:
        options |= {"batch_size": None, "sampler": loader.sampler}
    else:
        options |= {"batch_sampler": loader.batch_sampler}
    context = "fork" if workers else None
    return DataLoader(loader.dataset, num_workers=workers, multiprocessing_context=context, **options)


def make(kind, ranks=None, rank=None, stateful=True, workers=None):
    build, options = KINDS[kind]
    loader = LOADERS[build]()
    return prepare_data_loader(
        loader if workers is None else with_workers(loader, workers),
        device=torch.device("cpu"),
        num_processes=ranks,
        process_index=rank,
        use_stateful_dataloader=stateful,
        **{"dispatch_batches": False, **options},
    )


def run(loader, stream, *, until=None, epochs=4, ask=False, meddle=None, skip=0):
    """Iterate and note, with draws of the training step after each batch; save and stop at (epoch, batch).

    Args:
        ask: ask after each batch whether it is the last, as gradient accumulation does.
        meddle: called after each batch; draws from the loader's own generator, say.
        skip: batches to leave out of the first epoch.
    """
    current = skip_first_batches(loader, skip) if skip else loader
    while loader.iteration < epochs:
        epoch = loader.iteration
        for count, batch in enumerate(current):
            end = current.end_of_dataloader if ask else None
            drawn = (torch.rand(1).item(), random.random(), np.random.rand())
            stream.append((epoch, batch.tolist(), end, drawn, meddle and meddle(loader)))
            if until == (epoch, count):
                return {"loader": loader.state_dict(), "rng": get_rng_state()}
        current = loader
        if until == (epoch, "end"):
            return {"loader": loader.state_dict(), "rng": get_rng_state()}
    return None


def seed(value):
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def interrupted(kind, epoch, count, ranks=None, rank=None, idle=(), stateful=True, **options):
    """The uninterrupted stream, and the one of a run that ended and was resumed by a fresh loader.

    Without `stateful` the script goes on as with Accelerate: it says which epoch it is in, and skips.

    Args:
        idle: runs between that save what they loaded and read nothing; True: an iterator begins before the save.
    """
    seed(21)
    whole: list = []
    run(make(kind, ranks, rank, stateful), whole, **options)
    seed(21)
    parts: list = []
    state = run(make(kind, ranks, rank, stateful), parts, until=(epoch, count), **options)
    saved = pickle.loads(pickle.dumps(state))
    seed(99)
    fresh = make(kind, ranks, rank, stateful)
    fresh.load_state_dict(saved["loader"])
    if not stateful and count != "end":
        fresh.set_epoch(epoch)
        options["skip"] = count + 1
    set_rng_state(saved["rng"])
    for begins in idle:
        unused = iter(fresh) if begins else None
        again, rng = pickle.loads(pickle.dumps(fresh.state_dict())), get_rng_state()
        del unused
        seed(98)
        fresh = make(kind, ranks, rank)
        fresh.load_state_dict(again)
        set_rng_state(rng)
    run(fresh, parts, **options)
    return whole, parts


@pytest.mark.wide(but=["*-place0", "*-place3", "*-place6"])
@pytest.mark.parametrize("place", [(0, 0), (0, 4), (2, 3), (2, 10), (2, "end"), (1, 11), (2, 11)])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "worker" not in kind])
@pytest.mark.parametrize(
    "ask", [False, pytest.param(True, marks=pytest.mark.full)], ids=["", "asking for the end"]
)
@pytest.mark.parametrize("stateful", [True, False], ids=["by itself", "skipping"])
def test_t5_the_stream_goes_on_where_it_was(kind, place, ask, stateful):
    whole, parts = interrupted(kind, *place, ranks=1, rank=0, ask=ask, stateful=stateful)
    assert parts == whole


@pytest.mark.wide(but=["*-place0", "drop last-*"])
@pytest.mark.parametrize("place", [(0, 0), (2, 3), (2, 11), (1, "end")])
@pytest.mark.parametrize(
    "kind", ["own generator", "own generator, full batches", "drop last", "own generator, workers"]
)
def test_t5_a_generator_with_other_users_goes_on_where_it_was(kind, place):
    """As when an evaluation loader was given the same one."""

    def meddle(loader):
        return torch.rand(1, generator=loader.generator).item()

    whole, parts = interrupted(kind, *place, ranks=1, rank=0, meddle=meddle)
    assert parts == whole


@pytest.mark.wide(only=["by itself-workers"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("workers", "kept workers") else pytest.mark.full)
        for kind in KINDS
        if "worker" in kind
    ],
)
@pytest.mark.parametrize(
    "stateful", [True, pytest.param(False, marks=pytest.mark.full)], ids=["by itself", "skipping"]
)
def test_t5_the_stream_goes_on_where_it_was_with_workers(kind, stateful):
    for place in ((0, 0), (2, 3), (2, 11), (1, "end")):
        whole, parts = interrupted(kind, *place, ranks=1, rank=0, stateful=stateful)
        assert parts == whole, place


STEADY = [
    kind
    for kind in KINDS
    if not any(word in kind for word in ("worker", "lazy", "noisy", "stream", "python"))
]
"""Kinds whose samplers draw nothing from the generators of the training step after the first batch."""
QUICK = ("own generator, full batches",)


@pytest.mark.parametrize(
    ("before", "after"),
    [(0, 2), *(pytest.param(*pair, marks=pytest.mark.full) for pair in ((2, 4), (0, 1), (3, 0)))],
)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.full) for kind in STEADY]
)
def test_t5_another_number_of_workers_goes_on_where_it_was(kind, before, after):
    """Workers are given indices ahead, so they reach the end of the order, and what is drawn there, earlier."""
    for place, (whole, parts) in with_other_workers(kind, before, after, 1, 0).items():
        assert parts == whole, place


def with_other_workers(kind, before, after, ranks=None, rank=None):
    """By place, the stream of a run that was not interrupted, and of one that went on with other workers."""
    seed(21)
    whole: list = []
    run(make(kind, ranks, rank, workers=before), whole)
    last = sum(item[0] == 1 for item in whole) - 1
    places = [(0, 0), (1, 3), (1, last - 3), (1, last)]
    if kind == "own generator, replacement":
        places += [(1, place) for place in range(10, 16)]  # the sampler draws 32 samples at a time
    found = {}
    for place in places:
        seed(21)
        parts: list = []
        state = run(make(kind, ranks, rank, workers=before), parts, until=place)
        saved = pickle.loads(pickle.dumps(state))
        seed(99)
        fresh = make(kind, ranks, rank, workers=after)
        fresh.load_state_dict(saved["loader"])
        set_rng_state(saved["rng"])
        run(fresh, parts)
        found[place] = whole, parts
    return found


def with_other_workers_in_a_world():
    PartialState(cpu=True)
    kinds = [kind for kind in STEADY if "own" in kind or "draw" in kind or kind in ("shuffle", "split")]
    return {(kind, *pair): with_other_workers(kind, *pair) for kind in kinds for pair in ((0, 2), (2, 0))}


@pytest.mark.full
def test_t5_two_ranks_go_on_with_another_number_of_workers():
    for answers in worlds.run(with_other_workers_in_a_world, 2, timeout=240):
        for case, places in answers.items():
            for place, (whole, parts) in places.items():
                assert parts == whole, (case, place)


@pytest.mark.parametrize("workers", [0, 2])
def test_t5_a_seedable_order_from_the_loaders_own_generator_goes_on(workers):
    """Workers read ahead while the epoch begins again, and the order is drawn after its seed was set."""

    def make_loader():
        loader = DataLoader(
            range(12), shuffle=True, generator=torch.Generator().manual_seed(3), num_workers=workers
        )
        return prepare_data_loader(loader, use_seedable_sampler=True, use_stateful_dataloader=True)

    torch.manual_seed(0)
    loader, whole = make_loader(), []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            whole.append(batch.item())
            if len(whole) == 4:
                state = copy.deepcopy(loader.state_dict())
    torch.manual_seed(5)
    loader, rest = make_loader(), []
    loader.load_state_dict(state)
    for epoch in range(2):
        loader.set_epoch(epoch)
        rest += [batch.item() for batch in loader]
    assert rest == whole[4:]


@pytest.mark.wide(but=["*-place0", "*-place3"])
@pytest.mark.parametrize("place", [(0, 0), (2, 3), (1, 11), (2, "end")])
@pytest.mark.parametrize("idle", [(False,), (True,), (True, True)], ids=["loaded", "begun", "begun twice"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "worker" not in kind])
def test_a_loaded_state_of_which_nothing_was_read_can_be_saved_again(kind, idle, place):
    """KempnerForge#57: the second resume within an epoch read another order."""
    whole, parts = interrupted(kind, *place, ranks=1, rank=0, idle=idle)
    assert parts == whole


@pytest.mark.full
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "worker" in kind])
def test_a_loaded_state_of_which_workers_read_nothing_can_be_saved_again(kind):
    whole, parts = interrupted(kind, 2, 3, ranks=1, rank=0, idle=(False, True))
    assert parts == whole


@given(epoch=st.integers(0, 3), count=st.integers(0, 11))
def test_t5_any_place(epoch, count):
    whole, parts = interrupted("shuffle", epoch, count, ranks=1, rank=0)
    assert parts == whole


WORLD_KINDS = ["shuffle", "seedable", "own generator", "subset", "custom", "custom batches", "stream"]
WORLD_KINDS += [
    "dispatched",
    "dispatched stream",
    "split",
    "dispatched, augmenting stream",
    "dispatched, lazy",
]
WORLD_KINDS += [
    "own generator, full batches",
    "counting",
    "own numpy",
    "noisy rows",
    "stream's own generator",
]


def interrupted_in_a_world():
    PartialState(cpu=True)
    found = {}
    for kind in WORLD_KINDS:
        for place in ((0, 2), (2, 1), (2, 5), (1, "end")):
            for options in ({}, {"stateful": False}, {"ask": True}, {"idle": (False, True)}):
                found[kind, place, str(options)] = interrupted(kind, *place, **options)
    return found


@pytest.mark.full
def test_t5_two_ranks_go_on_where_they_were():
    for answers in worlds.run(interrupted_in_a_world, 2, timeout=120):
        for case, (whole, parts) in answers.items():
            assert parts == whole, case


NOISY = ("lazy", "noisy rows", "augmenting stream", "dispatched, lazy", "dispatched, augmenting stream")
NOISY += ("drawing at each index",)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "worker" not in kind and kind not in NOISY])
def test_without_the_option_the_draw_is_restored_and_the_epoch_starts_anew(kind):
    """So that scripts that skip by themselves do not skip twice."""
    seed(4)
    whole: list = []
    loader = make(kind, 1, 0, stateful=False)
    run(loader, whole)
    seed(4)
    parts: list = []
    saved = run(make(kind, 1, 0, stateful=False), parts, until=(2, 3))
    fresh = make(kind, 1, 0, stateful=False)
    fresh.load_state_dict(saved["loader"])
    assert fresh.iteration == 2
    set_rng_state(saved["rng"])
    assert saved["loader"]["batches_yielded"] == 4
    epoch = [item[1] for item in whole if item[0] == 2]
    assert [batch.tolist() for batch in skip_first_batches(fresh, 4)] == epoch[4:]
    assert fresh.iteration == 3

    fresh = make(kind, 1, 0, stateful=False)
    fresh.load_state_dict(saved["loader"])
    assert [batch.tolist() for batch in fresh] == epoch
    if kind not in ("stream", "sequential", "dispatched stream"):
        assert [batch.tolist() for batch in fresh] != epoch  # the draw serves one epoch only


def test_the_skipping_loader_tells_where_the_epoch_is():
    loader = make("shuffle", 1, 0)
    list(loader)  # an epoch of its own before
    for count, _ in enumerate(skip_first_batches(loader, 3)):
        if count == 1:
            break
    state = loader.state_dict()
    assert state["batches_yielded"] == 5
    assert state["position"] == {"samples": 10}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["sequential", "custom batches", "stream"])
def test_a_loader_that_always_skips_does_not_skip_twice(kind, ranks):
    def build():
        plain = skip_first_batches(LOADERS[kind](), 2 if kind != "stream" else 0)
        options = {"num_processes": ranks, "process_index": 0, "use_stateful_dataloader": True}
        loader = prepare_data_loader(plain, **options)
        return skip_first_batches(loader, 2) if kind == "stream" else loader

    torch.manual_seed(0)
    loader = build()
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    fresh = build()
    fresh.load_state_dict(state)
    assert [batch.tolist() for batch in fresh] == rest


def test_t9_another_number_of_ranks_goes_on_with_the_next_sample():
    torch.manual_seed(6)
    ranks = [make("shuffle", 2, rank) for rank in range(2)]
    for rank in ranks:
        rank.get_sampler().generator = torch.Generator().manual_seed(0)  # simulated ranks cannot broadcast
    order, states = [], []
    for loader in ranks:
        iterator = iter(loader)
        order.append([next(iterator).tolist() for _ in range(3)])
        states.append(loader.state_dict())
        del iterator
    first = sorted(i for rank in order for rows in rank for i in rows)
    for other in (1, 3):
        rest = []
        for rank in range(other):
            loader = make("shuffle", other, rank)
            loader.get_sampler().generator = torch.Generator()
            loader.load_state_dict(states[0])
            for batch in loader:
                valid = loader.valid_rows()
                rest += batch[: len(batch) if valid is None else valid[rank]].tolist()
        assert sorted(first + rest) == list(range(SIZE))


def test_t9_a_stream_goes_on_where_batches_divide():
    def after(ranks, batches):
        loader = make("stream", ranks, 0)
        iterator = iter(loader)
        for _ in range(batches):
            next(iterator)
        return loader.state_dict()

    alone = make("stream", 1, 0)
    alone.load_state_dict(after(2, 3))
    assert next(iter(alone)).tolist() == [12, 13]
    pair = make("stream", 2, 1)
    pair.load_state_dict(after(1, 4))
    assert next(iter(pair)).tolist() == [10, 11]
    with pytest.raises(NotAvailableError, match="3 batches on each of 1 ranks; 2 ranks cannot"):
        pair.load_state_dict(after(1, 3))


def test_states_are_plain_data():
    loader = make("shuffle", 1, 0)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert set(state) == {
        "version", "ranks", "index", "options", "reading", "epoch", "finished", "batches_yielded", "position",
        "draw", "rng_at_start", "ahead", "source", "generators", "samplers", "workers", "workers_run",
    }  # fmt: skip
    assert isinstance(state["draw"]["seed"], int)
    assert state["rng_at_start"]["torch"].dtype == torch.uint8
    assert state["finished"] is False
    fresh = make("shuffle", 1, 0)
    assert fresh.state_dict()["finished"] is True
    assert fresh.state_dict()["epoch"] == 0


def test_a_foreign_state_is_refused():
    loader = make("shuffle", 1, 0)
    with pytest.raises(DataError, match="not the state of a data loader"):
        loader.load_state_dict({"_snapshot": {}})
    state = loader.state_dict()
    with pytest.raises(DataError, match="version 99"):
        loader.load_state_dict(state | {"version": 99})
    stream = make("stream", 1, 0)
    iterator = iter(stream)
    next(iterator)
    with pytest.raises(DataError, match=r"local_batches.*samples"):
        loader.load_state_dict(stream.state_dict())


class SamplerOfItsOwn(Sampler):
    """Shuffled by a generator of its own, which goes on from epoch to epoch."""

    def __init__(self, n):
        self.n = n
        self.generator = torch.Generator().manual_seed(4)

    def __iter__(self):
        return iter(torch.randperm(self.n, generator=self.generator).tolist())

    def __len__(self):
        return self.n


@pytest.mark.parametrize("dispatch", [False, True])
def test_t5_the_draws_of_a_sampler_with_its_own_generator_come_back(dispatch):
    def build():
        return prepare_data_loader(
            DataLoader(range(13), batch_size=2, sampler=SamplerOfItsOwn(13)),
            device="cpu",
            put_on_device=True,
            num_processes=1,
            process_index=0,
            dispatch_batches=dispatch,
            use_stateful_dataloader=True,
        )

    loader = build()
    list(loader)  # the generator is not where a fresh one begins
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator] + [batch.tolist() for batch in loader]
    again = build()
    again.load_state_dict(state)
    assert [batch.tolist() for _ in range(2) for batch in again] == rest


class Untouchable(Dataset):
    """Says what was read of it."""

    def __init__(self, size):
        self.size, self.read = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return index


@pytest.mark.parametrize("stateful", [True, False])
def test_t5_continuing_costs_arithmetic_and_not_reading(stateful):
    """The dataset is not touched for what was handed out, and a late position costs what an early one costs."""
    size = 400_000
    ticks = {}
    for batches in (10, 190_000):
        build = lambda: prepare_data_loader(  # noqa: E731
            DataLoader(Untouchable(size), batch_size=2, shuffle=True),
            num_processes=1,
            process_index=0,
            use_stateful_dataloader=stateful,
        )
        torch.manual_seed(0)
        whole = build()
        order = torch.randperm(size, generator=torch.Generator().manual_seed(_epoch_seed(whole)))
        state = {**whole.state_dict(), "finished": False, "batches_yielded": batches}
        state |= {"position": {"samples": 2 * batches}, "draw": {"seed": _epoch_seed(whole)}}
        fresh = build()
        fresh.load_state_dict(state)
        current = fresh if stateful else skip_first_batches(fresh, batches)
        first, ticks[batches] = _counting_calls(lambda loader=current: next(iter(loader)))
        assert first.tolist() == order[2 * batches : 2 * batches + 2].tolist()
        assert fresh.dataset.read == first.tolist()
    assert ticks[190_000] <= ticks[10] + 5


def _epoch_seed(loader):
    return 1234


def _counting_calls(function):
    """What a function returns, and how many Python functions it called."""
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(1) if event == "call" else None)
    try:
        return function(), len(calls)
    finally:
        sys.setprofile(None)


@pytest.mark.wide
@given(
    kind=st.sampled_from(
        ["shuffle", "own generator", "replacement", "subset", "custom", "custom batches", "lazy"]
    ),
    size=st.integers(1, 40),
    epoch=st.integers(0, 3),
    batches=st.integers(0, 40),
    ahead=st.integers(0, 3),
)
def test_t5_property_of_the_index_stream_alone(kind, size, epoch, batches, ahead):
    """Stopped after any batch of any epoch, with any number of index batches read ahead for workers."""
    samplers = {
        "shuffle": lambda: BatchSampler(RandomSampler(range(size)), 3, False),
        "own generator": lambda: BatchSampler(RandomSampler(range(size), generator=_own()), 3, False),
        "replacement": lambda: BatchSampler(
            RandomSampler(range(size), replacement=True, num_samples=2 * size, generator=_own()), 3, True
        ),
        "subset": lambda: BatchSampler(SubsetRandomSampler(range(size)), 3, False),
        "custom": lambda: BatchSampler(Custom(), 3, False),
        "custom batches": lambda: CustomBatches(RandomSampler(range(size)), 3, False),
        "lazy": lambda: BatchSampler(Lazy(), 3, False),
    }

    def epochs(loader, count):
        return [[tuple(batch) for batch in loader] for _ in range(count)]

    def build():
        plain = DataLoader(range(SIZE + size), batch_sampler=samplers[kind](), collate_fn=tuple)
        return prepare_data_loader(plain, num_processes=1, process_index=0, use_stateful_dataloader=True)

    seed(5)
    loader = build()
    epochs(loader, epoch)
    iterator = iter(loader)
    length = len(loader)
    taken = [next(iterator) for _ in range(min(batches, length))]
    if loader.current.stream is not None and taken and ahead:
        loader.current.stream.ends_at(len(taken))  # what workers and gradient accumulation make it do
    saved, rng = loader.state_dict(), get_rng_state()
    rest = [tuple(batch) for batch in iterator]
    after = epochs(loader, 1)
    seed(77)
    fresh = build()
    fresh.load_state_dict(pickle.loads(pickle.dumps(saved)))
    set_rng_state(rng)
    fresh.set_epoch(epoch)
    assert [tuple(batch) for batch in fresh] == rest
    assert epochs(fresh, 1) == after


# Generators that other code draws from while a loader is read


class Buffered(IterableDataset):
    """A buffer of a few samples, of which a random one is next; `source` draws."""

    def __init__(self, source):
        self.source = source

    def __iter__(self):
        buffer = []
        for sample in range(20):
            buffer.append(sample)
            if len(buffer) > 3:
                yield buffer.pop(self.source.randrange(len(buffer)))
        yield from buffer


class Drawing(Sampler):
    """Draws each index, or all of them at the beginning."""

    def __init__(self, each):
        self.each = each

    def __len__(self):
        return 20

    def __iter__(self):
        order = random.sample(range(20), 20)
        while order:
            yield order.pop(random.randrange(len(order)) if self.each else 0)


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: DataLoader(Buffered(random), batch_size=2), True),
        (lambda: DataLoader(Buffered(random.Random(1)), batch_size=2), False),
        (lambda: DataLoader(Buffered(random), batch_size=2, num_workers=1), False),
        (lambda: DataLoader(range(20), batch_size=2, sampler=Drawing(each=True)), True),
        (lambda: DataLoader(range(20), batch_size=2, sampler=Drawing(each=False)), False),
        (lambda: DataLoader(range(20), batch_size=2, shuffle=True), False),
    ],
)
def test_draws_of_others_between_those_of_reading_are_told_of_when_a_state_is_saved(made, told, dispatch):
    def state_after(draws):
        device = PartialState(cpu=True).device
        loader = prepare_data_loader(made(), device, put_on_device=True, dispatch_batches=dispatch)
        for _ in itertools.islice(loader, 5):
            draws()
        return loader.state_dict()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        state_after(lambda: (torch.rand(1), np.random.rand()))  # from other generators
        assert not [each for each in seen if "from which other code draws" in str(each.message)]
        state_after(random.random)
        found = [each for each in seen if "from which other code draws" in str(each.message)]
    assert len(found) == told
