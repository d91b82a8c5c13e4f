"""Random training runs that move between strategies and numbers of ranks, against plain PyTorch on one process.

A case is drawn from one number: a model, an optimizer, windows, and legs. Each leg trains some micro-batches under a
strategy of its own, saves, and the next one loads. All that the script sees and all weights must be those of one
process that reads the same rows in float64. To repeat one:

    PYTHONPATH=tools python -m testkit.random_runs strategies 17
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from testkit import worlds
from testkit.experts import experts_of, routed
from testkit.random_runs import Kind, difference, ranks_of

FEATURES, HIDDEN, EXPERTS = 8, 12, 4
ROWS = 12  # of a batch over all ranks; 1 to 4 groups of ranks divide it
EPOCHS = 2

LAYOUTS: dict[str, dict[str, int] | None] = {
    "single": None,
    "ddp": {"dp_replicate_size": 2},
    "ddp of 3": {"dp_replicate_size": 3},
    "fsdp2": {"dp_shard_size": 2},
    "fsdp2 of 3": {"dp_shard_size": 3},
    "fsdp2 of 4": {"dp_shard_size": 4},
    "hsdp": {"dp_replicate_size": 2, "dp_shard_size": 2},
    "tp": {"tp_size": 2},
    "tp x ddp": {"tp_size": 2, "dp_replicate_size": 2},
    "tp x fsdp2": {"tp_size": 2, "dp_shard_size": 2},
    "pp": {"pp_size": 2},
    "pp of 3": {"pp_size": 3},
    "pp of 4": {"pp_size": 4},
    "pp x ddp": {"pp_size": 2, "dp_replicate_size": 2},
    "pp x fsdp2": {"pp_size": 2, "dp_shard_size": 2},
    "pp x tp": {"pp_size": 2, "tp_size": 2},
    "ep": {"dp_shard_size": 2, "ep_size": 2},
    "ep of 4": {"dp_shard_size": 4, "ep_size": 4},
    "ep x fsdp2": {"dp_shard_size": 4, "ep_size": 2},
    "ep x hsdp": {"dp_replicate_size": 2, "dp_shard_size": 2, "ep_size": 2},
    "ep x tp": {"dp_shard_size": 2, "tp_size": 2, "ep_size": 2},
    "ep over tp": {"dp_shard_size": 2, "tp_size": 2, "ep_size": 4},
}
"""Strategies by their degrees; `ep_size` counts ranks of the others."""
WHOLE = ("single", "ddp", "ddp of 3", "fsdp2", "fsdp2 of 3", "fsdp2 of 4", "hsdp")
"""Those that continue inside each other's windows."""


# The model


class Block(nn.Module):
    """A layer that tensor parallelism can divide, and experts if there are any."""

    def __init__(self, experts: str | None) -> None:
        super().__init__()
        self.dense = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, FEATURES))
        self.norm = nn.LayerNorm(FEATURES)
        if experts is not None:
            self.router = nn.Linear(FEATURES, EXPERTS)
            self.experts = experts_of(experts, EXPERTS, FEATURES, HIDDEN)
        self.kind = experts

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(self.norm(x))
        if self.kind is None:
            return x
        weights, indices = self.router(x).softmax(-1).topk(2)
        return x + routed(self.experts, x, indices, weights)


# Cases


@dataclass(frozen=True)
class Leg:
    """A part of a run.

    Attributes:
        layout: one of `LAYOUTS`.
        until: it ends with this micro-batch, counted from 1 over all epochs.
        plugin: options of FSDP.
        pipeline: options of stages.
        inside: the last stage computes the loss.
        set_to_none: of `zero_grad`.
        in_background: it saves asynchronously.
    """

    layout: str
    until: int
    plugin: dict[str, Any] | None
    pipeline: dict[str, Any] | None
    inside: bool
    set_to_none: bool
    in_background: bool


