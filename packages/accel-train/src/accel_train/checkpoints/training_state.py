"""What a training state holds besides weights: reading it, putting it back. `collecting.py` collects it.

Shared trees are saved once: optimizers, schedulers, the scaler, registered objects, counters. Where a rank has others
than the rank that saves for all, it saves its own beside (`rank_differences.py`). Every rank has trees of its own in
any case: random generators, the places of its loaders, and its unfinished accumulation windows.
"""

from __future__ import annotations

import numbers
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed import DistError

import accel_ckpt
from accel_ckpt.format.forms import OTHERS, check_form, natural
from accel_state.errors import AccelError
from accel_state.log import get_logger
from accel_state.messages import first_line
from accel_state.seeding import check_rng_state, derive_rng_state, set_rng_state
from accel_train.checkpoints import accelerate_checkpoints, rank_differences, window_state
from accel_train.checkpoints.chosen_parts import ALL, MODELS, Parts, left_out, limit, part_of, trains
from accel_train.checkpoints.collecting import named_models, replicated_buffers, trained
from accel_train.checkpoints.frozen_weights import completed
from accel_train.checkpoints.model_weights import CheckpointModel, WholeModel
from accel_train.errors import OptionError
from accel_train.setup.draws import share_draws
from accel_train.setup.prepared import Prepared
from accel_train.strategies.base import SavedModel

__all__ = ["Pairs", "Saved", "apply", "fit", "read"]

_logger = get_logger(__name__)


@dataclass
class Saved:
    """What a checkpoint holds for this rank, read and verified."""

    directory: Path
    models: Sequence[SavedModel]
    shared: dict[str, Any]
    rng: dict[str, Any] | None
    loaders: Mapping[int, dict[str, Any]]
    """States of prepared loaders by number; Accelerate saves few of them."""
    replicas: Mapping[str, Any]
    """What this rank's copies of the models have of their own; empty for another number of ranks."""
    optimizers: Sequence[Any] | None
    """This rank's own states of optimizers, by name of parameter; None where ranks have the same."""
    windows: Mapping[str, Any] | None
    """This rank's unfinished accumulation windows; None where none are saved."""
    guard: Mapping[str, Any] | None
    """What this rank's guard of steps has noted in them; None where none is saved."""
    local_folder: Callable[[], Path]
    """Gives the folder of the files on this machine, for hooks; fetches those of object storage."""
    parts: Parts = ALL
    """What is restored; the rest stays as it is."""
    left_out: Sequence[str] = ()
    """What is not, in words."""


# Reading. Whatever can fail, fails here, before anything is changed.


def read(
    here: Prepared,
    directory: Path,
    allow_missing_rng: bool,
    trust_custom_objects: bool,
    parts: Parts = ALL,
) -> Saved:
    """Read everything, or some parts, and check that it fits.

    A script that has prepared nothing but models and loaders, as evaluation does, gets the weights of a training.

    Raises:
        CheckpointNotFoundError: there is no complete checkpoint, or none of this rank's state in it.
        CorruptCheckpointError: a file is not what was written.
        StateMismatchError: other objects are prepared or registered than were saved.
        OptionError: an object was pickled, and it is not said here that it is trusted.
    """
    with _taken_up("it", directory):
        if accel_ckpt.is_accelerate_checkpoint(directory):
            return _read_foreign(here, directory, allow_missing_rng, trust_custom_objects, parts)
        return _read_own(here, directory, allow_missing_rng, trust_custom_objects, parts)


@contextmanager
def _taken_up(what: str, directory: Path) -> Iterator[None]:
    """What objects raise when a state is not what they have written is one error, that names the checkpoint."""
    try:
        yield
    except (AccelError, MemoryError, OSError, torch.OutOfMemoryError, DistError):
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise accel_ckpt.CorruptCheckpointError(
            f"{directory}: {what} is not what save_state() writes ({type(error).__name__}: {first_line(error)[:200]}). "
            "The checkpoint is damaged, or something else wrote it; load another one"
        ) from error


_SHARED = {
    "step": natural,
    "progress": {"save_iteration": natural, "optimizers": [{"skipped": bool, "spent": bool}]},
}
_RANK = {"rng": {}, "windows": window_state.FORM, "replicas": [{}], "buffers": {OTHERS: torch.Tensor}}


