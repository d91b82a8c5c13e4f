"""What the conformance suite runs on ranks, and the oracle that it is held against.

The oracle never uses the library: it is told which samples each rank read in which micro-batch, and computes every
update with plain PyTorch on one process, from all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from accel_state.entry_points import entry_points
from testkit.experts import experts_of, routed

INSTALLED = str(Path(__file__).parent / "installed")
"""Folder with the metadata of the test kit's strategies, as an installed package has it."""
DIM = 6


def _zero(stage: int, parameters: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    return zero | ({"offload_param": {"device": "cpu"}} if parameters else {})


# DeepSpeed's own CPU optimizers have no SGD, and would be compiled here.
_OFFLOAD: dict[str, Any] = {
    "zero_force_ds_cpu_optimizer": False,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
FLOAT32_ONLY = frozenset({"deepspeed"})
"""Strategies whose engine takes no float64."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "hsdp": ("fsdp2", {"dp_replicate_size": 2}),
    "offload": (
        "fsdp2",
        {"cpu_offload": True, "reshard_after_forward": False, "activation_checkpointing": True},
    ),
    "groups": ("tp", {"tp_size": 2}),
    "zero0": ("deepspeed", {"zero_stage": 0}),
    "zero1": ("deepspeed", {"zero_stage": 1}),
    "zero3": ("deepspeed", {"zero_stage": 3}),
    "zero2offload": ("deepspeed", {"hf_ds_config": _OFFLOAD | {"zero_optimization": _zero(2, False)}}),
    "zero3offload": ("deepspeed", {"hf_ds_config": _OFFLOAD | {"zero_optimization": _zero(3, True)}}),
}
"""Members of the suite beside the registered strategies: a strategy with options of its plugin."""

MESHES: dict[str, dict[str, int]] = {
    "dp_shard x tp": {"dp_shard_size": 2, "tp_size": 2},
    "dp_replicate x tp": {"dp_replicate_size": 2, "tp_size": 2},
    "dp_replicate x dp_shard": {"dp_replicate_size": 2, "dp_shard_size": 2},
    "pp x dp_shard": {"pp_size": 2, "dp_shard_size": 2},
    "pp x tp": {"pp_size": 2, "tp_size": 2},
    "ep": {"dp_shard_size": 4, "ep_size": 2},
    "ep of a list": {"dp_shard_size": 4, "ep_size": 2},
    "ep x tp": {"dp_shard_size": 2, "tp_size": 2, "ep_size": 4},
}
"""Variants of which the degrees of parallelism are given, and the strategy follows."""

EXPERTS = {"ep": "stacked", "ep x tp": "stacked", "ep of a list": "list"}
"""Members whose models have experts, and how these are held."""


def mesh_strategy(sizes: dict[str, int]) -> str:
    """The strategy that trains on such a mesh."""
    return "pp" if "pp_size" in sizes else "fsdp2" if "dp_shard_size" in sizes else "tp"


VARIANTS |= {name: (mesh_strategy(sizes), {}) for name, sizes in MESHES.items()}
for _installed in entry_points(
    "accel_train.strategies"
):  # it is tested itself, also under the name of a variant
    for _table in (VARIANTS, MESHES, EXPERTS):
        _table.pop(_installed, None)


ENVIRONMENTS = {"xla": {"ACCELERATE_USE_CPU": "false", "PJRT_DEVICE": "CPU"}}
"""Variables of a member's ranks, which otherwise compute on the CPU."""


@dataclass(frozen=True)
class Case:
    """One training run."""

    strategy: str
    precision: str = "no"
    accumulation: int = 1
    rounds: int = 5  # batches of each rank and epoch
    batch: int = 2
    epochs: int = 2
    items: bool = False
    clip_norm: float | None = None
    clip_value: float | None = None
    shuffle: bool = True
    dropout: bool = False
    frozen: bool = False
    evaluate: bool = False
    optimizer: str = "AdamW"
    optimizers: int = 1  # among which the parameters are divided
    scale: float = 256.0  # that fp16 begins with
    samples: int | None = None  # instead of `rounds` for every rank
    single: bool = False  # float32 although float64 would do
    forwards: int = 1  # before each backward, of the samples and of their negatives
    experts: str | None = None  # of the model, where they are not those of the strategy

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and samples: as exact as the precision allows."""
        return torch.float64 if self.precision == "no" and not self.is_single else torch.float32

    @property
    def is_single(self) -> bool:
        """Whether parameters are float32."""
        return self.single or VARIANTS.get(self.strategy, (self.strategy, {}))[0] in FLOAT32_ONLY


@dataclass
class Record:
    """What one rank saw."""

    batch: tuple[int, int] = (0, 1)  # its index among the ranks that read different samples, and their number
    windows: list[list[list[int]]] = field(default_factory=list)  # samples of each micro-batch of each window
    losses: list[float] = field(default_factory=list)  # of each micro-batch
    weights: list[dict[str, Tensor]] = field(default_factory=list)  # after each step, whole
    norms: list[float] = field(default_factory=list)  # that clipping returned
    masks: list[Tensor] = field(default_factory=list)  # what dropout kept of ones
    following: dict[str, Tensor] = field(
        default_factory=dict
    )  # weights after a step that follows a save or a load


class Samples(Dataset[Any]):
    """Samples with their index, features, a target, and a number of items."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, DIM, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        self.items = torch.randint(1, 5, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return index, self.x[index], self.y[index], self.items[index]


class Block(nn.Module):
    """One of several equal blocks."""

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Mixture(nn.Module):
    """A layer, a router and experts, before all else of a model.

    Signs of two features of a sample choose its experts, and the router only weighs them. A choice by what the router
    computes would differ where roundings differ, and with it all that follows.
    """

    def __init__(self, dtype: torch.dtype, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, dtype=dtype)
        self.router = nn.Linear(DIM, 4, dtype=dtype)
        self.experts = experts_of(kind, 4, DIM, DIM, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        indices = torch.stack([(x[:, 0] > 0).long(), 2 + (x[:, 1] > 0).long()], dim=1)
        x = self.linear(x)
        weights = self.router(x).softmax(-1).gather(1, indices)
        return x + routed(self.experts, x, indices, weights)


class Head(nn.Linear):
    """One number for each row."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze(-1)


class Net(nn.Module):
    """Repeated blocks and a head; each module takes what the one before returned, as stages of a pipeline need it."""

    def __init__(
        self, dtype: torch.dtype, frozen: bool = False, width: int = DIM, experts: str | None = None
    ) -> None:
        super().__init__()
        self.mixture = Mixture(dtype, experts) if experts else None
        self.first = nn.Linear(DIM, width, dtype=dtype)
        self.blocks = nn.ModuleList([Block(dtype, width) for _ in range(2)])
        self.head = Head(width, 1, dtype=dtype)
        if frozen:
            self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.mixture is not None:
            x = self.mixture(x)
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model(case: Case, seed: int = 0) -> Net:
    """The same weights everywhere."""
    torch.manual_seed(seed)
    width = 16 if case.precision == "fp8" else DIM  # fp8 needs multiples of 16
    model = Net(case.dtype, case.frozen, width, case.experts or EXPERTS.get(case.strategy))
    if MESHES.get(case.strategy, {}).get("tp_size", 1) > 1 and dist.is_initialized():
        _divide(model)
    return model


def _divide(model: Net) -> None:
    """Tensor parallelism, on the mesh of the newest `Accelerator`."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from accel_train import AcceleratorState

    mesh = AcceleratorState().device_mesh["tp"]
    for block in model.blocks:
        parallelize_module(block, mesh, {"linear": ColwiseParallel(output_layouts=Replicate())})


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Of the trained parameters."""
    return _optimizer(case, [parameter for parameter in model.parameters() if parameter.requires_grad])


def make_optimizers(case: Case, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Several, each of a part of the trained parameters; together they compute what one computes."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [_optimizer(case, trained[number :: case.optimizers]) for number in range(case.optimizers)]


def _optimizer(case: Case, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
    if case.optimizer == "SGD":
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    # A large epsilon keeps Adam from turning roundings of tiny gradients into whole steps.
    return torch.optim.AdamW(trained, lr=0.02, eps=1e-2)


@contextmanager
def strategies_installed() -> Iterator[None]:
    """Make the test kit's strategies known to this process the way installed packages are, inside the block only."""
    sys.path.insert(0, INSTALLED)
    try:
        yield
    finally:
        sys.path.remove(INSTALLED)


def _selection(member: str) -> Any:
    """What `Accelerator(strategy=…)` is given for a member of the suite."""
    strategy, options = VARIANTS.get(member, (member, {}))
    if not options:
        return strategy
    from accel_train.plugins import (
        DeepSpeedPlugin,
        FullyShardedDataParallelPlugin,
        TorchTensorParallelPlugin,
    )

    plugins: dict[str, Any] = {
        "fsdp2": FullyShardedDataParallelPlugin,
        "deepspeed": DeepSpeedPlugin,
        "tp": TorchTensorParallelPlugin,
    }
    return plugins[strategy](**options)


def make_accelerator(case: Case, **arguments: Any) -> Any:
    """An `Accelerator` of the case."""
    from accel_train import Accelerator, GradScalerKwargs, ParallelismConfig, PipelineParallelConfig

    selected = {} if case.strategy in ("single", "ddp") else {"strategy": _selection(case.strategy)}
    sizes = MESHES.get(case.strategy)
    if case.strategy == "pp":
        sizes = {"pp_size": 2, "dp_replicate_size": int(os.environ["WORLD_SIZE"]) // 2}
    if sizes is not None:
        modules = [*(["mixture"] if case.experts else []), "first", "blocks", "head"]
        stages = PipelineParallelConfig(modules=modules) if "pp_size" in sizes else None
        selected = {"parallelism_config": ParallelismConfig(**sizes, pp_handler=stages)}
    os.environ.update(ENVIRONMENTS.get(case.strategy, {}))
    # A scale at which no gradient overflows: a skipped step is a test of its own.
    scaling = GradScalerKwargs(init_scale=case.scale)
    with strategies_installed():
        return Accelerator(
            mixed_precision=case.precision,
            gradient_accumulation_steps=case.accumulation,
            kwargs_handlers=[scaling],
            **selected,
            **arguments,
        )


def _outputs(case: Case, model: nn.Module, x: Tensor) -> Tensor:
    outputs: Tensor = model(x)
    return outputs if case.forwards == 1 else outputs + 0.5 * model(-x)


def micro_batch(case: Case, accelerator: Any, model: nn.Module, row: Any, record: Record) -> Tensor:
    """Forward and backward."""
    index, x, y, items = row
    errors = (_outputs(case, model, x).to(case.dtype) - y) ** 2
    if case.items:
        loss = (errors * items).sum()
        accelerator.backward(loss, num_items=items.sum())
    else:
        loss = errors.mean()
        accelerator.backward(loss)
    record.losses.append(loss.item())
    if case.dropout:
        record.masks.append(nn.functional.dropout(torch.ones(16), 0.5))
    return index


def train(case: Case) -> Record:
    """Train on this rank and note everything."""
    accelerator = make_accelerator(case)
    batch = accelerator.strategy.batch
    record = Record((batch.index, batch.size))
    model = make_model(case)
    optimizers = make_optimizers(case, model)
    data = Samples(case.rounds * case.batch * batch.size, case.dtype)
    loader = DataLoader(data, batch_size=case.batch, shuffle=case.shuffle)
    other = DataLoader(Samples(6, case.dtype), batch_size=2)
    model, loader, other, *optimizers = accelerator.prepare(model, loader, other, *optimizers)
    torch.manual_seed(3)
    for _ in range(case.epochs):
        window: list[list[int]] = []
        for row in loader:
            with accelerator.accumulate(model):
                window.append(micro_batch(case, accelerator, model, row, record).tolist())
                if accelerator.sync_gradients and case.clip_norm is not None:
                    norm = accelerator.clip_grad_norm_(model.parameters(), case.clip_norm)
                    assert type(norm) is Tensor, type(norm)
                    assert norm.dim() == 0
                    record.norms.append(norm.item())
                if accelerator.sync_gradients and case.clip_value is not None:
                    accelerator.clip_grad_value_(model.parameters(), case.clip_value)
                for optimizer in optimizers:
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
            if accelerator.sync_gradients:
                record.windows.append(window)
                record.weights.append(cloned(accelerator.get_state_dict(model)))
                window = []
                if case.evaluate:
                    evaluate(accelerator, model, other)
    return record


def evaluate(accelerator: Any, model: nn.Module, loader: Any) -> None:
    """An evaluation inside an epoch of training."""
    model.eval()
    with torch.no_grad():
        for _, x, _, _ in loader:
            accelerator.gather_for_metrics(model(x))
    model.train()


def cloned(state: dict[str, Any]) -> dict[str, Tensor]:
    """A state dict that later steps do not change, in host memory."""
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def train_two(case: Case) -> tuple[Record, Record]:
    """Two models with an optimizer each, of which the second steps in every other window only."""
    accelerator = make_accelerator(case)
    batch = accelerator.strategy.batch
    records = Record((batch.index, batch.size)), Record((batch.index, batch.size))
    models = [make_model(case, seed) for seed in (0, 1)]
    optimizers = [make_optimizer(case, model) for model in models]
    loader = DataLoader(
        Samples(case.rounds * case.batch * batch.size, case.dtype),
        batch_size=case.batch,
        shuffle=case.shuffle,
    )
    *prepared, loader = accelerator.prepare(*models, *optimizers, loader)
    models, optimizers = prepared[:2], prepared[2:]
    torch.manual_seed(3)
    for epoch in range(case.epochs):
        window: list[list[int]] = []
        trained = slice(0, 2) if epoch == 0 else slice(0, 1)  # later only the first
        for row in loader:
            with accelerator.accumulate(*models[trained]):
                for model, record in zip(models[trained], records, strict=False):
                    index = micro_batch(case, accelerator, model, row, record)
                window.append(index.tolist())
                for optimizer in optimizers[trained]:
                    optimizer.step()
                    optimizer.zero_grad()
            if accelerator.sync_gradients:
                for model, record in zip(models[trained], records, strict=False):
                    record.windows.append(window)
                    record.weights.append(cloned(accelerator.get_state_dict(model)))
                window = []
    return records


def prepare_apart(case: Case, order: str) -> list[dict[str, Tensor]]:
    """Weights after two steps, with a model and its optimizer prepared in calls of their own."""
    accelerator = make_accelerator(case)
    model = make_model(case)
    optimizer = make_optimizer(case, model)
    row = next(iter(DataLoader(Samples(4, case.dtype), batch_size=4)))
    here = [part.to(accelerator.device) for part in row]
    if order == "with state":
        if any(
            hasattr(parameter, "device_mesh") for parameter in model.parameters()
        ):  # a part is on the device
            model.to(accelerator.device)
            optimizer.param_groups[0]["foreach"] = (
                False  # torch's kernels there take either kind of parameters
            )
        model(row[1].to(model.first.weight.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if order == "optimizer first":
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    else:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    weights = []
    for _ in range(2):
        micro_batch(case, accelerator, model, here, Record())
        optimizer.step()
        optimizer.zero_grad()
        weights.append(cloned(accelerator.get_state_dict(model)))
    return weights


def gather(case: Case, size: int, use_objects: bool) -> tuple[list[int], int]:
    """Indexes that `gather_for_metrics` returns for one pass over `size` samples, and the number of readers."""
    accelerator = make_accelerator(case)
    model, loader = accelerator.prepare(
        make_model(case), DataLoader(Samples(size, case.dtype), batch_size=case.batch, shuffle=True)
    )
    model.eval()
    seen: list[int] = []
    with torch.no_grad():
        for index, x, _, _ in loader:
            model(x)
            found = accelerator.gather_for_metrics(index.tolist() if use_objects else index)
            seen += found if use_objects else found.tolist()
    return seen, accelerator.strategy.batch.size


def uneven(case: Case) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses and final weights of an epoch in which ranks have different numbers of batches."""
    from accel_train import DataLoaderConfiguration

    accelerator = make_accelerator(case, dataloader_config=DataLoaderConfiguration(even_batches=False))
    batch = accelerator.strategy.batch
    model = make_model(case)
    optimizer = make_optimizer(case, model)
    data = Samples(case.rounds * case.batch * batch.size - case.batch, case.dtype)
    loader = DataLoader(data, batch_size=case.batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    record = Record()
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for row in loader:
            micro_batch(case, accelerator, model, row, record)
            optimizer.step()
            optimizer.zero_grad()
    return record.losses, cloned(accelerator.get_state_dict(model)), batch.index


def unwrapped(case: Case) -> tuple[bool, list[str], list[str]]:
    """Whether unwrapping gives the script's own model; its names, and those of the gathered state."""
    accelerator = make_accelerator(case)
    model = make_model(case)
    names = list(model.state_dict())
    prepared, _ = accelerator.prepare(model, make_optimizer(case, model))
    return accelerator.unwrap_model(prepared) is model, names, list(accelerator.get_state_dict(prepared))


def train_and_save(
    case: Case, folder: str, stop: int | None = None, samples: int | None = None, follow: bool = False
) -> Record:
    """Train, save in the last epoch, and end there; without a place to stop train to the end.

    Args:
        case: what is trained.
        folder: where the state goes.
        stop: save after so many micro-batches of the epoch,
        samples: or after so many samples of all ranks.
        follow: note the weights after a step that does not depend on the number of ranks.
    """
    return _resumable(case, folder, stop, load=False, samples=samples, follow=follow)


def load_and_train(case: Case, folder: str, follow: bool = False) -> Record:
    """Continue from what `train_and_save` saved."""
    return _resumable(case, folder, None, load=True, follow=follow)


def _resumable(
    case: Case, folder: str, stop: int | None, load: bool, samples: int | None = None, follow: bool = False
) -> Record:
    from accel_train import DataLoaderConfiguration

    accelerator = make_accelerator(
        case, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)
    )
    batch = accelerator.strategy.batch
    if samples is not None:
        stop = samples // (case.batch * batch.size)
    record = Record((batch.index, batch.size))
    model = make_model(case, 5 if load else 0)  # other weights than were saved
    optimizer = make_optimizer(case, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    data = Samples(case.samples or case.rounds * case.batch * batch.size, case.dtype)
    loader = DataLoader(data, batch_size=case.batch, shuffle=case.shuffle)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    torch.manual_seed(8 if load else 3)
    begin = 0
    if load:
        accelerator.load_state(folder)
        begin = loader.iteration
        record.weights.append(cloned(accelerator.get_state_dict(model)))
        if follow:
            record.following = _follow(case, accelerator, model, optimizer)
    for epoch in range(begin, case.epochs):
        for number, row in enumerate(loader):
            with accelerator.accumulate(model):
                record.windows.append([micro_batch(case, accelerator, model, row, record).tolist()])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                record.weights.append(cloned(accelerator.get_state_dict(model)))
            if stop is not None and epoch == case.epochs - 1 and number + 1 == stop:
                accelerator.save_state(folder)
                if follow:
                    record.following = _follow(case, accelerator, model, optimizer)
                return record
    return record


def _follow(case: Case, accelerator: Any, model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Weights after a step on samples that every rank reads, so that it is the same on any number of ranks."""
    row = next(iter(DataLoader(Samples(8, case.dtype), batch_size=8)))
    micro_batch(case, accelerator, model, [part.to(accelerator.device) for part in row], Record())
    optimizer.step()
    optimizer.zero_grad()
    return cloned(accelerator.get_state_dict(model))


def save_whole_model(case: Case, folder: str) -> dict[str, Tensor]:
    """Save a model by `save_model`; its weights."""
    accelerator = make_accelerator(case)
    model = make_model(case)
    model, _ = accelerator.prepare(model, make_optimizer(case, model))
    accelerator.save_model(model, folder)
    accelerator.wait_for_everyone()
    return cloned(accelerator.get_state_dict(model))


def offer_weights(
    case: Case,
) -> tuple[list[tuple[str, Any, Tensor]], dict[str, Any], dict[str, str], dict[str, Tensor]]:
    """What this rank offers of a model after a step, what all ranks know of it, and the whole weights."""
    accelerator = make_accelerator(case)
    model = make_model(case)
    model, optimizer = accelerator.prepare(model, make_optimizer(case, model))
    source = accelerator.weight_source(model)
    weights = _follow(case, accelerator, model, optimizer)
    given = [(name, box, tensor.clone()) for name, _, box, tensor in source]
    return given, source.about, source.aliases, weights


# The oracle


def oracle(case: Case, records: Sequence[Record], seed: int = 0) -> Record:
    """The same training on one process: every update from all samples of all ranks.

    Args:
        case: what was trained.
        records: what the ranks read, of which those with one batch index must have read the same.
        seed: of the model's first weights.

    Returns:
        losses in the order of micro-batch, then batch index.
    """
    by_index: dict[int, Record] = {}
    for record in records:
        by_index.setdefault(record.batch[0], record)
    readers = [by_index[index] for index in sorted(by_index)]
    assert len(readers) == readers[0].batch[1], "every batch index is read by some rank"
    model = make_model(case, seed)
    optimizer = make_optimizer(case, model)
    data = Samples(case.rounds * case.batch * len(readers), case.dtype)
    made = Record()
    for windows in zip(*(reader.windows for reader in readers), strict=True):
        total = _window(case, model, data, windows, made)
        optimizer.zero_grad()
        total.backward()
        _clip(case, model, made)
        optimizer.step()
        made.weights.append(cloned(model.state_dict()))
    return made


def _window(case: Case, model: nn.Module, data: Samples, windows: Any, made: Record) -> Tensor:
    from accel_train.precision.registry import PRECISIONS

    dtype = PRECISIONS.get(case.precision).dtype
    losses, items = [], 0
    for micro in zip(*windows, strict=True):
        for indexes in micro:
            x, y, counts = data.x[indexes], data.y[indexes], data.items[indexes]
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                outputs = _outputs(case, model, x)
            errors = (outputs.to(case.dtype) - y) ** 2
            losses.append((errors * counts).sum() if case.items else errors.mean())
            made.losses.append(losses[-1].item())
            items += int(counts.sum())
    return sum(losses) / (items if case.items else len(losses))


def _clip(case: Case, model: nn.Module, made: Record) -> None:
    if case.clip_norm is not None:
        made.norms.append(nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm).item())
    if case.clip_value is not None:
        nn.utils.clip_grad_value_(model.parameters(), case.clip_value)
