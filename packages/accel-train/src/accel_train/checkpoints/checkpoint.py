"""Saving and loading on behalf of an `Accelerator`; accel-ckpt does the writing and reading."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

import accel_ckpt
from accel_ckpt.optimizers import steps_only
from accel_state.log import get_logger
from accel_train.checkpoints import accelerate_checkpoints
from accel_train.checkpoints.training_state import Registered, Saved, apply, collect, fit, read
from accel_train.errors import OptionError
from accel_train.unwrap import extract_model_from_parallel

if TYPE_CHECKING:
    from accel_ckpt.saving.background import SaveHandle, WhenBusy
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
    "warn_of_used_folder",
]

_logger = get_logger(__name__)

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


def register(registered: list[Registered], objects: tuple[Any, ...], trusted: bool) -> None:
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
    registered.extend(Registered(item, trusted) for item in objects)


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
    each_node = accelerator.project_configuration.save_on_each_node
    writer = accelerator.process_index - accelerator.local_process_index if each_node else 0

    def write(writer: int | None = None) -> None:
        uploads = accelerator.is_main_process
        accel_ckpt.save_model(
            extract_model_from_parallel(model, keep_torch_compile=False),
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
            lambda: write() if _writes(accelerator) else None,
            accel_ckpt.default_coordinator(),
            doing=f"uploading the model to {push_to_hub}",
            error=accel_ckpt.CheckpointSaveError,
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
    shared, own = collect(accelerator)
    weights = [model_state_dict(model) for model in accelerator._models]

    def run_hooks(folder: Path) -> None:
        for hook in accelerator._hooks.save.values():
            hook(accelerator._models, weights, str(folder))

    def prune() -> None:
        if config.automatic_checkpoint_naming and config.total_limit is not None and _writes(accelerator):
            accel_ckpt.prune_checkpoints(directory.parent, config.total_limit)

    parts: dict[str, Any] = {
        "models": weights,
        "shared": shared,
        "per_rank": own,
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


def warn_of_used_folder(accelerator: Accelerator) -> None:
    """Say when training begins what the first save would fail with, perhaps hours later."""
    if accelerator.project_dir is None or not _writes(accelerator):
        return
    problem = _why_taken(accelerator, _automatic_folder(accelerator))
    if problem is not None:
        _logger.warning(
            f"The first save_state() of this training will fail: {problem}", main_process_only=False
        )


def _why_taken(accelerator: Accelerator, folder: Path) -> str | None:
    iteration = accelerator.project_configuration.iteration
    taken = accel_ckpt.checkpoints_from(folder, iteration)
    if not taken:
        return None
    return (
        f"{folder} already holds {', '.join(path.name for path in taken)}, and this save would be "
        f"checkpoint_{iteration}: two runs would mix. load_state() first, to go on after the newest; or "
        "set ProjectConfiguration(iteration=…) to the number to go on with, or another project_dir."
    )


def _target(accelerator: Accelerator, output_dir: str | Path | None) -> Path:
    config = accelerator.project_configuration
    if config.automatic_checkpoint_naming:
        folder = _automatic_folder(accelerator)
        problem = _why_taken(accelerator, folder)
        if problem is not None:
            raise OptionError(problem)
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


def _replicated(accelerator: Accelerator) -> list[str]:
    """The optimizers of which every rank holds the same."""
    strategy = accelerator._plan.strategy
    models = [model for model in accelerator._prepared_models if strategy.keeps_replicas(model)]
    return [
        f"optimizer_{index}"
        for index, optimizer in enumerate(accelerator._optimizers)
        if steps_only(optimizer.optimizer, models)
    ]


def load_state(
    accelerator: Accelerator,
    input_dir: str | Path | None,
    load_kwargs: dict[str, Any] | None,
    allow_missing_rng: bool,
    trust_custom_objects: bool,
    **kwargs: Any,
) -> Path:
    """See `Accelerator.load_state`."""
    strict = bool(kwargs.pop("strict", True))
    kwargs.pop("map_location", None)  # tensors are loaded to where their owners are
    if kwargs or load_kwargs:
        names = ", ".join(sorted({*kwargs, *(load_kwargs or {})}))
        raise OptionError(
            f"load_state() got {names}, which has no meaning here: nothing is unpickled. Leave it out; objects that "
            "were registered as trusted need trust_custom_objects=True."
        )
    accelerator._saver.make_room()
    found: list[Saved] = []

    def work() -> None:
        directory = _source(accelerator, input_dir)
        found.append(read(accelerator, directory, allow_missing_rng, trust_custom_objects))

    # Ranks agree that everything could be read before anything is changed on any of them.
    accel_ckpt.run_together(work, accel_ckpt.default_coordinator(), doing="reading the training state")
    [saved] = found
    models = list(accelerator._models)
    for hook in accelerator._hooks.load.values():
        hook(models, str(saved.directory))
    pairs: list[tuple[nn.Module, dict[str, Any]]] = []
    accel_ckpt.run_together(
        lambda: pairs.extend(fit(accelerator, saved, models, strict)),
        accel_ckpt.default_coordinator(),
        doing="comparing the training state with this script",
    )
    apply(accelerator, saved, pairs, strict)
    if accelerator.project_configuration.automatic_checkpoint_naming:
        taken = accel_ckpt.checkpoints_from(_automatic_folder(accelerator), 0)
        accelerator.project_configuration.iteration = (
            accelerate_checkpoints.number_of(taken[-1]) + 1 if taken else 0
        )
    return saved.directory


def _source(accelerator: Accelerator, input_dir: str | Path | None) -> Path:
    if input_dir is not None:
        return Path(input_dir).expanduser()
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise OptionError(
            "load_state() needs a folder, or ProjectConfiguration(automatic_checkpoint_naming=True) to find the newest."
        )
    folder = _automatic_folder(accelerator)
    found = accelerate_checkpoints.all_checkpoints(folder)
    if not found:
        raise accel_ckpt.CheckpointNotFoundError(
            f"There is no complete checkpoint in {folder}. Save one with save_state(), or name a folder."
        )
    return found[-1]
