"""Plain PyTorch training scripts: each line that changes gets a note that says what to write there."""

from __future__ import annotations

import ast

from accel_cli.migration.result import Remark
from accel_cli.migration.source import PythonSource, dotted

__all__ = ["notes_on_loops"]

_PRECISION = 'Accelerator(mixed_precision="bf16") or "fp16" does this; remove it'
_PREPARED = "accelerator.prepare(model) does this; remove it"
_STARTED = "Accelerator() does this; remove it"
_REPLACED = {
    "DDP": _PREPARED,
    "DataParallel": _PREPARED,
    "DistributedDataParallel": _PREPARED,
    "DistributedSampler": "accelerator.prepare(loader) gives each process its samples; remove the sampler, and give "
    "shuffle= to the DataLoader",
    "GradScaler": _PRECISION,
    "autocast": _PRECISION,
    "backward": "write accelerator.backward(loss); before the loop, write accelerator = Accelerator() and "
    "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
    "clip_grad_norm_": "write accelerator.clip_grad_norm_(…), which also knows sharded gradients",
    "clip_grad_value_": "write accelerator.clip_grad_value_(…), which also knows scaled gradients",
    "cuda": "prepared models and batches are on accelerator.device; remove this, or use that device",
    "destroy_process_group": "write accelerator.end_training()",
    "get_rank": "write accelerator.process_index",
    "get_world_size": "write accelerator.num_processes",
    "init_process_group": _STARTED,
    "set_device": _STARTED,
    "set_epoch": "a prepared loader counts its epochs; remove this",
    "state_dict": "of a prepared model, write accelerator.save_model(model, folder) on all processes, or "
    "accelerator.get_state_dict(model)",
    "unscale_": "accelerator.clip_grad_norm_ does this; remove it",
}
"""Last part of a called name, and what to write in its place."""


def notes_on_loops(source: PythonSource) -> list[Remark]:
    """A note for each line of a plain PyTorch training script that changes here.

    Args:
        source: of the script. One without ``backward()``, or with an ``Accelerator``, gets none.
    """
    if "Accelerator" in source.text:
        return []
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    found = {(call.lineno, _last_name(call.func)) for call in calls}
    if not any(name == "backward" for _, name in found):
        return []
    return sorted(Remark(line, f"{name}(): {_REPLACED[name]}") for line, name in found if name in _REPLACED)


def _last_name(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else dotted(called)
