"""A training that was killed at any batch and resumed by a new process makes the same numbers, bit for bit.

Each cell of the matrix is one training script, run three ways in a world of real ranks: never interrupted; until it is
stopped after a batch, with its state saved; and resumed from that state by new objects, with all generators elsewhere.
Losses of every batch and the final weights must be equal in every bit. `test_kill_9…` does the same with processes that
really die. Threads are fixed to 1 and algorithms are deterministic, as `repeatable` prints.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import random
import signal
import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from testkit import worlds

SAMPLES, BATCH, EPOCHS = 23, 2, 3


# What is trained on


class Rows(Dataset):
    """Map-style; reads draw random numbers when `noisy`."""

    def __init__(self, noisy=False, size=SAMPLES):
        self.rows = torch.arange(size * 4.0).reshape(size, 4).sin()
        self.noisy = noisy

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return _noisy(self.rows[index]) if self.noisy else self.rows[index]


def _noisy(row):
    return row + 0.01 * torch.rand(4) + 0.01 * random.random() + 0.01 * float(np.random.rand())


class Stream(IterableDataset):
    """Reads draw random numbers when `noisy`."""

    def __init__(self, noisy=False, size=SAMPLES):
        self.rows = Rows(noisy, size)

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.rows[index] for index in range(first, len(self.rows), step))


class Tracked(IterableDataset):
    """A stream that says where it is, and notes how much of it was read; each worker has its own part."""

    def __init__(self, noisy=False, size=SAMPLES):
        self.rows = Rows(noisy, size)
        self.place = self.read = 0
        self.going_on = False

    def __iter__(self):
        if not self.going_on:
            self.place = 0
        self.going_on = False
        return self.rest()

    def rest(self):
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        while first + self.place * step < len(self.rows):
            self.place += 1
            self.read += 1
            yield self.rows[first + (self.place - 1) * step]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place, self.going_on = state["place"], True


class EpochSampler(Sampler):
    """A sampler of one's own that wants to know the epoch."""

    def __init__(self, size=SAMPLES):
        self.size = size
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()

    def __len__(self):
        return self.size


class OwnBatches(BatchSampler):
    """A batch sampler of one's own, over a sampler that draws from torch's generator."""

    def __iter__(self):
        yield from super().__iter__()


KINDS: dict[str, Any] = {
    "default sampler": lambda c: DataLoader(Rows(c.noisy), BATCH, shuffle=True, **c.workers_kwargs()),
    "seeded": lambda c: DataLoader(Rows(c.noisy), BATCH, shuffle=True, **c.workers_kwargs()),
    "custom sampler": lambda c: DataLoader(
        Rows(c.noisy), BATCH, sampler=EpochSampler(), **c.workers_kwargs()
    ),
    "custom batch sampler": lambda c: DataLoader(
        Rows(c.noisy),
        batch_sampler=OwnBatches(RandomSampler(range(SAMPLES)), BATCH, False),
        **c.workers_kwargs(),
    ),
    "iterable": lambda c: DataLoader(Stream(c.noisy), BATCH, **c.workers_kwargs()),
    "dispatch": lambda c: DataLoader(Rows(c.noisy), BATCH, shuffle=True, **c.workers_kwargs()),
    "dispatched stream": lambda c: DataLoader(Stream(c.noisy), BATCH, **c.workers_kwargs()),
    "stateful": lambda c: DataLoader(Tracked(c.noisy), BATCH, **c.workers_kwargs()),
    "dispatched stateful": lambda c: DataLoader(Tracked(c.noisy), BATCH, **c.workers_kwargs()),
}


@dataclass(frozen=True)
class Cell:
    kind: str = "default sampler"
    skips: bool = False
    """False: the loader positions itself; True: the script skips, as with Accelerate."""
    workers: int = 0
    precision: str = "no"
    steps: int = 3
    """Micro-batches in an accumulation window."""
    noisy: bool = True
    items: bool = False
    """backward(loss_sum, num_items=…)"""
    background: bool = False
    """The state is written while training goes on for two batches more."""

    def workers_kwargs(self):
        return {"num_workers": self.workers, "multiprocessing_context": "fork" if self.workers else None}

    def config(self):
        from accel_train import DataLoaderConfiguration

        return DataLoaderConfiguration(
            dispatch_batches="dispatch" in self.kind,
            use_seedable_sampler=self.kind == "seeded",
            use_stateful_dataloader=not self.skips,
        )