def _read_own(
    here: Prepared, directory: Path, allow_missing_rng: bool, trust_custom_objects: bool, parts: Parts
) -> Saved:
    """What `save_state` wrote."""
    checkpoint = accel_ckpt.open_training_state(directory)
    if parts == ALL and not trains(here) and "optimizer_0" in checkpoint.lazy_shared(_OPTIMIZERS):
        parts = MODELS
    if parts != ALL:
        return _read_parts(limit(here, parts), checkpoint, allow_missing_rng, trust_custom_objects, parts)
    optimizers = [f"optimizer_{index}" for index in range(len(here.optimizers))]
    # Whole tensors are views of the files, which optimizers copy; of divided ones each rank reads its part.
    lazy = any(here.plan.strategy.is_divided(model) for model in here.prepared_models)
    shared = dict(checkpoint.lazy_shared(optimizers) if lazy else checkpoint.mapped_shared(optimizers))
    check_form(shared, _SHARED, f"{directory}: the shared state")
    saved_by = 1 if shared["progress"].get("main_process_alone") else checkpoint.manifest.world_size
    own = checkpoint.per_rank(_home(here, checkpoint, saved_by), allow_missing=allow_missing_rng)
    known = own or checkpoint.per_rank(min(checkpoint.manifest.ranks)) or {}
    check_form(known, _RANK, f"{directory}: the state of a rank")
    same = own is not None and here.process.num_processes == checkpoint.manifest.world_size
    shared = _with_own(here, checkpoint, shared, known if same else None)
    trees = {*shared, *(name for name in known if name.startswith("loader_"))}
    _check_parts(here, trees, directory)
    if not here.hooks.load:  # which may load models themselves
        _check_models(len(here.models), len(checkpoint.models), directory)
    _check_trust(here, shared, trust_custom_objects, directory)
    loaders = {index: known[f"loader_{index}"] for index in range(len(here.loaders))}
    for index, loader in enumerate(here.loaders):
        loader.check_state_dict(loaders[index])
    windows = _read_windows(here, checkpoint, own, known, saved_by)
    _unpickle_trusted(here, shared)
    guard = _read_guard(here, checkpoint, shared, own)
    models = [CheckpointModel(checkpoint, index) for index in range(len(checkpoint.models))]
    if not lazy:
        for saved in models:
            saved.whole()  # checks the files
    replicas = {"buffers": known["buffers"], "states": known["replicas"]} if same else {}
    _check_window_states(here, known["replicas"], same, directory)
    optimizers_own = known.get("optimizers") if same else None
    if "optimizers" in known and not same:
        _logger.warning(
            f"{checkpoint.directory} holds optimizer states of each of {saved_by} ranks, which LocalSGD trained for "
            f"themselves; {here.process.num_processes} ranks continue with those of rank 0."
        )
    rng = _read_rng(here, checkpoint, own, saved_by)
    folder = checkpoint.local_folder
    return Saved(directory, models, shared, rng, loaders, replicas, optimizers_own, windows, guard, folder)


def _with_own(
    here: Prepared,
    checkpoint: accel_ckpt.TrainingCheckpoint,
    shared: Mapping[str, Any],
    own: Mapping[str, Any] | None,
    parts: Parts = ALL,
) -> dict[str, Any]:
    """The shared trees, those that this rank saved of its own in the place of the others'.

    Args:
        here: what is prepared.
        checkpoint: where they were read.
        shared: all of them.
        own: what this rank has saved; None: other ranks continue than have saved.
        parts: what is restored.
    """
    differing = shared["progress"].get("differing", {})
    check_form(differing, rank_differences.FORM, f"{checkpoint.directory}: what differs between ranks")
    if own is not None:
        trees = own.get("differing", {})
        wanted = {name: trees[name] for name in trees if part_of(name) in {*parts, None}}
        return rank_differences.take_up(shared, wanted, checkpoint.directory)
    saved_by = checkpoint.manifest.world_size
    rank_differences.warn_of_other_ranks(here, differing, saved_by, checkpoint.directory, parts)
    return dict(shared)


class _AnyOptimizer(frozenset[str]):
    """The names of the trees of optimizers, however many there are."""

    def __contains__(self, name: object) -> bool:
        return str(name).startswith("optimizer_")


