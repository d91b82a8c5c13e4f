"""Random training scripts that are stopped after a batch, resumed by new objects, and compared with a run left alone.

A case is drawn from one number: data, loaders, windows, precision, optimizer, scheduler, what is registered, and where
it is saved and stopped. To repeat one on its own:

    PYTHONPATH=tools python -m testkit.random_runs ddp 17
"""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler
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

from testkit import worlds
from testkit.random_runs import Kind

RANKS = {"single": 1, "ddp": 2, "fsdp2": 2, "hsdp": 4}
"""Strategies, and the processes that each is tried on."""
FEATURES, HIDDEN = 6, 8


# Data


def _noise(kind: str | None) -> float:
    if kind == "torch":
        return float(torch.rand(()))
    if kind == "numpy":
        return float(np.random.rand())
    return random.random() if kind == "python" else 0.0


class Table(Dataset):
    """Rows with their number; reading draws from a generator, of the kind that is named."""

    def __init__(self, size: int, noise: str | None) -> None:
        self.inputs = (
            torch.arange(size * FEATURES, dtype=torch.float32).reshape(size, FEATURES).mul(0.37).sin()
        )
        self.targets = self.inputs.sum(1, keepdim=True).cos()
        self.noise = noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.inputs[index] + 0.1 * _noise(self.noise), self.targets[index], int(index)


class Reading(IterableDataset):
    """The rows as a stream, of which every worker reads a part."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return (self.table[index] for index in range(first, len(self.table), step))


class MeasuredReading(Reading):
    """The same, with a length."""

    def __len__(self) -> int:
        return len(self.table)


class Placed(Reading):
    """The same, which says where it is."""

    place = 0
    resumed = False

    def __iter__(self) -> Iterator[Any]:
        if not self.resumed:
            self.place = 0
        self.resumed = False
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        while first + self.place * step < len(self.table):
            self.place += 1
            yield self.table[first + (self.place - 1) * step]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.resumed = state["place"], True


class ByEpoch(Sampler):
    """Another order in every epoch that it is told of."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class ByGenerator(ByEpoch):
    """An order drawn from a generator of its own."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.generator = torch.Generator().manual_seed(41)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size, generator=self.generator).tolist())


class ByNumpy(ByEpoch):
    """An order drawn from NumPy's global generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(self.size).tolist())


ORDERS = [
    "sequence", "shuffle", "shuffle+generator", "weighted", "repeating", "subset", "epoch", "own+generator", "numpy",
    "batches", "random+batches", "stream", "measured", "placed",
]  # fmt: skip


@dataclass(frozen=True)
class Data:
    """One loader."""

    order: str
    size: int
    batch: int
    workers: int
    noise: str | None
    drop_last: bool
    persistent: bool

    @classmethod
    def draw(cls, chance: random.Random) -> Data:
        order = chance.choice(ORDERS)
        workers = chance.choice([0, 0, 0, 1, 2])
        noise = chance.choice([None, "torch", "numpy", "python"])
        # What is documented as not exact: generators of workers that stay, or of datasets that keep their place.
        persistent = bool(workers) and noise is None and chance.random() < 0.3
        noise = None if order == "placed" and workers else noise
        size, batch = chance.choice([7, 10, 13, 16, 24, 31]), chance.choice([1, 2, 3, 4])
        drop_last = chance.random() < 0.3 and size >= batch * max(RANKS.values())  # so that a batch is left
        return cls(order, size, batch, workers, noise, drop_last, persistent)

    def loader(self) -> DataLoader:
        table = Table(self.size, self.noise)
        given: dict[str, Any] = {"num_workers": self.workers, "persistent_workers": self.persistent}
        sized = {**given, "batch_size": self.batch, "drop_last": self.drop_last}
        streams = {"stream": Reading, "measured": MeasuredReading, "placed": Placed}
        samplers = {
            "weighted": lambda: WeightedRandomSampler([1.0 + i % 3 for i in range(self.size)], self.size),
            "repeating": lambda: RandomSampler(table, replacement=True, num_samples=self.size),
            "subset": lambda: SubsetRandomSampler([*range(0, self.size, 2), *range(1, self.size, 2)]),
            "epoch": lambda: ByEpoch(self.size),
            "own+generator": lambda: ByGenerator(self.size),
            "numpy": lambda: ByNumpy(self.size),
        }
        batched = {"batches": ByEpoch, "random+batches": lambda size: RandomSampler(range(size))}
        if self.order in streams:
            return DataLoader(streams[self.order](table), **sized)
        if self.order in samplers:
            return DataLoader(table, sampler=samplers[self.order](), **sized)
        if self.order in batched:
            sampler = BatchSampler(batched[self.order](self.size), self.batch, self.drop_last)
            return DataLoader(table, batch_sampler=sampler, **given)
        generator = torch.Generator().manual_seed(3) if "generator" in self.order else None
        return DataLoader(table, shuffle="shuffle" in self.order, generator=generator, **sized)


