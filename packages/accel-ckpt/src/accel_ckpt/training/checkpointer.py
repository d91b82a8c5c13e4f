"""Numbered checkpoints of one training in one folder, for training loops of any kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import nn

from accel_ckpt.coordination.ranks import Coordinator, default_coordinator, run_together
from accel_ckpt.errors import (
    CheckpointNotFoundError,
    CheckpointSaveError,
    StateMismatchError,
    UnsupportedValueError,
)
from accel_ckpt.folders.find import checkpoints_from, complete_checkpoints, find_folder, prune_checkpoints
from accel_ckpt.loading.load_module import check_weights, load_weights_into
from accel_ckpt.loading.load_state import TrainingCheckpoint, open_training_state, read_for_all
from accel_ckpt.modules.named_model import NamedModel
from accel_ckpt.parts import is_divided, shape_of
from accel_ckpt.saving.background import BackgroundSaver, SaveHandle, WhenBusy
from accel_ckpt.saving.drift import replica_marks, warn_of_drift
from accel_ckpt.saving.save_state import StateContent, save_collected
from accel_ckpt.training.object_parts import (
    ObjectPart,
    OptimizerPart,
    Stateful,
    averages_gradients,
    check_parts,
    replicated_optimizers,
)
from accel_ckpt.training.rank_trees import Marks, RankTree, ranks_that_differ
from accel_ckpt.training.state_part import SavedTrees, StatePart, Trees
from accel_ckpt.training.tree_fill import TreeFill
from accel_state.messages import warn

__all__ = ["Checkpointer", "RandomState", "Stateful"]

_PREFIX = "step_"
_ABOUT = "."  # the part that says what the others are; no path can have this name


class RandomState:
    """The state of this process's global random generators: Python's, NumPy's, torch's and the devices'."""

    def state_dict(self) -> dict[str, Any]:
        """The states of the generators."""
        from accel_state.seeding import get_rng_state

        return get_rng_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the states of the generators."""
        from accel_state.seeding import set_rng_state

        set_rng_state(state_dict)


class Checkpointer:
    """Saves and loads numbered checkpoints of one training, in a loop of any kind.

    A *state* is a dictionary of named parts: modules, optimizers, other objects with ``state_dict()`` and
    ``load_state_dict()``, tensors, plain data, and dictionaries of all these. Loading restores objects in place
    and puts tensors and plain data into the dictionaries. A checkpoint is ``<directory>/step_<number>``: atomic,
    verified, and a training state like any other (``accel_ckpt.open_training_state``).

    All ranks call all methods. Modules and the rest of a state are saved from rank 0; state that each rank has for
    itself, such as ``RandomState``, goes into ``per_rank``. A part of the state that differs on another rank is named
    in a warning when it is saved.

    Args:
        directory: the folder of the checkpoints, created by the first save; or a URI of object storage.
        keep: how many of the newest checkpoints a save keeps; ``None`` keeps all.
        max_shard_size: bytes per file of weights, or a size such as ``"5GB"``.
        coordinator: the ranks; those of the process group by default.

    Raises:
        ValueError: ``keep`` is less than one.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = None,
        max_shard_size: int | str = "10GB",
        coordinator: Coordinator | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint must stay, or None for all")
        self.directory = find_folder(directory).absolute
        self.keep = keep
        self.max_shard_size = max_shard_size
        self._coordinator = coordinator
        self._saver = BackgroundSaver()

    def steps(self) -> list[int]:
        """List the steps of the complete checkpoints, in rising order."""
        return [
            int(path.name.removeprefix(_PREFIX)) for path in complete_checkpoints(self.directory, _PREFIX)
        ]

    @overload
    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        per_rank: Mapping[str, Any] | None = None,
        asynchronous: Literal[False] = False,
        when_busy: WhenBusy = "wait",
    ) -> Path: ...

    @overload
    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        per_rank: Mapping[str, Any] | None = None,
        asynchronous: Literal[True],
        when_busy: WhenBusy = "wait",
    ) -> SaveHandle: ...

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        per_rank: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
        when_busy: WhenBusy = "wait",
    ) -> Path | SaveHandle:
        """Save a state. Collective; returns when the checkpoint is complete and on the disk, or with a handle.

        Args:
            step: number of the checkpoint. A number that exists, or is below one that exists, is refused, because it
                would mix an older run into this one.
            state: see ``Checkpointer``.
            per_rank: this rank's own state.
            asynchronous: copy the state, which may change in any way afterwards, and write in the background.
            when_busy: while an earlier save is running in the background, ``"wait"`` for it or ``"refuse"``.

        Returns:
            The checkpoint's folder; with ``asynchronous`` a handle, whose ``result()`` is the folder.

        Raises:
            CheckpointSaveError: this step or a later one exists, or writing failed, on this or another rank; or the
                earlier save in the background failed.
            SaveInProgressError: an earlier save is running, and ``when_busy`` is ``"refuse"``.
            UnsupportedValueError: a value is neither an object with a state nor plain data; names its path.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step is {step!r}; a checkpoint is numbered by an integer from 0 on")
        if asynchronous and self._coordinator is not None:
            raise ValueError("asynchronous saves are those of the process group; leave coordinator out")
        self._saver.make_room(when_busy)
        ranks = self._ranks()
        target = self.directory / f"{_PREFIX}{step}"
        collector = _Collector(self, step, state, per_rank or {})

        def prune() -> None:
            if self.keep is not None and ranks.rank == 0:
                prune_checkpoints(self.directory, self.keep, _PREFIX)

        if asynchronous:
            return self._saver.save_collected(target, collector, after=prune)
        saved = save_collected(target, collector, ranks)
        prune()
        return saved

    def wait(self) -> None:
        """Wait for the end of a save in the background, if one is running. Collective.

        Raises:
            CheckpointSaveError: the save failed.
        """
        self._saver.make_room()

    def load(
        self,
        state: MutableMapping[str, Any],
        step: int | Literal["latest"] = "latest",
        *,
        per_rank: MutableMapping[str, Any] | None = None,
        allow_new_ranks: bool = False,
    ) -> int:
        """Restore a state. Collective. Everything is read and compared, on all ranks, before anything changes.

        Args:
            state: a state like the saved one; changed in place.
            step: number of the checkpoint; ``"latest"`` is the complete one with the highest number.
            per_rank: a state like the one that this rank saved; changed in place.
            allow_new_ranks: on ranks that did not exist at the save, leave ``per_rank`` as it is.

        Returns:
            The step that was loaded.

        Raises:
            CheckpointNotFoundError: there is no such complete checkpoint, or it has no state for this rank.
            CorruptCheckpointError: a file was damaged or changed after the save.
            StateMismatchError: the parts, names or shapes of the state differ from the saved ones.
        """
        self.wait()
        ranks = self._ranks()
        found: list[tuple[int, list[_Restore]]] = []

        known = read_for_all(lambda: self.directory / f"{_PREFIX}{self._choose(step)}", ranks)

        def read() -> int:
            newest = None if known is None or step != "latest" else known.directory.rpartition(_PREFIX)[2]
            chosen = self._choose(step) if newest is None else int(newest)
            checkpoint = open_training_state(self.directory / f"{_PREFIX}{chosen}", known=known)
            content = _State(state)
            lazy = [_ABOUT, *content.optimizers]
            changes = content.restore(dict(checkpoint.lazy_shared(lazy)), checkpoint, ranks)
            if per_rank is not None:
                own = checkpoint.per_rank(ranks.rank, allow_missing=allow_new_ranks)
                if own is not None:
                    changes += _State(per_rank).restore(dict(own), checkpoint, ranks)
            found.append((chosen, changes))
            return chosen

        read_by = run_together(read, ranks, doing=f"loading from {self.directory}")
        if len(set(read_by)) > 1:
            raise StateMismatchError(
                f"ranks found different newest checkpoints in {self.directory}: {read_by}. Use a folder that all of "
                "them see, and let no other training write to it"
            )
        chosen, changes = found[0]
        for change in changes:
            change()
        return chosen

    def verify(self, step: int | Literal["latest"] = "latest") -> None:
        """Read every file of a checkpoint and compare its checksum.

        Raises:
            CheckpointNotFoundError: there is no such complete checkpoint.
            CorruptCheckpointError: names the file that has changed.
        """
        open_training_state(self.directory / f"{_PREFIX}{self._choose(step)}").verify()

    def _choose(self, step: int | Literal["latest"]) -> int:
        if step != "latest":
            return step
        steps = self.steps()
        if not steps:
            raise CheckpointNotFoundError(
                f"there is no complete checkpoint in {self.directory}; save() makes one, and steps() lists them"
            )
        return steps[-1]

    @property
    def has_several_ranks(self) -> bool:
        """Whether other ranks save with this one."""
        return self._ranks().world_size > 1

    @property
    def is_leader(self) -> bool:
        """Whether this rank's modules and shared parts are the ones that are saved."""
        return self._ranks().rank == 0

    def _ranks(self) -> Coordinator:
        return self._coordinator or default_coordinator()


