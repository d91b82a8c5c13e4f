"""Loading training states that Accelerate wrote, for a script of this project."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import RandomSampler, SequentialSampler

import accel_ckpt
from accel_state.messages import warn
from accel_train.checkpoints.chosen_parts import ALL, Parts
from accel_train.data.sampling.seedable import SeedableRandomSampler
from accel_train.errors import OptionError
from accel_train.setup.prepared import Prepared

if TYPE_CHECKING:  # read by few scripts, so imported through the lazy names of accel_ckpt
    from accel_ckpt.convert.accelerate import AccelerateCheckpoint, RankFile

__all__ = ["all_checkpoints", "number_of", "read", "trees"]

logger = logging.getLogger(__name__)


def all_checkpoints(folder: Path) -> list[Path]:
    """List automatic checkpoints that can be loaded, oldest first: complete ones of this library, and Accelerate's.

    Args:
        folder: the folder with folders ``checkpoint_<number>``.
    """
    return sorted(
        [*accel_ckpt.accelerate_checkpoints(folder), *accel_ckpt.complete_checkpoints(folder)], key=number_of
    )


def number_of(directory: Path) -> int:
    """The number at the end of a checkpoint's name."""
    return int(directory.name.rpartition("_")[2])


def warn_of_newer(chosen: Path) -> None:
    """Warn of newer folders that are ignored because they are not complete."""
    newer = [path.name for path in accel_ckpt.checkpoints_from(chosen.parent, number_of(chosen) + 1)]
    if newer:
        warn(
            f"{chosen.name} is loaded and not {newer[-1]}, the newest in {chosen.parent}: "
            f"{', '.join(newer)} is not complete on every rank: the manifest or a file that it lists is missing or has "
            "another size. Copy the whole folder again if there is another copy of it, or remove it.",
        )


def read(
    prepared: Prepared, directory: Path, allow_missing_rng: bool, trusted: bool = False, parts: Parts = ALL
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any] | None]:
    """Read everything that Accelerate saved for this rank; nothing is changed yet.

    Args:
        prepared: the prepared and registered objects, as in the script that saved.
        directory: the folder.
        allow_missing_rng: continue without random states that are missing, unreadable or of another kind of device.
        trusted: unpickle custom objects and schedulers, which can run code.
        parts: the parts that are read.

    Returns:
        State dicts of the models, the shared parts by the names that states of ours give them (loaders only
        where there is a position), and the random states.

    Raises:
        StateMismatchError: the prepared or registered objects differ from the saved ones.
        CheckpointNotFoundError: a file is missing, that of the rank's random states included.
        UnsafeCheckpointError: reading a file would run code from it.
        CorruptCheckpointError: a file cannot be read.
    """
    opt_in = "load_state(…, trust_custom_objects=True) runs it"
    lazy = any(map(prepared.plan.strategy.states.is_divided, prepared.prepared_models))
    checkpoint = accel_ckpt.AccelerateCheckpoint(directory, trusted=trusted, opt_in=opt_in, lazy=lazy)
    _check_parts(prepared, checkpoint, parts)
    shared: dict[str, Any] = {}
    for index, optimizer in enumerate(prepared.optimizers if "optimizers" in parts else ()):
        shared[f"optimizer_{index}"] = checkpoint.optimizer(
            index, prepared.plan.strategy.states.parameter_groups(optimizer.optimizer), prepared.models
        )
    for index in range(len(prepared.schedulers) if "schedulers" in parts else 0):
        shared[f"scheduler_{index}"] = checkpoint.scheduler(index)
    if prepared.plan.precision.scaler is not None and "optimizers" in parts:
        shared["scaler"] = checkpoint.scaler()
    for index in range(len(prepared.registered) if "registered" in parts else 0):
        shared[f"custom_{index}"] = checkpoint.custom(index)
    notes = []
    for index, loader in enumerate(prepared.loaders if "loaders" in parts else ()):
        if getattr(loader, "use_stateful_dataloader", False) and index in checkpoint.loaders:
            state, note = _loader_state(checkpoint.loader(index), loader, len(checkpoint.ranks))
            shared[f"loader_{index}"] = state
            notes += [f"loader {index}: {note}"] if note else []
    own = _rank_file(prepared, checkpoint, allow_missing_rng, notes) if "random" in parts else None
    shared["step"] = step = 0 if own is None or own.step is None else own.step
    if step and "loaders" in parts:  # Accelerate counts micro-batches from 0 in each epoch
        notes += [
            f"it was saved inside an epoch, after {step} micro-batches, and the order of that epoch is not in it: "
            f"loader {index} draws another order, so after skip_first_batches() some samples are read twice and "
            "some not at all. Begin a new epoch, or end this one with Accelerate"
            for index, loader in enumerate(prepared.loaders)
            if f"loader_{index}" not in shared and _draws_its_order(loader)
        ][:1]
    # Models that hooks saved themselves have no files; hooks take them out before models are loaded.
    read_models = "models" in parts and checkpoint.parts()["models"]
    models = [
        _with_ties(prepared, model, checkpoint.model(index)) if read_models else {}
        for index, model in enumerate(prepared.models)
    ]
    if prepared.process.is_main_process:
        _say(checkpoint, notes)
    return models, shared, None if own is None else own.rng


def _say(checkpoint: AccelerateCheckpoint, notes: list[str]) -> None:
    parts = ", ".join(f"{count} {name}" for name, count in checkpoint.parts().items() if count)
    warn(
        f"{checkpoint.directory} was written by Accelerate ({checkpoint.kind}, {len(checkpoint.ranks)} ranks; "
        f"{parts}). Nothing in it tells a complete save from one that was cut off."
        + "".join(f" {note[0].upper()}{note[1:]}." for note in notes),
    )