# The script


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "foreach": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=True),
    "tensor rate": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01)),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True, weight_decay=0.01),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=0.01),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=0.01),
    "adadelta": lambda groups: torch.optim.Adadelta(groups, lr=1.0),
}
SCHEDULERS: dict[str, Any] = {
    "none": lambda optimizer: None,
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.9),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 9),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.02, total_steps=200, cycle_momentum=False
    ),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.001, 0.02, 3, cycle_momentum=False),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, 1, 3), lr_scheduler.CosineAnnealingLR(optimizer, 9)],
        [3],
    ),
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 3), lr_scheduler.ExponentialLR(optimizer, 0.95)]
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.7),
}


@dataclass(frozen=True)
class Case:
    """A script, and where it is stopped."""

    strategy: str
    number: int
    data: tuple[Data, ...]
    evaluation: Data | None
    skips: bool
    window: int
    ends_with_loader: bool
    dispatch: bool | None
    seedable: bool
    precision: str
    models: int
    dropout: bool
    optimizer: str
    groups: int
    scheduler: str
    scheduler_prepared: bool
    average: str | None
    guard: bool
    items: bool
    clip: bool
    draws: bool
    epochs: int
    leaves_after: int | None
    """An epoch is left after so many batches."""
    background: bool
    save: float
    """After what share of the batches the state is saved."""
    more: int
    """Batches between the save and the end of that process."""
    saves_before: bool
    device_specific: bool
    idle: tuple[bool, ...]
    """Processes between that load the state and save it again without a step; True: an iterator begins."""

    @classmethod
    def draw(cls, strategy: str, number: int) -> Case:
        chance = random.Random(f"{strategy} {number}")
        idle = random.Random(f"{strategy} {number} idle").choice([(), (True,), (False,), (True, False)])
        skips = chance.random() < 0.35
        count = 1 if skips else chance.choice([1, 1, 2])
        return cls(
            strategy,
            number,
            data=tuple(Data.draw(chance) for _ in range(count)),
            evaluation=Data.draw(chance) if chance.random() < 0.4 else None,
            skips=skips,
            window=chance.choice([1, 1, 2, 3, 4]),
            ends_with_loader=chance.random() < 0.8,
            dispatch=chance.choice([None, None, None, True, False]),
            seedable=chance.random() < 0.2,
            precision=chance.choice(["no", "no", "no", "bf16", "fp16"]),
            models=chance.choice([1, 1, 1, 2]),
            dropout=chance.random() < 0.6,
            optimizer=chance.choice([*OPTIMIZERS]),
            groups=chance.choice([1, 1, 2]),
            scheduler=chance.choice([*SCHEDULERS]),
            scheduler_prepared=chance.random() < 0.8,
            average=chance.choice([None, None, None, "ours", "torch's"]),
            guard=chance.random() < 0.15,
            items=chance.random() < 0.2,
            clip=chance.random() < 0.5,
            draws=chance.random() < 0.5,
            epochs=chance.choice([2, 3]),
            leaves_after=chance.choice([None, None, None, 3]),
            background=chance.random() < 0.25,
            save=chance.random(),
            more=chance.choice([0, 0, 1, 2]),
            saves_before=chance.random() < 0.2,
            device_specific=chance.random() < 0.3,
            idle=idle,
        )


class Net(nn.Module):
    """With a buffer that forward changes, on every rank by its own samples."""

    def __init__(self, dropout: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, 1)
        self.dropout = nn.Dropout(0.3 if dropout else 0.0)
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.tanh(self.first(inputs)))
        if self.training:
            self.mean = self.mean.lerp(hidden.detach().float().mean(0), 0.1)
        return self.second(hidden - self.mean)


class Progress:
    """What the script counts, and the sum of its own losses, which differs between ranks."""

    epoch = batch = batches = 0
    losses = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("epoch", "batch", "batches", "losses")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@dataclass
class Found:
    """What a run has seen, batch by batch, and where it ended."""

    batches: list[Any] = field(default_factory=list)
    at_end: Any = None