class _Collector:
    """Collects the content of one save."""

    each_node = False

    def __init__(
        self, owner: Checkpointer, step: int, state: Mapping[str, Any], per_rank: Mapping[str, Any]
    ) -> None:
        self._owner, self._step = owner, step
        self._state, self._per_rank = state, per_rank
        self._content: StateContent | None = None
        self._replicas: dict[str, nn.Module] = {}

    def collect(self) -> tuple[dict[str, str], Marks]:
        """Take the state, if this step can be saved; returns what tells that of one rank from another's: marks of the
        replicas of modules, and of the shared parts.
        """
        taken = checkpoints_from(self._owner.directory, self._step, _PREFIX)
        if taken:
            raise CheckpointSaveError(
                f"{taken[-1]} exists, so step {self._step} cannot be the newest. Continue with the step after load(), "
                "remove the folder, or use another one"
            )
        state, own = _State(self._state), _State(self._per_rank)
        if own.modules:
            raise UnsupportedValueError(
                f"{', '.join(own.modules)}: a module cannot be part of per_rank; its weights belong to the state"
            )
        self._replicas = {path: m for path, m in state.modules.items() if averages_gradients(m)}
        self._content = StateContent(
            models=[model.state_dict() for model in state.models],
            shared=state.dump(),
            per_rank=own.dump(),
            replicated=replicated_optimizers(state.optimizers, [*self._replicas.values()]),
            max_shard_size=self._owner.max_shard_size,
            canonical=True,
        )
        replicas = {path: replica_marks([*module.parameters()]) for path, module in self._replicas.items()}
        several = self._owner.has_several_ranks
        shared = state.compared(self._content.shared) if several else {}
        return replicas, {path: RankTree.of(path, tree).marks for path, tree in shared.items()}

    def content(self, collected: Sequence[Any]) -> StateContent:
        """Return the collected content."""
        assert self._content is not None, "collected before"
        if self._owner.is_leader:
            for path, module in self._replicas.items():
                names = [name for name, _ in module.named_parameters()]
                warn_of_drift(
                    f"{path} ({type(module).__name__})",
                    names,
                    [marks.get(path, "") for marks, _ in collected],
                )
            for path, ranks in ranks_that_differ([marks for _, marks in collected], 0).items():
                warn(
                    f"{path} is not the same on rank {', '.join(map(str, ranks))} as on rank 0, whose value is saved "
                    "for all. Pass state that differs between ranks as save(…, per_rank=…), and to load()"
                )
        return self._content


