"""FSDP checkpoint files as Accelerate and transformers' ``Trainer`` write them, written and read with PyTorch.

With FULL_STATE_DICT rank 0 writes ``pytorch_model_fsdp.bin`` and ``optimizer.bin`` (from the second model on
``pytorch_model_fsdp_1.bin`` and so on). With SHARDED_STATE_DICT every rank writes its parts into folders of PyTorch's
distributed checkpoint, ``pytorch_model_fsdp_0`` with all names under ``model``, and ``optimizer_0`` with all names
under ``optimizer``. ``Accelerator.save_state`` uses another format: its checkpoints are verified, and fit any strategy.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from accel_ckpt import CheckpointNotFoundError, StateMismatchError
from accel_ckpt.format.reader import read_pickled
from accel_state.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accel_train.errors import OptionError
from accel_train.plugins.fsdp import FullyShardedDataParallelPlugin
from accel_train.setup.unwrap import is_peft_model, plain_module

__all__ = ["load_fsdp_model", "load_fsdp_optimizer", "save_fsdp_model", "save_fsdp_optimizer"]


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    model: nn.Module,
    output_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save a model's weights in the files for ``fsdp_plugin.state_dict_type``; all ranks call it.

    Args:
        fsdp_plugin: its ``state_dict_type`` is FULL_STATE_DICT or SHARDED_STATE_DICT.
        accelerator: the ``Accelerator`` that prepared the model.
        model: the prepared model.
        output_dir: an existing or a new folder.
        model_index: number of the model, for the names of files.
        adapter_only: save only the adapter's weights of a PEFT model, under PEFT's names.
        use_dcp: must stay True: files per rank, which only the same number of ranks could read, are not written.

    Raises:
        OptionError: ``use_dcp`` is False.
    """
    folder = _prepared_folder(output_dir, use_dcp)
    full = _is_full(fsdp_plugin)
    state = _model_state(model, adapter_only, full)
    if full:
        if accelerator.is_main_process:
            _write(state, folder / _file(FSDP_MODEL_NAME, model_index))
    else:
        save({"model": state}, checkpoint_id=folder / f"{FSDP_MODEL_NAME}_{model_index}")
    accelerator.wait_for_everyone()


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    model: nn.Module,
    input_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Load weights that ``save_fsdp_model`` or Accelerate wrote into a prepared model; all ranks call it.

    ``input_dir`` may also be the folder ``pytorch_model_fsdp_0`` itself. Files are read without running code from them.

    Returns:
        Missing and unexpected names, as ``Module.load_state_dict`` returns them.

    Raises:
        CheckpointNotFoundError: the files do not exist.
        StateMismatchError: they hold other names or shapes.
        OptionError: ``use_dcp`` is False.
    """
    folder = _existing_folder(input_dir, use_dcp)
    plain = plain_module(model)
    if _is_full(fsdp_plugin):
        path = _found(folder / _file(FSDP_MODEL_NAME, model_index), fsdp_plugin)
        state = _read(path) if accelerator.is_main_process else {}
        options = StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=_several(), strict=not adapter_only
        )
        return set_model_state_dict(plain, _names_of_model(state, model, adapter_only), options=options)
    state = _model_state(model, adapter_only, full=False)
    _load_parts({"model": state}, _parts(folder, f"{FSDP_MODEL_NAME}_{model_index}", fsdp_plugin))
    state = _names_of_model(state, model, adapter_only)
    return set_model_state_dict(plain, state, options=StateDictOptions(strict=not adapter_only))


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    output_dir: str | Path,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Save an optimizer's state by parameter name, as ``save_fsdp_model`` saves weights; all ranks call it.

    Args:
        fsdp_plugin: its ``state_dict_type`` is FULL_STATE_DICT or SHARDED_STATE_DICT.
        accelerator: the ``Accelerator`` that prepared both.
        optimizer: the prepared optimizer of ``model``'s parameters.
        model: the prepared model.
        output_dir: an existing or a new folder.
        optimizer_index: number of the optimizer, for the names of files.
        use_dcp: must stay True.

    Raises:
        OptionError: ``use_dcp`` is False.
    """
    folder = _prepared_folder(output_dir, use_dcp)
    full = _is_full(fsdp_plugin)
    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    state = get_optimizer_state_dict(plain_module(model), _inner(optimizer), options=options)
    if full:
        if accelerator.is_main_process:
            _write(state, folder / _file(OPTIMIZER_NAME, optimizer_index))
    else:
        save({"optimizer": state}, checkpoint_id=folder / f"{OPTIMIZER_NAME}_{optimizer_index}")
    accelerator.wait_for_everyone()


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    input_dir: str | Path,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load a state that ``save_fsdp_optimizer`` or Accelerate wrote into a prepared optimizer; all ranks call it.

    Args:
        fsdp_plugin: its ``state_dict_type`` is FULL_STATE_DICT or SHARDED_STATE_DICT.
        accelerator: the ``Accelerator`` that prepared both.
        optimizer: the prepared optimizer of ``model``'s parameters.
        model: the prepared model.
        input_dir: the folder, or the folder ``optimizer_0`` inside it.
        optimizer_index: number of the optimizer, for the names of files.
        adapter_only: has no effect: an optimizer of an adapter's parameters has only their states.
        use_dcp: must stay True.

    Raises:
        CheckpointNotFoundError: the files do not exist.
        StateMismatchError: they hold other names or shapes.
        OptionError: ``use_dcp`` is False.
    """
    folder, plain, inner = _existing_folder(input_dir, use_dcp), plain_module(model), _inner(optimizer)
    if _is_full(fsdp_plugin):
        path = _found(folder / _file(OPTIMIZER_NAME, optimizer_index), fsdp_plugin)
        state = _read(path) if accelerator.is_main_process else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=_several())
        set_optimizer_state_dict(plain, inner, state, options=options)
        return
    state = get_optimizer_state_dict(plain, inner)
    _load_parts({"optimizer": state}, _parts(folder, f"{OPTIMIZER_NAME}_{optimizer_index}", fsdp_plugin))
    set_optimizer_state_dict(plain, inner, state)


def _is_full(plugin: FullyShardedDataParallelPlugin) -> bool:
    kind: str = plugin.state_dict_type.name
    return kind == "FULL_STATE_DICT"


def _several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _file(name: str, index: int) -> str:
    return f"{name}.bin" if index == 0 else f"{name}_{index}.bin"


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _prepared_folder(folder: str | Path, use_dcp: bool) -> Path:
    path = _existing_folder(folder, use_dcp)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _existing_folder(folder: str | Path, use_dcp: bool) -> Path:
    if not use_dcp:
        raise OptionError(
            "use_dcp=False asks for one file per rank, which only the same number of ranks can read; leave it True: "
            "any number of ranks can read PyTorch's distributed checkpoints"
        )
    return Path(folder)


def _model_state(model: nn.Module, adapter_only: bool, full: bool) -> dict[str, Any]:
    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    state = get_model_state_dict(plain_module(model), options=options)
    if not (adapter_only and is_peft_model(model)):
        return state
    from peft import get_peft_model_state_dict

    return dict(get_peft_model_state_dict(plain_module(model), state_dict=state))


def _names_of_model(state: dict[str, Any], model: nn.Module, adapter_only: bool) -> dict[str, Any]:
    """The state under the model's own names; PEFT's names of adapters leave out the adapter's name."""
    if not (adapter_only and is_peft_model(model)):
        return state
    from peft import get_peft_model_state_dict

    names = dict.fromkeys(get_model_state_dict(plain_module(model)))
    own = get_peft_model_state_dict(plain_module(model), state_dict={name: name for name in names})
    return {own[name]: value for name, value in state.items() if name in own}


