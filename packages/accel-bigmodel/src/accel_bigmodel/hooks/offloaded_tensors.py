"""Offloaded tensors, which have no values between calls, and tensors that replace a module's own during a call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from accel_bigmodel.containers import is_container
from accel_bigmodel.errors import OffloadError
from accel_ckpt.modules.tensors import rewrap

__all__ = ["BORROW_LOCK", "Borrowed", "OffloadedTensor", "TensorLocation", "tensor_locations", "wrapped_like"]


@dataclass(frozen=True)
class TensorLocation:
    """The location of a parameter or buffer in a module."""

    name: str
    """Relative to the module whose locations were listed."""
    table: MutableMapping[str, Any]
    """The dictionary of the submodule that registers the tensor."""
    leaf: str
    is_parameter: bool
    is_saved: bool
    """Whether the tensor is in the state dict."""
    keeper: nn.Module | None
    """The submodule, if it keeps its own references to what is set, as recurrent layers do."""

    @property
    def tensor(self) -> Tensor:
        """The tensor that is registered now."""
        found: Tensor = self.table[self.leaf]
        return found

    @property
    def is_empty(self) -> bool:
        """Whether the tensor was removed, as by ``layer.bias = None``."""
        return self.table.get(self.leaf) is None

    def put(self, tensor: Tensor) -> None:
        """Register another tensor."""
        if self.keeper is None:
            self.table[self.leaf] = tensor
        else:
            setattr(self.keeper, self.leaf, tensor)


def tensor_locations(module: nn.Module, recurse: bool) -> list[TensorLocation]:
    """The locations of the tensors of a module, and with ``recurse`` of its submodules.

    Tensors of submodules that are only containers, such as an ``nn.ParameterList``, count as the module's own.
    """
    found = []
    for prefix, owner in module.named_modules() if recurse else _with_lists("", module):
        dot = f"{prefix}." if prefix else ""
        keeper = None if type(owner).__setattr__ is nn.Module.__setattr__ else owner
        for table in (owner._parameters, owner._buffers):
            for leaf, tensor in table.items():
                if tensor is not None:
                    saved = leaf not in owner._non_persistent_buffers_set
                    found.append(
                        TensorLocation(dot + leaf, table, leaf, table is owner._parameters, saved, keeper)
                    )
    return found


def _with_lists(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield name, module
    for leaf, child in module.named_children():
        if is_container(child):
            yield from _with_lists(f"{name}.{leaf}" if name else leaf, child)


_Kind = tuple[torch.device, torch.dtype]

# Held while the tensors of a call are registered or removed: threads may call a model concurrently, and modules may
# share tensors. A second call uses those of the first, and the last one to end removes them.
BORROW_LOCK = threading.RLock()


# One entry per tensor and per placeholder, by identity; entries go with the hooks that use them.
_by_identity: weakref.WeakValueDictionary[int, OffloadedTensor] = weakref.WeakValueDictionary()


class OffloadedTensor:
    """A parameter or buffer whose values are offloaded; one object for all modules that share the tensor.

    The modules share the placeholder between calls, the values during overlapping calls, and the restored tensor at the
    end, so ties are kept.

    Attributes:
        placeholder: its substitute on the meta device; the tensor itself if it is there already.
        device: where it was originally.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        self.placeholder = tensor if tensor.is_meta else wrapped_like(tensor, tensor.detach().to("meta"))
        self._original = weakref.ref(tensor)
        self._is_back = False
        self._copies: dict[_Kind, tuple[Tensor, int]] = {}

    @classmethod
    def of(cls, tensor: Tensor) -> OffloadedTensor:
        """The one record of a tensor, made if there is none."""
        found = _by_identity.get(id(tensor))
        if found is None or not found.represents(tensor):
            found = cls(tensor)
            _by_identity[id(tensor)] = found
            _by_identity[id(found.placeholder)] = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no borrowed values. It restores the copy of the tensor, if a tied module or the map copied it."""
        return {"device": self.device, "placeholder": self.placeholder, "original": self._original()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["placeholder"])  # type: ignore[misc]
        self.device = state["device"]
        _by_identity[id(self.placeholder)] = self
        original = state["original"]
        if original is not None:
            self._original = weakref.ref(original)
            _by_identity[id(original)] = self

    def represents(self, tensor: Tensor) -> bool:
        """Whether this is the offloaded tensor or its placeholder."""
        return tensor is self.placeholder or tensor is self._original()

    def borrow(self, device: torch.device, dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
        """The values on a device in a dtype, made by ``make`` unless another call has borrowed them already."""
        data, count = self._copies.get((device, dtype)) or (make(), 0)
        self._copies[device, dtype] = data, count + 1
        return data

    def give_back(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return values that were borrowed once.

        Returns:
            Whether no other call has borrowed them.
        """
        data, count = self._copies.pop((device, dtype))
        if count > 1:
            self._copies[device, dtype] = data, count - 1
        return count == 1

    def restore(self, value: Tensor) -> Tensor:
        """The original tensor with these values: the same object if a reference to it still exists.

        Changes to the placeholder, as by ``half()`` or ``requires_grad_()``, apply to it too.
        """
        original, placeholder = self._original(), self.placeholder
        if original is None or original is placeholder:
            original = wrapped_like(placeholder, value.detach().to(self.device, placeholder.dtype))
            self._original = weakref.ref(original)
            _by_identity[id(original)] = self
        elif not self._is_back:
            original.data = value.detach().to(self.device, placeholder.dtype)
            original.requires_grad_(placeholder.requires_grad)
        self._is_back = True
        return original

    def release(self) -> Tensor:
        """Offload the tensor again; returns the placeholder."""
        self._is_back = False
        return self.placeholder


