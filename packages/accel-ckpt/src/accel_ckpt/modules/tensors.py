"""Single tensors of a module: listing them, and setting one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from accel_ckpt.errors import StateMismatchError, UninitializedTensorError
from accel_ckpt.modules.names import listed
from accel_ckpt.modules.ties import parent_and_leaf
from accel_ckpt.tensor_storage import parse_dtype

__all__ = [
    "check_is_module",
    "check_nothing_on_meta",
    "get_non_persistent_buffers",
    "named_module_tensors",
    "set_module_tensor_to_device",
]


def check_is_module(model: object) -> None:
    """Check that a model is a module, not a name, a class or a state dict.

    Raises:
        TypeError: it is not; the message says what it is.
    """
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type):
        given = f"the class {model.__name__}, not an object of it"
    elif isinstance(model, str):
        given = f"the text {model!r}; only checkpoints can be given by name"
    else:
        given = f"one {type(model).__qualname__}"
    raise TypeError(
        f"the model is {given}; give a torch.nn.Module, which may have been built under init_empty_weights()"
    )


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """List the parameters, then the buffers of a module with their names.

    Args:
        module: the module.
        include_buffers: include buffers.
        recurse: include tensors of submodules.
        remove_non_persistent: leave out buffers that ``state_dict()`` leaves out.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    hidden = (
        get_non_persistent_buffers(module, recurse=recurse, fqns=recurse) if remove_non_persistent else set()
    )
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in hidden:
            yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Names of the buffers that ``state_dict()`` leaves out.

    Args:
        module: the module.
        recurse: include buffers of submodules.
        fqns: with ``recurse``, full names from ``module`` down, instead of the names inside each submodule.
    """
    if not recurse:
        return set(module._non_persistent_buffers_set)
    found: set[str] = set()
    for prefix, submodule in module.named_modules():
        names = submodule._non_persistent_buffers_set
        found |= {f"{prefix}.{name}" if prefix and fqns else name for name in names}
    return found


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: int | str | torch.device,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: MutableMapping[int, dict[torch.device, torch.Tensor]] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move one parameter or buffer to a device, with a new value if one is given.

    The parameter object is replaced; ``requires_grad`` and attributes set on it are kept. Other names of a
    tied parameter do not change: see ``tied_params_map`` and ``retie_parameters``.

    Args:
        module: the module, changed in place.
        tensor_name: full name from ``module`` down.
        device: the target device.
        value: the new value, of the same shape; needed when the tensor is on the meta device and ``device``
            is not.
        dtype: dtype of the result. Without it a ``value`` takes the dtype of the tensor that it replaces.
        fp16_statistics: the row statistics (``SCB``) of a bitsandbytes int8 ``value``.
        tied_params_map: address of a tensor's memory → device → the tensor that is on this device already; shared
            by several calls, so that a tied tensor exists once per device.
        non_blocking: as in ``Tensor.to``.
        clear_cache: has no effect: nothing is allocated that is not kept, so there is no cache to clear.

    Raises:
        AttributeError: there is no such tensor.
        StateMismatchError: the value has another shape.
        UninitializedTensorError: the tensor is on the meta device and no value is given.
    """
    owner, leaf = parent_and_leaf(module, tensor_name)
    is_buffer = leaf in owner._buffers
    if not is_buffer and leaf not in owner._parameters:
        raise AttributeError(
            f"{type(owner).__name__} has no parameter or buffer {leaf!r} (tensor_name is {tensor_name!r})"
        )
    old = owner._buffers[leaf] if is_buffer else owner._parameters[leaf]
    if old is None:
        raise AttributeError(f"{tensor_name!r} is registered as None and cannot be placed")
    target = torch.device(device)
    if value is None and old.device.type == "meta" and target.type != "meta":
        raise UninitializedTensorError(
            f"{tensor_name!r} is on the meta device; a value is needed to put it on {target}"
        )
    if value is not None and value.shape != old.shape:
        raise StateMismatchError(
            f"{tensor_name!r} has the shape {tuple(old.shape)}, but the value has {tuple(value.shape)}"
        )
    source = old if value is None else value
    wanted = _wanted_dtype(old, value, dtype)
    new = _shared(source, target, tied_params_map)
    if new is None or new.dtype != wanted:
        new = source.detach().to(target, wanted, non_blocking=non_blocking)
        if tied_params_map is not None and source.device.type != "meta":
            tied_params_map.setdefault(source.data_ptr(), {})[target] = new
    if is_buffer:
        owner._buffers[leaf] = new
    else:
        owner._parameters[leaf] = rewrap(old, new)
    if fp16_statistics is not None:
        owner._parameters[leaf].SCB = fp16_statistics.to(target)  # type: ignore[union-attr]