_OPTIMIZERS = _AnyOptimizer()


def _read_parts(
    here: Prepared,
    checkpoint: accel_ckpt.TrainingCheckpoint,
    allow_missing_rng: bool,
    trust_custom_objects: bool,
    parts: Parts,
) -> Saved:
    """Some parts of a checkpoint of ours; `here` has only what they are for."""
    directory = checkpoint.directory
    divided = any(here.plan.strategy.is_divided(model) for model in here.prepared_models)
    lazy = divided or "optimizers" not in parts
    trees = checkpoint.lazy_shared(_OPTIMIZERS) if lazy else checkpoint.mapped_shared(_OPTIMIZERS)
    saved_by = 1 if trees["progress"].get("main_process_alone") else checkpoint.manifest.world_size
    own: Mapping[str, Any] | None = None
    known: Mapping[str, Any] = {}
    if parts != MODELS:  # ranks may have their own
        optional = allow_missing_rng or "random" not in parts
        own = checkpoint.per_rank(_home(here, checkpoint, saved_by), allow_missing=optional)
        known = own or checkpoint.per_rank(min(checkpoint.manifest.ranks)) or {}
    same = own is not None and here.process.num_processes == checkpoint.manifest.world_size
    mine = _with_own(here, checkpoint, trees, known if same else None, parts)
    names = {*mine, *(name for name in known if name.startswith("loader_"))}
    shared = {name: mine[name] for name in mine if part_of(name) in {*parts, None}}
    _check_parts(here, {name for name in names if part_of(name) in parts}, directory, parts)
    if "models" in parts and not here.hooks.load:
        _check_models(len(here.models), len(checkpoint.models), directory)
    _check_trust(here, shared, trust_custom_objects, directory)
    loaders = {index: known[f"loader_{index}"] for index in range(len(here.loaders))}
    for index, loader in enumerate(here.loaders):
        loader.check_state_dict(loaders[index])
    _unpickle_trusted(here, shared)
    models = [CheckpointModel(checkpoint, index) for index in range(len(checkpoint.models))]
    if "models" in parts and not divided:
        for saved in models:
            saved.whole()  # checks the files
    return Saved(
        directory,
        models,
        shared,
        _read_rng(here, checkpoint, own, saved_by) if "random" in parts else None,
        loaders,
        replicas={},
        optimizers=known.get("optimizers") if same and "optimizers" in parts else None,
        windows=None,
        guard=None,
        local_folder=checkpoint.local_folder,
        parts=parts,
        left_out=left_out(parts, trees),
    )


def _unpickle_trusted(here: Prepared, shared: dict[str, Any]) -> None:
    for index in range(len(here.registered)):
        if f"pickled_{index}" in shared:
            shared[f"custom_{index}"] = pickle.loads(shared.pop(f"pickled_{index}"))


def _read_foreign(
    here: Prepared, directory: Path, allow_missing_rng: bool, trust_custom_objects: bool, parts: Parts
) -> Saved:
    """What Accelerate saved: no accumulation windows, and loaders only where they were stateful."""
    if parts == ALL and not trains(here) and accel_ckpt.AccelerateCheckpoint(directory).parts()["optimizers"]:
        parts = MODELS
    here = limit(here, parts)
    models, shared, rng = accelerate_checkpoints.read(
        here, directory, allow_missing_rng, trust_custom_objects, parts
    )
    numbers = range(len(here.loaders))
    loaders = {index: shared.pop(f"loader_{index}") for index in numbers if f"loader_{index}" in shared}
    return Saved(
        directory,
        [WholeModel(weights) for weights in models],
        shared,
        rng,
        loaders,
        replicas={},
        optimizers=None,
        windows=None,
        guard=None,
        local_folder=lambda: directory,
        parts=parts,
        left_out=left_out(parts, accelerate_checkpoints.trees(directory)),
    )


def _home(here: Prepared, checkpoint: accel_ckpt.TrainingCheckpoint, saved_by: int) -> int:
    """The rank whose trees this rank takes up: its own, or for a rank that did not save, the first."""
    rank = here.process.process_index
    return rank if rank < saved_by else min(checkpoint.manifest.ranks)


