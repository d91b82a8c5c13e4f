"""Gradients of an open accumulation window inside DeepSpeed's engine, and what a saved state has of them.

Where they wait depends on the ZeRO stage. Up to stage 1 each rank has its own, whole, in `parameter.grad`; they are
saved as those of plain PyTorch. From stage 2 on, every backward reduces them, and a rank keeps its partition, with
which only the same ranks and the same stage can continue.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accel_ckpt import NamedModel
from accel_train.errors import AccumulationError
from accel_train.strategies.deepspeed.gradients import DeepSpeedGradients
from accel_train.strategies.deepspeed.loss_scale import scale_of

__all__ = ["EngineWindow"]

_IN_PARAMETERS = "parameters"


class EngineWindow:
    """The open window of one engine.

    Args:
        engine: DeepSpeed's engine.
        model: the module that it trains.
        gradients: what has been noted of its gradients.

    Attributes:
        place: where gradients wait; None: in a place that is not known here.
    """

    def __init__(self, engine: Any, model: nn.Module, gradients: DeepSpeedGradients) -> None:
        self._engine, self._model, self._gradients = engine, model, gradients
        self.place = _place_of(engine)

    @property
    def in_parameters(self) -> bool:
        """Whether gradients wait in `parameter.grad`, whole and this rank's own."""
        return self.place == _IN_PARAMETERS

    def state(self) -> dict[str, Any]:
        """What is waiting; tensors are the engine's.

        Raises:
            AccumulationError: it cannot be saved.
        """
        if not self._gradients.waiting:
            return {}
        self._check_savable()
        scale = scale_of(self._engine)
        common = {"place": self.place, "scale": None if scale is None else scale.value}
        if self.in_parameters:
            return {**common, "gradients": {}, "used": []}
        buffers = self._storage.buffers(self._engine.optimizer)
        names = self._names()
        return {
            **common,
            "gradients": {_name(key, names): buffer for key, buffer in buffers.items() if buffer is not None},
            "used": sorted(_name(key, names) for key in _used(self._engine.optimizer)),
        }

    def misfit(self, state: Mapping[str, Any]) -> str | None:
        """Why a state cannot be loaded; None: it can."""
        there, here = state.get("place"), self.place
        if there is None:
            return None
        if there != here:
            return (
                f"gradients of an open accumulation window are saved in {there!r} of the engine, and here they wait in "
                f"{here!r}. Use the same ZeRO stage, offload and dtypes, or a checkpoint saved after a step"
            )
        scale = scale_of(self._engine)
        if scale is not None and not scale.is_dynamic and scale.value != state.get("scale", scale.value):
            return (
                f"gradients of an open accumulation window are scaled by {state['scale']}, and fp16.loss_scale fixes "
                f"the scale at {scale.value} here. Set the same loss_scale, or use a checkpoint saved after a step"
            )
        if self.in_parameters:
            return None
        names, storage = self._names(), self._storage
        shapes = storage.shapes(self._engine.optimizer)
        wanted = {_name(key, names): shape for key, shape in shapes.items()}
        found = {name: tuple(tensor.shape) for name, tensor in state["gradients"].items()}
        unknown = (found.keys() - wanted.keys()) | (set(state["used"]) - set(names.values()))
        missing = set() if storage.may_be_fewer else wanted.keys() - found.keys()
        if unknown or missing:
            return (
                f"gradients of an open accumulation window are of other parameters: "
                f"{', '.join(sorted(unknown | missing)[:5])}. Build the model and the optimizer as they were"
            )
        odd = [name for name, shape in found.items() if shape != wanted[name]]
        if odd:
            return f"the gradient of {odd[0]} has {list(found[odd[0]])} elements there, and {list(wanted[odd[0]])} here"
        return None

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned; no gradient waits."""
        if not state.get("place") or self.in_parameters:
            return
        optimizer = self._engine.optimizer
        names = self._names()
        used = {*state["used"]}
        keys = {_name(key, names): key for key in self._storage.shapes(optimizer)}
        gradients = {keys[name]: values for name, values in state["gradients"].items()}
        with torch.no_grad():
            trained = [p for p in _trained(optimizer) if names[id(p)] in used]
            self._storage.load(optimizer, gradients, trained)
        self._gradients.waiting = True

    def take_up(self) -> None:
        """Called when `parameter.grad` was filled from a state."""
        self._gradients.restart(any(p.grad is not None for p in self._gradients.parameters))

    def _check_savable(self) -> None:
        if self.place is None:
            raise AccumulationError(
                f"The state cannot be saved inside this accumulation window: the engine of "
                f"{type(self._model).__name__} uses {type(self._engine.optimizer).__name__}, whose gradients are not "
                "part of a saved state. Save after optimizer.step(), where `accelerator.sync_gradients` is true."
            )
        if self._gradients.noted:
            raise AccumulationError(
                f"The state cannot be saved here: the gradients of {type(self._model).__name__} are complete, or their "
                "clipping or scaling is noted for DeepSpeed's step. Save after optimizer.step()."
            )

    def _names(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for name, parameter in NamedModel(self._model).parameters().items():
            found.setdefault(id(parameter), name)
        return found

    @property
    def _storage(self) -> _Storage:
        return _STORAGES[str(self.place)]


def _name(key: Any, names: Mapping[int, str]) -> str:
    """What a state calls a parameter, or the partition of a group."""
    return f"group {key}" if isinstance(key, int) else names[id(key)]


def _place_of(engine: Any) -> str | None:
    optimizer, kind = engine.optimizer, type(engine.optimizer).__name__
    if optimizer is engine.basic_optimizer or kind in ("FP16_UnfusedOptimizer", "FP16_Optimizer"):
        return _IN_PARAMETERS
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        return "partitions of stage 3"
    if kind == "BF16_Optimizer":
        return "flat sums"
    if kind != "DeepSpeedZeroOptimizer":
        return None
    if engine.zero_optimization_stage() == 1:
        return "sums" if optimizer.use_grad_accum_attribute else _IN_PARAMETERS
    return "host memory of stage 2" if optimizer.cpu_offload else "partitions of stage 2"


# By place: the tensors that hold gradients, by parameter, or by the number of a group whose partition is one tensor

_Buffers = dict[Any, Tensor | None]
_Shapes = dict[Any, tuple[int, ...]]


def _trained(optimizer: Any) -> list[Any]:
    names = ("fp16_groups", "bf16_groups", "bit16_groups")
    groups = next(getattr(optimizer, name) for name in names if hasattr(optimizer, name))
    return [*itertools.chain.from_iterable(groups)]


def _sums(optimizer: Any) -> _Buffers:
    return {parameter: parameter.grad_accum for parameter in _trained(optimizer)}


def _shapes_of_sums(optimizer: Any) -> _Shapes:
    return {parameter: tuple(parameter.shape) for parameter in _trained(optimizer)}


def _load_sums(optimizer: Any, gradients: Mapping[Any, Tensor], used: list[Any]) -> None:
    for parameter, values in gradients.items():
        dtype = optimizer.gradient_accumulation_dtype
        parameter.grad_accum = values.to(parameter.device, dtype, copy=True)
    optimizer._epilogue_ran_this_backward = False  # else the next forward drops them


def _flat_sums(optimizer: Any) -> _Buffers:
    """Of parameters that had a gradient in the window, flat and whole."""
    return {
        parameter: buffer if used else None
        for group, buffers, flags in zip(
            optimizer.bf16_groups,
            optimizer.fp32_groups_gradients,
            optimizer.fp32_groups_has_gradients,
            strict=True,
        )
        for parameter, buffer, used in zip(group, buffers, flags, strict=True)
    }


def _shapes_of_flat_sums(optimizer: Any) -> _Shapes:
    return {parameter: (parameter.numel(),) for parameter in _trained(optimizer)}


def _load_flat_sums(optimizer: Any, gradients: Mapping[Any, Tensor], used: list[Any]) -> None:
    for number, group in enumerate(optimizer.bf16_groups):
        for place, parameter in enumerate(group):
            if parameter in gradients:
                optimizer.fp32_groups_gradients[number][place].copy_(gradients[parameter])
                optimizer.fp32_groups_has_gradients[number][place] = True


def _partitions_2(optimizer: Any) -> _Buffers:
    found: _Buffers = {}
    for number, parameters in enumerate(optimizer.params_in_partition):
        if optimizer._use_compact_grad_partition_buffer(number):
            found[number] = optimizer._get_compact_grad_partition_buffer(number).flat_partition
        elif optimizer.cpu_offload:
            kept = optimizer.accumulated_grads_in_cpu
            found |= {parameter: kept.get(optimizer.get_param_id(parameter)) for parameter in parameters}
        else:
            found |= zip(parameters, optimizer.all_grad_tensors[number], strict=True)
    return found


def _shapes_of_partitions_2(optimizer: Any) -> _Shapes:
    found: _Shapes = {}
    for number, parameters in enumerate(optimizer.params_in_partition):
        if optimizer._use_compact_grad_partition_buffer(number):
            found[number] = (int(optimizer.partition_size[number]),)
        elif optimizer.cpu_offload:
            found |= {parameter: _host_shape(optimizer, parameter) for parameter in parameters}
        else:
            found |= {parameter: tuple(parameter.shape) for parameter in parameters}
    return found


def _host_shape(optimizer: Any, parameter: Any) -> tuple[int, ...]:
    """Of a gradient in host memory: flat, and only this rank's part if the engine keeps it in 16 bits."""
    [_, _, _, count] = optimizer.grad_position[optimizer.get_param_id(parameter)]
    return (int(count) if optimizer.low_precision_master_weights_and_grads else parameter.numel(),)


