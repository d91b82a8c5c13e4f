"""Saving the training state of a run: model weights, shared trees, and the trees of each rank, in one folder.

A *tree* is nested dictionaries and lists of tensors and plain data. Its tensors go to safetensors files under
names that give their path in the tree, everything else to tagged JSON (``accel_ckpt.format.tagged_json``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from accel_ckpt.coordination.ranks import Coordinator, default_coordinator
from accel_ckpt.disk import LOCAL, Disk
from accel_ckpt.errors import UnsupportedValueError
from accel_ckpt.folders.find import find_folder
from accel_ckpt.folders.folder import Transaction
from accel_ckpt.format.tagged_json import Tree
from accel_ckpt.modules.names import canonical_state_dict
from accel_ckpt.saving.draft import Offer, StateDraft, StatePlan
from accel_ckpt.saving.plan import convert_file_size_to_int
from accel_state.messages import warn

__all__ = [
    "StateCollector",
    "StateContent",
    "Tree",
    "begin_save",
    "plan_save",
    "save_collected",
    "save_training_state",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateContent:
    """The content of a training state for a save, and its options; most are arguments of ``save_training_state``."""

    models: Sequence[Mapping[str, Any]]
    shared: Mapping[str, Tree]
    per_rank: Mapping[str, Tree]
    replicated: Collection[str] = ()
    safe_serialization: bool = True
    each_node: bool = False
    before_write: Callable[[Path], None] | None = None
    max_shard_size: int | str = "10GB"
    canonical: bool = False
    """The names in ``models`` are canonical, as those of ``NamedModel``: they are used unchanged."""

    def __post_init__(self) -> None:
        """Refuse an invalid size before ranks begin anything together."""
        convert_file_size_to_int(self.max_shard_size)

    def collect(self) -> None:
        """See `StateCollector`: this content needs no comparison between ranks."""

    def content(self, collected: Sequence[Any]) -> StateContent:
        """See `StateCollector`."""
        return self

    def draft(self, rank: int, leads: bool, alone: bool) -> StateDraft:
        """Encode the state that this rank holds."""
        found = StateDraft.make(
            self.models if self.canonical else [canonical_state_dict(model) for model in self.models],
            self.shared,
            self.per_rank,
            rank=rank,
            leads=leads,
            replicated=() if alone else self.replicated,
            safe_serialization=self.safe_serialization,
            max_shard_size=convert_file_size_to_int(self.max_shard_size),
        )
        if self.each_node and any(found.parts.values()):
            raise UnsupportedValueError(
                "tensors that are divided among ranks are saved to a file system that all nodes share; save without "
                "save_on_each_node"
            )
        return found


class StateCollector(Protocol):
    """Collects what a save writes, when ranks must compare some of it; without a collective of its own."""

    @property
    def each_node(self) -> bool:
        """As in ``save_training_state``; read before anything is collected."""

    def collect(self) -> Any:
        """Take what belongs to one moment; returns plain data for the other ranks. If it fails, then on all ranks."""

    def content(self, collected: Sequence[Any]) -> StateContent:
        """Return the content that this rank saves.

        Args:
            collected: what ``collect`` returned on each rank.
        """


def save_training_state(
    directory: str | os.PathLike[str],
    *,
    models: Sequence[Mapping[str, Any]],
    shared: Mapping[str, Tree],
    per_rank: Mapping[str, Tree],
    replicated: Collection[str] = (),
    safe_serialization: bool = True,
    each_node: bool = False,
    before_write: Callable[[Path], None] | None = None,
    max_shard_size: int | str = "10GB",
    coordinator: Coordinator | None = None,
    disk: Disk = LOCAL,
) -> Path:
    """Save a training state atomically: it exists completely or not at all. Collective.

    Args:
        directory: the checkpoint's folder, or a URI of object storage (``s3://bucket/run/checkpoint_1``). An existing
            checkpoint is replaced as a whole, in one step; files in the folder that no save of a training state wrote
            are kept.
        models: state dicts with canonical names. Every rank writes the part of a ``DTensor`` or
            :class:`accel_ckpt.Part` that it holds. The leading rank writes whole tensors, and the others need not pass
            them. One name may have a list of parts. Together the ranks must hold all of a divided tensor; of equal
            parts (replicas) one is written. Entries that are not tensors (``get_extra_state``) are kept with the shared
            trees.
        shared: name → tree, saved from the leading rank. If a tree holds a ``DTensor`` or parts, all ranks that hold
            some of it pass it; the leading rank always does, if it holds nothing as ``Part.nothing(shape)``. A list
            that consists only of parts is one tensor.
        per_rank: name → tree, this rank's own; for example its random generators.
        replicated: names in ``shared`` whose large tensors are equal on all ranks, so that each rank writes a part of
            them. Samples are compared; a tensor that differs is written by the leading rank.
        safe_serialization: weights as safetensors, or as ``.bin`` of ``torch.save``.
        each_node: the ranks of every node save a folder of their own, led by the first of them; for nodes without a
            shared file system.
        before_write: called on every rank with the temporary folder, before anything is written or `models` is
            read; files that it adds become part of the checkpoint, and it may change `models` in place.
        max_shard_size: bytes per file of weights, or a size such as ``"5GB"``.
        coordinator: the ranks; those of the process group by default.
        disk: the file system to write to.

    Returns:
        The absolute path of the folder; for a URI a :class:`accel_ckpt.RemotePath`.

    Raises:
        CheckpointSaveError: writing failed, here or on another rank; raised on every rank. An earlier checkpoint in
            the folder is unchanged.
        UnsupportedValueError: a value in a tree cannot be saved exactly, or the ranks together do not hold all of a
            tensor; names the path, or the tensor and the missing box.
    """
    content = StateContent(
        models=models,
        shared=shared,
        per_rank=per_rank,
        replicated=replicated,
        safe_serialization=safe_serialization,
        each_node=each_node,
        before_write=before_write,
        max_shard_size=max_shard_size,
    )
    return save_collected(directory, content, coordinator, disk)


def save_collected(
    directory: str | os.PathLike[str],
    content: StateCollector,
    coordinator: Coordinator | None = None,
    disk: Disk = LOCAL,
) -> Path:
    """Save like :func:`save_training_state`, with content that is given or that each rank collects. Collective.

    Ranks agree four times: when they have collected (and the temporary folder is made, of which the first tells the
    name), when all know what they will write, when all have written, and when the folder has its name. None of them can
    be left out: a rank that did not receive the last one cannot know that the checkpoint is complete. Where all ranks
    say the same, a rank receives as much in a world of any size.

    Args:
        directory: as in :func:`save_training_state`.
        content: the content to save.
        coordinator: the ranks.
        disk: the file system to write to.
    """
    transaction, plan = begin_save(directory, content, coordinator, disk)
    return transaction.complete(lambda folder: plan.write(folder, transaction.disk))


def begin_save(
    directory: str | os.PathLike[str],
    content: StateCollector,
    coordinator: Coordinator | None = None,
    disk: Disk = LOCAL,
) -> tuple[Transaction, StatePlan]:
    """Everything of ``save_collected`` but the writing, which ``transaction.complete(plan.write)`` does."""
    ranks = coordinator or default_coordinator()
    each_node = content.each_node
    transaction = find_folder(directory).begin(ranks, each_node=each_node, disk=disk, prepare=content.collect)
    drafts: list[StateDraft] = []

    def draft() -> tuple[int | None, Offer]:
        found = content.content(transaction.prepared)
        if found.before_write is not None:
            found.before_write(transaction.scratch)
        drafts.append(found.draft(ranks.rank, transaction.leader, alone=ranks.world_size == 1))
        return ranks.local_rank if each_node else None, drafts[0].offer()

    answers = transaction.together(draft)
    first, last = (
        _own_group([local or 0 for local, _ in answers], ranks.rank) if each_node else (0, len(answers))
    )
    try:
        plan = drafts[0].plan([offer for _, offer in answers[first:last]], ranks.rank - first)
    except UnsupportedValueError:  # on all ranks alike
        transaction.abort()
        raise
    transaction.nbytes = plan.nbytes
    if plan.drifted is not None:
        warn(
            f"{transaction.directory}: values that must be equal on all ranks have drifted apart: {plan.drifted}. The "
            "checkpoint holds those of the first rank, and a run that loads it continues with them on all ranks"
        )
    return transaction, plan


def plan_save(content: StateContent, rank: int, ranks: int) -> tuple[StatePlan, Offer]:
    """What a rank would write of a state, if all others hold what it holds or the rules of divided tensors say.

    Args:
        content: of this rank.
        rank: this rank.
        ranks: their number; no others need exist.

    Returns:
        The plan, and the description of the state that each rank gives to the others where these differ.

    Raises:
        UnsupportedValueError: together such ranks do not hold all of a tensor.
    """
    draft = content.draft(rank, leads=rank == 0, alone=ranks == 1)
    offer = draft.offer()
    return draft.plan([offer] * ranks, rank), offer


def _own_group(local_ranks: Sequence[int], rank: int) -> tuple[int, int]:
    """The ranks of this rank's node, which are consecutive and begin with local rank 0."""
    first = max(r for r in range(rank + 1) if local_ranks[r] == 0)
    return first, next(
        (r for r in range(rank + 1, len(local_ranks)) if local_ranks[r] == 0), len(local_ranks)
    )