@dataclass(frozen=True)
class Case:
    """A run, drawn from its number.

    Attributes:
        number: draws everything, also weights and rows.
        experts: how experts are held; None: there are none.
        blocks: how many.
        frozen: which parameters are.
        tied: the last layer has the weight of the first.
        optimizer: its kind.
        clip: how gradients are clipped.
        scheduler: its kind.
        items: the loss is a sum over items, whose number varies by sample.
        windows: micro-batches of a step.
        batches: of an epoch.
        shuffle: the loader does.
        averages: an exponential moving average of weights is kept.
        legs: of the run.
        events: what the script does after some micro-batches; a "look" at the model comes between backward and step.
    """

    number: int
    experts: str | None
    blocks: int
    frozen: str
    tied: bool
    optimizer: str
    clip: str
    scheduler: str
    items: bool
    windows: int
    batches: int
    shuffle: bool
    averages: bool
    legs: tuple[Leg, ...]
    events: dict[int, str]

    @classmethod
    def draw(cls, number: int) -> Case:
        """The case of a number."""
        chance = random.Random(number)
        experts = chance.choice([None, None, "stacked", "list"])
        windows, batches = chance.choice([1, 1, 2, 3]), chance.randint(4, 7)
        items, tied = chance.random() < 0.3, chance.random() < 0.2
        inside_windows = chance.random() < 0.3
        layouts = [
            name
            for name in LAYOUTS
            if (experts or not name.startswith("ep")) and not (tied and name.startswith("pp"))
        ]
        total = EPOCHS * batches
        stops = [
            at
            for at in range(1, total)
            if at % batches and (inside_windows or not at % batches % windows)  # not at an epoch's end
        ]
        stops = sorted(chance.sample(stops, min(chance.randint(0, 2), len(stops))))
        chosen = [chance.choice(layouts) for _ in range(len(stops) + 1)]
        same = inside_windows and chance.random() < 0.5
        if same:
            chosen = chosen[:1] * len(chosen)
        elif inside_windows:
            chosen = [chance.choice(WHOLE) for _ in chosen]
        legs = [
            _leg(chance, layout, until, items) for layout, until in zip(chosen, [*stops, total], strict=True)
        ]
        if same:
            legs = [Leg(**{**asdict(legs[0]), "until": leg.until}) for leg in legs]
        ranks = max((LAYOUTS[name] or {}).get("pp_size", 1) for name in chosen)
        return cls(
            number=number,
            experts=experts,
            blocks=max(chance.randint(2, 6), 2 * ranks if ranks > 1 else 0),
            frozen=chance.choice(["none", "none", "norms", "first"]),
            tied=tied,
            optimizer=chance.choice(["sgd", "adamw", "groups", "muon"]),
            clip=chance.choice(["none", "norm", "norm", "inf", "value"]),
            scheduler=chance.choice(["none", "step", "cosine", "lambda"]),
            items=items,
            windows=windows,
            batches=batches,
            shuffle=chance.random() < 0.5,
            averages=chance.random() < 0.25,
            legs=tuple(legs),
            events={
                at: chance.choice(["evaluate", "look", "sleep", "gather", "rate", "go back"])
                for at in range(1, total + 1)
                if chance.random() < 0.15
            },
        )


def _leg(chance: random.Random, layout: str, until: int, items: bool) -> Leg:
    plugin = pipeline = None
    inside = layout.startswith("pp") and not items and chance.random() < 0.6
    if "dp_shard_size" in (LAYOUTS[layout] or {}):
        by_block = chance.random() < 0.7
        recomputed = chance.choice([False, False, True, "selective"]) if by_block else False
        plugin = {
            "reshard_after_forward": chance.choice([True, False]),
            "activation_checkpointing": recomputed,
            "cpu_offload": chance.random() < 0.15,
            "forward_prefetch": chance.random() < 0.2,
        }
        if by_block:
            plugin |= {
                "auto_wrap_policy": "transformer_based_wrap",
                "transformer_cls_names_to_wrap": ["Block"],
            }
    if layout.startswith("pp"):
        fused = ["1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble"]
        schedule = chance.choice(["gpipe", *fused]) if inside else "gpipe"
        if plugin is not None and "zero" in schedule and plugin["activation_checkpointing"] == "selective":
            plugin["activation_checkpointing"] = True  # the other is refused
        pipeline = {"schedule": schedule, "num_micro_batches": chance.choice([None, 2, 3, 6])}
    return Leg(
        layout, until, plugin, pipeline, inside, chance.random() < 0.8, in_background=chance.random() < 0.3
    )


def _model(case: Case) -> nn.Sequential:
    torch.manual_seed(case.number)
    blocks = [Block(case.experts) for _ in range(case.blocks)]
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), *blocks, nn.Linear(FEATURES, FEATURES)).double()
    if case.tied:
        model[-1].weight = model[0].weight
    if case.frozen == "norms":
        for block in blocks:
            block.norm.requires_grad_(False)
    elif case.frozen == "first":
        model[0].requires_grad_(False)
        model[1].requires_grad_(False)
    return model


