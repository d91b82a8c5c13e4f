"""Saving and loading on behalf of an `Accelerator`; accel-ckpt does the writing and reading."""

from __future__ import annotations

import functools
import pickle
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, TypeVar, cast

from torch import nn

import accel_ckpt
from accel_ckpt.coordination.ranks import MainProcess, SingleProcess, do_together, is_saving_process
from accel_ckpt.format.memory import collector_paused
from accel_ckpt.loading.load_state import read_for_all
from accel_ckpt.modules.named_model import NamedModel
from accel_ckpt.parts import is_sharded
from accel_ckpt.saving.save_state import StateContent, plan_save
from accel_state.messages import warn
from accel_state.trees import recursively_apply
from accel_train.checkpoints import accelerate_checkpoints
from accel_train.checkpoints.chosen_parts import ALL, choose
from accel_train.checkpoints.collecting import collect, replicated_optimizers
from accel_train.checkpoints.frozen_weights import leave_out_frozen
from accel_train.checkpoints.parts import named_models, parts_of
from accel_train.checkpoints.training_state import Pairs, Saved, apply, fit, read
from accel_train.errors import DividedTensorError, OptionError
from accel_train.plugins import ProjectConfiguration
from accel_train.rehearsal import NotSaved, leaves_out
from accel_train.setup.prepared import Prepared, Registered
from accel_train.state_part import StatePart, Trees
from accel_train.strategies.state_adapter import full_state_dict

if TYPE_CHECKING:
    from accel_ckpt.saving.background import SaveHandle, WhenBusy
    from accel_state.world.rehearsal import Rehearsal

__all__ = [
    "automatic_folder",
    "load_state",
    "refuse_used_folder",
    "register",
    "save_model",
    "save_object",
    "save_state",
    "state_dict",
    "weight_source",
]


T = TypeVar("T")
P = ParamSpec("P")

_SAVE = "save_state"
_WHO_SAVES = (
    "Call {}() on all processes, or, where each has the whole model, on the main process alone: move it out of a "
    "condition on the rank."
)
_SAVED_ALONE = (
    "save() was called on the main process only, with {0} tensors that are divided among processes: the file would "
    "hold the main process's parts as if they were whole. Call save() on all processes (the main process writes), or "
    "gather first: `state = accelerator.get_state_dict(model)` on all processes, and save that."
)


def register(registered: list[Registered], objects: tuple[Any, ...], trusted: bool) -> None:
    """Add objects to those that a state includes.

    Raises:
        OptionError: some have no `state_dict` or no `load_state_dict`; none is added then.
    """
    wrong = [
        f"Item at index {index} ({type(item).__name__})"
        for index, item in enumerate(objects)
        if not (
            callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))
        )
    ]
    if wrong:
        raise OptionError(
            f"register_for_checkpointing() takes objects with state_dict() and load_state_dict(). {', '.join(wrong)} "
            "lack one of them."
        )
    registered.extend(Registered(item, trusted) for item in objects)


def save_object(prepared: Prepared, obj: Any, f: str | Path, safe_serialization: bool) -> None:
    """See `Accelerator.save`."""
    if leaves_out(prepared, "save", f):
        return
    each_node = prepared.project.save_on_each_node
    obj = _whole(prepared, obj, each_node)
    accel_ckpt.save(obj, f, save_on_each_node=each_node, safe_serialization=safe_serialization)


def _whole(prepared: Prepared, obj: Any, each_node: bool) -> Any:
    """An object with whole tensors in the place of divided ones. Collective, if it has any."""
    found: list[Any] = []
    recursively_apply(found.append, obj, test_type=is_sharded)
    if not found or prepared.process.num_processes == 1:
        return obj
    if prepared.process.main_process_alone("save", _WHO_SAVES.format("save")):
        _refuse_alone(prepared, DividedTensorError(_SAVED_ALONE.format(len(found))), "save")
    shapes = [tuple(leaf.shape) for leaf in found]
    everywhere = accel_ckpt.default_coordinator().exchange(shapes)
    odd = [rank for rank, others in enumerate(everywhere) if others != everywhere[0]]
    if odd:
        raise DividedTensorError(
            f"save() gathers tensors that are divided among ranks, and rank {odd[0]} passed "
            f"{len(everywhere[odd[0]])} of other shapes than rank 0, which passed {len(everywhere[0])}. Pass the same "
            "object on all ranks."
        )
    keep = is_saving_process(each_node)

    def gather(leaf: Any) -> Any:
        whole = accel_ckpt.gather_whole(leaf)
        return whole if keep else None  # ranks that write nothing hold one tensor at a time

    return recursively_apply(gather, obj, test_type=is_sharded)


