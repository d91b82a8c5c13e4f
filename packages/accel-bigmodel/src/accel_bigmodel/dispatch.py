"""Dispatching a model: placing its parts according to a device map, so that it runs from there."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from accel_bigmodel.device_maps.budget import available_host_memory
from accel_bigmodel.device_maps.checks import (
    check_all_have_values,
    check_device_map,
    execution_device,
)
from accel_bigmodel.device_maps.device_usage import device_of, main_device_of
from accel_bigmodel.errors import DeviceMapError, OffloadError
from accel_bigmodel.hooks.align import AlignDevicesHook, align_inputs
from accel_bigmodel.hooks.alignment import has_offloaded_params
from accel_bigmodel.hooks.base import (
    MOVES,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    hook_of,
    remove_one_hook,
)
from accel_bigmodel.offload_cache import OffloadCache, check_folder
from accel_bigmodel.offload_files import OffloadedWeightsLoader
from accel_bigmodel.paging.pager import Pager
from accel_bigmodel.streaming.groups import Group, plan_groups
from accel_bigmodel.streaming.stats import StreamStats
from accel_bigmodel.streaming.streamer import Streamer
from accel_bigmodel.streaming.transfer import AcceleratorTransfer
from accel_bigmodel.streaming.types import Transfer
from accel_ckpt.errors import StateMismatchError
from accel_ckpt.format.memory import mapped_file_of
from accel_ckpt.loading.mapped_files import watch_mapped_files
from accel_ckpt.modules.devices import existing_device
from accel_ckpt.modules.names import listed, prefixed_modules
from accel_ckpt.modules.tensors import (
    check_is_module,
    check_nothing_on_meta,
    get_non_persistent_buffers,
    refuse_without_values,
    set_data,
    set_module_tensor_to_device,
)
from accel_ckpt.modules.ties import find_tied_tensors, retie_parameters
from accel_ckpt.saving.plan import convert_file_size_to_int

__all__ = [
    "Dispatch",
    "cpu_offload",
    "disk_offload",
    "dispatch_model",
    "is_dispatched",
    "offload_stats",
    "undispatch",
]

Device = int | str | torch.device
Model = TypeVar("Model", bound=nn.Module)

CPU = torch.device("cpu")

# Share of the free host memory for mapped weights; the rest is for activations and other processes.
_MAPPED_SHARE = 0.8


class Dispatch:
    """Record of a dispatched model: where its parts are, and the streamer or pager that moves their weights.

    A copy of the model has its own weights in memory, and its own streamer or pager.
    """

    def __init__(
        self, device_map: Mapping[str, Device], main_device: torch.device, mover: Streamer | Pager | None
    ) -> None:
        self.device_map = dict(device_map)
        self.main_device = main_device
        """The device that computes modules with offloaded weights."""
        self.mover = mover
        """The streamer that copies offloaded weights to a device, or the pager that reads them from disk; or None."""
        self.hooks: list[tuple[nn.Module, ModelHook]] = []
        """Modules with the hooks that dispatching added, without those of users."""


def dispatch_model(
    model: Model,
    device_map: Mapping[str, Device],
    main_device: Device | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Mapping[str, Any]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    *,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    transfer: Transfer | None = None,
) -> Model:
    """Dispatch a model: place its parts according to a device map, so that it can run.

    Modules on an accelerator are moved there. Modules on ``"cpu"`` and ``"disk"`` compute on the main device: their
    weights are copied to it just ahead of their use, and are on the host or on disk between forwards. If the main
    device is the CPU, nothing is copied: weights on disk are views of mapped files, whose pages are read when touched.
    Parameters stay the same objects and always have their real values, so ``state_dict()`` and saving work as usual.

    Args:
        model: its tensors have values, or ``state_dict`` or ``offload_index`` provides them. Changed in place.
        device_map: name of a module or tensor → index of an accelerator, a device, ``"cpu"`` or ``"disk"``.
        main_device: device that computes modules on ``"cpu"`` and ``"disk"``; by default the first accelerator of the
            map, otherwise the CPU.
        state_dict: values of tensors on the meta device.
        offload_dir: folder for weights on ``"disk"`` that are not in a safetensors file yet.
        offload_index: index of the tensors in ``offload_dir``, as ``save_offload_index`` writes it, for tensors on the
            meta device; by default its ``index.json``, if there is one.
        offload_buffers: offload buffers too, instead of keeping them on the main device. Non-persistent buffers always
            stay there.
        skip_keys: keyword arguments and keys of outputs that are not moved between devices.
        preload_module_classes: classes of modules whose weights, including those of their children, are copied before
            their forward begins, because it uses weights of children itself.
        force_hooks: move inputs to the device even if the map has only one device.
        device_memory: bytes on the main device for offloaded weights; with room to spare, some stay there permanently.
            By default the memory of two blocks.
        host_memory: bytes of host memory that mapped files may fill when everything computes on the CPU; by default
            80% of the free memory. The weights of a larger model are read ahead of their use and evicted after it.
        transfer: how weights are copied to the main device; by default on a side stream.

    Returns:
        The model.

    Raises:
        DeviceMapError: the map does not cover the model, names something that does not exist, or splits tied weights;
            the main device cannot compute, or is not the transfer's.
        OffloadError: weights on ``"disk"`` are not in a file, and ``offload_dir`` is missing or not a path.
        UninitializedTensorError: tensors on the meta device have no values.
        StateMismatchError: the values have other shapes.
        ValueError: ``device_memory`` or ``host_memory`` is not a size.
    """
    device_budget, host_budget = memory_sizes(device_memory, host_memory)
    check_folder(offload_dir, "offload_dir")
    check_device_map(model, device_map, strict=True)
    check_all_have_values(device_map)
    places = {name: _device(place) for name, place in device_map.items()}
    main = (
        torch.device(main_device_of(places))
        if main_device is None
        else _computing_device(main_device, "main_device")
    )
    if transfer is not None and execution_device(transfer.device) != execution_device(main):
        raise DeviceMapError(
            f"the transfer copies weights to {str(transfer.device)!r}, but the main device is {str(main)!r}; make the "
            "transfer for that device"
        )

    def make_plan() -> tuple[_Plan, Streamer | None]:
        streams = transfer is not None or main != CPU
        plan = _Plan(model, places, main, streams, buffers=offload_buffers)
        return plan, _streamer(plan, preload_module_classes, device_budget, transfer)

    plan, streamer = make_plan()
    values = _values(plan, state_dict, offload_dir, offload_index)
    attached = _dispatch_of(model)
    before = attached.mover if attached is not None and isinstance(attached.mover, Streamer) else None
    if streamer is not None:
        streamer.check(replacing=before)
    if offload_dir is None:
        _check_files(plan, {} if before is None else before.homes(), values)
    undispatch(model)
    if values:
        _fill(model, values)
        plan, streamer = (
            make_plan()
        )  # again, because filling puts new tensors in place of those on the meta device
    if offload_dir is not None:
        _keep_on_disk(plan, offload_dir)
    mover = streamer or _pager(plan, preload_module_classes, host_budget)
    plan.move()
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    model._accel_dispatch = dispatch = Dispatch(places, main, mover)  # type: ignore[assignment]
    try:
        if mover is not None:
            mover.attach()
        for module, hook in _hooks(plan, skip_keys, force_hooks):
            dispatch.hooks.append((module, hook))
            add_hook_to_module(module, hook, append=True)
        if mover is not None or _spread(plan):
            _guard(model)
        watch_mapped_files(model)
    except BaseException:
        undispatch(model)
        plan.put_back()
        raise
    plan.moved.clear()
    return model


def cpu_offload(
    model: Model,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    *,
    device_memory: int | str | None = None,
    transfer: Transfer | None = None,
) -> Model:
    """Keep the weights of a model in host memory, and copy them to a device block by block.

    Args:
        model: changed in place.
        execution_device: where it computes; by default the device of its first parameter.
        offload_buffers: as in :func:`dispatch_model`.
        state_dict: values of tensors on the meta device.
        preload_module_classes: classes whose children's weights are copied with their own.
        device_memory: bytes of the device for the weights.
        transfer: how weights are copied.
    """
    device = _execution_device(model, execution_device)
    return _without_map(dispatch_model(
        model, {"": "cpu"}, main_device=device, state_dict=state_dict, offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes, device_memory=device_memory, transfer=transfer,
    ))  # fmt: skip


def disk_offload(
    model: Model,
    offload_dir: str | os.PathLike[str] | None,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
    *,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    transfer: Transfer | None = None,
) -> Model:
    """Keep the weights of a model on disk.

    Weights that are views of safetensors files stay as they are, and nothing is written. Others are written to the
    folder once.

    Args:
        model: changed in place.
        offload_dir: for weights that are not in a safetensors file yet.
        execution_device: where it computes; by default the device of its first parameter.
        offload_buffers: as in :func:`dispatch_model`.
        preload_module_classes: classes whose children's weights are copied with their own.
        device_memory: bytes of the device for the weights.
        host_memory: bytes of host memory that mapped files may fill.
        transfer: how weights are copied.
    """
    device = _execution_device(model, execution_device)
    return _without_map(dispatch_model(
        model, {"": "disk"}, main_device=device, offload_dir=offload_dir, offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes, device_memory=device_memory, host_memory=host_memory,
        transfer=transfer,
    ))  # fmt: skip


def _without_map(model: Model) -> Model:
    """Clients take ``hf_device_map`` for a map that the user gave."""
    del _attribute_owner(model).hf_device_map
    return model


def is_dispatched(model: nn.Module) -> bool:
    """Whether a forward of a model moves weights or inputs: here, or by a map of another library.

    Args:
        model: any model.
    """
    return _dispatch_of(model) is not None or getattr(model, "hf_device_map", None) is not None


def undispatch(model: Model) -> Model:
    """Remove everything that ``dispatch_model`` attached, and nothing else.

    Every tensor keeps its values, on the device where it is between forwards.

    Args:
        model: a model, dispatched or not.
    """
    dispatch = _dispatch_of(model)
    if dispatch is None:
        return model
    if dispatch.mover is not None:
        dispatch.mover.detach()
    carrier = _attribute_owner(model)
    del carrier.__dict__["_accel_dispatch"]
    for module, hook in dispatch.hooks:
        remove_one_hook(module, hook)
    for module in (model, carrier):
        for name in MOVES:
            if isinstance(vars(module).get(name), _Refusal):
                del vars(module)[name]
    carrier.__dict__.pop("hf_device_map", None)
    return model


def offload_stats(model: nn.Module) -> StreamStats | None:
    """Bytes of weights copied, the rate, and the time waited since a model was dispatched.

    Args:
        model: as ``dispatch_model`` or ``load_checkpoint_and_dispatch`` returned it.

    Returns:
        ``None`` if its weights need no copies: all are where they compute, or are views of files that fit in memory.

    Raises:
        OffloadError: the model was not dispatched.
    """
    dispatch = _dispatch_of(model)
    if dispatch is None:
        raise OffloadError(f"this {type(model).__name__} was not dispatched; call dispatch_model first")
    return None if dispatch.mover is None else dispatch.mover.stats()


def _attribute_owner(model: nn.Module) -> nn.Module:
    """The module that holds the attributes set on a model; ``torch.compile`` wrappers pass them on to it."""
    return getattr(model, "_orig_mod", model)


def _dispatch_of(model: nn.Module) -> Dispatch | None:
    return _attribute_owner(model).__dict__.get("_accel_dispatch")


def _device(place: Device) -> torch.device | str:
    return "disk" if place == "disk" else execution_device(place) or CPU


def _computing_device(device: Device, argument: str) -> torch.device:
    """A device that a user chose to compute on, which exists."""
    if str(device) in ("disk", "meta"):
        raise DeviceMapError(
            f"{argument} is {device!r}, which cannot compute; give the index of an accelerator, or a device such as "
            "'cpu'"
        )
    return execution_device(existing_device(device, f"{argument} is", error=DeviceMapError)) or CPU


def _execution_device(model: nn.Module, wanted: Device | None) -> torch.device:
    check_is_module(model)
    if wanted is not None:
        return _computing_device(wanted, "execution_device")
    first = next(model.parameters(), None)
    return CPU if first is None or first.device.type == "meta" else first.device


def memory_sizes(
    device_memory: int | str | None, host_memory: int | str | None
) -> tuple[int | None, int | None]:
    """Convert the memory arguments of :func:`dispatch_model` to bytes.

    Raises:
        ValueError: an argument is not a size; names it.
    """
    found: dict[str, int | None] = {}
    for name, size in (("device_memory", device_memory), ("host_memory", host_memory)):
        try:
            found[name] = None if size is None else convert_file_size_to_int(size)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return found["device_memory"], found["host_memory"]


def _values(
    plan: _Plan,
    state_dict: Mapping[str, torch.Tensor] | None,
    offload_dir: str | os.PathLike[str] | None,
    offload_index: Mapping[str, Mapping[str, Any]] | None,
) -> dict[str, torch.Tensor]:
    """Values for the tensors on the meta device."""
    model = plan.model
    has_index = offload_index is not None
    if not has_index and offload_dir is not None and any(tensor.is_meta for tensor in plan.tensors.values()):
        has_index = (Path(offload_dir) / "index.json").is_file()  # of an earlier offload_state_dict()
    if state_dict is None and not has_index:
        if any(tensor.is_meta for tensor in plan.tensors.values()):
            check_nothing_on_meta(model)
        return {}
    given = OffloadedWeightsLoader(
        state_dict=dict(state_dict or {}),
        save_folder=offload_dir if has_index else None,
        index=offload_index,
    )
    empty = {
        name: tensor
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        if tensor.is_meta
    }
    values = {name: given[name] for name in empty if name in given}
    known = {id(empty[name]) for name in values}
    hidden = get_non_persistent_buffers(model, recurse=True, fqns=True)
    refuse_without_values([name for name, tensor in empty.items() if id(tensor) not in known], hidden)
    for name, value in values.items():
        if value.shape != empty[name].shape:
            raise StateMismatchError(
                f"{name!r} has the shape {tuple(empty[name].shape)}, but its value has the shape {tuple(value.shape)}"
            )
    return values


def _fill(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Put values in place of tensors on the meta device; a tied tensor takes the value of its first name."""
    ties = find_tied_tensors(model)
    for name, value in values.items():
        set_module_tensor_to_device(model, name, CPU, value=value)
    retie_parameters(model, ties)