def _load_partitions_2(optimizer: Any, gradients: Mapping[Any, Tensor], used: list[Any]) -> None:
    for number, parameters in enumerate(optimizer.params_in_partition):
        if optimizer._use_compact_grad_partition_buffer(number):
            buffer = optimizer._get_compact_grad_partition_buffer(number).flat_partition
            buffer.copy_(gradients[number])
        elif optimizer.cpu_offload:
            for parameter in parameters:
                if parameter in gradients:
                    number_of_parameter = optimizer.get_param_id(parameter)
                    buffer = _host_buffer(optimizer, parameter).copy_(gradients[parameter])
                    optimizer.accumulated_grads_in_cpu[number_of_parameter] = buffer
        else:
            dtype = optimizer.gradient_accumulation_dtype
            optimizer.all_grad_tensors[number] = [
                gradients[parameter].to(parameter.device, dtype, copy=True) for parameter in parameters
            ]
    if optimizer.cpu_offload:
        optimizer._offload_accumulated_param_ids = {*map(optimizer.get_param_id, used)}
    optimizer.micro_step_id = 0  # that of the first backward; the next one adds to it


def _host_buffer(optimizer: Any, parameter: Any) -> Tensor:
    """Memory for a gradient, as the engine takes it."""
    from deepspeed.accelerator import get_accelerator

    [group, _, start, count] = optimizer.grad_position[optimizer.get_param_id(parameter)]
    if optimizer.low_precision_master_weights_and_grads:
        part: Tensor = optimizer.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, start, count)
        return part
    buffer = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=optimizer.device)
    pinned: Tensor = get_accelerator().pin_memory(buffer) if optimizer.cpu_offload_pin_memory else buffer
    return pinned


