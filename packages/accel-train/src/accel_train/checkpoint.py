"""Saving and loading on behalf of an `Accelerator`; accel-ckpt does the writing and reading."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

import accel_ckpt
from accel_state.seeding import get_rng_state, set_rng_state
from accel_train import foreign
from accel_train.errors import OptionError
from accel_train.unwrap import extract_model_from_parallel

if TYPE_CHECKING:
    from accel_ckpt.background import SaveHandle, WhenBusy
    from accel_train.accelerator import Accelerator

__all__ = [
    "Hooks",
    "LoadHook",
    "RemovableHandle",
    "SaveHook",
    "load_state",
    "model_state_dict",
    "register",
    "save_model",
    "save_object",
    "save_state",
]

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], Any]
LoadHook = Callable[[list[nn.Module], str], Any]


class Hooks:
    """The hooks of one `Accelerator`."""

    def __init__(self) -> None:
        self.save: OrderedDict[int, SaveHook] = OrderedDict()
        self.load: OrderedDict[int, LoadHook] = OrderedDict()

    def add_save(self, hook: SaveHook) -> RemovableHandle:
        """Add a hook that runs before a state is written."""
        return _add(self.save, hook)

    def add_load(self, hook: LoadHook) -> RemovableHandle:
        """Add a hook that runs before a state is loaded."""
        return _add(self.load, hook)


def _add(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def register(registered: list[Any], objects: tuple[Any, ...]) -> None:
    """Add objects to those that a state includes.

    Raises:
        OptionError: some have no `state_dict` or no `load_state_dict`; none is added then.
    """
    wrong = [
        f"item {index} ({type(item).__name__})"
        for index, item in enumerate(objects)
        if not (
            callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))
        )
    ]
    if wrong:
        raise OptionError(
            f"register_for_checkpointing() takes objects with state_dict() and load_state_dict(); {', '.join(wrong)} "
            "lack one of them."
        )
    registered.extend(objects)


def model_state_dict(model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
    """The full state dict of a model under its own names."""
    if not unwrap:
        return model.state_dict()
    plain = extract_model_from_parallel(model, keep_torch_compile=False)
    return accel_ckpt.canonical_state_dict(plain.state_dict(), plain)


def save_object(accelerator: Accelerator, obj: Any, f: str | Path, safe_serialization: bool) -> None:
    """See `Accelerator.save`."""
    each_node = accelerator.project_configuration.save_on_each_node
    accel_ckpt.save(obj, f, save_on_each_node=each_node, safe_serialization=safe_serialization)


def save_model(
    accelerator: Accelerator,
    model: nn.Module,
    save_directory: str | Path,
    max_shard_size: int | str,
    safe_serialization: bool,
    push_to_hub: str | None,
    **upload: Any,
) -> None:
    """See `Accelerator.save_model`."""

    def write() -> None:
        if _writes(accelerator):
            uploads = accelerator.is_main_process
            accel_ckpt.save_model(
                extract_model_from_parallel(model, keep_torch_compile=False),
                save_directory,
                max_shard_size=max_shard_size,
                safe_serialization=safe_serialization,
                push_to_hub=push_to_hub if uploads else None,
                **(upload if uploads else {}),
            )

    if push_to_hub is None:
        write()
    else:
        accel_ckpt.run_together(
            write, accel_ckpt.default_coordinator(), doing=f"uploading the model to {push_to_hub}"
        )


def _writes(accelerator: Accelerator) -> bool:
    each_node = accelerator.project_configuration.save_on_each_node
    return accelerator.is_local_main_process if each_node else accelerator.is_main_process


def save_state(
    accelerator: Accelerator,
    output_dir: str | Path | None,
    safe_serialization: bool,
    asynchronous: bool,
    when_busy: WhenBusy,
    **kwargs: Any,
) -> Path | SaveHandle:
    """See `Accelerator.save_state`."""
    if kwargs:
        raise OptionError(
            f"save_state() got {', '.join(sorted(kwargs))}, which no strategy of this version takes. Leave it out."
        )
    config = accelerator.project_configuration
    saver = accelerator._saver
    saver.make_room(when_busy)
    directory = _target(accelerator, output_dir)
    accelerator._plan.precision.settle()
    weights = [model_state_dict(model) for model in accelerator._models]

    def run_hooks(folder: Path) -> None:
        for hook in accelerator._hooks.save.values():
            hook(accelerator._models, weights, str(folder))

    def prune() -> None:
        if config.automatic_checkpoint_naming and config.total_limit is not None and _writes(accelerator):
            accel_ckpt.prune_checkpoints(directory.parent, config.total_limit)

    parts: dict[str, Any] = {
        "models": weights,
        "shared": _shared(accelerator),
        "per_rank": {"rng": get_rng_state()},
        "replicated": _replicated(accelerator),
        "safe_serialization": safe_serialization,
        "each_node": config.save_on_each_node,
        "before_write": run_hooks,
    }
    saved: Path | SaveHandle
    if asynchronous:
        optimizers = [optimizer.optimizer for optimizer in accelerator._optimizers]
        saved = saver.save(directory, **parts, optimizers=optimizers, after=prune)
        if any(hasattr(optimizer, "eval") for optimizer in optimizers):
            saved.wait_staged()  # schedule-free optimizers change parameters between steps, too
    else:
        saved = accel_ckpt.save_training_state(directory, **parts)
        prune()
    config.iteration += 1
    return saved


def _target(accelerator: Accelerator, output_dir: str | Path | None) -> Path:
    config = accelerator.project_configuration
    if config.automatic_checkpoint_naming:
        folder = _automatic_folder(accelerator)
        taken = accel_ckpt.checkpoints_from(folder, config.iteration)
        if taken:
            raise OptionError(
                f"{folder} already holds {', '.join(path.name for path in taken)}, and this save would be "
                f"checkpoint_{config.iteration}: two runs would mix. load_state() first, to go on after the newest; or "
                "set ProjectConfiguration(iteration=…) to the number to go on with, or another project_dir."
            )
        return folder / f"checkpoint_{config.iteration}"
    if output_dir is None:
        raise OptionError(
            "save_state() needs a folder, or ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True)."
        )
    return Path(output_dir).expanduser()


def _automatic_folder(accelerator: Accelerator) -> Path:
    project = accelerator.project_dir
    if project is None:
        raise OptionError(
            "automatic_checkpoint_naming needs a place: ProjectConfiguration(project_dir=…) or "
            "Accelerator(project_dir=…)."
        )
    return Path(project).expanduser() / "checkpoints"


def _stateful(accelerator: Accelerator) -> Iterator[tuple[str, Any]]:
    """Everything but models and optimizers that a state holds, with its key."""
    for index, scheduler in enumerate(accelerator._schedulers):
        yield f"scheduler_{index}", scheduler
    if accelerator.scaler is not None:
        yield "scaler", accelerator.scaler
    for index, loader in enumerate(accelerator._dataloaders):
        yield f"loader_{index}", loader
    for index, custom in enumerate(accelerator._custom_objects):
        yield f"custom_{index}", custom


def _shared(accelerator: Accelerator) -> dict[str, Any]:
    shared: dict[str, Any] = {"step": accelerator.step}
    for index, optimizer in enumerate(accelerator._optimizers):
        shared[f"optimizer_{index}"] = accel_ckpt.optimizer_state_by_name(
            optimizer.optimizer, accelerator._models
        )
    for key, item in _stateful(accelerator):
        shared[key] = item.state_dict()
    return shared


def _replicated(accelerator: Accelerator) -> list[str]:
    """The optimizers of which every rank holds the same."""
    strategy = accelerator._plan.strategy
    models = [model for model in accelerator._prepared_models if strategy.keeps_replicas(model)]
    alike = {id(parameter) for model in models for parameter in model.parameters()}
    return [
        f"optimizer_{index}"
        for index, optimizer in enumerate(accelerator._optimizers)
        if all(id(p) in alike for group in optimizer.optimizer.param_groups for p in group["params"])
    ]


def load_state(
    accelerator: Accelerator,
    input_dir: str | Path | None,
    load_kwargs: dict[str, Any] | None,
    allow_missing_rng: bool,
    **kwargs: Any,
) -> Path:
    """See `Accelerator.load_state`."""
    strict = bool(kwargs.pop("strict", True))
    kwargs.pop("map_location", None)  # tensors are loaded to where their owners are
    if kwargs or load_kwargs:
        names = ", ".join(sorted({*kwargs, *(load_kwargs or {})}))
        raise OptionError(
            f"load_state() got {names}, which has no meaning here: nothing is unpickled. Leave it out."
        )
    accelerator._saver.make_room()
    found: list[_Saved] = []

    def read() -> None:
        found.append(_read(accelerator, _source(accelerator, input_dir), allow_missing_rng))

    # Ranks agree that everything could be read before anything is changed on any of them.
    accel_ckpt.run_together(read, accel_ckpt.default_coordinator(), doing="reading the training state")
    [saved] = found
    models = list(accelerator._models)
    for hook in accelerator._hooks.load.values():
        hook(models, str(saved.directory))
    _apply(accelerator, saved, models, strict)
    if accelerator.project_configuration.automatic_checkpoint_naming:
        taken = accel_ckpt.checkpoints_from(_automatic_folder(accelerator), 0)
        accelerator.project_configuration.iteration = _number(taken[-1]) + 1 if taken else 0
    return saved.directory


@dataclass
class _Saved:
    """What a checkpoint holds for this rank, read and verified."""

    directory: Path
    models: list[dict[str, Any]]
    shared: dict[str, Any]
    rng: dict[str, Any] | None


def _read(accelerator: Accelerator, directory: Path, allow_missing_rng: bool) -> _Saved:
    if accel_ckpt.is_accelerate_checkpoint(directory):
        return _Saved(directory, *foreign.read(accelerator, directory, allow_missing_rng))
    checkpoint = accel_ckpt.open_training_state(directory)
    shared = dict(checkpoint.shared)
    _check_parts(accelerator, set(shared), len(checkpoint.models), directory)
    own = checkpoint.per_rank(accelerator.process_index, allow_missing=allow_missing_rng)
    models = [checkpoint.models[index] for index in range(len(accelerator._models))]
    return _Saved(directory, models, shared, None if own is None else own["rng"])


def _apply(accelerator: Accelerator, saved: _Saved, models: list[nn.Module], strict: bool) -> None:
    for model, weights in zip(accelerator._models, saved.models, strict=True):
        if any(model is kept for kept in models):  # hooks take out what they loaded themselves
            _load_model(model, weights, strict)
    for index, optimizer in enumerate(accelerator._optimizers):
        tree = saved.shared[f"optimizer_{index}"]
        accel_ckpt.load_optimizer_state(optimizer.optimizer, tree, accelerator._models)
    for key, item in _stateful(accelerator):
        if key in saved.shared:  # states of others may lack loaders; ours were checked to be whole
            item.load_state_dict(saved.shared[key])
    accelerator.step = saved.shared["step"]
    if saved.rng is not None:
        set_rng_state(saved.rng)


def _number(directory: Path) -> int:
    return int(directory.name.rpartition("_")[2])


def _source(accelerator: Accelerator, input_dir: str | Path | None) -> Path:
    if input_dir is not None:
        return Path(input_dir).expanduser()
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise OptionError(
            "load_state() needs a folder, or ProjectConfiguration(automatic_checkpoint_naming=True) to find the newest."
        )
    folder = _automatic_folder(accelerator)
    chosen = foreign.newest(folder, accel_ckpt.complete_checkpoints(folder))
    if chosen is None:
        raise accel_ckpt.CheckpointNotFoundError(
            f"There is no complete checkpoint in {folder}. Save one with save_state(), or name a folder."
        )
    return chosen


def _check_parts(accelerator: Accelerator, parts: set[str], models: int, directory: Path) -> None:
    """Say what does not match, before anything is changed."""
    prepared = {f"optimizer_{index}" for index in range(len(accelerator._optimizers))}
    prepared |= {key for key, _ in _stateful(accelerator)}
    saved = parts - {"step"}
    problems = []
    if prepared - saved:
        problems.append(f"it lacks {', '.join(sorted(prepared - saved))}")
    if saved - prepared:
        problems.append(f"nothing was prepared or registered for its {', '.join(sorted(saved - prepared))}")
    if models != len(accelerator._models):
        problems.append(f"it holds {models} models, and {len(accelerator._models)} were prepared")
    if problems:
        raise accel_ckpt.StateMismatchError(
            f"{directory} does not fit this script: {'; '.join(problems)}. Prepare and register the same objects, in "
            "the same order, as the script that saved it."
        )


def _load_model(model: nn.Module, weights: dict[str, Any], strict: bool) -> None:
    plain = extract_model_from_parallel(model, keep_torch_compile=False)
    own = plain.state_dict()
    canonical = accel_ckpt.canonical_state_dict({name: name for name in own}, plain)
    plain.load_state_dict(
        {canonical.get(name, name): value for name, value in weights.items()}, strict=strict
    )