class _Plan:
    """Where each tensor of a model goes. A tensor with several names goes to the fastest of their devices."""

    def __init__(
        self,
        model: nn.Module,
        places: Mapping[str, torch.device | str],
        main: torch.device,
        streams: bool,
        buffers: bool,
    ) -> None:
        self.model = model
        self.places = places
        self.main = main
        self.streams = streams
        """Whether offloaded weights are copied to another device to compute with them."""
        self.offload_buffers = buffers
        self.moved: list[tuple[torch.Tensor, torch.Tensor | torch.device]] = []
        """Tensors that ``move`` moved, with their old data, or only the old device if keeping data would fill it."""
        self.tensors: dict[int, torch.Tensor] = {}
        self.homes: dict[int, torch.device | str] = {}
        self.names: dict[int, str] = {}
        for prefix, _, module in prefixed_modules(model):
            # Non-persistent buffers may be missing from the map; they go to the main device.
            around = device_of(prefix[:-1], places) or main
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    self._add(prefix + leaf, parameter, places.get(prefix + leaf, around))
            for leaf, buffer in module._buffers.items():
                if buffer is not None:
                    is_offloaded = buffers and leaf not in module._non_persistent_buffers_set
                    place = places.get(prefix + leaf, around)
                    self._add(
                        prefix + leaf, buffer, place if is_offloaded or place not in ("disk", CPU) else main
                    )

    def _add(self, name: str, tensor: torch.Tensor, place: torch.device | str) -> None:
        key = id(tensor)
        old = self.homes.get(key)
        if old is None or _slowness(place) < _slowness(old):
            self.homes[key] = place
        self.tensors[key] = tensor
        self.names.setdefault(key, name)

    def at(self, place: torch.device | str) -> dict[str, torch.Tensor]:
        """The tensors of a device by their first name."""
        return {self.names[key]: tensor for key, tensor in self.tensors.items() if self.homes[key] == place}

    def waiting(self) -> Collection[str]:
        """Entries of the map whose weights are offloaded."""
        return [name for name, place in self.places.items() if place in ("disk", CPU)]

    def move(self) -> None:
        """Move tensors to their devices, and offloaded ones to the host. If one cannot be moved, all go back."""
        try:
            for key, tensor in self.tensors.items():
                home = self.homes[key]
                target = CPU if home == "disk" else torch.device(home)
                if tensor.device != target:
                    old = tensor.data
                    set_data(tensor, old.to(target))
                    self.moved.append((tensor, old if old.is_cpu else old.device))
        except BaseException:
            self.put_back()
            raise

    def put_back(self) -> None:
        """Undo ``move``."""
        while self.moved:
            tensor, old = self.moved.pop()
            set_data(tensor, old if isinstance(old, torch.Tensor) else tensor.data.to(old))


