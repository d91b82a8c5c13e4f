"""Planning a training: which strategies fit the memory, which one is advised, and changes after which one would fit.

Data in, data out; nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from accel_bigmodel.errors import EstimateError
from accel_bigmodel.planning.footprints.base import (
    DeviceCluster,
    Footprint,
    Setting,
    StrategyFootprint,
    Timelines,
    Workload,
)
from accel_bigmodel.planning.footprints.registry import footprint, footprint_class, footprint_names
from accel_bigmodel.planning.shape import ModelShape

__all__ = ["Row", "Suggestion", "TrainingPlan", "make_plan", "settings_for", "suggestions"]

_MOST = 1 << 16
"""Samples beyond which no larger batch is looked for."""


_KINDS = 3
"""Leading parts of a row's cost that a strategy without another package must share to take its place."""
_LITTLE_MORE = 2.0
"""How much more such a strategy may send: communication of this order overlaps with computation."""


@dataclass(frozen=True, slots=True)
class Row:
    """A strategy in a plan.

    Attributes:
        setting: the strategy and its options.
        found: the memory of a rank.
        fits: whether it fits on the device and in host memory.
        host: bytes of host memory per machine.
        traffic: bytes that a rank sends in a step.
        extra: costs besides traffic, in words; empty: none.
        largest_batch: the most samples of a micro-batch on a rank that still fit; None: activations are not known.
        cost: sort key of the rows, the cheapest first.
    """

    setting: Setting
    found: Footprint
    fits: bool
    host: float
    traffic: float
    extra: str
    largest_batch: int | None
    cost: tuple[float, ...]

    @property
    def kind(self) -> type[StrategyFootprint]:
        """The footprint of the strategy."""
        return footprint_class(self.setting.strategy)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change after which something fits.

    Attributes:
        change: the change, in words.
        row: the best row that then fits; None: the text says it.
    """

    change: str
    row: Row


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The result of ``make_plan``.

    Attributes:
        shape: the model.
        cluster: the devices.
        workload: the training.
        rows: strategies, the cheapest first.
        notes: notes on the figures, for the reader.
    """

    shape: ModelShape
    cluster: DeviceCluster
    workload: Workload
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def advised(self) -> Row | None:
        """The advised row: the cheapest that fits, or one that needs no other package and sends little more."""
        cheapest = next((row for row in self.rows if row.fits), None)
        if cheapest is None or not cheapest.kind.needs_package:
            return cheapest
        return next((row for row in self.rows if row.fits and _replaces(row, cheapest)), cheapest)


def _replaces(row: Row, cheapest: Row) -> bool:
    return (
        not row.kind.needs_package
        and row.cost[:_KINDS] == cheapest.cost[:_KINDS]
        and row.traffic <= _LITTLE_MORE * cheapest.traffic
    )


def settings_for(
    shape: ModelShape, cluster: DeviceCluster, workload: Workload, checkpointing: bool
) -> list[Setting]:
    """Every strategy that can run the model on these devices.

    Args:
        shape: the model.
        cluster: the devices.
        workload: the training.
        checkpointing: all strategies recompute their units (activation checkpointing), because the script does it;
            otherwise ``fsdp2`` is listed without and with it.
    """
    return [
        setting
        for name in footprint_names()
        for setting in footprint_class(name).settings(shape, cluster, workload, checkpointing)
    ]


def make_plan(
    shape: ModelShape,
    cluster: DeviceCluster,
    workload: Workload,
    timelines: Timelines,
    *,
    checkpointing: bool = False,
    batches: bool = True,
    notes: Sequence[str] = (),
) -> TrainingPlan:
    """Plan the training: memory per rank under every strategy that can run, whether it fits, ordered by cost.

    Rows are sorted: without offload before offload, without recomputation before recomputation, then by less traffic,
    then strategies that need no other package first. `TrainingPlan.advised` may prefer one of the latter.

    Args:
        shape: the model.
        cluster: the devices.
        workload: the training.
        timelines: timelines of the model's activations.
        checkpointing: the script recomputes units under every strategy.
        batches: also search the largest batch of each strategy.
        notes: notes for the reader.

    Raises:
        EstimateError: the devices cannot be divided among the machines, or a number is below 1.
    """
    if cluster.devices < 1 or cluster.machines < 1 or workload.batch_size < 1:
        raise EstimateError("devices, machines and the batch size are numbers from 1 on")
    if cluster.devices % cluster.machines:
        raise EstimateError(
            f"{cluster.devices} devices cannot be divided among {cluster.machines} machines; give a multiple"
        )
    rows = [
        _row(shape, cluster, workload, timelines, setting, batches)
        for setting in settings_for(shape, cluster, workload, checkpointing)
    ]
    rows.sort(key=lambda row: row.cost)
    return TrainingPlan(shape, cluster, workload, tuple(rows), tuple(notes))