def trees(directory: Path) -> list[str]:
    """Read the shared trees of a checkpoint, besides weights, under this library's names."""
    checkpoint = accel_ckpt.AccelerateCheckpoint(directory)
    counts = checkpoint.parts()
    found = [f"{kind}_{i}" for kind, name in _NAMES.items() for i in range(counts[name])]
    return [*found, *(["scaler"] if counts["scalers"] else [])]


_NAMES = {"optimizer": "optimizers", "scheduler": "schedulers", "custom": "custom objects"}


def _check_parts(prepared: Prepared, checkpoint: AccelerateCheckpoint, parts: Parts) -> None:
    part_names = {"scalers": "optimizers", "custom objects": "registered"}
    counts = {
        "models": len(prepared.models),
        "optimizers": len(prepared.optimizers),
        "schedulers": len(prepared.schedulers),
        "scalers": int(prepared.plan.precision.scaler is not None),
        "custom objects": len(prepared.registered),
    }
    there = checkpoint.parts()
    if prepared.hooks.load and not there["models"]:
        del counts["models"]
    problems = [
        f"{there[name]} {name}, and here are {counts[name]}"
        for name in counts
        if counts[name] != there[name] and part_names.get(name, name) in parts
    ]
    if problems:
        raise accel_ckpt.StateMismatchError(
            f"{checkpoint.directory}, written by Accelerate ({checkpoint.kind}), does not fit this script: it holds "
            f"{'; '.join(problems)}. Prepare and register the same objects, in the same order, as the script that "
            "saved it; or say which parts to restore: load_state(…, only=('models',)) restores the weights alone."
        )


def _rank_file(
    prepared: Prepared, checkpoint: AccelerateCheckpoint, allow_missing_rng: bool, notes: list[str]
) -> RankFile | None:
    advice = "Pass allow_missing_rng=True to keep the current random state."
    try:
        own = checkpoint.rank(prepared.process.process_index)
        fit_devices(own.rng, prepared.plan.device, prepared.process.num_processes > 1)
    except accel_ckpt.CheckpointError as error:
        if not allow_missing_rng:
            raise type(error)(f"{error}. {advice}") from error
        notes.append(f"the random state of rank {prepared.process.process_index} stays as it is: {error}")
        logger.info("random states were not restored: %s", error)
        return None
    return own


def fit_devices(rng: dict[str, Any], device: torch.device, several_ranks: bool) -> None:
    """Keep the random states of the device that this rank uses; they were saved for all devices of its machine.

    Raises:
        StateMismatchError: they were saved on another kind of device.
    """
    saved = rng.get("device")
    kind = None if device.type == "cpu" else device.type
    there = None if saved is None else saved["type"]
    if kind is None:
        rng.pop("device", None)  # saved wherever there was one, used or not
    elif kind != there:
        raise accel_ckpt.StateMismatchError(
            f"its random states were saved {f'on {there}' if there else 'without an accelerator'}, and this process "
            f"runs on {kind}"
        )
    elif saved is not None and several_ranks and len(saved["states"]) > 1:
        saved["states"] = [saved["states"][device.index or 0]]


def _with_ties(prepared: Prepared, model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Weights under all names: Accelerate leaves out names whose tensor is there under another one."""
    plain = prepared.plan.strategy.plain(model)
    own = accel_ckpt.canonical_state_dict(plain.state_dict(keep_vars=True), plain)
    groups: dict[int, list[str]] = {}
    for name, value in own.items():
        groups.setdefault(id(value), []).append(name)
    complete = dict(weights)
    for names in groups.values():
        present = [name for name in names if name in weights]
        for name in names if present else ():
            complete.setdefault(name, weights[present[0]])
    return complete


def _draws_its_order(loader: Any) -> bool:
    """Whether the order of an epoch comes from a random generator, and not from a seed and the epoch."""
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    return isinstance(sampler, RandomSampler) and not isinstance(sampler, SeedableRandomSampler)


def _loader_state(saved: Any, loader: Any, ranks: int) -> tuple[dict[str, Any], str]:
    """The position of a loader of torchdata as one of ours, and what has to be said about it."""
    batches, finished = _batches(saved)
    begun = not finished and batches > 0
    state = loader.state_after(batches if begun else 0, ranks)
    sampler = loader.get_sampler()
    if not begun or sampler is None or isinstance(sampler, SeedableRandomSampler | SequentialSampler):
        return state, ""
    drawn = "drawn again" if isinstance(sampler, RandomSampler) else "what its sampler gives now"
    return state, (
        f"it continues after {batches} batches of each rank, but the order of the interrupted epoch was not saved, so "
        f"the order is {drawn}"
    )


def _batches(saved: Any) -> tuple[int, bool]:
    """Batches that each rank had been handed, and whether the epoch was over."""
    try:
        finished = bool(saved["_iterator_finished"]) if "_iterator_finished" in saved else False
        if "_snapshot" in saved:  # with workers
            return int(saved["_snapshot"]["_snapshot_step"]) + int(saved["_steps_since_snapshot"]), finished
        return int(saved["_num_yielded"]), finished
    except (KeyError, TypeError, ValueError) as error:
        raise OptionError(
            f"The saved state of a loader is not one of torchdata's: {error!r} in {saved!r:.200}. Load without "
            "use_stateful_dataloader, and use skip_first_batches."
        ) from error
