"""Initial values of parameters that are about to be divided among ranks."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import accel_ckpt
from accel_ckpt.modules.tensors import set_data
from accel_ckpt.modules.ties import find_tied_parameters, retie_parameters
from accel_ckpt.parts import is_sharded
from accel_state.log import get_logger
from accel_state.operations.collectives import broadcast, gather_object
from accel_train.errors import PrepareError
from accel_train.strategies.gradients import local_part

__all__ = [
    "ModelDescription",
    "Start",
    "agree",
    "check_files",
    "lay_out",
    "place_whole",
    "read_parts",
    "widen",
]

_logger = get_logger(__name__)


@dataclass(frozen=True)
class ModelDescription:
    """Description of one rank's model before it is divided.

    Attributes:
        outline: digest of the names, shapes and dtypes of parameters and buffers.
        meta: names of the parameters and buffers on the meta device.
        kind: class of the model, for messages.
    """

    outline: str
    meta: tuple[str, ...]
    kind: str


def agree(model: nn.Module) -> list[ModelDescription]:
    """Exchange descriptions of the models of all ranks. Collective.

    Raises:
        PrepareError: on all ranks, if their models differ in names, shapes or dtypes.
    """
    tensors = list(_named_tensors(model))
    text = "\n".join(f"{name} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for name, t in tensors)
    meta = tuple(name for name, tensor in tensors if tensor.is_meta)
    mine = ModelDescription(
        hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), meta, type(model).__name__
    )
    held: list[ModelDescription] = gather_object([mine])
    odd = [rank for rank, other in enumerate(held) if other.outline != held[0].outline]
    if odd:
        raise PrepareError(
            f"The model {held[0].kind} of rank 0 has other parameters or buffers than that of rank "
            f"{', '.join(map(str, odd))} ({held[odd[0]].kind}): names, shapes, dtypes or requires_grad differ. Build "
            "the same model on every rank before prepare()."
        )
    real = [rank for rank, other in enumerate(held) if len(other.meta) < len(held[0].meta)]
    if real:
        raise PrepareError(
            f"{held[0].meta[0]!r} of {held[0].kind} is on the meta device on rank 0, and has values on rank {real[0]}, "
            "which would be lost: all ranks start with rank 0's. Load the weights on rank 0."
        )
    return held


@dataclass
class Start:
    """Gives the tensors of each unit their whole values, just before the unit is divided.

    Attributes:
        device: device on which a unit gets its values; None: where its tensors are, in host memory if they have none.
        sends: whether rank 0 sends its values to the others.
        makes: whether no rank has values, so that modules initialise their own.
        init: initialises a module's own parameters; None: its `reset_parameters`.
        groups: ranks that hold the same parts of tensors that tensor parallelism has divided; in each, the first one's
            values are taken.
        told_by: the class whose options say how values are made, for messages.
    """

    device: torch.device | None
    sends: bool
    makes: bool
    init: Callable[[nn.Module], None] | None = None
    groups: Sequence[Any] = ()
    told_by: str = "FullyShardedDataParallelPlugin"
    _done: set[int] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        checkpoint: str | Path | None,
        *,
        device: torch.device | None,
        syncs: bool,
        init: Callable[[nn.Module], None] | None,
        groups: Sequence[Any],
        told_by: str = "FullyShardedDataParallelPlugin",
    ) -> Start | None:
        """Decide how a model's tensors get their values; None: each rank reads its parts from `checkpoint`. Collective.

        Args:
            model: the whole model; not changed.
            checkpoint: weights, for a model on the meta device.
            device: see `Start`.
            syncs: rank 0's values replace those of other ranks.
            init: see `Start`.
            groups: see `Start`.
            told_by: see `Start`.

        Raises:
            PrepareError: the ranks' models differ, or nothing gives a tensor values.
            StateMismatchError: names or shapes of the checkpoint are not the model's.
            CheckpointNotFoundError: there are no such files.
        """
        held = agree(model)  # the models are alike, so all ranks get the same errors
        makes = bool(held[0].meta)
        if makes and checkpoint is not None:
            check_files(model, checkpoint)
            return None
        if checkpoint is not None:
            _logger.warning(
                f"checkpoint={str(checkpoint)!r} is not read for {held[0].kind}, which has values already; build the "
                "model on the meta device to have each rank read its parts"
            )
        some = any(rank.meta for rank in held)
        if some and not makes and device is None:
            device = torch.device("cpu")  # rank 0 sends from where the others receive
        start = cls(device, syncs or some, makes, init, groups, told_by)
        start.check(model)
        return start

    @torch.no_grad()
    def fill(self, unit: nn.Module) -> None:
        """Give memory and values to the unit's own tensors, without those of the units inside it."""
        modules = [module for module in unit.modules() if id(module) not in self._done]
        self._done.update(map(id, modules))
        empty = _materialise(modules, self.device or torch.device("cpu"))
        if self.makes:
            for module in empty:
                make = self._maker(module)
                assert make is not None, "checked before the first unit"
                make(module)
        if self.sends:
            tensors = _distinct(modules)
            if self.device is not None:  # rank 0 sends from where the others receive
                place_whole((tensor for tensor in tensors if not is_sharded(tensor)), self.device)
            share_values(tensors, self.groups)

    def check(self, model: nn.Module) -> None:
        """Check that every tensor can be given a value; changes nothing.

        Raises:
            PrepareError: a module has tensors on the meta device, and nothing initialises them.
        """
        for name, tensor in _named_tensors(model):
            if tensor.is_meta and is_sharded(tensor):
                raise PrepareError(
                    f"{name!r} is divided by tensor parallelism and on the meta device, so no rank has all its values "
                    f"to send. Load the weights before prepare(), or pass {self.told_by}(checkpoint=…)."
                )
        for module in model.modules() if self.makes else ():
            own = (*module._parameters.values(), *module._buffers.values())
            if any(tensor is not None and tensor.is_meta for tensor in own) and self._maker(module) is None:
                raise PrepareError(
                    f"{type(module).__name__} has parameters on the meta device and no reset_parameters(), so nothing "
                    f"says which values they start with. Pass {self.told_by}(param_init_fn=…), or checkpoint=… to read "
                    "them."
                )

    def _maker(self, module: nn.Module) -> Callable[[nn.Module], None] | None:
        return self.init or getattr(type(module), "reset_parameters", None)