def _wanted_dtype(
    old: torch.Tensor, value: torch.Tensor | None, dtype: str | torch.dtype | None
) -> torch.dtype:
    if dtype is None:
        # Integer values are quantised weights: their dtype is the point of them.
        return old.dtype if value is None or value.dtype.is_floating_point else value.dtype
    source = old if value is None else value
    return parse_dtype(dtype) if source.dtype.is_floating_point else source.dtype


def _shared(
    source: torch.Tensor,
    target: torch.device,
    tied: MutableMapping[int, dict[torch.device, torch.Tensor]] | None,
) -> torch.Tensor | None:
    if tied is None or source.device.type == "meta":
        return None
    return tied.get(source.data_ptr(), {}).get(target)


def rewrap(old: Any, data: torch.Tensor) -> nn.Parameter:
    """Make a parameter from ``data`` with the class, attributes and ``requires_grad`` of another one."""
    grad = bool(old.requires_grad) and (data.dtype.is_floating_point or data.dtype.is_complex)
    new: nn.Parameter
    # A parameter over a tensor subclass, such as a quantised one, is of that class: isinstance() would say so, too.
    if issubclass(type(old), nn.Parameter) and type(data) in (torch.Tensor, nn.Parameter):
        # Not by its constructor, which may require unknown arguments; the attributes that it set are copied.
        new = torch.Tensor._make_subclass(type(old), data, grad)
    else:
        new = nn.Parameter(data, requires_grad=grad)
    new.__dict__.update(old.__dict__)
    return new


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Replace a tensor's data, also by data on another device; it stays the same object, with version and gradient.

    Some device types do not allow data of another device in ``tensor.data``. There the tensor is swapped with a new
    one, which torch allows as long as no autograd graph has saved it.

    Raises:
        RuntimeError: an autograd graph has saved the tensor, on such a device.
    """
    if torch._has_compatible_shallow_copy_type(tensor, data):
        tensor.data = data
        return
    gradient, tensor.grad = tensor.grad, None
    new = rewrap(tensor, data) if isinstance(tensor, nn.Parameter) else data.detach()
    version = None if tensor.is_inference() or new.is_inference() else tensor._version
    torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]
    if version is not None:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
    if gradient is not None:
        tensor.grad = gradient.to(data.device)


def check_nothing_on_meta(model: nn.Module) -> None:
    """Refuse a model that still has tensors without values.

    Raises:
        UninitializedTensorError: names these tensors, and says what fills them.
    """
    # Names are made for those models only that are refused.
    holders = (tensors for module in model.modules() for tensors in (module._parameters, module._buffers))
    if any(tensor is not None and tensor.is_meta for tensors in holders for tensor in tensors.values()):
        everything = (*model.named_parameters(), *model.named_buffers())
        left = [name for name, tensor in everything if tensor.is_meta]
        refuse_without_values(left, get_non_persistent_buffers(model, recurse=True, fqns=True))


def refuse_without_values(left: Sequence[str], hidden: Collection[str]) -> None:
    """Refuse tensors that are left on the meta device.

    Args:
        left: names of these tensors; may be empty.
        hidden: names of buffers that no checkpoint holds.

    Raises:
        UninitializedTensorError: `left` is not empty.
    """
    if not left:
        return
    buffers = [name for name in left if name in hidden]
    message = f"these tensors have no values yet (meta device): {listed(left)}"
    if len(buffers) < len(left):
        message += "; load their checkpoint first"
    if buffers:
        message += (
            f". No checkpoint holds {listed(buffers)}, because non-persistent buffers are not saved: build the "
            "model with real buffers (init_empty_weights(include_buffers=False)), or assign them before loading"
        )
    raise UninitializedTensorError(message)