def state_dict(prepared: Prepared, model: nn.Module) -> dict[str, Any]:
    """See `Accelerator.get_state_dict`."""
    strategy = prepared.plan.strategy
    if prepared.process.num_processes > 1 and strategy.states.is_divided(model):
        _all_hold_parts(prepared, "get_state_dict", model)
    return full_state_dict(strategy.states, model)


def weight_source(prepared: Prepared, model: nn.Module, dtype: Any) -> accel_ckpt.OfferedWeights:
    """See `Accelerator.weight_source`."""
    strategy = prepared.plan.strategy
    if prepared.process.num_processes > 1:
        prepared.process.all_take_part(
            "weight_source",
            "All processes offer their parts of the weights. Call weight_source() on all processes: move it out of `if "
            "accelerator.is_main_process:`.",
        )
    alike = NamedModel(strategy.plain(model)).parameters() if strategy.states.keeps_replicas(model) else ()
    return accel_ckpt.OfferedWeights(
        lambda: strategy.states.exported_state(model), dtype=dtype, replicated=tuple(alike)
    )


def _all_hold_parts(prepared: Prepared, operation: str, model: nn.Module) -> None:
    """Wait until all ranks call an operation that gathers a model, of which each holds a part.

    Raises:
        CollectiveMismatchError: some do not call it.
    """
    strategy = prepared.plan.strategy
    prepared.process.all_take_part(
        operation,
        f"The strategy {strategy.name!r} divides the model {type(strategy.plain(model)).__name__} among processes, and "
        f"each gives its part. Call {operation}() on all processes: move it out of `if accelerator.is_main_process:`.",
    )


def _reported(
    save: Callable[Concatenate[Prepared, P], T],
) -> Callable[Concatenate[Prepared, P], T]:
    """Decorator for what saves: reports it to the launcher, where that asks."""

    @functools.wraps(save)
    def run(prepared: Prepared, /, *args: P.args, **kwargs: P.kwargs) -> T:
        pulse = prepared.ledger.pulse
        with nullcontext() if pulse is None else pulse.saving():
            return save(prepared, *args, **kwargs)

    return run


@_reported
def save_model(
    prepared: Prepared,
    /,
    model: nn.Module,
    save_directory: str | Path,
    max_shard_size: int | str,
    safe_serialization: bool,
    push_to_hub: str | None,
    **upload: Any,
) -> None:
    """See `Accelerator.save_model`."""
    strategy, process = prepared.plan.strategy, prepared.process
    if leaves_out(prepared, "save_model", save_directory, together=strategy.states.is_divided(model)):
        return
    each_node = prepared.project.save_on_each_node
    _warn_of_training_weights(prepared, strategy.plain(model))
    weights: Any = strategy.plain(model)  # read by the rank that writes
    if strategy.states.is_divided(model):
        _all_hold_parts(prepared, "save_model", model)
        if push_to_hub is None:
            accel_ckpt.save_gathered_model(
                strategy.states.exported_state(model),
                save_directory,
                max_shard_size,
                safe_serialization,
                each_node=each_node,
            )
            return
        weights = full_state_dict(strategy.states, model)
    writer = process.process_index - process.local_process_index if each_node else 0

    def write(writer: int | None = None) -> None:
        uploads = process.is_main_process
        accel_ckpt.save_model(
            weights,
            save_directory,
            max_shard_size=max_shard_size,
            safe_serialization=safe_serialization,
            push_to_hub=push_to_hub if uploads else None,
            writer=writer,
            **(upload if uploads else {}),
        )

    if push_to_hub is None:
        write(writer)  # the others return when it is complete
    else:
        accel_ckpt.run_together(
            lambda: write() if _writes(prepared) else None,
            accel_ckpt.default_coordinator(),
            doing=f"uploading the model to {push_to_hub}",
            error=accel_ckpt.CheckpointSaveError,
        )


def _warn_of_training_weights(prepared: Prepared, model: nn.Module) -> None:
    """Say that a schedule-free optimizer has not put the weights there that its averages are."""
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in prepared.optimizers:
        groups = optimizer.param_groups
        training = any(group.get("train_mode") for group in groups)
        if training and any(id(parameter) in own for group in groups for parameter in group["params"]):
            warn(
                f"save_model() saves the weights at which {type(optimizer.optimizer).__name__} takes its gradients, "
                "not the averaged ones. Call optimizer.eval() before it, and optimizer.train() before the next step.",
            )


