"""Reading a training state, checking that it fits, and restoring it. `collecting.py` collects it.

Shared trees are saved once: optimizers, schedulers, the scaler, registered objects, counters. If a rank's trees differ
from those of the rank that saves for all, it saves the differences beside (`rank_differences.py`). Every rank also has
its own trees: random generators, the positions of its loaders, and its unfinished accumulation windows. `parts.py`
lists all parts, and each part handles its own trees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

import accel_ckpt
from accel_ckpt.format.forms import OTHERS, check_form, natural
from accel_ckpt.loading.load_state import ReadForAll
from accel_train.checkpoints import accelerate_checkpoints, rank_differences, window_state
from accel_train.checkpoints.chosen_parts import ALL, MODELS, Parts, left_out, part_of, trains
from accel_train.checkpoints.frozen_weights import completed
from accel_train.checkpoints.model_weights import CheckpointModel, WholeModel
from accel_train.checkpoints.parts import named_models, parts_of
from accel_train.setup.prepared import Prepared
from accel_train.state_part import SavedTrees, StatePart, taken_up
from accel_train.strategies.state_adapter import SavedModel

__all__ = ["Pairs", "Saved", "apply", "fit", "read"]


@dataclass
class Saved:
    """The content of a checkpoint for this rank, read and verified.

    Attributes:
        trees: everything except weights.
        models: the weights of each model.
        taken: each part that is restored, with the state that it read.
        local_folder: returns the folder of the files on this machine, for hooks; fetches those of object storage.
        left_out: descriptions of the parts that are not restored.
    """

    trees: SavedTrees
    models: Sequence[SavedModel]
    local_folder: Callable[[], Path]
    taken: list[tuple[StatePart, Any]] = field(default_factory=list)
    left_out: Sequence[str] = ()

    @property
    def directory(self) -> Path:
        """The checkpoint."""
        return self.trees.directory

    @property
    def parts(self) -> Parts:
        """The parts that are restored; the rest stays as it is."""
        return self.trees.groups


# Reading. Whatever can fail, fails here, before anything is changed.


def read(
    prepared: Prepared,
    directory: Path,
    allow_missing_rng: bool,
    trust_custom_objects: bool,
    parts: Parts = ALL,
    shared: ReadForAll | None = None,
) -> Saved:
    """Read everything, or some parts, and check that it fits.

    A script that has prepared only models and loaders, as for an evaluation, gets the weights of a training.

    Args:
        prepared: the prepared objects.
        directory: the checkpoint.
        allow_missing_rng: a rank that did not save keeps its random generators.
        trust_custom_objects: pickles of registered objects may be loaded.
        parts: the parts that are restored.
        shared: what the first rank has read for all.

    Raises:
        CheckpointNotFoundError: there is no complete checkpoint, or it has no state for this rank.
        CorruptCheckpointError: a file was damaged or changed after the save.
        StateMismatchError: the prepared or registered objects differ from the saved ones.
        OptionError: an object was pickled, and is not declared as trusted here.
    """
    with taken_up("it", directory):
        known = parts_of(prepared, named_models(prepared), trust_custom_objects)
        if shared is None and accel_ckpt.is_accelerate_checkpoint(directory):
            saved = _read_foreign(prepared, directory, allow_missing_rng, trust_custom_objects, parts)
        else:
            checkpoint = accel_ckpt.open_training_state(directory, known=shared)
            saved = _read_own(prepared, known, checkpoint, allow_missing_rng, parts)
        wanted = [part for part in known if part.is_wanted(saved.parts, ALL)]
        saved.taken = [(part, part.read(saved.trees)) for part in wanted]
        return saved


_SHARED = {
    "step": natural,
    "progress": {"save_iteration": natural, "optimizers": [{"skipped": bool, "spent": bool}]},
}
_RANK = {"rng": {}, "windows": window_state.FORM, "replicas": [{}], "buffers": {OTHERS: torch.Tensor}}


def _read_own(
    prepared: Prepared,
    known: Sequence[StatePart],
    checkpoint: accel_ckpt.TrainingCheckpoint,
    allow_missing_rng: bool,
    parts: Parts,
) -> Saved:
    """Read a checkpoint of `save_state`."""
    directory = checkpoint.directory
    if parts == ALL and not trains(prepared) and "optimizer_0" in checkpoint.lazy_shared(_OPTIMIZERS):
        parts = MODELS
    divided = any(prepared.plan.strategy.states.is_divided(model) for model in prepared.prepared_models)
    trees = _trees(prepared, checkpoint, allow_missing_rng, parts, divided)
    _check_parts(known, trees, checkpoint)
    models = [CheckpointModel(checkpoint, index) for index in range(len(checkpoint.models))]
    if "models" in parts:
        if not prepared.hooks.load:  # which may load models themselves
            _check_models(len(prepared.models), len(models), directory)
        if not divided:
            for model in models:
                model.whole()  # checks the files
    return Saved(trees, models, checkpoint.local_folder, left_out=left_out(parts, trees.shared))


def _trees(
    prepared: Prepared,
    checkpoint: accel_ckpt.TrainingCheckpoint,
    allow_missing_rng: bool,
    parts: Parts,
    divided: bool,
) -> SavedTrees:
    """The trees of the parts that are restored."""
    directory = checkpoint.directory
    # Whole tensors are views of the files, which optimizers copy; of divided ones each rank reads its part.
    lazy = divided or "optimizers" not in parts
    shared = dict(checkpoint.lazy_shared(_OPTIMIZERS) if lazy else checkpoint.mapped_shared(_OPTIMIZERS))
    check_form(shared, _SHARED, f"{directory}: the shared state")
    world_size = checkpoint.manifest.world_size
    saved_by = 1 if shared["progress"].get("main_process_alone") else world_size
    rank = prepared.process.process_index
    own: Mapping[str, Any] | None = None
    known: Mapping[str, Any] = {}
    if parts != MODELS:
        # A rank that did not save takes up what the first saved.
        first = min(checkpoint.manifest.ranks)
        optional = allow_missing_rng or "random" not in parts
        own = checkpoint.per_rank(rank if rank < saved_by else first, allow_missing=optional)
        known = own or checkpoint.per_rank(first) or {}
        check_form(known, _RANK, f"{directory}: the state of a rank")

    def of_rank(other: int) -> Mapping[str, Any]:
        saved = checkpoint.per_rank(other)
        assert saved is not None, "a missing rank raises"
        return saved

    trees = SavedTrees(
        directory,
        shared,
        own,
        known,
        rank=rank,
        ranks=prepared.process.num_processes,
        saved_by=saved_by,
        saved_ranks=checkpoint.manifest.ranks,
        world_size=world_size,
        groups=parts,
        of_rank=of_rank,
    )
    _take_differing(prepared, trees)
    return trees


def _take_differing(prepared: Prepared, trees: SavedTrees) -> None:
    """Put what this rank saved of its own in the place of the shared trees, and leave out those that stay."""
    differing = trees.progress.get("differing", {})
    check_form(differing, rank_differences.FORM, f"{trees.directory}: what differs between ranks")
    wanted = {*trees.groups, None}
    if trees.same_ranks:
        own = {
            name: tree for name, tree in trees.known.get("differing", {}).items() if part_of(name) in wanted
        }
        trees.shared = rank_differences.take_up(trees.shared, own, trees.directory)
    else:
        rank_differences.warn_of_other_ranks(
            prepared, differing, trees.world_size, trees.directory, trees.groups
        )


class _AnyOptimizer(frozenset[str]):
    """The names of the trees of optimizers, however many there are."""

    def __contains__(self, name: object) -> bool:
        return str(name).startswith("optimizer_")


_OPTIMIZERS = _AnyOptimizer()


def _check_parts(
    known: Sequence[StatePart], trees: SavedTrees, checkpoint: accel_ckpt.TrainingCheckpoint
) -> None:
    """Say what does not match, before anything is changed."""
    owners = {name: part for part in known for name in part.expected()}
    loaders = (name for name in trees.known if name.startswith("loader_"))
    names = {name.replace("pickled_", "custom_") for name in (*trees.shared, *loaders)} - {"progress"}

    def is_wanted(name: str) -> bool:
        if name in owners:
            return owners[name].is_wanted(trees.groups, ALL)
        return trees.groups == ALL or part_of(name) in trees.groups

    prepared, saved = {*filter(is_wanted, owners)}, {*filter(is_wanted, names)}
    problems = []
    if prepared - saved:
        problems.append(f"it lacks {', '.join(sorted(prepared - saved))}")
    if saved - prepared:
        problems.append(f"nothing was prepared or registered for its {', '.join(sorted(saved - prepared))}")
    if problems:
        raise accel_ckpt.StateMismatchError(
            f"{checkpoint.directory} does not fit this script: {'; '.join(problems)}. Prepare and register the same "
            "objects, in the same order, as the script that saved it; or say which parts to restore: load_state(…, "
            "only=('models',)) restores the weights alone."
        )


def _read_foreign(
    prepared: Prepared, directory: Path, allow_missing_rng: bool, trust_custom_objects: bool, parts: Parts
) -> Saved:
    """Read a checkpoint of Accelerate: no accumulation windows, and loaders only if they were stateful."""
    if (
        parts == ALL
        and not trains(prepared)
        and accel_ckpt.AccelerateCheckpoint(directory).parts()["optimizers"]
    ):
        parts = MODELS
    models, shared, rng = accelerate_checkpoints.read(
        prepared, directory, allow_missing_rng, trust_custom_objects, parts
    )
    loaders = {name: shared.pop(name) for name in [*shared] if name.startswith("loader_")}
    rank, ranks = prepared.process.process_index, prepared.process.num_processes
    trees = SavedTrees(
        directory,
        shared,
        None if rng is None else {"rng": rng},
        loaders,
        rank=rank,
        ranks=ranks,
        saved_by=ranks,
        saved_ranks=range(ranks),
        world_size=ranks,
        groups=parts,
        of_rank=lambda other: {},
    )
    weights = [WholeModel(model) for model in models]
    omitted = [] if parts == ALL else left_out(parts, accelerate_checkpoints.trees(directory))
    return Saved(trees, weights, lambda: directory, left_out=omitted)


def _check_models(here: int, saved: int, directory: Path) -> None:
    if here != saved:
        raise accel_ckpt.StateMismatchError(
            f"{directory} does not fit this script: it holds {saved} models, and {here} were prepared, or left by the "
            "load hooks. Prepare the same models, in the same order, as the script that saved it."
        )


# Putting back

Pairs: TypeAlias = list[tuple[nn.Module, SavedModel]]


def fit(prepared: Prepared, saved: Saved, models: list[nn.Module], strict: bool) -> Pairs:
    """Match saved weights with `models`, the ones that load hooks have left, and check them and all parts.

    Raises:
        StateMismatchError: names or shapes differ from the saved ones.
    """
    pairs = _pairs(prepared, saved, models, strict) if "models" in saved.parts else []
    for model, weights in pairs:
        problems = prepared.plan.strategy.states.misfits(model, weights, strict)
        if problems:
            raise accel_ckpt.StateMismatchError(
                f"{saved.directory} does not fit the model {type(prepared.plan.strategy.plain(model)).__name__}: "
                f"{'; '.join(problems)}. Nothing was changed. Build the model as it was when the state was saved"
            )
    for part, taken in saved.taken:
        part.check(taken, saved.trees)
    return pairs


def _pairs(prepared: Prepared, saved: Saved, models: list[nn.Module], strict: bool) -> Pairs:
    kept = [model for model in prepared.models if any(model is other for other in models)]
    if len(saved.models) == len(prepared.models):
        paired = zip(prepared.models, saved.models, strict=True)
        pairs = [(model, weights) for model, weights in paired if any(model is other for other in kept)]
    else:  # a save hook dropped the weights of models that the load hook has loaded
        _check_models(len(kept), len(saved.models), saved.directory)
        pairs = list(zip(kept, saved.models, strict=True))
    frozen = saved.trees.progress.get("frozen")
    if frozen is None:
        return pairs
    with taken_up("what it says of frozen parameters", saved.directory):
        return [
            (model, _completed(prepared, model, weights, about, strict, saved.directory))
            for (model, weights), about in zip(pairs, frozen, strict=True)
        ]


def _completed(
    prepared: Prepared, model: nn.Module, weights: SavedModel, frozen: Any, strict: bool, directory: Path
) -> SavedModel:
    strategy = prepared.plan.strategy
    what = f"the model {type(strategy.plain(model)).__name__}"
    return completed(weights, frozen, strategy.states.model_state(model), strict, what, directory)


def apply(prepared: Prepared, saved: Saved, pairs: Pairs, strict: bool) -> None:
    """Restore all parts that were read."""
    for model, weights in pairs:
        prepared.plan.strategy.states.load_model_state(model, weights, strict)
    for part, taken in saved.taken:
        part.load(taken, saved.trees)
