"""Folders that DeepSpeed's engine writes, read without DeepSpeed and for any number of ranks.

A folder, which DeepSpeed calls a tag, has a file of the model, under ZeRO stage 3 one for each rank, and under ZeRO a
file of each rank with its part of the float32 weights and of the optimizer's states. These parts are flat: below
stage 3 the parameters of a group follow each other, and ranks hold slices of that; in stage 3 every parameter is cut
into equal parts, the last one padded, and a rank's parts follow each other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from accel_ckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from accel_ckpt.foreign.pickles import Inert, unpickle
from accel_ckpt.format.reader import cause_of
from accel_state.errors import NotAvailableError

__all__ = ["DeepSpeedFolder", "is_deepspeed_folder", "tagged_folder"]

_MODEL = "mp_rank_00_model_states.pt"
_RANK_MODEL = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt")
_RANK_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_OTHERS = {
    "a mixture of experts": re.compile(r"(?:layer_\d+_)?expert_\d+_.*"),
    "a pipeline": re.compile(r"layer_\d+-model_.*"),
    "tensor parallelism": re.compile(r".*mp_rank_(?!00_)\d+_(?:model|optim)_states\.pt"),
}
_STAND_INS: tuple[Any, ...] = (
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    *(
        (Inert, f"deepspeed.{name}")
        for name in (
            "runtime.fp16.loss_scaler.LossScaler",
            "runtime.fp16.loss_scaler.DynamicLossScaler",
            "utils.tensor_fragment.fragment_address",
            "utils.tensor_fragment.tensor_fragment",
        )
    ),
)


# Errors of code that takes the content of a file apart, where the file describes something else.
_ODD = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError, ZeroDivisionError)

T = TypeVar("T")


def _taking_apart(method: Callable[[DeepSpeedFolder], T]) -> Callable[[DeepSpeedFolder], T]:
    """Turn errors about the structure of a file's content into a `CorruptCheckpointError` that names the folder."""

    @wraps(method)
    def call(folder: DeepSpeedFolder) -> T:
        try:
            return method(folder)
        except (CheckpointError, NotAvailableError):
            raise
        except _ODD as error:
            raise CorruptCheckpointError(
                f"{folder.path} does not hold what DeepSpeed writes: {cause_of(error)}"
            ) from error

    return call


def is_deepspeed_folder(folder: Path) -> bool:
    """Whether a folder holds what DeepSpeed's `save_checkpoint` writes for one tag."""
    return folder.is_dir() and any(folder.glob("*_model_states.pt"))


def tagged_folder(directory: Path) -> Path | None:
    """The folder that the file ``latest`` names; None if there is no such file.

    Raises:
        CorruptCheckpointError: it names no folder of its own directory.
        CheckpointNotFoundError: the folder is not there.
    """
    latest = directory / "latest"
    if not latest.is_file():
        return None
    tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    if not tag or tag in (".", "..") or re.search(r"[/\\:\0]", tag):
        raise CorruptCheckpointError(f"{latest} names the folder {tag!r}, and can only name one beside it")
    if not is_deepspeed_folder(directory / tag):
        raise CheckpointNotFoundError(
            f"{latest} names the folder {tag!r}, and {directory / tag} holds no *_model_states.pt"
        )
    return directory / tag


