"""FSDP checkpoint files as Accelerate and transformers' ``Trainer`` write them, written and read with PyTorch.

With FULL_STATE_DICT rank 0 writes ``pytorch_model_fsdp.bin`` and ``optimizer.bin`` (from the second model on
``pytorch_model_fsdp_1.bin`` and so on). With SHARDED_STATE_DICT every rank writes its parts into folders of PyTorch's
distributed checkpoint, ``pytorch_model_fsdp_0`` with all names under ``model``, and ``optimizer_0`` with all names
under ``optimizer``. Files of each rank, ``pytorch_model_fsdp_0_rank0.bin`` and so on, are only read.
``Accelerator.save_state`` uses another format: its checkpoints are verified, and fit any strategy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

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
from accel_ckpt.coordination.ranks import default_coordinator, do_together
from accel_ckpt.foreign.dcp import is_dcp_folder
from accel_ckpt.foreign.rank_files import RankFiles, rank_files
from accel_ckpt.format.reader import read_pickled
from accel_ckpt.training.tree_fill import check_tree, fill_tree
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
        use_dcp: must stay True: files of each rank are read, but not written.

    Raises:
        OptionError: ``use_dcp`` is False.
    """
    files = _StateFiles("model", model_index, output_dir, fsdp_plugin, accelerator, use_dcp)
    files.write(_model_state(model, adapter_only, files.full))


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

    Args:
        fsdp_plugin: its ``state_dict_type`` is FULL_STATE_DICT or SHARDED_STATE_DICT.
        accelerator: the ``Accelerator`` that prepared the model.
        model: the prepared model.
        input_dir: the folder.
        model_index: number of the model, for the names of files.
        adapter_only: load only the adapter's weights of a PEFT model.
        use_dcp: where there are both, False reads the files ``pytorch_model_fsdp_0_rank*.bin``, and True the folder.

    Returns:
        Missing and unexpected names, as ``Module.load_state_dict`` returns them.

    Raises:
        CheckpointNotFoundError: the files, or those of some ranks, do not exist.
        CorruptCheckpointError: the file of a rank is damaged, or belongs to another save.
        StateMismatchError: they hold other names or shapes.
    """
    files = _StateFiles("model", model_index, input_dir, fsdp_plugin, accelerator, use_dcp)
    state = files.read(lambda: _model_state(model, adapter_only, full=False))
    options = files.reading_options(strict=not adapter_only)
    return set_model_state_dict(
        plain_module(model), _names_of_model(state, model, adapter_only), options=options
    )


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
        use_dcp: must stay True: files of each rank are read, but not written.

    Raises:
        OptionError: ``use_dcp`` is False.
    """
    files = _StateFiles("optimizer", optimizer_index, output_dir, fsdp_plugin, accelerator, use_dcp)
    options = StateDictOptions(full_state_dict=files.full, cpu_offload=files.full)
    files.write(get_optimizer_state_dict(plain_module(model), _inner(optimizer), options=options))


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
        use_dcp: where there are both, False reads the files ``optimizer_0_rank*.bin``, and True the folder.

    Raises:
        CheckpointNotFoundError: the files, or those of some ranks, do not exist.
        CorruptCheckpointError: the file of a rank is damaged, or belongs to another save.
        StateMismatchError: they hold other names or shapes.
    """
    files = _StateFiles("optimizer", optimizer_index, input_dir, fsdp_plugin, accelerator, use_dcp)
    plain, inner = plain_module(model), _inner(optimizer)
    state = files.read(lambda: get_optimizer_state_dict(plain, inner))
    set_optimizer_state_dict(plain, inner, state, options=files.reading_options())


class _StateFiles:
    """The files of a model or an optimizer: one file of the whole state, or a folder to which all ranks write.

    Args:
        what: "model" or "optimizer"; also the name of the state in a folder.
        index: the number of the model or optimizer.
        folder: the folder of the checkpoint; for reading also that of the state itself.
        plugin: says which of the two it is.
        accelerator: the ``Accelerator`` that prepared the model.
        use_dcp: False: the files of each rank, which are only read.
    """

    def __init__(
        self,
        what: Literal["model", "optimizer"],
        index: int,
        folder: str | Path,
        plugin: FullyShardedDataParallelPlugin,
        accelerator: Any,
        use_dcp: bool,
    ) -> None:
        self._what = what
        self._folder = Path(folder)
        self._kind = plugin.state_dict_type.name
        self._accelerator = accelerator
        self._use_dcp = use_dcp
        self.full = self._kind == "FULL_STATE_DICT"
        name = FSDP_MODEL_NAME if what == "model" else OPTIMIZER_NAME
        numbered = f"{name}_{index}" if index or not self.full else name
        self._path = self._folder / (f"{numbered}.bin" if self.full else numbered)

    def write(self, state: dict[str, Any]) -> None:
        """Write a state; all ranks return when it is complete."""
        if not self._use_dcp:
            raise OptionError(
                "use_dcp=False asks for files of each rank, which are read here, but not written. Leave it True; or "
                "call save_state(), in which each rank also writes its own file"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self.full:
            save({self._what: state}, checkpoint_id=self._path)
        elif self._accelerator.is_main_process:
            # Under another name first, so that a file under this one is complete.
            draft = self._path.with_name(f".{self._path.name}.draft")
            torch.save(state, draft)
            os.replace(draft, self._path)
        self._accelerator.wait_for_everyone()

    def read(self, own_parts: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Read a state: all of it on the main process, and nothing on others; or, from a folder, each rank's parts.

        Args:
            own_parts: returns the tensors that a folder's values are read into.
        """
        path = self._path
        if not self.full and self._folder.name == path.name:
            path = self._folder
        is_there = path.is_file() if self.full else is_dcp_folder(path)
        if not self.full and not (is_there and self._use_dcp) and rank_files(path):
            return self._read_ranks(path, own_parts())
        if not is_there:
            what = "does not exist" if self.full else "is no folder of a distributed checkpoint"
            raise CheckpointNotFoundError(
                f"{path} {what}, which state_dict_type={self._kind} expects; {self._folder} has "
                f"{_listing(self._folder)}"
            )
        if self.full:
            return read_pickled(path) if self._accelerator.is_main_process else {}
        state = own_parts()
        try:
            load({self._what: state}, checkpoint_id=path)
        except CheckpointException as error:
            reasons = sorted({str(failure[0]) for failure in error.failures.values()})
            raise StateMismatchError(f"{path} does not fit: {'; '.join(reasons)}") from error
        return state

    def _read_ranks(self, stem: Path, own: dict[str, Any]) -> dict[str, Any]:
        """Read this rank's parts from the files of each rank into `own`, once all ranks have found that they fit."""

        def checked() -> dict[str, Any]:
            tree = RankFiles(stem).tree
            saved = {key: tree[key] for key in own if key in tree}
            check_tree(saved, own)
            return saved

        saved = do_together(checked, default_coordinator(), doing=f"reading {stem}_rank*.bin")
        state: dict[str, Any] = fill_tree(saved, own)
        return state

    def reading_options(self, strict: bool = True) -> StateDictOptions:
        """How torch takes up what was read."""
        several = dist.is_initialized() and dist.get_world_size() > 1
        return StateDictOptions(
            full_state_dict=self.full, broadcast_from_rank0=self.full and several, strict=strict
        )


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


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


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return ", ".join(names[:8]) + (" …" if len(names) > 8 else "") if names else "no files"