def _read_rng(
    here: Prepared,
    checkpoint: accel_ckpt.TrainingCheckpoint,
    own: Mapping[str, Any] | None,
    saved_by: int,
) -> dict[str, Any] | None:
    if own is None:
        return None  # allowed by the caller
    rng: dict[str, Any] = own["rng"]
    rank = here.process.process_index
    if here.process.num_processes > saved_by:
        others = ", ".join(str(other) for other in range(saved_by, here.process.num_processes))
        if saved_by < checkpoint.manifest.world_size:
            _logger.warning(
                f"{checkpoint.directory} was saved by the main process alone; rank {others} derives its random state "
                "from that of rank 0."
            )
        else:
            _logger.warning(
                f"{checkpoint.directory} was saved by {saved_by} ranks; rank {others} is new and derives its random "
                "state from a saved one."
            )
    check_rng_state(rng)
    return rng if rank < saved_by else derive_rng_state(rng, rank)


def _read_windows(
    here: Prepared,
    checkpoint: accel_ckpt.TrainingCheckpoint,
    own: Mapping[str, Any] | None,
    known: Mapping[str, Any],
    saved_by: int,
) -> Mapping[str, Any]:
    windows: Mapping[str, Any] = known["windows"]
    ranks = here.process.num_processes
    if own is None and (windows["windows"] or windows["gradients"]):
        raise accel_ckpt.StateMismatchError(
            f"{checkpoint.directory} was saved inside an accumulation window and holds no state of rank "
            f"{here.process.process_index}, whose gradients it would need. Load a checkpoint that is complete, or one "
            "that was saved between two steps."
        )
    # The main process saves alone only where no window is unfinished, so what it saved holds for any rank.
    same = ranks == checkpoint.manifest.world_size or saved_by < checkpoint.manifest.world_size
    window_state.check(trained(here), windows, here.plan.strategy, same_ranks=same)
    if not same:
        trees = []
        for rank in range(checkpoint.manifest.world_size):
            saved = checkpoint.per_rank(rank)
            assert saved is not None, "a missing rank raises"
            window_state.check(trained(here), saved["windows"], here.plan.strategy, same_ranks=False)
            trees.append(saved["windows"])
        windows = window_state.for_other_ranks(trees, ranks, here.process.process_index)
        window_state.check(trained(here), windows, here.plan.strategy, same_ranks=False)
    return windows


def _read_guard(
    here: Prepared,
    checkpoint: accel_ckpt.TrainingCheckpoint,
    shared: Mapping[str, Any],
    own: Mapping[str, Any] | None,
) -> Mapping[str, Any] | None:
    """What the guard of this rank takes up; of another number of ranks the first takes all, since theirs are summed."""
    if here.accumulator.guard is None or "guard" not in shared["progress"]:
        return None
    ranks, rank = checkpoint.manifest.ranks, here.process.process_index
    if own is not None and len(ranks) == here.process.num_processes:
        waiting: Mapping[str, Any] = own["guard"]
        return waiting
    trees = [(checkpoint.per_rank(saved) or {})["guard"] for saved in ranks]
    backwards = max(tree["backwards"] for tree in trees)  # also where nothing is taken: ranks judge together
    names = ("loss", "weight")
    return {name: sum(tree[name] for tree in trees) if rank == 0 else 0.0 for name in names} | {
        "backwards": backwards
    }


def _expected(here: Prepared) -> Iterator[str]:
    yield from (f"optimizer_{index}" for index in range(len(here.optimizers)))
    yield from (f"scheduler_{index}" for index in range(len(here.schedulers)))
    yield from (f"loader_{index}" for index in range(len(here.loaders)))
    yield from (f"custom_{index}" for index in range(len(here.registered)))
    if here.plan.precision.has_state:
        yield "scaler"


def _check_parts(here: Prepared, trees: set[str], directory: Path, parts: Parts = ALL) -> None:
    """Say what does not match, before anything is changed."""
    prepared = {tree for tree in _expected(here) if part_of(tree) in parts}
    saved = {tree.replace("pickled_", "custom_") for tree in trees} - {"step", "progress"}
    problems = []
    if prepared - saved:
        problems.append(f"it lacks {', '.join(sorted(prepared - saved))}")
    if saved - prepared:
        problems.append(f"nothing was prepared or registered for its {', '.join(sorted(saved - prepared))}")
    if problems:
        raise accel_ckpt.StateMismatchError(
            f"{directory} does not fit this script: {'; '.join(problems)}. Prepare and register the same objects, in "
            "the same order, as the script that saved it; or say which parts to restore: load_state(…, "
            "only=('models',)) restores the weights alone."
        )


