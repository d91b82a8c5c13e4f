"""Differences between a rank and the rank that saves for all: objects that the script registered, schedulers that were
fed this rank's own loss, options of optimizers, the loss scale, flags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_ckpt.format.forms import OTHERS, check_form, natural
from accel_ckpt.format.saved_tensors import SavedTensor
from accel_ckpt.training.optimizers import KERNEL_OPTIONS
from accel_ckpt.training.rank_trees import Marks, RankTree
from accel_state.log import get_logger
from accel_state.trees import recursively_apply
from accel_train.checkpoints.chosen_parts import ALL, Parts, part_of
from accel_train.setup.prepared import Prepared

__all__ = ["FORM", "compared", "in_words", "marks_of", "own_trees", "take_up", "warn_of_other_ranks"]

_logger = get_logger(__name__)

FORM = {OTHERS: [natural]}
"""Of what `ranks_that_differ` returns."""

_STATE = ("state", "global_state")  # of optimizers; strategies know whether ranks have the same


def compared(shared: Mapping[str, Any]) -> dict[str, RankTree]:
    """Encode the shared trees of this rank for a comparison; of optimizers only their options."""
    return {
        name: RankTree.of(name, _options(tree) if _is_optimizer(name) else tree)
        for name, tree in shared.items()
    }


def marks_of(trees: Mapping[str, RankTree]) -> dict[str, Sequence[str]]:
    """Describe the trees for the other ranks, as plain data."""
    return {name: tree.marks for name, tree in trees.items()}


def own_trees(trees: Mapping[str, RankTree], leader: Marks) -> dict[str, Any]:
    """The differences that this rank saves.

    Args:
        trees: this rank's trees.
        leader: the marks of the rank whose trees are saved for all.
    """
    beside = {name: tree.beside(leader.get(name, ())) for name, tree in trees.items()}
    return {name: own for name, own in beside.items() if own is not None}


def take_up(shared: Mapping[str, Any], own: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Restore the shared trees of this rank from those saved for all, and its differences.

    Args:
        shared: the trees that were saved for all, or some of them.
        own: the result of `own_trees` for this rank.
        where: the checkpoint, for messages.

    Raises:
        CorruptCheckpointError: `own` has another form.
    """
    check_form(own, {OTHERS: {}}, f"{where}: what a rank has of its own")
    trees = dict(shared)
    for name, beside in own.items():
        if _is_optimizer(name):
            mine = RankTree.restored(name, _read(_options(shared[name])), beside, str(where))
            trees[name] = _with_options(shared[name], mine)
        else:
            trees[name] = RankTree.restored(name, shared.get(name), beside, str(where))
            kind, _, number = name.partition("_")
            # The same object may be a pickle on one rank and plain data on another.
            trees.pop({"custom": "pickled", "pickled": "custom"}.get(kind, "") + f"_{number}", None)
    return trees


def warn_of_other_ranks(
    prepared: Prepared, differing: Mapping[str, Sequence[int]], saved_by: int, where: Path, parts: Parts = ALL
) -> None:
    """Warn of states that continue from rank 0's, because another number of ranks saved their own.

    Args:
        prepared: the prepared objects.
        differing: the result of `ranks_that_differ`.
        saved_by: number of ranks that saved.
        where: the checkpoint.
        parts: the parts that are restored.
    """
    names = [name for name in differing if part_of(name) in {*parts, None}]
    for name in names:
        others = ", ".join(map(str, differing[name]))
        _logger.warning(
            f"{where} was saved by {saved_by} ranks, and rank {others} had another state of {in_words(prepared, name)} "
            f"than rank 0: {prepared.process.num_processes} ranks continue with that of rank 0. Load with {saved_by} "
            "ranks to give each its own, or make it the same on all ranks before it is saved."
        )


def in_words(prepared: Prepared, name: str) -> str:
    """The name of a shared tree in messages."""
    kind, _, number = name.partition("_")
    if kind in ("custom", "pickled"):
        items = prepared.registered
        known = f" ({type(items[int(number)].item).__name__})" if int(number) < len(items) else ""
        return f"the registered object {number}{known}"
    if kind == "optimizer":
        return f"the options (learning rates and others) of optimizer {number}"
    return {"scaler": "the loss scale", "progress": "the flags of skipped steps"}.get(
        kind, f"{kind} {number}".strip()
    )


def _is_optimizer(name: str) -> bool:
    return name.startswith("optimizer_")


def _options(tree: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's tree without states, names of parameters, and options that are never restored."""
    rest = {key: value for key, value in tree.items() if key not in _STATE}
    left_out = {"params", *KERNEL_OPTIONS}
    groups = [{k: v for k, v in group.items() if k not in left_out} for group in tree["param_groups"]]
    return {**rest, "param_groups": groups}


def _read(tree: Any) -> Any:
    """A tree with values for tensors that were not read yet."""
    return recursively_apply(SavedTensor.read, tree, test_type=lambda leaf: isinstance(leaf, SavedTensor))


def _with_options(tree: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    groups = [
        {**mine, "params": group["params"]}
        for mine, group in zip(options["param_groups"], tree["param_groups"], strict=True)
    ]
    return {**tree, **options, "param_groups": groups}