def _rows(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs, targets, numbers of items, and numbers of rows."""
    generator = torch.Generator().manual_seed(case.number + 1)
    count = ROWS * case.batches
    values = [torch.randn(count, FEATURES, generator=generator).double() for _ in range(2)]
    return *values, torch.randint(1, 4, (count,), generator=generator), torch.arange(count)


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if case.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=0.01)
    if case.optimizer == "adamw":
        return torch.optim.AdamW(trained, lr=0.02)
    if case.optimizer == "muon":
        from accel_train import muon_with_adamw

        return muon_with_adamw(model, lr=0.02, weight_decay=0.1, adamw_lr=3e-3, adjust_lr_fn="original")
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": 0.02},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "lr": 0.05},
    ]
    return torch.optim.Adam(groups, lr=0.01, amsgrad=True)


def _scheduler(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    return {
        "none": lambda: None,
        "step": lambda: lr_scheduler.StepLR(optimizer, 2, 0.5),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 20),
        "lambda": lambda: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    }[case.scheduler]()


def _lower(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """What the event "rate" does."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.8
    if scheduler is not None:
        scheduler.base_lrs = [rate * 0.8 for rate in scheduler.base_lrs]


def _loss(output: Tensor, target: Tensor, items: Tensor | None = None) -> Tensor:
    each = (output - target).square().mean(-1)
    return each.mean() if items is None else (each * items).sum()


# Runs


@dataclass
class Seen:
    """What a script sees.

    Attributes:
        losses: of micro-batches.
        norms: of steps.
        outputs: of evaluations.
        orders: numbers of the rows of micro-batches.
        weights: at the end.
        averages: of weights, at the end.
    """

    losses: list[float]
    norms: list[float]
    outputs: list[Tensor]
    orders: list[list[int]]
    weights: dict[str, Tensor]
    averages: dict[str, Tensor]


def one_process(case: Case, orders: Sequence[Sequence[int]]) -> Seen:
    """The oracle: plain PyTorch, without this library.

    Args:
        case: the case.
        orders: numbers of the rows of each micro-batch.
    """
    model = _model(case)
    optimizer = _optimizer(case, model)
    scheduler = _scheduler(case, optimizer)
    inputs, targets, items, _ = _rows(case)
    seen = Seen([], [], [], [], {}, {})
    window: list[Tensor] = []
    for number, order in enumerate(orders, 1):
        rows = torch.tensor(order)
        window.append(rows)
        with torch.no_grad():
            seen.losses.append(float(_loss(model(inputs[rows]), targets[rows], _items(case, items[rows]))))
        if len(window) == case.windows or number % case.batches == 0:
            count = sum(int(items[part].sum()) for part in window) if case.items else len(window)
            for part in window:
                (_loss(model(inputs[part]), targets[part], _items(case, items[part])) / count).backward()
            window.clear()
            if case.clip in ("norm", "inf"):
                norm = nn.utils.clip_grad_norm_(model.parameters(), *_BOUNDS[case.clip])
                seen.norms.append(float(norm))
            elif case.clip == "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            if case.averages:
                for name, value in model.named_parameters():
                    before = seen.averages.get(name, value.detach())
                    seen.averages[name] = 0.7 * before + 0.3 * value.detach()
        if case.events.get(number) == "evaluate":
            with torch.no_grad():
                seen.outputs.append(model(inputs))
        elif case.events.get(number) == "rate":
            _lower(optimizer, scheduler)
    seen.weights = dict(model.state_dict())
    return seen


_BOUNDS = {"norm": (0.3, 2.0), "inf": (0.05, float("inf"))}


def _items(case: Case, items: Tensor) -> Tensor | None:
    return items if case.items else None


def train_leg(case: Case, index: int, folder: str) -> Seen:
    """One leg, on one of its ranks.

    Args:
        case: the case.
        index: of the leg.
        folder: where the one before it has saved, and it saves.
    """
    from accel_train import AveragedWeights

    leg, begin = case.legs[index], case.legs[index - 1].until if index else 0
    accelerator = _accelerator(case, leg)
    model = _model(case)
    if (LAYOUTS[leg.layout] or {}).get("tp_size"):
        _divide(model, accelerator)
    optimizer = _optimizer(case, model)
    scheduler = _scheduler(case, optimizer)
    inputs, *_ = tensors = _rows(case)
    loader = DataLoader(TensorDataset(*tensors), batch_size=ROWS, shuffle=case.shuffle)
    model, optimizer, loader, *rest = accelerator.prepare(
        model, optimizer, loader, *([] if scheduler is None else [scheduler])
    )
    average = AveragedWeights(accelerator, model, decay=0.7) if case.averages else None
    if index:
        accelerator.load_state(f"{folder}/{index - 1}")
    seen = Seen([], [], [], [], {}, {})
    number = begin
    while number < leg.until:
        for x, y, items, rows in loader:
            with accelerator.accumulate(model):
                loss = model(x, target=y).loss if leg.inside else _loss(model(x), y, _items(case, items))
                accelerator.backward(loss, **({"num_items": items.sum()} if case.items else {}))
                if case.events.get(number + 1) == "look":
                    with torch.no_grad():
                        model(x)
                groups = accelerator.strategy.batch.size if case.items else 1
                seen.losses.append(float(accelerator.reduce(loss.detach(), "mean")) * groups)
                seen.orders.append(list(dict.fromkeys(accelerator.gather(rows).tolist())))
                if accelerator.sync_gradients and case.clip in ("norm", "inf"):
                    norm = accelerator.clip_grad_norm_(model.parameters(), *_BOUNDS[case.clip])
                    seen.norms.append(float(norm))
                elif accelerator.sync_gradients and case.clip == "value":
                    accelerator.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
                for each in rest:
                    each.step()
                optimizer.zero_grad(set_to_none=leg.set_to_none)
                if average is not None:
                    average.update()
            number += 1
            event = case.events.get(number)
            if event == "evaluate":
                model.eval()
                with torch.no_grad():
                    seen.outputs.append(model(inputs))
                model.train()
            elif event == "sleep":
                accelerator.offload_states()
                accelerator.reload_states()
            elif event == "gather":
                accelerator.get_state_dict(model)
            elif event == "rate":
                _lower(optimizer, rest[0].scheduler if rest else None)
            elif event == "go back" and number % case.batches:
                accelerator.save_state(f"{folder}/here")
                accelerator.load_state(f"{folder}/here")
            if number == leg.until:
                break
    if index < len(case.legs) - 1:
        saved = accelerator.save_state(f"{folder}/{index}", asynchronous=leg.in_background)
        if leg.in_background:
            saved.result()
        return seen
    seen.weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    if average is not None:
        with average.applied():
            found = accelerator.get_state_dict(model)
            seen.averages = {name: value.clone() for name, value in found.items()}
    return seen


def _accelerator(case: Case, leg: Leg) -> Any:
    from accel_train import (
        Accelerator,
        DataLoaderConfiguration,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        PipelineParallelConfig,
    )

    degrees, stages = LAYOUTS[leg.layout], None
    if leg.pipeline is not None:
        stages = PipelineParallelConfig(**leg.pipeline, loss_function=_loss if leg.inside else None)
    return Accelerator(
        cpu=True,
        gradient_accumulation_steps=case.windows,
        parallelism_config=None if degrees is None else ParallelismConfig(**degrees, pp_handler=stages),
        fsdp_plugin=None if leg.plugin is None else FullyShardedDataParallelPlugin(**leg.plugin),
        dataloader_config=DataLoaderConfiguration(
            split_batches=True, use_seedable_sampler=True, data_seed=5, use_stateful_dataloader=True
        ),
    )


def _divide(model: nn.Sequential, accelerator: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = accelerator.torch_device_mesh["tp"]
    for block in model[1:-1]:
        parallelize_module(block, mesh, {"dense.0": ColwiseParallel(), "dense.2": RowwiseParallel()})


def problem_of(number: int) -> str | None:
    """What differs between a case and one process; None: nothing does."""
    case = Case.draw(number)
    with tempfile.TemporaryDirectory(prefix="accel-test-") as folder:
        legs = [
            worlds.run(train_leg, ranks_of(LAYOUTS[leg.layout]), case, index, folder, timeout=180)
            for index, leg in enumerate(case.legs)
        ]
    first = [ranks[0] for ranks in legs]
    orders = [order for leg in first for order in leg.orders]
    for epoch in range(EPOCHS):
        read = [row for order in orders[epoch * case.batches :][: case.batches] for row in order]
        if sorted(read) != list(range(ROWS * case.batches)):
            return f"epoch {epoch} read {len(set(read))} of {ROWS * case.batches} rows, {len(read)} times"
    wanted = one_process(case, orders)
    for kind in ("losses", "norms", "outputs"):
        for rank in range(min(map(len, legs))):
            found = [value for ranks in legs for value in getattr(ranks[rank], kind)]
            if problem := difference(found, getattr(wanted, kind), _bound(case)):
                return f"{kind} of rank {rank}: {problem}"
    for rank, seen in enumerate(legs[-1]):
        if list(seen.weights) != list(wanted.weights):
            return f"rank {rank} has the weights {list(seen.weights)}"
        if problem := difference(seen.weights, wanted.weights, _bound(case)):
            return f"weights of rank {rank}: {problem}"
        averages = {name: seen.averages[name] for name in wanted.averages}
        if problem := difference(averages, wanted.averages, _bound(case)):
            return f"averages of rank {rank}: {problem}"
    return None


def _bound(case: Case) -> float:
    return 1e-6 if case.optimizer == "muon" else 1e-8  # Muon sends its updates in bfloat16


KIND = Kind("strategies", Case.draw, problem_of)
