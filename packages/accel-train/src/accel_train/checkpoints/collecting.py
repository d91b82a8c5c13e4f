"""Collecting the parts of a training state besides weights. Nothing here may affect the training."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import accel_ckpt
from accel_ckpt.coordination.ranks import MainProcess
from accel_ckpt.modules.named_model import NamedModel
from accel_ckpt.parts import is_divided
from accel_ckpt.saving.drift import replica_marks, warn_of_drift
from accel_ckpt.training import object_parts
from accel_ckpt.training.rank_trees import Marks, RankTree, mark_of, ranks_that_differ
from accel_train.checkpoints import rank_differences
from accel_train.checkpoints.chosen_parts import part_of
from accel_train.checkpoints.replica_state import replicated_buffers
from accel_train.setup.prepared import Prepared
from accel_train.state_part import StatePart, Trees
from accel_train.strategies.state_adapter import StateAdapter

__all__ = ["collect", "replicated_optimizers"]


def collect(
    prepared: Prepared,
    parts: Sequence[StatePart],
    named: Sequence[NamedModel],
    ranks: accel_ckpt.Coordinator | None = None,
) -> Trees:
    """Collect the shared trees, and this rank's own, at one moment. Collective: if it fails, it fails on every rank.

    Tensors in them are the training's own, so a save copies them before the training continues.

    Args:
        prepared: the prepared objects.
        parts: the parts of the state.
        named: the models with their canonical names.
        ranks: the ranks that save; only the main process if the others do not take part; None: all.
    """
    found: list[_Collected] = []
    replicas = _replicated_parameters(prepared)
    leader = _leader(prepared)

    def work() -> tuple[dict[str, str], list[str], Marks, int]:
        found.append(_Collected.of(prepared, parts, named))
        marks = [replica_marks([*parameters.values()]) for _, parameters in replicas]
        return found[0].marks, marks, rank_differences.marks_of(found[0].compared), leader

    answers = accel_ckpt.run_together(
        work,
        ranks or accel_ckpt.default_coordinator(),
        doing="collecting the training state",
        error=accel_ckpt.CheckpointSaveError,
    )
    [mine] = found
    trees = mine.trees
    if prepared.process.is_main_process:
        for number, (what, parameters) in enumerate(replicas):
            warn_of_drift(what, [*parameters], [answer[1][number] for answer in answers])
    together = [answer for answer in answers if answer[3] == leader]
    first, _, theirs, _ = together[0]
    differing = ranks_that_differ([answer[2] for answer in together], leader)
    trees.progress["main_process_alone"] = isinstance(ranks, MainProcess)
    if differing:
        trees.progress["differing"] = differing
    # The weights that are saved are the leader's. Inside a window, and where they are not broadcast, buffers differ.
    trees.own["buffers"] = {
        name: held for name, held in mine.buffers.items() if mine.marks[name] != first.get(name)
    }
    if own := rank_differences.own_trees(mine.compared, theirs):
        trees.own["differing"] = own
    return trees


def replicated_optimizers(
    states: StateAdapter,
    optimizers: Sequence[torch.optim.Optimizer],
    models: Sequence[nn.Module],
    trees: Mapping[str, Any],
) -> list[str]:
    """The trees of optimizers that every rank holds alike: they step only replicas, and have no parts of a state.

    Args:
        states: knows which models are replicas.
        optimizers: the prepared optimizers, without wrappers.
        models: the prepared models.
        trees: the states of optimizers by name.
    """
    alike = [model for model in models if states.keeps_replicas(model)]
    named = {f"optimizer_{number}": optimizer for number, optimizer in enumerate(optimizers)}
    found = object_parts.replicated_optimizers(named, alike)
    return [name for name in found if not _has_parts(trees[name]["state"])]


def _has_parts(state: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a rank lists only its part of any value of an optimizer's state."""
    for values in state.values():
        for value in values.values():
            if type(value) is not Tensor and is_divided(value):
                return True
    return False


@dataclass(frozen=True)
class _Collected:
    """The state that a rank has collected at one moment."""

    trees: Trees
    buffers: dict[str, torch.Tensor]
    marks: dict[str, str]
    """Of the buffers."""
    compared: dict[str, RankTree]
    """The shared trees, where there are other ranks to compare them with."""

    @classmethod
    def of(cls, prepared: Prepared, parts: Sequence[StatePart], named: Sequence[NamedModel]) -> _Collected:
        trees = Trees()
        for part in parts:
            before = set(trees.shared)
            part.dump(trees)
            if added := trees.shared.keys() - before:
                _check_names(part, added)
        if prepared.process.num_processes == 1:
            return cls(trees, {}, {}, {})
        buffers = replicated_buffers(named)
        marks = {name: mark_of(name, buffer) for name, buffer in buffers.items()}
        return cls(trees, buffers, marks, rank_differences.compared(trees.shared))


def _check_names(part: StatePart, added: Collection[str]) -> None:
    """Refuse a shared tree of a new kind that its part does not expect: no script could load the checkpoint."""
    new = {name for name in added if part_of(name) is None}
    unexpected = new.difference(part.expected()) if new else new
    if unexpected:
        raise accel_ckpt.CheckpointSaveError(
            f"{type(part).__name__}.dump() adds to Trees.shared {', '.join(sorted(unexpected))}, which expected() does "
            "not yield, so no script could load the checkpoint. Yield the name there, or add it to Trees.progress"
        )


def _leader(prepared: Prepared) -> int:
    """The rank that saves weights and shared trees for this one: the first, or with a folder per node its first."""
    each_node = prepared.project.save_on_each_node
    return prepared.process.process_index - prepared.process.local_process_index if each_node else 0


def _replicated_parameters(prepared: Prepared) -> list[tuple[str, dict[str, nn.Parameter]]]:
    """The parameters of models of which every rank has a copy: the model's number and class, and its tensors."""
    if prepared.process.num_processes == 1:
        return []
    strategy = prepared.plan.strategy
    plain = {
        index: strategy.plain(model)
        for index, model in enumerate(prepared.prepared_models)
        if strategy.states.keeps_replicas(model)
    }
    return [
        (f"model {index} ({type(model).__name__})", dict(model.named_parameters()))
        for index, model in plain.items()
    ]
