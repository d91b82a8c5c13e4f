"""Collecting what a training state holds besides weights. Nothing here may change what the training does next."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import accel_ckpt
from accel_ckpt.coordination import MainProcess
from accel_ckpt.format import tagged_json
from accel_ckpt.modules.named_model import NamedModel
from accel_ckpt.parts import is_divided
from accel_ckpt.saving.drift import replica_marks, warn_of_drift
from accel_ckpt.training.rank_trees import Marks, RankTree, mark_of, ranks_that_differ
from accel_state.seeding import get_rng_state
from accel_train.checkpoints import rank_differences, window_state
from accel_train.setup.prepared import Prepared, Registered

__all__ = ["collect", "named_models", "replicated_buffers", "trained"]


def collect(
    here: Prepared,
    ranks: accel_ckpt.Coordinator | None = None,
    named: Sequence[NamedModel] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The shared trees, and this rank's own; of one moment. Collective: if it fails, then on every rank.

    Tensors in them are the training's own, so a save copies them before it lets the training go on.

    Args:
        here: what to save.
        ranks: those that save; the main process alone where the others do not take part; None: all.
        named: the models with their canonical names; None: they are worked out here.
    """
    named = named_models(here) if named is None else named
    found: list[_Collected] = []
    replicas = _replicated_parameters(here)
    leader = _leader(here)

    def work() -> tuple[dict[str, str], list[str], Marks, int]:
        _check_averaged(here)
        found.append(_Collected.of(here, named))
        marks = [replica_marks([*parameters.values()]) for _, parameters in replicas]
        return found[0].marks, marks, rank_differences.marks_of(found[0].compared), leader

    answers = accel_ckpt.run_together(
        work,
        ranks or accel_ckpt.default_coordinator(),
        doing="collecting the training state",
        error=accel_ckpt.CheckpointSaveError,
    )
    [mine] = found
    shared, own = mine.shared, mine.own
    if here.process.is_main_process:
        for number, (what, parameters) in enumerate(replicas):
            warn_of_drift(what, [*parameters], [answer[1][number] for answer in answers])
    together = [answer for answer in answers if answer[3] == leader]
    first, _, theirs, _ = together[0]
    differing = ranks_that_differ([answer[2] for answer in together], leader)
    shared["progress"]["main_process_alone"] = isinstance(ranks, MainProcess)
    if differing:
        shared["progress"]["differing"] = differing
    # The weights that are saved are the leader's. Inside a window, and where they are not broadcast, buffers differ.
    own["buffers"] = {
        name: held for name, held in mine.buffers.items() if mine.marks[name] != first.get(name)
    }
    if trees := rank_differences.own_trees(mine.compared, theirs):
        own["differing"] = trees
    return shared, own


@dataclass(frozen=True)
class _Collected:
    """What a rank has taken of one moment."""

    shared: dict[str, Any]
    own: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    marks: dict[str, str]
    """Of the buffers."""
    compared: dict[str, RankTree]
    """The shared trees, where there are other ranks to compare them with."""

    @classmethod
    def of(cls, here: Prepared, named: Sequence[NamedModel]) -> _Collected:
        shared, own = _shared_trees(here, named), _rank_trees(here, named)
        buffers = replicated_buffers(here, named)
        marks = {name: mark_of(name, buffer) for name, buffer in buffers.items()}
        several = here.process.num_processes > 1
        return cls(shared, own, buffers, marks, rank_differences.compared(shared) if several else {})


def _leader(here: Prepared) -> int:
    """The rank that saves weights and shared trees for this one: the first, or with a folder per node its first."""
    each_node = here.project.save_on_each_node
    return here.process.process_index - here.process.local_process_index if each_node else 0


def _check_averaged(here: Prepared) -> None:
    unaveraged = here.plan.strategy.unaveraged()
    if unaveraged:
        raise accel_ckpt.CheckpointSaveError(
            f"ranks train copies of {type(here.plan.strategy.plain(unaveraged[0])).__name__} inside LocalSGD, and have "
            "stepped since these were averaged. Save after LocalSGD.average(), or after the context"
        )


def named_models(here: Prepared) -> list[NamedModel]:
    """The prepared models; their canonical names are worked out once for all that uses this list."""
    return [NamedModel(here.plan.strategy.plain(model)) for model in here.prepared_models]