class Script:
    """One process of the script."""

    def __init__(self, case: Case, folder: str, resume: bool) -> None:
        from accel_train import (
            Accelerator,
            AveragedWeights,
            DataLoaderConfiguration,
            FullyShardedDataParallelPlugin,
            GradientAccumulationPlugin,
            ParallelismConfig,
            ProjectConfiguration,
            set_seed,
        )

        self.case = case
        torch.use_deterministic_algorithms(True)
        set_seed(case.number % 1000 + (7000 if resume else 0), device_specific=case.device_specific)
        options: dict[str, Any] = {
            "fsdp2": {"fsdp_plugin": FullyShardedDataParallelPlugin()},
            "hsdp": {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)},
        }.get(case.strategy, {})
        self.accelerator = Accelerator(
            mixed_precision=case.precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=case.window, sync_with_dataloader=case.ends_with_loader
            ),
            dataloader_config=DataLoaderConfiguration(
                use_stateful_dataloader=not case.skips,
                dispatch_batches=case.dispatch,
                use_seedable_sampler=case.seedable,
            ),
            project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2),
            **options,
        )
        models = []
        for number in range(case.models):
            with torch.random.fork_rng():
                torch.manual_seed(number)
                models.append(Net(case.dropout))
        prepared = self.accelerator.prepare(
            *models, *map(self._optimizer, models), *(data.loader() for data in case.data)
        )
        count = case.models
        self.models, self.optimizers = prepared[:count], prepared[count : 2 * count]
        self.loaders = prepared[2 * count :]
        self.evaluation = self.accelerator.prepare(case.evaluation.loader()) if case.evaluation else None
        self.schedulers = [self._scheduler(optimizer) for optimizer in self.optimizers]
        self.progress = Progress()
        self.accelerator.register_for_checkpointing(self.progress)
        self.averages: list[Any] = []
        if case.average == "ours":
            self.averages = [AveragedWeights(self.accelerator, model, decay=0.9) for model in self.models]
        elif case.average and case.strategy in ("single", "ddp"):
            swa = torch.optim.swa_utils
            plain = map(self.accelerator.unwrap_model, self.models)
            function = swa.get_ema_multi_avg_fn(0.9)
            self.averages = [
                swa.AveragedModel(model, multi_avg_fn=function, use_buffers=True) for model in plain
            ]
            self.accelerator.register_for_checkpointing(*self.averages)
        if case.guard:
            self.accelerator.guard_steps(loss_spike=1.5, warmup=2, history=5, max_consecutive=None)
        self.iterators: dict[int, Any] = {}
        if resume:
            self.accelerator.load_state()

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = [*model.parameters()]
        if self.case.groups == 1:
            return OPTIMIZERS[self.case.optimizer](parameters)
        matrices = [parameter for parameter in parameters if parameter.dim() > 1]
        others = [parameter for parameter in parameters if parameter.dim() <= 1]
        return OPTIMIZERS[self.case.optimizer](
            [{"params": matrices}, {"params": others, "weight_decay": 0.1}]
        )

    def _scheduler(self, optimizer: Any) -> Any:
        scheduler = SCHEDULERS[self.case.scheduler](optimizer.optimizer)
        if scheduler is not None and self.case.scheduler_prepared:
            return self.accelerator.prepare(scheduler)
        if scheduler is not None:
            self.accelerator.register_for_checkpointing(scheduler)
        return scheduler

    def run(self, saves: Sequence[int] = (), stop_at: int | None = None) -> Found:
        """Train to the end, or until a batch; save after others."""
        found, case, progress = Found(), self.case, self.progress
        for epoch in range(self._next_epoch(), case.epochs):
            for batch in self._rest_of(epoch):
                found.batches.append(self._batch(batch))
                if progress.batches in saves:
                    handle = self.accelerator.save_state(asynchronous=case.background)
                if progress.batches == stop_at:
                    if case.background:
                        handle.result()
                    return found
                if progress.batch == case.leaves_after:
                    break
            progress.epoch, progress.batch = epoch + 1, 0
        weights = [self.accelerator.get_state_dict(model) for model in self.models]
        found.at_end = weights, [dict(average.state_dict()) for average in self.averages], progress.losses
        return found

    def save_again(self, begins: bool) -> None:
        """Save what was loaded, without a step."""
        kept = iter(self._rest_of(self._next_epoch())) if begins else None
        self.accelerator.save_state()
        del kept

    def _next_epoch(self) -> int:
        progress = self.progress
        if self.case.leaves_after is not None and progress.batch >= self.case.leaves_after:
            progress.epoch, progress.batch = progress.epoch + 1, 0
        return progress.epoch

    def _rest_of(self, epoch: int) -> Any:
        loader, batches = self.loaders[0], self.progress.batch
        loader.set_epoch(epoch)
        return self.accelerator.skip_first_batches(loader, batches) if self.case.skips and batches else loader

    def _batch(self, batch: Any) -> Any:
        case, accelerator, progress = self.case, self.accelerator, self.progress
        read = [batch, *(self._next(index) for index in range(1, len(self.loaders)))]
        with accelerator.accumulate(*self.models):
            losses = [
                nn.functional.mse_loss(model(inputs).float(), targets)
                for model in self.models
                for inputs, targets, _ in read
            ]
            loss = torch.stack(losses).sum()
            accelerator.backward(loss * len(batch[0]), num_items=len(batch[0])) if case.items else (
                accelerator.backward(loss)
            )
            if case.clip and accelerator.sync_gradients:
                for model in self.models:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
            for optimizer in self.optimizers:
                optimizer.step()
            self._schedule(loss)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        for model, average in zip(self.models, self.averages, strict=False):
            if case.average == "ours":
                average.update()
            elif accelerator.sync_gradients:
                average.update_parameters(accelerator.unwrap_model(model))
        progress.batch += 1
        progress.batches += 1
        progress.losses += float(loss.detach())
        return (
            [numbers.tolist() for _, _, numbers in read],
            float(loss.detach()),
            progress.losses,
            [float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups],
            self._evaluate() if self.evaluation is not None and progress.batches % 4 == 0 else None,
            (torch.rand(1).item(), random.random(), np.random.rand()) if case.draws else None,
        )

    def _schedule(self, loss: torch.Tensor) -> None:
        for scheduler in self.schedulers:
            if scheduler is None:
                continue
            if self.case.scheduler == "plateau":
                mean = float(self.accelerator.reduce(loss.detach().double(), "mean"))
                scheduler.step(mean)
            elif self.case.scheduler_prepared or self.accelerator.sync_gradients:
                scheduler.step()

    def _next(self, index: int) -> Any:
        """The next batch of another loader, which begins again at its end."""
        for _ in range(3):
            if index not in self.iterators:
                self.iterators[index] = iter(self.loaders[index])
            try:
                return next(self.iterators[index])
            except StopIteration:
                del self.iterators[index]
        raise AssertionError("a loader gives no batch")

    @torch.no_grad()
    def _evaluate(self) -> list[Any]:
        found = []
        for model in self.models:
            model.eval()
        for inputs, targets, numbers in self.evaluation:
            gathered = self.accelerator.gather_for_metrics((self.models[0](inputs), targets, numbers))
            found.append([value.tolist() for value in gathered])
        for model in self.models:
            model.train()
        return found