class DeepSpeedFolder:
    """One tag of a DeepSpeed checkpoint. Files are mapped where their layout allows; tensors are on the CPU.

    Args:
        path: the folder of the tag.

    Raises:
        NotAvailableError: it was written with experts, a pipeline or tensor parallelism.
        CheckpointNotFoundError: the file of a rank is missing.
        CorruptCheckpointError: a file cannot be read, or does not hold what such a file holds.
        UnsafeCheckpointError: reading a file would run code from it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        names = sorted(entry.name for entry in path.iterdir())
        for what, pattern in _OTHERS.items():
            found = next((name for name in names if pattern.fullmatch(name)), None)
            if found is not None:
                raise NotAvailableError(
                    f"{path} was written by DeepSpeed with {what} ({found}), which is not read here. Convert it with "
                    "DeepSpeed's own tools to plain weights, and load them with load_checkpoint_in_model"
                )
        self._models = self._numbered(names, _RANK_MODEL)
        self._parts = self._numbered(names, _RANK_OPTIMIZER)
        if (path / _MODEL).is_file():
            self._models = {0: path / _MODEL}
        elif 0 not in self._models:
            raise CheckpointNotFoundError(f"{path} has neither {_MODEL} nor the model states of rank 0")

    def _numbered(self, names: Sequence[str], pattern: re.Pattern[str]) -> dict[int, Path]:
        return {int(match[1]): self.path / name for name in names if (match := pattern.fullmatch(name))}

    # Files

    @cached_property
    def _model(self) -> Mapping[str, Any]:
        return self._read(self._models[0], "module")

    @cached_property
    def _ranks(self) -> list[Mapping[str, Any]]:
        """The state of each rank's optimizer; empty without ZeRO."""
        if not self._parts:
            return []
        first = self._read(self._parts[min(self._parts)], "optimizer_state_dict")["optimizer_state_dict"]
        count = first.get("partition_count")
        ranks = max(count) if isinstance(count, list | tuple) and count else count
        if not isinstance(ranks, int) or ranks < 1:
            raise CorruptCheckpointError(
                f"{self._parts[min(self._parts)]} says that it is one of {count!r} parts"
            )
        self._complete(self._parts, ranks, "optim_states")
        return [
            self._read(self._parts[rank], "optimizer_state_dict")["optimizer_state_dict"]
            for rank in range(ranks)
        ]

    def _complete(self, files: Mapping[int, Path], ranks: int, kind: str) -> None:
        # Up to the first one: the number of ranks is what a file says, and may be any.
        missing = next((rank for rank in range(ranks) if rank not in files), None)
        if missing is not None:
            raise CheckpointNotFoundError(
                f"{self.path} was written by {ranks} ranks, and the {kind} of rank {missing} "
                f"(zero_pp_rank_{missing}_mp_rank_00_{kind}.pt) is missing"
            )

    def _read(self, path: Path, key: str) -> Mapping[str, Any]:
        content = unpickle(path, str(path), mapped=True, stand_ins=_STAND_INS)
        if not isinstance(content, Mapping) or not isinstance(content.get(key), Mapping):
            raise CorruptCheckpointError(f"{path} is not a file of DeepSpeed: it has no {key!r}")
        return content

    # What it says

    @property
    @_taking_apart
    def stage(self) -> int:
        """Stage of ZeRO; 0: none."""
        return int(self._ranks[0].get("zero_stage", 0)) if self._ranks else 0

    @property
    def has_optimizer(self) -> bool:
        """Whether the states of an optimizer are there."""
        return bool(self._parts) or isinstance(self._model.get("optimizer"), Mapping)

    @property
    def scheduler(self) -> Any:
        """State dict of a scheduler that the engine stepped; None if there was none."""
        return self._model.get("lr_scheduler")

    # Weights

    @_taking_apart
    def weights(self) -> dict[str, Tensor]:
        """Whole weights by name: float32 where the optimizer updates float32 copies; buffers as they are."""
        found = {name: value for name, value in self._model["module"].items() if isinstance(value, Tensor)}
        if self.stage == 0:
            return {**found, **self._float32_copies(found)}
        if self.stage == 3:
            buffers = set(self._model.get("buffer_names") or ())
            found = {name: value for name, value in found.items() if name in buffers}
            found |= self._frozen()
        for number, name, shape, start in self._layout():
            found[name] = self._whole(self._flat(number), name, shape, start)
        for name, other in (self._model.get("shared_params") or {}).items():
            if other in found:
                found[name] = found[other]
        return found

    def _float32_copies(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Without ZeRO the float32 copies have no names; rounded, they are the weights that the model has."""
        state = self._model.get("optimizer")
        groups = state.get("fp32_groups") if isinstance(state, Mapping) else None
        found: dict[str, Tensor] = {}
        for copy in (copy for group in groups or () for copy in group):
            for name, value in weights.items():
                if (
                    name not in found
                    and value.shape == copy.shape
                    and torch.equal(copy.to(value.dtype), value)
                ):
                    tied = [other for other, item in weights.items() if item.data_ptr() == value.data_ptr()]
                    found |= dict.fromkeys(tied, copy)
                    break
        return found

    def _frozen(self) -> dict[str, Tensor]:
        """Parameters without gradients, of which stage 3 writes every rank's part to its model file."""
        shapes = self._model.get("frozen_param_shapes") or {}
        if not shapes:
            return {}
        self._complete(self._models, len(self._ranks), "model_states")
        parts = [
            self._read(self._models[rank], "module").get("frozen_param_fragments") or {}
            for rank in range(len(self._ranks))
        ]
        return {
            name: self._whole([part.get(name) for part in parts], name, tuple(shape), 0)
            for name, shape in shapes.items()
        }

    def _layout(self) -> Iterator[tuple[int, str, tuple[int, ...], int]]:
        """Group, name, shape and start in the group of every trained parameter.

        Below stage 3 starts count from the beginning of rank 0's part, in stage 3 from that of each rank's.
        """
        shapes = self._model.get("param_shapes")
        if not isinstance(shapes, list):
            raise CorruptCheckpointError(f"{self._models[0]} does not name the parameters (param_shapes)")
        paddings = self._ranks[0].get("param_alignment_paddings")
        for number, group in enumerate(shapes):
            start = 0
            for place, (name, shape) in enumerate(group.items()):
                yield number, name, tuple(shape), start
                size = math.prod(shape)
                start += -(-size // len(self._ranks)) if self.stage == 3 else size
                if paddings is not None and self.stage < 3:
                    start += paddings[number][place]

    def _whole(self, parts: Sequence[Any], name: str, shape: tuple[int, ...], start: int) -> Tensor:
        """A tensor from the flat parts of all ranks.

        Raises:
            CorruptCheckpointError: they are shorter than it needs.
        """
        size = math.prod(shape)
        pieces: list[Tensor] = []
        if all(isinstance(part, Tensor) and part.dim() == 1 for part in parts):
            if self.stage == 3:
                share = -(-size // len(parts))
                pieces = [part[start : start + share] for part in parts]
            else:
                begin = 0
                for part in parts:
                    low, high = max(start - begin, 0), min(start + size - begin, part.numel())
                    pieces += [part[low:high]] if low < high else []
                    begin += part.numel()
        if sum(piece.numel() for piece in pieces) < size:
            raise CorruptCheckpointError(
                f"{self.path} does not hold all of {name} (shape {list(shape)}): the parts of its {len(parts)} ranks "
                "are too short"
            )
        return torch.cat(pieces)[:size].view(shape) if pieces else torch.empty(shape)

    def _flat(self, number: int) -> list[Tensor]:
        """Each rank's flat part of the float32 weights of a group."""
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        found = []
        for rank, state in enumerate(self._ranks):
            groups = state.get(key)
            if not isinstance(groups, list | tuple) or number >= len(groups):
                raise CorruptCheckpointError(
                    f"{self._parts[rank]} holds no {key} for group {number} of the parameters"
                )
            found.append(groups[number])
        return found

    # Optimizer

    @_taking_apart
    def optimizer(self) -> dict[str, Any]:
        """The optimizer's state dict: parameters by name, without ZeRO by position.

        Raises:
            CheckpointNotFoundError: the folder holds no optimizer's state.
            NotAvailableError: the state was saved in the elastic form, which later versions do not write.
        """
        if not self.has_optimizer:
            raise CheckpointNotFoundError(f"{self.path} holds no state of an optimizer")
        if not self._parts:
            whole = self._model["optimizer"]
            return dict(whole.get("optimizer_state_dict", whole))
        key = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        saved = [rank.get(key) for rank in self._ranks]
        if not all(isinstance(item, Mapping) and {"state", "param_groups"} <= item.keys() for item in saved):
            raise NotAvailableError(
                f"{self.path} holds the optimizer in DeepSpeed's elastic form. Load it with DeepSpeed, and save it "
                'with "elastic_checkpoint": false'
            )
        base = saved[0]
        assert base is not None
        # The optimizer has one flat tensor for all parameters of a group.
        keys = [key for group in base["param_groups"] for key in group["params"]]
        state: dict[str, Any] = {}
        names: dict[int, list[str]] = {number: [] for number in range(len(keys))}
        for number, name, shape, start in self._layout():
            if number >= len(keys):
                raise CorruptCheckpointError(f"{self.path} holds no optimizer state for the group of {name}")
            names[number].append(name)
            of_ranks = [item["state"].get(keys[number], {}) for item in saved if item is not None]
            sizes = [part.numel() for part in self._flat(number)]
            entries: dict[str, Any] = {}
            for entry, first in of_ranks[0].items():
                values = [rank.get(entry) for rank in of_ranks]
                if all(_is_part(value, size) for value, size in zip(values, sizes, strict=True)):
                    entries[entry] = self._whole(values, f"{entry} of {name}", shape, start)
                else:  # of the whole group, such as its step
                    entries[entry] = first.clone() if isinstance(first, Tensor) else first
            if entries:
                state[name] = entries
        numbers = {key: number for number, key in enumerate(keys)}
        groups = [
            {**group, "params": [name for key in group["params"] for name in names[numbers[key]]]}
            for group in base["param_groups"]
        ]
        return {"state": state, "param_groups": groups}


def _is_part(value: Any, size: int) -> bool:
    """Whether a state of an optimizer has an element for each of a rank's flat part; it may be padded."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() >= size