def replicated_buffers(here: Prepared, named: Sequence[NamedModel]) -> dict[str, torch.Tensor]:
    """Buffers of which every rank has a copy, by name: strategies that divide parameters leave them whole."""
    if here.process.num_processes == 1:
        return {}
    found: dict[str, torch.Tensor] = {}
    for index, model in enumerate(named):
        saved = model.state_dict()
        for name, buffer in model.buffers().items():
            if name in saved and not is_divided(buffer):
                found[f"model_{index}.{name}"] = buffer
    return found


def _replicated_parameters(here: Prepared) -> list[tuple[str, dict[str, nn.Parameter]]]:
    """The parameters of models of which every rank has a copy: the model's number and class, and its tensors."""
    if here.process.num_processes == 1:
        return []
    strategy = here.plan.strategy
    plain = {
        index: strategy.plain(model)
        for index, model in enumerate(here.prepared_models)
        if strategy.keeps_replicas(model)
    }
    return [
        (f"model {index} ({type(model).__name__})", dict(model.named_parameters()))
        for index, model in plain.items()
    ]


def _shared_trees(here: Prepared, named: Sequence[NamedModel]) -> dict[str, Any]:
    """The trees that are the same on every rank."""
    shared: dict[str, Any] = {
        "step": here.step,
        "progress": {
            "save_iteration": here.project.iteration + 1,
            "optimizers": [
                {"skipped": optimizer.step_was_skipped, "spent": optimizer.gradients_spent}
                for optimizer in here.optimizers
            ],
        },
    }
    for index, optimizer in enumerate(here.optimizers):
        shared[f"optimizer_{index}"] = here.plan.strategy.optimizer_state(optimizer.optimizer, named)
    for index, scheduler in enumerate(here.schedulers):
        shared[f"scheduler_{index}"] = scheduler.state_dict()
    guard = here.accumulator.guard
    if guard is not None:
        shared["progress"]["guard"] = guard.state_dict(here.optimizers)
    scaler = here.plan.precision.state_dict(here.inner_optimizers)
    if scaler is not None:
        shared["scaler"] = scaler
    for index, registered in enumerate(here.registered):
        key, tree = _dump_registered(registered, index)
        shared[f"{key}_{index}"] = tree
    return shared


def _rank_trees(here: Prepared, named: Sequence[NamedModel]) -> dict[str, Any]:
    """The trees that are this rank's own."""
    trees: dict[str, Any] = {"rng": get_rng_state()}
    for index, loader in enumerate(here.loaders):
        trees[f"loader_{index}"] = loader.state_dict()
    trees["windows"] = window_state.dump(here.accumulator, trained(here, named), here.plan.strategy)
    guard = here.accumulator.guard
    if guard is not None:
        trees["guard"] = guard.waiting()
    strategy = here.plan.strategy
    trees["replicas"] = [strategy.window_state(model) for model in here.prepared_models]
    if strategy.optimizers_differ(here.inner_optimizers):
        trees["optimizers"] = [
            strategy.optimizer_state(optimizer.optimizer, named)["state"] for optimizer in here.optimizers
        ]
    return trees


def _dump_registered(registered: Registered, index: int) -> tuple[str, Any]:
    state = registered.item.state_dict()
    try:
        tagged_json.encode(state, lambda path, tensor: "")
    except accel_ckpt.UnsupportedValueError as error:
        if registered.trusted:
            return "pickled", pickle.dumps(state)
        raise accel_ckpt.UnsupportedValueError(
            f"the registered object {index} ({type(registered.item).__name__}): {error}. Or pass "
            "register_for_checkpointing(…, trusted=True) to pickle its state, and load_state(…, "
            "trust_custom_objects=True): only for checkpoints of people you trust, because a pickle can run any code"
        ) from error
    return "custom", state


def trained(here: Prepared, named: Sequence[NamedModel] = ()) -> window_state.Trained:
    """The objects that windows of gradients belong to."""
    return window_state.Trained(
        here.models,
        here.prepared_models,
        here.optimizers,
        here.loaders,
        named,
        engine_optimizers=here.plan.strategy.capabilities.hides_gradients,
    )