def check_files(model: nn.Module, checkpoint: str | Path) -> None:
    """Check that a checkpoint can give a model on the meta device its values, before it is divided. Collective.

    Raises:
        PrepareError: no checkpoint holds a buffer, or another rank cannot read the files.
        StateMismatchError: names or shapes of the checkpoint are not the model's.
        CheckpointNotFoundError: there are no such files.
    """
    _check_buffers(model)
    accel_ckpt.run_together(
        lambda: accel_ckpt.check_checkpoint_fits(model, checkpoint),
        accel_ckpt.default_coordinator(),
        doing=f"reading {checkpoint}",
        error=PrepareError,
    )


def _check_buffers(model: nn.Module) -> None:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set:
                raise PrepareError(
                    f"The buffer {f'{prefix}.{name}'.lstrip('.')} is on the meta device, and checkpoints do not hold "
                    "it. Build the model with init_empty_weights(include_buffers=False), so that buffers have values."
                )


def widen(unit: nn.Module) -> int:
    """Keep trained parameters of less than 32 bits in float32 from now on; returns how many there are.

    Under mixed precision the engine gathers them in the low precision anyway.
    """
    narrow = [
        parameter
        for parameter in unit.parameters()
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16)
    ]
    for parameter in narrow:
        parameter.data = parameter.data.float()
    return len(narrow)


@torch.no_grad()
def lay_out(unit: nn.Module) -> None:
    """Store parameters row after row, as the engine divides them; those of channels-last convolutions are not."""
    for parameter in unit.parameters():
        if not is_sharded(parameter) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def read_parts(
    model: nn.Module,
    checkpoint: str | Path,
    device: torch.device,
    home: torch.device,
    named: nn.Module | None = None,
) -> None:
    """Allocate the parts of a divided model on the meta device, and read them; each rank reads only its parts.

    Args:
        model: the divided model.
        checkpoint: its weights, which `check_files` has checked.
        device: device that computes the model, for buffers and whole parameters.
        home: device of the parts while they are not gathered.
        named: holds the same tensors under the names of the checkpoint, of which it has a part; None: `model` has all.

    Raises:
        StateMismatchError: tied names of the checkpoint have different values.
    """
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    ties = find_tied_parameters(model)
    model.to_empty(device=home)
    retie_parameters(model, ties)
    for module, name, buffer in buffers:
        module._buffers[name] = (
            torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        )
    place_whole((parameter for parameter in model.parameters() if not is_sharded(parameter)), device)
    if named is None:
        accel_ckpt.load_checkpoint_in_model(model, checkpoint)
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not in the model", category=UserWarning)
        accel_ckpt.load_checkpoint_in_model(named, checkpoint)


def share_values(tensors: Sequence[Tensor], groups: Sequence[Any]) -> None:
    """Let all ranks begin with rank 0's values. Collective.

    Args:
        tensors: each once; changed in place.
        groups: ranks that hold the same parts of divided tensors; in each the first one's values are taken.
    """
    whole = [tensor.detach() for tensor in tensors if not is_sharded(tensor)]
    if whole:
        broadcast(whole)
    for group in groups:
        for tensor in filter(is_sharded, tensors):
            dist.broadcast(local_part(tensor.detach()), group=group, group_src=0)


def place_whole(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Move tensors that FSDP does not manage to the device that computes."""
    for tensor in tensors:
        if not tensor.is_meta and tensor.device != device:
            set_data(tensor, tensor.data.to(device))


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _distinct(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The modules' own tensors, tied ones once, in an order that is the same on every rank."""
    found: dict[int, Tensor] = {}
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                found.setdefault(id(tensor), tensor)
    return list(found.values())


def _materialise(modules: Iterable[nn.Module], device: torch.device) -> list[nn.Module]:
    """Put empty tensors in the place of those on the meta device; returns the modules that had any."""
    made: dict[int, Tensor] = {}
    empty: list[nn.Module] = []
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if not empty or empty[-1] is not module:
                    empty.append(module)
                new = made.get(id(tensor))
                if new is None:
                    new = torch.empty_like(tensor, device=device)
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, tensor.requires_grad)
                    made[id(tensor)] = new
                tensors[name] = new  # type: ignore[assignment]
    return empty
