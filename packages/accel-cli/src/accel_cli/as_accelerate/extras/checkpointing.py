"""Functions of ``accelerate.checkpointing``: a training state as the files that Accelerate writes.

`Accelerator.save_state` writes a checkpoint of this library, and reads both. These functions serve clients that call
them without an `Accelerator`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from accel_ckpt.convert.accelerate import AccelerateCheckpoint
from accel_ckpt.foreign.pickles import unpickle
from accel_ckpt.training.optimizers import load_optimizer_state
from accel_state import PartialState
from accel_state.seeding import set_rng_state
from accel_train import save
from accel_train.errors import OptionError
from accel_train.loop.optimizer import AcceleratedOptimizer


def save_accelerator_state(
    output_dir: str | Path,
    model_states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write a training state. All ranks call it; the main process writes the shared parts.

    Args:
        output_dir: a folder that exists.
        model_states: state dicts of the models.
        optimizers: their states are written.
        schedulers: likewise.
        dataloaders: those that continue inside an epoch (`use_stateful_dataloader`) have a state that is written.
        process_index: rank whose random states these are.
        step: kept beside them.
        scaler: a gradient scaler; None: there is none.
        save_on_each_node: the main process of each machine writes.
        safe_serialization: models as safetensors, else as ``pytorch_model.bin``.
    """
    folder = Path(output_dir)
    weights = "model.safetensors" if safe_serialization else "pytorch_model.bin"
    common: list[tuple[str, int, Any, bool]] = [
        *((weights, i, state, safe_serialization) for i, state in enumerate(model_states)),
        *(("optimizer.bin", i, one.state_dict(), False) for i, one in enumerate(optimizers)),
        *(("scheduler.bin", i, one.state_dict(), False) for i, one in enumerate(schedulers)),
        *(
            ("dl_state_dict.bin", i, one.state_dict(), False)
            for i, one in enumerate(dataloaders)
            if _continues(one)
        ),
        *(() if scaler is None else (("scaler.pt", 0, scaler.state_dict(), False),)),
    ]
    for name, index, state, safe in common:
        save(
            state,
            folder / (name.replace(".", f"_{index}.") if index else name),
            save_on_each_node=save_on_each_node,
            safe_serialization=safe,
        )
    torch.save({"step": step, **_random_states()}, folder / f"random_states_{process_index}.pkl")
    return folder


def load_accelerator_state(
    input_dir: str | Path,
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: Any = None,
    map_location: str | None = None,
    load_kwargs: Mapping[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Load a training state that Accelerate or `save_accelerator_state` wrote; no code in it is run.

    Args:
        input_dir: the folder.
        models: they are loaded into in the order of saving.
        optimizers: likewise, built as those that were saved.
        schedulers: likewise.
        dataloaders: likewise those that continue inside an epoch.
        process_index: rank whose random states are restored.
        scaler: a gradient scaler; None: there is none.
        map_location: None, "cpu" or "on_device"; values go where the parameters are in any case.
        load_kwargs: not supported.
        **load_model_func_kwargs: as for ``load_state_dict`` of a model.

    Returns:
        ``step``, as it was saved.

    Raises:
        OptionError: `load_kwargs` is given, or another `map_location`.
        CheckpointNotFoundError: the folder lacks a part.
        UnsafeCheckpointError: a file would run code.
    """
    if map_location not in (None, "cpu", "on_device"):
        raise OptionError(f"map_location is {map_location!r}; expected None, 'cpu' or 'on_device'.")
    if load_kwargs:
        raise OptionError(
            f"load_kwargs={dict(load_kwargs)!r} is not taken: files are read without torch.load. Leave it out."
        )
    saved = AccelerateCheckpoint(Path(input_dir))
    states = saved.rank(process_index)
    for index, model in enumerate(models):
        model.load_state_dict(saved.model(index), **load_model_func_kwargs)
    for index, optimizer in enumerate(optimizers):
        plain = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        parameters = [group["params"] for group in plain.param_groups]
        load_optimizer_state(plain, saved.optimizer(index, parameters, models), models)
    for index, scheduler in enumerate(schedulers):
        scheduler.load_state_dict(saved.scheduler(index))
    for index, loader in enumerate(dataloaders):
        if _continues(loader):
            loader.load_state_dict(saved.loader(index))
    if scaler is not None:
        scaler.load_state_dict(saved.scaler())
    set_rng_state(states.rng)
    return {} if states.step is None else {"step": states.step}


def save_custom_state(obj: Any, path: str | Path, index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of an object to ``custom_checkpoint_<index>.pkl``, by the main process."""
    save(obj.state_dict(), Path(path) / _custom(index), save_on_each_node=save_on_each_node)


def load_custom_state(obj: Any, path: str | Path, index: int = 0) -> None:
    """Load a state that `save_custom_state` wrote; no code in it is run.

    Raises:
        UnsafeCheckpointError: the file would run code.
    """
    file = Path(path) / _custom(index)
    obj.load_state_dict(unpickle(file, str(file)))


def _custom(index: int) -> str:
    return f"custom_checkpoint_{index}.pkl"


def _continues(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    kind = PartialState().device.type
    if kind != "cpu" and hasattr(module := torch.get_device_module(kind), "get_rng_state_all"):
        states[f"torch_{kind}_manual_seed"] = module.get_rng_state_all()
    return states