def _row(
    shape: ModelShape,
    cluster: DeviceCluster,
    workload: Workload,
    timelines: Timelines,
    setting: Setting,
    batches: bool,
) -> Row:
    found = footprint(shape, setting, workload, timelines)
    traffic, extra, cost = _cost(shape, setting, cluster, workload)
    largest = None
    if batches and found.knows_activations:
        largest = _largest_batch(shape, cluster, workload, timelines, setting)
    return Row(
        setting,
        found,
        _fits(found, cluster),
        found.host * cluster.per_machine,
        traffic,
        extra,
        largest,
        cost,
    )


def _fits(found: Footprint, cluster: DeviceCluster) -> bool:
    host = cluster.host_memory
    return found.peak.total <= cluster.usable and (host is None or found.host * cluster.per_machine <= host)


def _largest_batch(
    shape: ModelShape, cluster: DeviceCluster, workload: Workload, timelines: Timelines, setting: Setting
) -> int:
    def fits(batch: int) -> bool:
        return _fits(footprint(shape, setting, replace(workload, batch_size=batch), timelines), cluster)

    if not fits(1):
        return 0
    low, high = 1, 2
    while high < _MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _cost(
    shape: ModelShape, setting: Setting, cluster: DeviceCluster, workload: Workload
) -> tuple[float, str, tuple[float, ...]]:
    """Bytes that a rank sends in a step, other costs in words, and the place in the order."""
    kind = footprint_class(setting.strategy)
    traffic = kind(shape, setting, workload, None).traffic(cluster)
    extra: list[str] = []
    if kind.waits:
        extra.append(kind.waits)
    if setting.checkpointing:
        extra.append("recomputes the forward")
    offloads = setting.offload + setting.offload_optimizer
    if setting.offload:
        extra.append("fetches weights from host memory")
    if setting.offload or setting.offload_optimizer:
        extra.append("steps on the CPU")
    cost = (
        offloads,
        bool(kind.waits),
        setting.checkpointing,
        round(traffic / 1e6),
        kind.needs_package,
        setting.stage,
    )
    return traffic, "; ".join(extra), tuple(map(float, cost))


def suggestions(plan: TrainingPlan, timelines: Timelines, *, checkpointing: bool = False) -> list[Suggestion]:
    """Suggest single changes after which a strategy fits: a smaller batch, more devices.

    Args:
        plan: a plan in which nothing fits.
        timelines: as for ``make_plan``.
        checkpointing: as for ``make_plan``.
    """
    found: list[Suggestion] = []
    cluster, workload = plan.cluster, plan.workload
    best = max(plan.rows, key=lambda row: row.largest_batch or 0)
    if best.largest_batch and best.largest_batch < workload.batch_size:
        batch = best.largest_batch
        smaller = make_plan(
            plan.shape, cluster, replace(workload, batch_size=batch), timelines, checkpointing=checkpointing
        ).advised
        if smaller is not None:
            steps = math.ceil(workload.batch_size / batch)
            found.append(
                Suggestion(
                    f"--batch_size {batch}, with {steps} accumulation steps for the same update", smaller
                )
            )
    devices = cluster.devices
    while devices < 4096:
        devices *= 2
        machines = max(1, math.ceil(devices / max(8, cluster.per_machine)))
        if devices % machines:
            continue
        larger = replace(cluster, devices=devices, machines=machines)
        plan_of_more = make_plan(
            plan.shape, larger, workload, timelines, checkpointing=checkpointing, batches=False
        )
        if plan_of_more.advised is not None:
            words = f"--devices {devices}" + (f" --machines {machines}" if machines > 1 else "")
            found.append(Suggestion(words, plan_of_more.advised))
            break
    if cluster.host_memory is not None:
        unlimited = make_plan(
            plan.shape,
            replace(cluster, host_memory=None),
            workload,
            timelines,
            checkpointing=checkpointing,
            batches=False,
        ).advised
        if unlimited is not None:
            found.append(Suggestion("more host memory", unlimited))
    return found