def _write(state: dict[str, Any], path: Path) -> None:
    """Under another name first, so that a file under this one is complete."""
    draft = path.with_name(f".{path.name}.draft")
    torch.save(state, draft)
    os.replace(draft, path)


def _read(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = read_pickled(path)
    return state


def _found(path: Path, plugin: FullyShardedDataParallelPlugin) -> Path:
    if not path.is_file():
        raise CheckpointNotFoundError(
            f"{path} does not exist, which state_dict_type={plugin.state_dict_type.name} expects; "
            f"{path.parent} has {_listing(path.parent)}"
        )
    return path


def _parts(folder: Path, name: str, plugin: FullyShardedDataParallelPlugin) -> Path:
    path = folder if folder.name == name else folder / name
    if not (path / ".metadata").is_file():
        raise CheckpointNotFoundError(
            f"{path} is no folder of a distributed checkpoint, which state_dict_type={plugin.state_dict_type.name} "
            f"expects; {folder} has {_listing(folder)}"
        )
    return path


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return ", ".join(names[:8]) + (" …" if len(names) > 8 else "") if names else "no files"


def _load_parts(state: dict[str, Any], path: Path) -> None:
    try:
        load(state, checkpoint_id=path)
    except CheckpointException as error:
        reasons = {f"{reason}" for reason, *_ in [(value[0],) for value in error.failures.values()]}
        raise StateMismatchError(f"{path} does not fit: {'; '.join(sorted(reasons))}") from error