def _partitions_3(optimizer: Any) -> _Buffers:
    """The pieces of the buffer that stage 3 adds to, in the order in which it has cut it."""
    found: _Buffers = {}
    start = 0
    for parameter in _trained(optimizer):
        count = parameter.partition_numel()
        found[parameter] = optimizer.grad_partitions_flat_buffer.narrow(0, start, count)
        start += count
    return found


def _load_partitions_3(optimizer: Any, gradients: Mapping[Any, Tensor], used: list[Any]) -> None:
    buffers = _partitions_3(optimizer)
    for parameter, buffer in buffers.items():
        assert buffer is not None
        buffer.copy_(gradients[parameter])
    optimizer._offload_boundary_param_ids = {parameter.ds_id for parameter in used}
    if not optimizer.offload_optimizer:
        for number, group in enumerate(optimizer.fp16_groups):
            optimizer.averaged_gradients[number] = [buffers[parameter] for parameter in group]
    optimizer.micro_step_id = 1  # the next backward adds
    optimizer._epilogue_ran_this_backward = False


def _used(optimizer: Any) -> list[Any]:
    """Parameters that had a gradient in the window, where the engine keeps account of them."""
    if hasattr(optimizer, "_offload_boundary_param_ids"):
        return [p for p in _trained(optimizer) if p.ds_id in optimizer._offload_boundary_param_ids]
    known = getattr(optimizer, "_offload_accumulated_param_ids", ())
    owned = itertools.chain.from_iterable(getattr(optimizer, "params_in_partition", ()))
    return [parameter for parameter in owned if known and optimizer.get_param_id(parameter) in known]


def _shapes_of_partitions_3(optimizer: Any) -> _Shapes:
    return {parameter: (int(parameter.partition_numel()),) for parameter in _trained(optimizer)}


@dataclass(frozen=True)
class _Storage:
    """Where an engine adds up gradients.

    Attributes:
        buffers: the tensors that hold them.
        shapes: their shapes, also of those that are not there now.
        load: fills them, given the values and the parameters that had a gradient.
        may_be_fewer: parameters without a gradient have no tensor.
    """

    buffers: Callable[[Any], _Buffers]
    shapes: Callable[[Any], _Shapes]
    load: Callable[[Any, Mapping[Any, Tensor], list[Any]], None]
    may_be_fewer: bool = False


_STORAGES = {
    "sums": _Storage(_sums, _shapes_of_sums, _load_sums, may_be_fewer=True),
    "flat sums": _Storage(_flat_sums, _shapes_of_flat_sums, _load_flat_sums, may_be_fewer=True),
    "partitions of stage 2": _Storage(_partitions_2, _shapes_of_partitions_2, _load_partitions_2),
    "host memory of stage 2": _Storage(
        _partitions_2, _shapes_of_partitions_2, _load_partitions_2, may_be_fewer=True
    ),
    "partitions of stage 3": _Storage(_partitions_3, _shapes_of_partitions_3, _load_partitions_3),
}