def _slowness(place: torch.device | str) -> int:
    return 2 if place == "disk" else int(place == CPU)


def _loose(plan: _Plan) -> dict[str, nn.Parameter]:
    """Parameters to keep on disk that are not in a file. Buffers stay in memory, because forwards may change them."""
    return {
        name: tensor
        for name, tensor in plan.at("disk").items()
        if isinstance(tensor, nn.Parameter) and tensor.numel() and mapped_file_of(tensor) is None
    }


def _check_files(plan: _Plan, homes: Mapping[int, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Refuse parameters to keep on disk that will not be in a file.

    Args:
        plan: where tensors go.
        homes: host tensors of weights that a mover has on a device now, by identity.
        values: values that tensors on the meta device will get, by name.
    """
    loose = []
    for name, tensor in _loose(plan).items():
        later = values.get(name) if tensor.is_meta else homes.get(id(tensor))
        if later is None or later.dtype != tensor.dtype or mapped_file_of(later) is None:
            loose.append(name)
    if loose:
        raise OffloadError(
            f"{listed(sorted(loose))} are to be kept on disk, but are not in a mapped safetensors file; load them "
            "from one with load_checkpoint_and_dispatch, or pass offload_dir, a folder to write them to"
        )


def _keep_on_disk(plan: _Plan, folder: str | os.PathLike[str]) -> None:
    """Make every parameter that is kept on disk a view of a file."""
    if loose := _loose(plan):
        views = OffloadCache(folder).keep(loose)
        for name, tensor in loose.items():
            tensor.data = views[name]


def _groups(plan: _Plan, preload: Sequence[str] | None) -> list[Group]:
    return plan_groups(
        plan.model, plan.waiting(), preload_module_classes=preload, offload_buffers=plan.offload_buffers
    )


def _streamer(
    plan: _Plan, preload: Sequence[str] | None, budget: int | None, transfer: Transfer | None
) -> Streamer | None:
    """The streamer, if weights are offloaded from the device that computes."""
    if not plan.streams or not plan.waiting():
        return None
    groups = _groups(plan, preload)
    in_memory = [
        group.name for group in groups if all(plan.homes[id(t)] == CPU for t in group.tensors.values())
    ]
    transfer = transfer or AcceleratorTransfer(plan.main)
    return Streamer(plan.model, groups, transfer, budget=budget, in_memory=in_memory)


def _pager(plan: _Plan, preload: Sequence[str] | None, budget: int | None) -> Pager | None:
    """The pager, if the mapped files exceed the memory they may fill."""
    if plan.streams or not plan.waiting():
        return None
    if budget is None:
        budget = int(_MAPPED_SHARE * available_host_memory())
    tensors = plan.tensors.values()
    fits = sum(t.nbytes for t in tensors) <= budget  # quicker to compute, and enough for most models
    if fits or sum(t.nbytes for t in tensors if mapped_file_of(t) is not None) <= budget:
        return None
    return Pager(plan.model, _groups(plan, preload), budget=budget)


class WrongDevice(ModelHook):
    """Explains what to do when a forward fails because tensors are on different devices.

    Args:
        names: names of the tensors that the model had when it was dispatched.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)

    def forward_failed(self, module: nn.Module) -> None:
        """Look for tensors that were added, and for modules that use weights of their children."""
        error = sys.exception()
        if (
            not isinstance(error, RuntimeError)
            or isinstance(error, OffloadError)
            or "device" not in str(error)
        ):
            return
        tensors = (*module.named_parameters(), *module.named_buffers())
        added = [f"{name} (on {tensor.device})" for name, tensor in tensors if name not in self.names]
        if added:
            raise OffloadError(
                f"{error}. These tensors were added after dispatch and are not in the device map: {', '.join(added)}. "
                "Call dispatch_model again with a map that names them"
            ) from error
        where = _innermost_module(error)
        if where is not None and any(
            has_offloaded_params(below) for below in where.modules() if below is not where
        ):
            kind = type(where).__name__
            raise OffloadError(
                f"{error}. This comes from the forward of {kind}. If it uses weights of its submodules without "
                "calling them, these are not on the device at that time: dispatch the model with "
                f"preload_module_classes=[{kind!r}]"
            ) from error


def _innermost_module(error: BaseException) -> nn.Module | None:
    """The innermost module among the methods in which an error was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners = (frame.f_locals.get("self") for frame in reversed(frames))
    return next((owner for owner in owners if isinstance(owner, nn.Module)), None)


def _spread(plan: _Plan) -> bool:
    """Whether parts of the model are on several devices."""
    places = set(plan.places.values())
    return plan.main != CPU and (len(places) > 1 or not places.isdisjoint({"disk", CPU}))


def _hooks(
    plan: _Plan, skip_keys: str | Sequence[str] | None, force: bool
) -> Iterator[tuple[nn.Module, ModelHook]]:
    """The hooks that the modules of a model need."""
    model = plan.model
    if force or _spread(plan):
        for name, place in plan.places.items():
            device = plan.main if place in ("disk", CPU) else torch.device(place)
            owner = _module(model, name)
            if owner is not model:
                yield owner, align_inputs(device, skip_keys=skip_keys)
        own = align_inputs(plan.main, io_same_device=True, skip_keys=skip_keys)
        yield model, SequentialHook(WrongDevice(plan.names.values()), own)
    yield from _encoder_hook(model)


def _encoder_hook(model: nn.Module) -> Iterator[tuple[nn.Module, ModelHook]]:
    """A hook for the encoder of an encoder-decoder that moves outputs back to the device of the inputs.

    transformers' ``generate()`` requires this of the encoder's hook in a dispatched model. Without a hook it makes one
    of Accelerate's, and fails if Accelerate is not installed.
    """
    get_encoder = getattr(model, "get_encoder", None)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and callable(get_encoder):
        encoder = get_encoder()
        if isinstance(encoder, nn.Module) and encoder is not model and hook_of(encoder) is None:
            yield encoder, AlignDevicesHook(io_same_device=True)


def _guard(model: nn.Module) -> None:
    """Make methods raise that would move a model, alone or with a module that contains it."""
    for module in (model, _attribute_owner(model)):
        for name in MOVES:
            if hasattr(type(module), name):
                vars(module)[name] = _RefusalInside(module) if name == "_apply" else _Refusal(name)


def _module(model: nn.Module, name: str) -> nn.Module:
    """The module of a name, or the owner of the tensor of that name."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return model.get_submodule(name.rpartition(".")[0])


class _Refusal:
    """Replaces a method that would move a dispatched model."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.refuse()

    def refuse(self) -> NoReturn:
        """Raise the error."""
        raise OffloadError(
            f"model.{self.name}() would move some parts of a dispatched model away from where its device map puts "
            "them, and leave others behind. Load it again with another device_map, or call "
            "accel_bigmodel.undispatch(model) before moving it; the whole model must then fit the device"
        )


class _RefusalInside(_Refusal):
    """Replaces ``_apply``, by which a module that contains a dispatched model would move it.

    Changes of dtype only are allowed.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__("to")
        self.module = module

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        for device in {tensor.device for tensor in (*self.module.parameters(), *self.module.buffers())}:
            if fn(torch.empty(0, device=device)).device != device:
                self.refuse()
        return type(self.module)._apply(self.module, fn, *args, **kwargs)  # type: ignore[no-untyped-call]