def wrapped_like(tensor: Tensor, data: Tensor) -> Tensor:
    """``data`` wrapped like ``tensor``: a parameter with its class, attributes and ``requires_grad``, or a buffer."""
    return rewrap(tensor, data) if isinstance(tensor, nn.Parameter) else data


class Borrowed:
    """Tensors that replace a module's own during a call; one list per call, because a module may call itself."""

    def __init__(self) -> None:
        self._calls: list[list[tuple[TensorLocation, Tensor, Tensor, Callable[[], object]]]] = []

    def begin(self) -> None:
        """A call begins."""
        self._calls.append([])

    def put(self, location: TensorLocation, tensor: Tensor, ended: Callable[[], object] = bool) -> None:
        """Register ``tensor`` at ``location`` until the call ends.

        A gradient for it is refused, because it would be lost with the tensor.

        Args:
            location: of a module's tensor.
            tensor: with values.
            ended: called after the tensor was removed.
        """
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor.register_hook(_Refusal(location.name))  # type: ignore[no-untyped-call]
        self._calls[-1].append((location, location.tensor, tensor, ended))
        location.put(tensor)

    def end(self) -> None:
        """End the latest call; a tensor that ``forward`` registered in place of a borrowed one stays."""
        with BORROW_LOCK:
            for location, own, tensor, ended in reversed(self._calls.pop() if self._calls else ()):
                if location.table.get(location.leaf) is tensor:
                    location.put(_beneath(own))
                else:  # another hook's tensor may have replaced it, and be removed later
                    tensor._borrowed_over = own  # type: ignore[attr-defined]
                ended()

    def end_all(self) -> None:
        """End every call."""
        while self._calls:
            self.end()


def _beneath(tensor: Tensor) -> Tensor:
    """A tensor, or the one that it replaced if it was itself borrowed and has been returned."""
    while (own := vars(tensor).get("_borrowed_over")) is not None:
        tensor = own
    return tensor


class _Refusal:
    """Raises when the gradient of a borrowed parameter is computed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, grad: Tensor) -> NoReturn:
        raise OffloadError(
            f"a gradient was computed for {self.name!r}, whose values are loaded only during the forward, so the "
            "gradient would be lost: freeze offloaded weights (requires_grad_(False)), or remove the hook before "
            "training"
        )