def _writes(prepared: Prepared) -> bool:
    each_node = prepared.project.save_on_each_node
    return prepared.process.is_local_main_process if each_node else prepared.process.is_main_process


@_reported
def save_state(
    prepared: Prepared,
    /,
    output_dir: str | Path | None,
    safe_serialization: bool,
    asynchronous: bool,
    when_busy: WhenBusy,
    trainable_only: bool,
    **kwargs: Any,
) -> Path | SaveHandle:
    """See `Accelerator.save_state`."""
    if kwargs:
        raise OptionError(
            f"save_state() got {', '.join(sorted(kwargs))}, which no strategy of this version takes. Leave it out."
        )
    if trainable_only and prepared.hooks.save:
        raise OptionError(
            "save_state(trainable_only=True) cannot be combined with a hook of register_save_state_pre_hook, which "
            "decides itself which weights are saved. Use one of the two."
        )
    config = prepared.project
    if prepared.process.rehearsal is not None:
        divided = any(prepared.plan.strategy.states.is_divided(model) for model in prepared.prepared_models)
        directory = _target(prepared, output_dir)
        leaves_out(prepared, _SAVE, directory, together=divided)
        _rehearse_save(prepared, prepared.process.rehearsal)
        config.iteration += 1
        return cast("SaveHandle", NotSaved(directory)) if asynchronous else directory
    saver = prepared.saver
    ranks = _saving_ranks(prepared, asynchronous, when_busy)
    directory = _in_agreement(
        lambda: _target(prepared, output_dir), ranks, prepared.project.project_dir or output_dir
    )
    named = named_models(prepared)
    known = parts_of(prepared, named)
    alone = isinstance(ranks, MainProcess)
    try:
        trees = collect(prepared, known, named, ranks)
    except Exception as error:
        if alone:  # the others hear of it where they wait
            _refuse_alone(prepared, error)
        raise
    if alone:
        _check_complete(prepared, known, trees)
    content, states = _content(prepared, named, trees), prepared.plan.strategy.states
    weights: list[Any] = content["models"]
    if trainable_only:
        trees.progress["frozen"] = leave_out_frozen(weights, list(map(states.frozen, named)))

    def run_hooks(folder: Path) -> None:
        for hook in prepared.hooks.save.values():
            hook(prepared.models, weights, str(folder))

    def prune() -> None:
        if config.automatic_checkpoint_naming and config.total_limit is not None and _writes(prepared):
            accel_ckpt.prune_checkpoints(directory.parent, config.total_limit)

    parts: dict[str, Any] = {
        **content,
        "safe_serialization": safe_serialization,
        "each_node": config.save_on_each_node,
        "before_write": run_hooks,
    }
    if asynchronous:
        handle = saver.save(directory, **parts, after=prune)
        config.iteration += 1
        return handle
    saved = accel_ckpt.save_training_state(directory, **parts, coordinator=ranks)
    config.iteration += 1  # before anything else can fail: the name is taken
    prune()
    return saved


def _content(prepared: Prepared, named: Sequence[NamedModel], trees: Trees) -> dict[str, Any]:
    """What a save holds of this rank: the arguments of `StateContent`."""
    states = prepared.plan.strategy.states
    return {
        "models": [
            states.model_state(model, name)
            for model, name in zip(prepared.prepared_models, named, strict=True)
        ],
        "shared": trees.shared,
        "per_rank": trees.own,
        "replicated": replicated_optimizers(
            states, prepared.inner_optimizers, prepared.prepared_models, trees.shared
        ),
    }


def _rehearse_save(prepared: Prepared, rehearsal: Rehearsal) -> None:
    """Plan a save as this rank would in the real world, and report what it would cost."""
    process, named = prepared.process, named_models(prepared)
    began = time.process_time()
    with rehearsal.aside():
        trees = collect(prepared, parts_of(prepared, named), named, SingleProcess())
        content = StateContent(**_content(prepared, named, trees))
        try:
            plan, offer = plan_save(content, process.process_index, process.num_processes)
        except accel_ckpt.UnsupportedValueError as error:
            rehearsal.note(
                f"what a save would cost is not known, because ranks hold different tensors: {error}"
            )
            return
    facts = {
        "files": len(plan.texts) + len(plan.files),
        "bytes": plan.nbytes,
        "seconds": time.process_time() - began,
        "described in": len(pickle.dumps(offer)),
    }
    rehearsal.sections[_SAVE] = lambda: facts