# Comparing


def equal(one: Any, other: Any) -> bool:
    """In every bit; NaNs of one place are equal."""
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and bool(torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other or (one != one and other != other))


def problem_of(strategy: str, number: int) -> str | None:
    """What differs between a run that is left alone and one that is stopped; None: nothing does."""
    case = Case.draw(strategy, number)
    with tempfile.TemporaryDirectory(prefix="accel-test-") as folder:
        quiet = {"ACCELERATE_LOG_LEVEL": "ERROR"}
        found = worlds.run(_seen_by_rank, RANKS[strategy], case, folder, timeout=90, environ=quiet)
    wrong = [f"rank {rank}: {problem}" for rank, problem in enumerate(found) if problem is not None]
    return wrong[0] if wrong else None


def _seen_by_rank(case: Case, folder: str) -> str | None:
    """What this rank sees differ."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = Script(case, f"{folder}/whole", resume=False).run()
        count = len(whole.batches)
        places = range(1, count)  # inside accumulation windows too
        if not places:
            return None
        save = places[int(case.save * len(places))]
        stop = min(count, save + case.more)
        saves = [*places[: case.saves_before], save]
        before = Script(case, folder, resume=False).run(saves, stop)
        for begins in case.idle:
            Script(case, folder, resume=True).save_again(begins)
        after = Script(case, folder, resume=True).run()
    where = f"saved after batch {save}, stopped after {stop} of {count}, saved again {case.idle}"
    for what, expected, found in (
        ("stopped run", whole.batches[:stop], before.batches),
        ("resumed run", whole.batches[save:], after.batches),
    ):
        if len(expected) != len(found):
            return f"{where}: {what} has {len(found)} batches, not {len(expected)}"
        for at, (one, other) in enumerate(zip(expected, found, strict=True)):
            if not equal(one, other):
                return f"{where}: {what}, batch {at} of {len(found)}: {other}, not {one}"
    return (
        None
        if equal(whole.at_end, after.at_end)
        else f"{where}: at the end {after.at_end}, not {whole.at_end}"
    )


KINDS = {
    strategy: Kind(strategy, partial(Case.draw, strategy), partial(problem_of, strategy))
    for strategy in RANKS
}
"""By strategy."""