def _check_window_states(
    here: Prepared, states: Sequence[Mapping[str, Any]], same: bool, directory: Path
) -> None:
    strategy = here.plan.strategy
    if not same:
        if any("power_sgd" in state for state in states):
            _logger.warning(
                f"{directory} holds what PowerSGD has approximated on another number of ranks: it starts again."
            )
        return
    for model, state in zip(here.prepared_models, states, strict=False):
        misfit = strategy.window_state_misfit(model, state)
        if misfit is not None:
            raise accel_ckpt.StateMismatchError(
                f"{directory} does not fit {type(strategy.plain(model)).__name__} here: {misfit}. Use the same "
                "DistributedDataParallelKwargs as the script that saved it"
            )


def _check_models(here: int, saved: int, directory: Path) -> None:
    if here != saved:
        raise accel_ckpt.StateMismatchError(
            f"{directory} does not fit this script: it holds {saved} models, and {here} were prepared, or left by the "
            "load hooks. Prepare the same models, in the same order, as the script that saved it."
        )


def _check_trust(here: Prepared, shared: Mapping[str, Any], trusted: bool, directory: Path) -> None:
    """Refuse to unpickle unless this object was registered as trusted and the caller allows it."""
    for index, registered in enumerate(here.registered):
        if f"pickled_{index}" not in shared or (registered.trusted and trusted):
            continue
        kind = type(registered.item).__name__
        missing = [] if registered.trusted else ["register_for_checkpointing(…, trusted=True)"]
        missing += [] if trusted else ["load_state(…, trust_custom_objects=True)"]
        raise OptionError(
            f"{directory} holds the registered object {index} ({kind}) as a pickle, which can run any code when it is "
            f"loaded. If you trust the authors of the checkpoint, pass {' and '.join(missing)}."
        )


# Putting back

Pairs: TypeAlias = list[tuple[nn.Module, SavedModel]]


def fit(here: Prepared, saved: Saved, models: list[nn.Module], strict: bool) -> Pairs:
    """Which weights go to which of `models`, the ones that load hooks have left; checked, also for the optimizers.

    Raises:
        StateMismatchError: names or shapes are others than were saved.
    """
    here = limit(here, saved.parts)
    kept = [model for model in here.models if any(model is other for other in models)]
    if "models" not in saved.parts:
        pairs: Pairs = []
    elif len(saved.models) == len(here.models):
        paired = zip(here.models, saved.models, strict=True)
        pairs = [(model, weights) for model, weights in paired if any(model is other for other in kept)]
    else:  # a save hook dropped the weights of models that the load hook has loaded
        _check_models(len(kept), len(saved.models), saved.directory)
        pairs = list(zip(kept, saved.models, strict=True))
    frozen = saved.shared.get("progress", {}).get("frozen")
    if frozen is not None and pairs:
        with _taken_up("what it says of frozen parameters", saved.directory):
            pairs = [
                (model, _completed(here, model, weights, about, strict, saved.directory))
                for (model, weights), about in zip(pairs, frozen, strict=True)
            ]
    for model, weights in pairs:
        problems = here.plan.strategy.misfits(model, weights, strict)
        if problems:
            raise accel_ckpt.StateMismatchError(
                f"{saved.directory} does not fit the model {type(here.plan.strategy.plain(model)).__name__}: "
                f"{'; '.join(problems)}. Nothing was changed. Build the model as it was when the state was saved"
            )
    for index, optimizer in enumerate(here.optimizers):
        with _taken_up(f"the state of optimizer {index}", saved.directory):
            here.plan.strategy.check_optimizer_state(
                optimizer.optimizer, _optimizer_tree(saved, index), here.models
            )
    for index, scheduler in enumerate(here.schedulers):
        _check_scheduler(
            scheduler, saved.shared[f"scheduler_{index}"], f"{saved.directory}: scheduler {index}"
        )
    return pairs