def _saving_ranks(prepared: Prepared, asynchronous: bool, when_busy: WhenBusy) -> accel_ckpt.Coordinator:
    """The ranks that call `save_state`: all, or where each has a replica, the main process alone.

    Raises:
        OptionError: an asynchronous save needs all ranks.
        CheckpointSaveError: the ranks hold parts, or states of their own, so all must save.
        CollectiveMismatchError: some of the ranks call, the main process not alone.
    """
    process = prepared.process
    if not process.main_process_alone(_SAVE, _WHO_SAVES.format(_SAVE)):
        prepared.saver.make_room(when_busy)
        ranks = accel_ckpt.default_coordinator()
        if prepared.project.automatic_checkpoint_naming:
            # Only the main process counts what it saves alone.
            prepared.project.iteration = ranks.exchange(prepared.project.iteration)[0]
        return ranks
    if asynchronous:
        _refuse_alone(
            prepared,
            OptionError(
                "save_state(asynchronous=True) was called on the main process only, but a save in the background needs "
                "all processes. Call it on all of them, or leave asynchronous out."
            ),
        )
    strategy = prepared.plan.strategy
    for model in prepared.prepared_models:
        if strategy.states.is_divided(model):
            _refuse_alone(
                prepared,
                accel_ckpt.CheckpointSaveError(
                    f"save_state() was called on the main process only, but the strategy {strategy.name!r} divides the "
                    f"model {type(strategy.plain(model)).__name__} among processes, and each saves its part. Call "
                    "save_state() on all processes: move it out of `if accelerator.is_main_process:`."
                ),
            )
    prepared.saver.make_room_alone(when_busy)
    return MainProcess(process.num_processes)


def _check_complete(prepared: Prepared, parts: Sequence[StatePart], trees: Trees) -> None:
    """Check that the main process holds everything that a save of all ranks would have.

    Raises:
        CheckpointSaveError: other ranks hold parts, or state of their own.
    """
    for part in parts:
        problem = part.needs_all_ranks(trees)
        if problem is not None:
            text = f"save_state() was called on the main process only, {problem}"
            _refuse_alone(prepared, accel_ckpt.CheckpointSaveError(text))


def _refuse_alone(prepared: Prepared, error: Exception, operation: str = _SAVE) -> NoReturn:
    """Raise here, and on the ranks that wait for this one where they can be reached."""
    assert prepared.process.participation is not None, "a process alone in its world has no others"
    prepared.process.participation.refuse(operation, error)


def refuse_used_folder(prepared: Prepared) -> None:
    """Raise, when training begins, the error with which the first save would fail, perhaps hours later.

    Raises:
        OptionError: checkpoints of another run would be mixed with this one's.
    """
    if prepared.project.project_dir is not None:
        try:
            problem = _why_taken(prepared, automatic_folder(prepared.project))
        except accel_ckpt.ObjectStorageError as error:  # perhaps on this rank only, and a save looks again
            warn(f"could not check for checkpoints of another run: {error}")
            return
        if problem is not None:
            raise OptionError(problem)


def _in_agreement(step: Callable[[], T], ranks: accel_ckpt.Coordinator, place: str | Path | None) -> T:
    """Run a step that looks for checkpoints; in object storage it fails on all ranks, or on none."""
    if place is None or not isinstance(accel_ckpt.location(place), accel_ckpt.RemotePath):
        return step()
    return do_together(step, ranks, doing=f"looking for checkpoints in {place}")


def _why_taken(prepared: Prepared, folder: Path) -> str | None:
    iteration = prepared.project.iteration
    taken = accel_ckpt.checkpoints_from(folder, iteration)
    if not taken:
        return None
    return (
        f"{folder} already holds {', '.join(path.name for path in taken)}, and the next save would be "
        f"checkpoint_{iteration}: two runs would mix. To continue that run call load_state() first, or resume() in a "
        "script started with `accel launch --resume`; for a new run give another project_dir, or set "
        "ProjectConfiguration(iteration=…)."
    )