class Centre(nn.Module):
    """Subtracts a running mean: a buffer that each rank changes in forward, and that outputs depend on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean = self.mean.lerp(x.detach().float().mean(0), 0.1)
        return x - self.mean


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), Centre(), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x)


class Progress:
    """Where the script is: it could keep this in its own file as well."""

    def __init__(self):
        self.epoch = self.batch = 0

    def state_dict(self):
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state):
        self.epoch, self.batch = state["epoch"], state["batch"]


def repeatable(seed):
    """All that bit-for-bit equality rests on, besides the state; and generators that differ between ranks."""
    from accel_state import PartialState

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    value = seed + PartialState().process_index
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    return f"threads {torch.get_num_threads()}, deterministic algorithms, seed {value}"


def train(
    cell,
    folder=None,
    *,
    stop=None,
    resume=False,
    save_at=lambda place: False,
    epochs=EPOCHS,
    project=None,
    on_batch=lambda entry: None,
):
    """The script; returns losses by (epoch, batch) and the final weights."""
    from accel_train import Accelerator

    repeatable(100 if resume else 1)
    accelerator = Accelerator(
        mixed_precision=cell.precision,
        gradient_accumulation_steps=cell.steps,
        dataloader_config=cell.config(),
        project_config=project,
    )
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, KINDS[cell.kind](cell)
    )
    progress, losses = Progress(), []
    handle, last = None, None
    accelerator.register_for_checkpointing(progress)
    if resume:
        accelerator.load_state(folder)
    for epoch in range(progress.epoch, epochs):
        loader.set_epoch(epoch)
        rest = (
            accelerator.skip_first_batches(loader, progress.batch)
            if cell.skips and progress.batch
            else loader
        )
        for x in rest:
            with accelerator.accumulate(model):
                output = model(x).float()
                if cell.items:
                    loss = output.pow(2).sum()
                    accelerator.backward(loss, num_items=len(x))
                else:
                    loss = output.pow(2).mean()
                    accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(
                (epoch, progress.batch, loss.item(), torch.rand(1).item(), accelerator.sync_gradients)
            )
            on_batch(losses[-1])
            progress.batch += 1
            if save_at((epoch, progress.batch)) or stop == (epoch, progress.batch):
                handle = accelerator.save_state(folder, asynchronous=cell.background)
            if stop == (epoch, progress.batch):
                last = len(losses)
            if last is not None and len(losses) == last + (2 if cell.background else 0):
                if cell.background:
                    handle.result()
                return losses[:last], None
        progress.epoch, progress.batch = epoch + 1, 0
    return losses, [parameter.detach().clone() for parameter in model.state_dict().values()]


def same(whole, parts):
    return whole[0] == parts[0] and all(torch.equal(a, b) for a, b in zip(whole[1], parts[1], strict=True))


def differing(cells, folder):
    """The cells, with the place of the kill, of which something differs; run on every rank of a world."""
    print(repeatable(1))
    wrong = []
    for cell, places in cells:
        whole = train(cell)
        for place in places:
            before, _ = train(cell, folder, stop=place)
            after, weights = train(cell, folder, resume=True)
            if not same(whole, (before + after, weights)):
                first = next((a for a, b in zip(whole[0], before + after, strict=False) if a != b), "weights")
                wrong.append((cell, place, "first difference at", first))
    return wrong


def last_batch(ranks):
    """The number of batches of an epoch."""
    return -(-SAMPLES // (BATCH * ranks))


def places(ranks):
    """Epoch 0 and 2; inside a window, at its end, and at the end of the epoch."""
    inside, end = 1, 3
    return [(0, inside), (2, end), (2, inside + 3 if ranks == 1 else inside + 1), (1, last_batch(ranks))]


FAST = [
    Cell(kind, skips, workers) for kind, (skips, workers) in itertools.product(KINDS, [(False, 0), (True, 0)])
] + [
    Cell(workers=2),
    Cell(workers=2, skips=True),
    Cell("custom batch sampler", workers=2),
    Cell("dispatch", workers=2),
    Cell("iterable", workers=2),
    Cell("dispatched stream", workers=2),
    Cell("stateful", workers=2, noisy=False),
    Cell("dispatched stateful", workers=2, noisy=False),
    Cell(precision="bf16"),
    Cell(precision="fp16", kind="custom sampler"),
    Cell(items=True),
    Cell(steps=1),
    Cell(background=True),
]


@pytest.mark.wide
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_t5_resumed_equals_uninterrupted(tmp_path, ranks):
    """The losses of every batch and the final weights, bit for bit; each cell is stopped at two of three places."""
    at_start, at_window_end, _, at_epoch_end = places(ranks)
    pairs = list(itertools.combinations((at_start, at_window_end, at_epoch_end), 2))
    cells = [(cell, pairs[(index + ranks) % 3]) for index, cell in enumerate(FAST)]
    for wrong in worlds.run(differing, ranks, cells, tmp_path / "state", timeout=240):
        assert wrong == []


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(1600)
def test_t5_resumed_equals_uninterrupted_full(tmp_path, kind, precision, ranks):
    """The cross product."""
    windows = [(1, False), (3, False), (3, True)] if precision == "no" else [(3, False)]
    cells = [
        (
            Cell(kind, skips, workers, precision, steps, not (workers and "stateful" in kind), items),
            places(ranks),
        )
        for skips, workers, (steps, items) in itertools.product((False, True), (0, 2), windows)
    ]
    for wrong in worlds.run(differing, ranks, cells, tmp_path / "state", timeout=1500):
        assert wrong == []


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(1600)
def test_t5_stopped_at_every_batch(tmp_path, kind, skips, ranks):
    everywhere = [(epoch, batch + 1) for epoch in (0, 2) for batch in range(last_batch(ranks))]
    for wrong in worlds.run(
        differing, ranks, [(Cell(kind, skips), everywhere)], tmp_path / "state", timeout=1500
    ):
        assert wrong == []


def altered(cells, folder, every):
    """Cells that end elsewhere when they save after every so many batches."""
    print(repeatable(1))
    now = lambda place: place[1] % every == 0  # noqa: E731
    return [
        cell for cell in cells if not same(train(cell, epochs=2), train(cell, folder, save_at=now, epochs=2))
    ]


@pytest.mark.parametrize(("ranks", "every"), [(2, 1), (1, 1), (1, 2)])
@pytest.mark.full
def test_saving_changes_nothing_for_the_run_that_goes_on(tmp_path, ranks, every):
    cells = [
        *(Cell(kind) for kind in KINDS),
        Cell(workers=2),
        Cell("iterable", workers=2),
        Cell("dispatched stream", workers=2),
        *(
            replace(Cell(), precision=precision, steps=steps)
            for precision in ("bf16", "fp16")
            for steps in (1, 3)
        ),
    ]
    for wrong in worlds.run(altered, ranks, cells, tmp_path / "state", every, timeout=240):
        assert wrong == []


# Processes that really die


def until_killed(cell, folder, victim, batches, delay):
    """Go on from the newest checkpoint and save after every batch, until the victim dies after `batches` more."""
    from accel_ckpt import complete_checkpoints
    from accel_state import PartialState
    from accel_train import ProjectConfiguration

    rank = PartialState().process_index
    print(repeatable(1))
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    left = itertools.count(batches, -1)

    def on_batch(entry):
        with open(f"{folder}/losses-{rank}", "a") as file:
            file.write(f"{entry!r}\n")
        if rank == victim and next(left) == 0:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()

    resume = bool(complete_checkpoints(pathlib.Path(folder) / "checkpoints"))
    PartialState().wait_for_everyone()
    everywhere = lambda place: True  # noqa: E731
    return train(cell, resume=resume, save_at=everywhere, project=project, on_batch=on_batch)


def survived(folder, cell, ranks, kills, seed):
    """Kill `kills` times and run to the end; whether everything was as in a run that was left alone."""
    whole = worlds.run(train, ranks, cell)
    chance = random.Random(seed)
    died = 0
    results = None
    while results is None:
        victim = chance.randrange(ranks) if died < kills else None
        try:
            results = worlds.run(
                until_killed, ranks, cell, folder, victim, chance.randrange(8), chance.uniform(0, 0.03)
            )
        except worlds.RankError as error:
            # Either the pipe of the dead rank closes first, or the other rank says first that it is gone: our
            # collectives, or gloo in the middle of DDP's backward.
            signs = (
                "exited without an answer",
                "another rank",
                f"rank {victim} is gone",
                "closed by peer",
                "reset by peer",
            )
            if victim is None or not any(sign in str(error) for sign in signs):
                raise
            died += 1
    for rank, (expected, (_, weights)) in enumerate(zip(whole, results, strict=True)):
        written = [eval(line) for line in (folder / f"losses-{rank}").read_text().splitlines()]
        assert set(written) == set(expected[0])  # batches that were repeated gave the same again
        assert all(torch.equal(a, b) for a, b in zip(expected[1], weights, strict=True))
    return died


@pytest.mark.wide(but=["default sampler-2"])
@pytest.mark.filterwarnings("ignore:a save that did not finish", "ignore:a save was interrupted")
@pytest.mark.parametrize(("kind", "ranks"), [("default sampler", 1), ("default sampler", 2), ("iterable", 1)])
def test_kill_9_at_random_batches(tmp_path, kind, ranks):
    assert survived(tmp_path, Cell(kind), ranks, kills=3, seed=ranks) > 0


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:a save that did not finish", "ignore:a save was interrupted")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_kill_9_at_random_batches_full(tmp_path, kind, skips, ranks):
    workers = 2 if "iterable" in kind else 0
    assert survived(tmp_path, Cell(kind, skips, workers, "bf16"), ranks, kills=5, seed=7) > 0
