"""The hook that moves a module's inputs, and its offloaded weights, to the execution device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from accel_bigmodel.errors import OffloadError
from accel_bigmodel.hooks.base import ModelHook, computes_weight_early, outside_graphs
from accel_bigmodel.hooks.devices import concrete_device
from accel_bigmodel.hooks.offloaded_tensors import (
    BORROW_LOCK,
    Borrowed,
    OffloadedTensor,
    TensorLocation,
    tensor_locations,
    wrapped_like,
)
from accel_ckpt.errors import StateMismatchError, UninitializedTensorError
from accel_ckpt.modules.names import listed
from accel_state.trees import find_device, send_to_device

__all__ = ["AlignDevicesHook", "TiedParams", "align_inputs", "moved_to"]

TiedParams = MutableMapping[int, dict[torch.device, Tensor]]

_PLAIN = (type(None), bool, int, float, str)


class AlignDevicesHook(ModelHook):
    """Hook that moves inputs to the execution device, and optionally weights for the duration of the forward.

    With ``offload`` the weights are on the meta device between calls. Weights that are trained cannot be offloaded: a
    gradient for an offloaded weight is refused. A tensor with values that replaces an offloaded one on the module is
    used as it is, and stays.

    Args:
        execution_device: device of inputs and weights during the forward; ``None`` moves nothing.
        offload: take the weights from ``weights_map`` before each forward, and free them after it.
        io_same_device: move the output to the device of the first input tensor.
        weights_map: values by name, relative to the module; may load them on access. Default: the module's values when
            the hook is added, in host memory.
        offload_buffers: offload persistent buffers too; other buffers stay on the execution device.
        place_submodules: handle the weights of submodules too.
        skip_keys: keyword arguments, and keys of outputs, that are not moved.
        tied_params_map: address of a tied tensor's values → device → the tensor with these values on this device; hooks
            that share the map share these tensors.

    Raises:
        DeviceMapError: when added, if there is no such device.
        UninitializedTensorError: when added, if a tensor on the meta device has no values anywhere.
        OffloadError: when added, if a hook of PyTorch needs the weights before ``forward`` (old weight normalisation),
            or if the module is compiled by ``torch.jit``.
        StateMismatchError: when added or called, if ``weights_map`` lacks a name or has another shape for it.
    """

    def __init__(
        self,
        execution_device: int | str | torch.device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Sequence[str] | None = None,
        tied_params_map: TiedParams | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self._leaves_weights = False
        self._made_map = False
        self._resolved_for: Any = ...
        self._device: torch.device | None = None
        self._offloaded: list[tuple[TensorLocation, OffloadedTensor]] = []
        self._meta_ties: list[OffloadedTensor] = []  # keep tensors tied that were placed on the meta device
        self._moved: list[tuple[TensorLocation, Tensor, torch.device]] = []
        self._borrowed = Borrowed()
        self._input_devices: dict[
            int, list[torch.device | None]
        ] = {}  # by thread, one entry per running call

    def __repr__(self) -> str:
        shown = (
            "execution_device",
            "offload",
            "io_same_device",
            "offload_buffers",
            "place_submodules",
            "skip_keys",
        )
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Place or offload the weights. If the hook was on another module, that one gets its weights back."""
        if self._leaves_weights:
            return module
        self._restore_weights()
        device = self._where()
        locations = tensor_locations(module, self.place_submodules)
        aside = [location for location in locations if self._offloads(location)]
        kept = [location for location in locations if not self._offloads(location)]
        if device is not None and device.type != "meta":
            _refuse_meta(kept)
        if self.offload:
            _refuse_unreachable(module, aside)
            self._offload_tensors(aside, type(module).__name__)
            self._moved = [(location, location.tensor, location.tensor.device) for location in kept]
        if device is not None:
            self._meta_ties = (
                [OffloadedTensor.of(location.tensor) for location in kept] if device.type == "meta" else []
            )
            try:
                for location in kept:
                    _put_on(location, device, self.tied_params_map)
            except BaseException:  # the device is full
                self._restore_weights()
                raise
        return module

    def pre_forward(
        self, module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the weights and arguments to the execution device."""
        if self.offload or self.io_same_device:
            return self._begin(args, kwargs)
        device = self._where()
        if device is None or (_all_on(args, device) and _all_on(kwargs.values(), device)):
            return args, kwargs
        return self._send(args, kwargs)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Free the weights, and move the output to where the input was."""
        return self._end(output) if self.offload or self._input_devices else output

    def forward_failed(self, module: nn.Module) -> None:
        """Free the weights."""
        if self.offload or self._input_devices:
            self._end(None)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Give offloaded weights back to the module, on their original device. Weights that were only placed stay."""
        self._restore_weights()
        return module

    def _restore_weights(self) -> None:
        self._borrowed.end_all()
        self._input_devices.clear()
        for location, offloaded in self._offloaded:
            if offloaded.device.type != "meta" and not location.is_empty and location.tensor.is_meta:
                location.put(offloaded.restore(self._value(location.name, offloaded)))
        for location, original, device in self._moved:
            if device.type != "meta" and not location.is_empty:
                location.put(original if location.tensor.is_meta else moved_to(location.tensor, device))
        self._offloaded, self._meta_ties, self._moved = [], [], []
        if self._made_map:
            self.weights_map, self._made_map = None, False

    def _where(self) -> torch.device | None:
        if self.execution_device is not self._resolved_for:
            given = self.execution_device
            self._device = None if given is None else concrete_device(given)
            self._resolved_for = given
        return self._device

    def _offloads(self, location: TensorLocation) -> bool:
        return self.offload and (location.is_parameter or (self.offload_buffers and location.is_saved))

    def _offload_tensors(self, locations: list[TensorLocation], kind: str) -> None:
        if self.weights_map is None:
            _refuse_meta(locations)
            # Tensors on the CPU are kept themselves, so that the same objects come back.
            self.weights_map = {
                location.name: location.tensor
                if location.tensor.device.type == "cpu"
                else location.tensor.detach().to("cpu")
                for location in locations
            }
            self._made_map = True
        elif (
            type(self.weights_map).__contains__ is not Mapping.__contains__
        ):  # else it would load every value
            missing = [location.name for location in locations if location.name not in self.weights_map]
            if missing:
                raise StateMismatchError(
                    f"weights_map has no values for {', '.join(missing)} of this {kind}; it must name every tensor to "
                    "offload, relative to the module"
                )
        self._offloaded = [(location, OffloadedTensor.of(location.tensor)) for location in locations]
        for location, offloaded in self._offloaded:
            location.put(offloaded.release())

    @outside_graphs
    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = self._where()
        source = find_device((args, kwargs)) if self.io_same_device else None
        if device is not None:
            args, kwargs = self._send(args, kwargs)
        if self.offload:
            self._load(device)
        if self.io_same_device:
            self._input_devices.setdefault(get_ident(), []).append(source)
        return args, kwargs

    @outside_graphs
    def _send(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert self._device is not None
        args = send_to_device(args, self._device)
        return args, send_to_device(kwargs, self._device, skip_keys=self.skip_keys) if kwargs else kwargs

    @outside_graphs
    def _end(self, output: Any) -> Any:
        self._borrowed.end()
        calls = self._input_devices.get(get_ident(), [])
        device = calls.pop() if calls else None
        if not calls:
            self._input_devices.pop(get_ident(), None)
        return output if device is None else send_to_device(output, device, skip_keys=self.skip_keys)

    def _load(self, device: torch.device | None) -> None:
        with BORROW_LOCK:
            self._borrowed.begin()
            try:
                for location, offloaded in self._offloaded:
                    if not location.is_empty and location.tensor.is_meta:
                        self._borrow(location, offloaded, device or _home_of(offloaded))
            except BaseException:
                self._borrowed.end()
                raise

    def _borrow(self, location: TensorLocation, offloaded: OffloadedTensor, device: torch.device) -> None:
        own, tied = location.tensor, list[dict[torch.device, Tensor]]()

        def make() -> Tensor:
            value = self._value(location.name, offloaded)
            shared = None if self.tied_params_map is None else self.tied_params_map.get(value.data_ptr())
            if shared is not None and device in shared:
                return shared[device].detach()
            data = value.detach().to(device, _dtype_for(value, own))
            if shared is not None:
                shared[device] = data
                tied.append(shared)
            return data

        tensor = wrapped_like(own, offloaded.borrow(device, own.dtype, make).detach())
        scales = self._int8_scales(location.name, tensor)
        if scales is not None:
            tensor.SCB = scales.to(device)  # type: ignore[attr-defined]
        self._borrowed.put(location, tensor, partial(_returned, offloaded, device, own.dtype, tied))

    def _value(self, name: str, offloaded: OffloadedTensor) -> Tensor:
        assert self.weights_map is not None
        value = self.weights_map[name]
        if value.shape != offloaded.placeholder.shape:
            raise StateMismatchError(
                f"weights_map has the shape {tuple(value.shape)} for {name!r}, but the module has "
                f"{tuple(offloaded.placeholder.shape)}: these are the weights of another model"
            )
        return value

    def _int8_scales(self, name: str, value: Tensor) -> Tensor | None:
        """The scales of a weight that bitsandbytes quantised, which are beside it in its state dict."""
        if value.dtype != torch.int8 or not name.endswith("weight") or self.weights_map is None:
            return None
        scales = f"{name.removesuffix('weight')}SCB"
        return self.weights_map.get(scales)


def align_inputs(
    device: int | str | torch.device | None,
    io_same_device: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> AlignDevicesHook:
    """Make a hook that moves inputs to a device, but not weights, which are on the device or are streamed.

    Not a separate class, because other libraries rebuild a hook from the name that its class has in Accelerate, as PEFT
    does for modules that are trained beside an adapter.
    """
    hook = AlignDevicesHook(device, io_same_device=io_same_device, skip_keys=skip_keys)
    hook._leaves_weights = True
    return hook


def _returned(
    offloaded: OffloadedTensor,
    device: torch.device,
    dtype: torch.dtype,
    tied: list[dict[torch.device, Tensor]],
) -> None:
    offloaded.give_back(device, dtype)
    for shared in tied:
        shared.pop(device, None)


def _dtype_for(value: Tensor, own: Tensor) -> torch.dtype:
    # Integers in place of floating numbers are quantised values, so their dtype must stay.
    number = value.dtype.is_floating_point or value.dtype.is_complex
    return own.dtype if number else value.dtype


def _all_on(values: Iterable[Any], device: torch.device) -> bool:
    """Whether sending these to a device would change nothing; False if unknown."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            continue
        if isinstance(value, Tensor):
            if value.device != device:
                return False
        elif isinstance(value, list | tuple):
            if not _all_on(value, device):
                return False
        elif isinstance(value, Mapping):
            if not _all_on(value.values(), device):
                return False
        elif hasattr(value, "to") or is_dataclass(value):
            return False
    return True


def _put_on(location: TensorLocation, device: torch.device, tied: TiedParams | None) -> None:
    tensor = location.tensor
    if tensor.device == device:
        return
    if device.type == "meta":
        location.put(OffloadedTensor.of(tensor).placeholder)
        return
    shared = None if tied is None else tied.get(tensor.data_ptr())
    if shared is None:
        location.put(moved_to(tensor, device))
        return
    # Other modules need it on other devices, so the tensor itself cannot be moved.
    if device not in shared:
        shared[device] = wrapped_like(tensor, tensor.detach().to(device))
    there = shared[device]
    location.put(there if type(there) is type(tensor) else wrapped_like(tensor, there.detach()))


def _home_of(offloaded: OffloadedTensor) -> torch.device:
    return torch.device("cpu") if offloaded.device.type == "meta" else offloaded.device


def moved_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device; it stays the same object if torch allows that, so that ties and optimizers keep it."""
    if tensor.device == device:
        return tensor
    data = tensor.detach().to(device)
    if not torch._has_compatible_shallow_copy_type(tensor, data):
        return wrapped_like(tensor, data)
    tensor.data = data
    if tensor.grad is not None:
        tensor.grad.data = tensor.grad.detach().to(device)
    return tensor


def _refuse_unreachable(module: nn.Module, locations: list[TensorLocation]) -> None:
    """Refuse to offload weights that are used before this hook can load them.

    Some hooks of PyTorch compute a weight from others before ``forward``; compiled TorchScript code calls its
    submodules without their hooks, and holds its weights itself.
    """
    owners = {location.name.rpartition(".")[0] for location in locations}
    for name, owner in module.named_modules():
        if name not in owners:
            continue
        where = f"{type(owner).__name__} {name!r}" if name else type(owner).__name__
        if isinstance(owner, torch.jit.ScriptModule):
            raise OffloadError(
                f"{where} is compiled by torch.jit, so its weights cannot be loaded for the duration of a forward: "
                "offload the module from before torch.jit.script or torch.jit.trace, or do not offload this one"
            )
        if kind := computes_weight_early(owner):
            raise OffloadError(
                f"{kind} of torch.nn.utils computes a weight of {where} before its forward, when the weights that it "
                "needs are not loaded yet: use torch.nn.utils.parametrizations instead, make it permanent "
                "(torch.nn.utils.remove_weight_norm, remove_spectral_norm or prune.remove), or do not offload this "
                "module"
            )


def _refuse_meta(locations: list[TensorLocation]) -> None:
    names = [location.name for location in locations if location.tensor.is_meta]
    if names:
        raise UninitializedTensorError(
            f"these tensors have no values (meta device): {listed(names)}. Load them before the hook is added, or "
            "pass a weights_map that has them"
        )
