"""The output of ``accel plan``: the table, the advice, JSON, and the configuration file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accel_bigmodel.planning.advice import Row, Suggestion, TrainingPlan
from accel_cli.render import show_table, show_text
from accel_state.config.files import save_config
from accel_state.config.launch import LaunchConfig
from accel_state.config.roots import root_for
from accel_state.config.schema import build
from accel_state.errors import ConfigError

__all__ = ["as_json", "configuration", "show", "write"]

_PARTS = ("weights", "masters", "gradients", "optimizer", "gathered", "activations", "logits")
_HEADERS = ("weights", "masters", "grads", "optim", "gathered", "activ", "logits")

_LEGEND = {
    "optim": "optimizer states",
    "gathered": "whole weights while they compute, buffers, and what the step computes",
    "host": "GB of host memory of a machine",
    "traffic": "GB that a rank sends in a step",
    "batch": "the largest batch that fits",
}


def gigabytes(size: float) -> str:
    """A size as a number of GB, 10^9 bytes."""
    if size < 5e5:
        return "<0.001" if size else "0"
    return f"{size / 1e9:.1f}" if size >= 1e8 else f"{size / 1e9:.3f}"


def show(plan: TrainingPlan, suggested: list[Suggestion]) -> None:
    """Print the plan."""
    shape, cluster, workload = plan.shape, plan.cluster, plan.workload
    machines = f" on {cluster.machines} machines" if cluster.machines > 1 else ""
    adapters = f", adapters of rank {shape.adapters}: {shape.trainable:,} trained" if shape.adapters else ""
    print(f"{shape.name}: {shape.parameters:,} parameters in {len(shape.units)} blocks{adapters}")
    show_text(
        f"{cluster.devices} x {gigabytes(cluster.memory)} GB{machines}, of which {gigabytes(cluster.reserve)} GB each "
        f"are reserved; micro-batch {workload.batch_size} of {workload.seq_length:,} tokens, {workload.optimizer}, "
        f"mixed precision {workload.precision}"
    )
    print()
    show_text(
        "GB (10^9 bytes) on a rank at the peak of a step. Sorted: what fits first, then by peak. *: advised"
    )
    print()
    columns = ("  strategy", "fits", "peak", *_HEADERS, "host", "traffic", "batch")
    best = plan.advised
    ordered = sorted(plan.rows, key=lambda row: (not row.fits, row.found.peak.total))
    bold = ordered.index(best) if best is not None else None
    rows = [_cells(row, advised=row is best) for row in ordered]
    without = show_table(columns, rows, left=2, bold=bold, spare=(*_HEADERS[::-1], "traffic", "host"))
    if without:
        names = ", ".join(name for name in columns if name in without)
        show_text(f"(no room for {names}: make the terminal wider, or see --json)")
    print()
    show_text("; ".join(f"{name}: {what}" for name, what in _LEGEND.items() if name not in without))
    for note in plan.notes:
        show_text(f"note: {note}")
    print()
    _show_advice(plan, suggested)


def _cells(row: Row, *, advised: bool) -> tuple[str, ...]:
    peak = row.found.peak
    parts = [gigabytes(getattr(peak, part)) if getattr(peak, part) else "-" for part in _PARTS]
    return (
        f"* {row.setting.name}" if advised else f"  {row.setting.name}",
        "yes" if row.fits else "no",
        gigabytes(peak.total),
        *parts,
        gigabytes(row.host) if row.host else "-",
        gigabytes(row.traffic),
        "-" if row.largest_batch is None else str(row.largest_batch),
    )


def _show_advice(plan: TrainingPlan, suggested: list[Suggestion]) -> None:
    best = plan.advised
    if best is not None:
        room = plan.cluster.usable - best.found.peak.total
        peak = best.found.peak
        show_text(
            f"Advised: {best.setting.name}. It peaks at {gigabytes(peak.total)} GB ({peak.when}), with "
            f"{gigabytes(room)} GB to spare.\nWhy: {_why(plan, best)}."
        )
        if best.extra:
            show_text(f"Its price: it {best.extra}.")
        if best.setting.checkpointing and not best.kind.checkpoints:
            show_text(
                "The script has to turn activation checkpointing on, as model.gradient_checkpointing_enable() does."
            )
        return
    least = min(plan.rows, key=lambda row: row.found.peak.total)
    peak = least.found.peak
    over = max(0.0, peak.total - plan.cluster.usable)
    show_text(
        f"Nothing fits: {least.setting.name} needs the least memory, {gigabytes(peak.total)} GB ({peak.when}), "
        f"{gigabytes(over)} GB more than the {gigabytes(plan.cluster.usable)} GB available."
        if over
        else f"Nothing fits: {least.setting.name} needs {gigabytes(least.host)} GB of host memory on each machine."
    )
    for each in suggested:
        found = each.row
        host = f", and {gigabytes(found.host)} GB of host memory" if found.host else ""
        show_text(
            f"- with {each.change}, {found.setting.name} fits: {gigabytes(found.found.peak.total)} GB{host}"
        )
    if not suggested:
        show_text(
            "- no number of devices up to 4,096 helps; shorten the sequences (--seq_length), or train fewer weights"
        )


def _why(plan: TrainingPlan, best: Row) -> str:
    others = [row for row in plan.rows if row.fits and row is not best]
    if not others:
        return "nothing else fits"
    if best.setting.offload or best.setting.offload_optimizer:
        return "nothing fits without offload"
    if best.setting.checkpointing and not all(row.setting.checkpointing for row in plan.rows):
        return "nothing fits that neither recomputes nor offloads"
    sends = f"it sends {gigabytes(best.traffic)} GB per rank and step"
    least = next(row for row in plan.rows if row.fits)
    if least is not best:
        return f"{sends}. {least.setting.name} would send {gigabytes(least.traffic)} GB, but needs another package"
    # Tensor parallelism sends less, but blocks the computation, and its ranks share one micro-batch.
    if not best.kind.waits and any(row.kind.waits for row in others):
        return f"{sends}, the least of the strategies whose ranks read different batches"
    return f"{sends}, the least of the strategies that fit without recomputation"


def as_json(plan: TrainingPlan, suggested: list[Suggestion]) -> str:
    """The plan as JSON; sizes are bytes."""
    best = plan.advised

    def row_of(row: Row) -> dict[str, Any]:
        peak = asdict(row.found.peak)
        return {
            "name": row.setting.name,
            "fits": row.fits,
            "peak": row.found.peak.total,
            "parts": peak,
            "between_steps": row.found.kept,
            "host_memory": row.host,
            "traffic": row.traffic,
            "costs": row.extra,
            "largest_batch": row.largest_batch,
            "setting": asdict(row.setting),
        }

    return json.dumps(
        {
            "model": plan.shape.name,
            "parameters": plan.shape.parameters,
            "trainable": plan.shape.trainable,
            "blocks": len(plan.shape.units),
            "devices": asdict(plan.cluster),
            "workload": asdict(plan.workload),
            "strategies": [row_of(row) for row in plan.rows],
            "advised": best.setting.name if best is not None else None,
            "suggestions": [{"change": each.change, **row_of(each.row)} for each in suggested],
            "notes": list(plan.notes),
        },
        indent=2,
    )


def configuration(plan: TrainingPlan, row: Row) -> LaunchConfig:
    """The configuration that ``accel launch`` reads for a row of a plan.

    Raises:
        ConfigError: the strategy is selected in the script alone.
    """
    setting, cluster = row.setting, plan.cluster
    selecting = row.kind.launch_values(setting, cluster)
    if selecting is None:
        raise ConfigError(
            f"{setting.strategy} is selected in the script ({row.kind.selected_in_script}), so there is no "
            "configuration file for it; leave out --write"
        )
    values: dict[str, Any] = {
        "distributed_type": "MULTI_GPU",
        "num_processes": cluster.devices,
        "num_machines": cluster.machines,
        "machine_rank": 0,
        "mixed_precision": plan.workload.precision,
        **selecting,
    }
    config: LaunchConfig = build(root_for(values), values)
    return config


def write(plan: TrainingPlan, path: Path) -> Path | None:
    """Write the configuration file of the advised row; None: nothing fits, and nothing is written.

    Raises:
        ConfigError: the file exists, cannot be written, or the strategy has no configuration.
    """
    best = plan.advised
    if best is None:
        return None
    if path.expanduser().exists():
        raise ConfigError(f"--write {path} exists and is not changed; remove it, or give another path")
    return save_config(configuration(plan, best), path)