def _completed(
    here: Prepared, model: nn.Module, weights: SavedModel, frozen: Any, strict: bool, directory: Path
) -> SavedModel:
    strategy = here.plan.strategy
    what = f"the model {type(strategy.plain(model)).__name__}"
    return completed(weights, frozen, strategy.model_state(model), strict, what, directory)


def _check_scheduler(scheduler: Any, state: Any, where: str) -> None:
    """A scheduler of torch takes every entry as an attribute of its own, also one that is a method."""
    check_form(state, {}, where)
    inner = getattr(scheduler, "scheduler", scheduler)
    known = inner.state_dict()
    taken = [key for key in state if not isinstance(key, str) or (key not in known and hasattr(inner, key))]
    if taken:
        raise accel_ckpt.StateMismatchError(
            f"{where} has the entries {', '.join(str(key)[:80] for key in taken[:5])}, which would replace parts of "
            f"{type(inner).__name__} that are no state. Prepare the same scheduler as the script that saved it"
        )
    counts = [key for key, value in known.items() if type(value) in (int, float) and key in state]
    check_form(state, dict.fromkeys(counts, _number), where)
    for nested, its_state in zip(
        getattr(inner, "_schedulers", ()), state.get("_schedulers", ()), strict=False
    ):
        _check_scheduler(nested, its_state, where)


def _number(value: Any) -> bool:
    """A number, or a tensor of one."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def apply(here: Prepared, saved: Saved, pairs: Pairs, strict: bool) -> None:
    """Put everything back that is restored."""
    for model, weights in pairs:
        here.plan.strategy.load_model_state(model, weights, strict)
    with _taken_up("what a rank has of its own", saved.directory):
        _restore_replicas(here, saved.replicas)
    if "models" in saved.parts:
        kept = "optimizers" not in saved.parts and here.plan.strategy.optimizers_differ(here.inner_optimizers)
        here.plan.strategy.state_loaded(optimizers_differ=kept or saved.optimizers is not None)
    here = limit(here, saved.parts)
    shared = saved.shared
    progress = shared.get("progress", {})
    for index, optimizer in enumerate(here.optimizers):
        tree = _optimizer_tree(saved, index)
        with _taken_up(f"the state of optimizer {index}", saved.directory):
            here.plan.strategy.load_optimizer_state(optimizer.optimizer, tree, here.models)
    for optimizer, flags in zip(here.optimizers, progress.get("optimizers", []), strict=False):
        optimizer.restore_flags(**flags)
    for index, scheduler in enumerate(here.schedulers):
        with _taken_up(f"the state of scheduler {index}", saved.directory):
            scheduler.load_state_dict(shared[f"scheduler_{index}"])
    if "scaler" in shared:
        with _taken_up("the state of the gradient scaler", saved.directory):
            here.plan.precision.load_state_dict(shared["scaler"], here.inner_optimizers)
    for index, registered in enumerate(here.registered):
        registered.item.load_state_dict(shared[f"custom_{index}"])
    for index, state in saved.loaders.items():
        with _taken_up(f"the state of loader {index}", saved.directory):
            here.loaders[index].load_state_dict(state)
    if saved.windows is not None:
        window_state.load(here.accumulator, trained(here), saved.windows)
    guard = here.accumulator.guard
    if guard is not None and saved.guard is not None:
        with _taken_up("the state of the guard of steps", saved.directory):
            guard.load_state_dict(progress["guard"], saved.guard, here.optimizers)
    if saved.parts == ALL:
        here.step = shared["step"]
        if "save_iteration" in progress:
            here.project.iteration = progress["save_iteration"]
    if saved.rng is not None:
        set_rng_state(saved.rng)
    if "random" in saved.parts:
        share_draws(here.plan.strategy.draws)  # another mesh may have saved them


def _optimizer_tree(saved: Saved, index: int) -> Any:
    tree = saved.shared[f"optimizer_{index}"]
    return tree if saved.optimizers is None else {**tree, "state": saved.optimizers[index]}


def _restore_replicas(here: Prepared, replicas: Mapping[str, Any]) -> None:
    strategy = here.plan.strategy
    for model, state in zip(here.prepared_models, replicas.get("states", []), strict=False):
        strategy.load_window_state(model, state)
    buffers = replicated_buffers(here, named_models(here))
    for name, saved in replicas.get("buffers", {}).items():
        buffers[name].copy_(saved)