def _target(prepared: Prepared, output_dir: str | Path | None) -> Path:
    config = prepared.project
    if config.automatic_checkpoint_naming:
        folder = automatic_folder(prepared.project)
        problem = _why_taken(prepared, folder)
        if problem is not None:
            raise OptionError(problem)
        return folder / f"checkpoint_{config.iteration}"
    if output_dir is None:
        project = "…" if config.project_dir is None else repr(str(config.project_dir))
        raise OptionError(
            "save_state() needs a folder: save_state('checkpoints/step_100'); or, to number the folders, Accelerator("
            f"project_config=ProjectConfiguration(project_dir={project}, automatic_checkpoint_naming=True))."
        )
    return accel_ckpt.location(output_dir)


def automatic_folder(project: ProjectConfiguration) -> Path:
    """The folder of checkpoints with automatic names.

    Raises:
        OptionError: the project has no folder.
    """
    if project.project_dir is None:
        raise OptionError(
            "automatic_checkpoint_naming needs a folder: pass ProjectConfiguration(project_dir=…) or "
            "Accelerator(project_dir=…)."
        )
    return accel_ckpt.location(project.project_dir) / "checkpoints"


def load_state(
    prepared: Prepared,
    input_dir: str | Path | None,
    load_kwargs: dict[str, Any] | None,
    allow_missing_rng: bool,
    trust_custom_objects: bool,
    only: Collection[str] | None,
    **kwargs: Any,
) -> Path:
    """See `Accelerator.load_state`."""
    parts = choose(only)
    strict = bool(kwargs.pop("strict", True))
    kwargs.pop("map_location", None)  # tensors are loaded to where their owners are
    if kwargs or load_kwargs:
        names = ", ".join(sorted({*kwargs, *(load_kwargs or {})}))
        raise OptionError(
            f"load_state() got {names}, which has no effect here: nothing is unpickled. Leave it out; objects that "
            "were registered as trusted need trust_custom_objects=True."
        )
    prepared.process.all_take_part(
        "load_state",
        "Every rank restores its own state, and all must succeed: call load_state() on all processes, not inside "
        "`if accelerator.is_main_process:`.",
    )
    prepared.saver.make_room()
    found: list[Saved] = []
    ranks = accel_ckpt.default_coordinator()
    shared = read_for_all(lambda: _source(prepared, input_dir), ranks)

    def work() -> None:
        directory = _source(prepared, input_dir or (shared and shared.directory))
        with collector_paused():
            found.append(read(prepared, directory, allow_missing_rng, trust_custom_objects, parts, shared))
        if prepared.hooks.load and "models" in found[0].parts:
            found[0].local_folder()  # from object storage it can fail

    # Ranks agree that everything could be read before anything is changed on any of them.
    accel_ckpt.run_together(work, ranks, doing="reading the training state")
    [saved] = found
    models = list(prepared.models)
    if prepared.hooks.load and "models" in saved.parts:
        folder = str(saved.local_folder())
        for hook in prepared.hooks.load.values():
            hook(models, folder)
    pairs: Pairs = []

    def compare() -> None:
        with collector_paused():
            pairs.extend(fit(prepared, saved, models, strict))

    accel_ckpt.run_together(compare, ranks, doing="comparing the training state with this script")
    with collector_paused():
        apply(prepared, saved, pairs, strict)
    if saved.left_out and prepared.process.is_main_process:
        warn(
            f"load_state() restored {', '.join(sorted(saved.parts))} of {saved.directory}. This stays as it is here: "
            f"{', '.join(saved.left_out)}",
        )
    if prepared.project.automatic_checkpoint_naming and saved.parts == ALL:
        base = automatic_folder(prepared.project)
        taken = _in_agreement(lambda: accel_ckpt.checkpoints_from(base, 0), ranks, base)
        prepared.project.iteration = accelerate_checkpoints.number_of(taken[-1]) + 1 if taken else 0
    return saved.directory


def _source(prepared: Prepared, input_dir: str | Path | None) -> Path:
    if input_dir is not None:
        return accel_ckpt.location(input_dir)
    if not prepared.project.automatic_checkpoint_naming:
        raise OptionError(
            "load_state() needs a folder, or ProjectConfiguration(automatic_checkpoint_naming=True) to find the newest."
        )
    folder = automatic_folder(prepared.project)
    found = accelerate_checkpoints.all_checkpoints(folder)
    if not found:
        raise accel_ckpt.CheckpointNotFoundError(
            f"There is no complete checkpoint in {folder}. Save one with save_state(), or name a folder."
        )
    if prepared.process.is_main_process:
        accelerate_checkpoints.warn_of_newer(found[-1])
    return found[-1]