_Restore: TypeAlias = Callable[[], object]
"""Puts one thing back; what can fail has been tried before."""


class _State:
    """The leaves of a state by their dotted path: modules, whose weights are models, and the parts of all else."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping):
            raise UnsupportedValueError(
                f"a state is a dictionary of named parts, got {type(state).__name__}; give {{'model': model, …}}"
            )
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self._objects: dict[str, Stateful] = {}
        values: dict[str, tuple[Any, Any]] = {}
        for path, holder, key in _walk(state, ""):
            leaf = holder[key]
            if isinstance(leaf, nn.Module):
                self.modules[path] = leaf
            elif isinstance(leaf, torch.optim.Optimizer):
                self.optimizers[path] = leaf
            elif _has_state(leaf):
                self._objects[path] = leaf
            else:
                values[path] = holder, key
        self._values = _Values(values)

    @cached_property
    def models(self) -> Sequence[NamedModel]:
        """The modules with their canonical names, which are worked out once."""
        return [NamedModel(module) for module in self.modules.values()]

    @property
    def parts(self) -> list[StatePart]:
        """The parts of the state, in the order in which they are loaded."""
        parts: list[StatePart] = [OptimizerPart(*named, self.models) for named in self.optimizers.items()]
        return [*parts, *(ObjectPart(*named) for named in self._objects.items()), self._values]

    def dump(self) -> dict[str, Any]:
        """The trees to be saved by name."""
        trees = Trees(shared={_ABOUT: {"modules": list(self.modules)}})
        for part in self.parts:
            part.dump(trees)
        return trees.shared

    def compared(self, dumped: Mapping[str, Any]) -> dict[str, Any]:
        """The dumped trees that must be the same on all ranks: data, and objects except optimizers."""
        return {**dumped[_ABOUT]["values"], **{path: dumped[path] for path in self._objects}}

    def restore(
        self, trees: dict[str, Any], checkpoint: TrainingCheckpoint, ranks: Coordinator
    ) -> list[_Restore]:
        """Compare everything, and return the functions that restore the saved state, in order."""
        about = trees.get(_ABOUT)
        if about is None:
            raise StateMismatchError(
                f"{checkpoint.directory} is a training state that no Checkpointer saved; open it with "
                "open_training_state()"
            )
        here = {
            "objects": [*self.optimizers, *self._objects],
            "modules": self.modules,
            "values": self._values.paths,
        }
        check_parts(here, {"objects": trees.keys() - {_ABOUT}, **about}, checkpoint.directory)
        saved = _saved(trees, checkpoint, ranks)
        taken = [(part, part.read(saved)) for part in self.parts]
        weights = {path: checkpoint.weights(about["modules"].index(path)) for path in self.modules}
        for path, module in self.modules.items():
            check_weights(module, weights[path])
        for part, found in taken:
            part.check(found, saved)
        fills = [partial(load_weights_into, module, weights[path]) for path, module in self.modules.items()]
        return [*fills, *(partial(part.load, found, saved) for part, found in taken)]


def _saved(trees: dict[str, Any], checkpoint: TrainingCheckpoint, ranks: Coordinator) -> SavedTrees:
    def of_rank(rank: int) -> Mapping[str, Any]:
        return checkpoint.per_rank(rank) or {}

    manifest = checkpoint.manifest
    return SavedTrees(
        checkpoint.directory,
        trees,
        own=None,
        known={},
        rank=ranks.rank,
        ranks=ranks.world_size,
        saved_by=manifest.world_size,
        saved_ranks=manifest.ranks,
        world_size=manifest.world_size,
        groups=frozenset(),
        of_rank=of_rank,
    )


class _Values(StatePart):
    """Tensors and plain data.

    Args:
        values: by path; the dictionary that holds each, and its key there.
    """

    def __init__(self, values: Mapping[str, tuple[Any, Any]]) -> None:
        self._values = values

    @property
    def paths(self) -> Collection[str]:
        """The paths of all values."""
        return self._values.keys()

    def _live(self) -> dict[str, Any]:
        return {path: holder[key] for path, (holder, key) in self._values.items()}

    def dump(self, trees: Trees) -> None:
        """Add the values to the tree that describes the others."""
        trees.shared[_ABOUT]["values"] = self._live()

    def read(self, saved: SavedTrees) -> TreeFill:
        """Match saved values with those here; only values that are divided among ranks are filled in place."""
        values, live = saved.shared[_ABOUT]["values"], self._live()
        for path, here in live.items():
            _check_value(path, here, values[path])
        return TreeFill(values, live, lambda saved, here, path: here if is_divided(here) else None)

    def check(self, taken: TreeFill, saved: SavedTrees) -> None:
        """Check the content of the files."""
        taken.check()

    def load(self, taken: TreeFill, saved: SavedTrees) -> None:
        """Put the values into their dictionaries."""
        values = taken.run()
        for path, (holder, key) in self._values.items():
            _put(holder, key, values[path])


def _walk(state: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    for key, value in state.items():
        if not isinstance(key, str) or not key or "." in key or "/" in key:
            raise UnsupportedValueError(
                f"the key {key!r} at {prefix or 'the top'} cannot name a part of a state; use a non-empty string "
                "without '.' and '/'"
            )
        if _holds_objects(value):
            yield from _walk(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", state, key


def _holds_objects(value: Any) -> bool:
    """Whether a dictionary has objects below it; one of nothing but data is data."""
    return isinstance(value, dict) and any(_has_state(v) or _holds_objects(v) for v in value.values())


def _has_state(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and isinstance(value, Stateful)


def _check_value(path: str, here: Any, saved: Any) -> None:
    """A value that is divided among ranks can only be filled by a tensor of its shape."""
    if isinstance(here, Mapping) and isinstance(saved, Mapping):
        for name, item in here.items():
            _check_value(f"{path}.{name}", item, saved.get(name, item))
    elif is_divided(here) and shape_of(here) != tuple(getattr(saved, "shape", ())):
        raise StateMismatchError(
            f"{path} is divided among ranks here, of shape {list(shape_of(here))}, and was saved as "
            f"{list(saved.shape) if hasattr(saved, 'shape') else type(saved).__name__}"
        )


def _put(holder: Any, key: str, value: Any) -> None:
    """Replace a value; a dictionary keeps its identity, a tensor its device, a divided tensor is filled."""
    before = holder[key]
    if isinstance(before, dict) and isinstance(value, dict):
        placed = {name: _like(before.get(name), item) for name, item in value.items()}
        before.clear()
        before.update(placed)
    else:
        holder[key] = _like(before, value)


def _like(before: Any, value: Any) -> Any:
    if value is before:  # divided, and filled
        return before
    if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.to(before.device)
    return value
