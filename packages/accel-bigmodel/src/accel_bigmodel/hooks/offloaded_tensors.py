"""Tensors that have no values between the calls that need them, and tensors that stand in for others during a call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from accel_bigmodel.errors import OffloadError
from accel_bigmodel.streaming.groups import never_called
from accel_ckpt.modules.tensors import rewrap

__all__ = ["BORROW_LOCK", "Borrowed", "OffloadedTensor", "TensorLocation", "tensor_locations", "wrapped_like"]


@dataclass(frozen=True)
class TensorLocation:
    """Where a module holds a parameter or buffer."""

    name: str
    """From the module down that was asked for its locations."""
    table: MutableMapping[str, Any]
    """The dictionary of the submodule that owns the tensor."""
    leaf: str
    is_parameter: bool
    is_saved: bool
    """It is in the state dict."""
    keeper: nn.Module | None
    """The submodule, if it has notes of its own of what is set, as recurrent layers have."""

    @property
    def tensor(self) -> Tensor:
        """What is there now."""
        found: Tensor = self.table[self.leaf]
        return found

    @property
    def is_empty(self) -> bool:
        """Whether somebody has taken the tensor away, as by ``layer.bias = None``."""
        return self.table.get(self.leaf) is None

    def put(self, tensor: Tensor) -> None:
        """Put another tensor there."""
        if self.keeper is None:
            self.table[self.leaf] = tensor
        else:
            setattr(self.keeper, self.leaf, tensor)


def tensor_locations(module: nn.Module, recurse: bool) -> list[TensorLocation]:
    """Where a module, and with ``recurse`` its submodules, hold their tensors.

    What is in parts that are never called, such as an ``nn.ParameterList``, is the module's own.
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
        if never_called(child):
            yield from _with_lists(f"{name}.{leaf}" if name else leaf, child)


_Kind = tuple[torch.device, torch.dtype]

# Held while the tensors of a call are put in place or taken away: threads may call a model at the same time, and
# modules may share tensors. A second call finds them in place, and the last one takes them away.
BORROW_LOCK = threading.RLock()


# One entry per tensor and per placeholder, by identity; entries go with the hooks that use them.
_by_identity: weakref.WeakValueDictionary[int, OffloadedTensor] = weakref.WeakValueDictionary()


class OffloadedTensor:
    """A parameter or buffer whose values wait elsewhere; one object for all modules that share the tensor.

    They then share the placeholder between calls, the values during calls that overlap, and at the end the tensor that
    comes back: tied stays tied.

    Attributes:
        placeholder: stands for it on the meta device; the tensor itself if that is where it is.
        device: where it was.
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
        """A copy has lent nothing. It brings back the copy of the tensor, where a tied module or the map copied it."""
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
        """Whether this is the tensor that was parked."""
        return tensor is self.placeholder or tensor is self._original()

    def borrow(self, device: torch.device, dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
        """The values on a device in a dtype, made by ``make`` unless they are on loan so already."""
        data, count = self._copies.get((device, dtype)) or (make(), 0)
        self._copies[device, dtype] = data, count + 1
        return data

    def give_back(self, device: torch.device, dtype: torch.dtype) -> bool:
        """End one loan.

        Returns:
            Whether it was the last one of its kind.
        """
        data, count = self._copies.pop((device, dtype))
        if count > 1:
            self._copies[device, dtype] = data, count - 1
        return count == 1

    def restore(self, value: Tensor) -> Tensor:
        """The tensor as it was, with these values: the same object if anyone still has it.

        What was done to the placeholder, as by ``half()`` or ``requires_grad_()``, holds for it too.
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
        """The values go, the placeholder stays."""
        self._is_back = False
        return self.placeholder


def wrapped_like(tensor: Tensor, data: Tensor) -> Tensor:
    """``data`` as what ``tensor`` is: a parameter with its class, attributes and ``requires_grad``, or a buffer."""
    return rewrap(tensor, data) if isinstance(tensor, nn.Parameter) else data


class Borrowed:
    """Tensors that stand in for a module's own during a call, one layer per call: a module may call itself."""

    def __init__(self) -> None:
        self._calls: list[list[tuple[TensorLocation, Tensor, Tensor, Callable[[], object]]]] = []

    def begin(self) -> None:
        """A call begins."""
        self._calls.append([])

    def put(self, location: TensorLocation, tensor: Tensor, ended: Callable[[], object] = bool) -> None:
        """Let ``tensor`` stand in for what is at ``location`` until the call ends.

        A gradient that would be accumulated in it, and lost with it, is refused.

        Args:
            location: of a module's tensor.
            tensor: with values.
            ended: called when the tensor has been taken away.
        """
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor.register_hook(_Refusal(location.name))  # type: ignore[no-untyped-call]
        self._calls[-1].append((location, location.tensor, tensor, ended))
        location.put(tensor)

    def end(self) -> None:
        """The call that began last ends; what ``forward`` itself put in place of a lent tensor stays."""
        with BORROW_LOCK:
            for location, own, tensor, ended in reversed(self._calls.pop() if self._calls else ()):
                if location.table.get(location.leaf) is tensor:
                    location.put(_beneath(own))
                else:  # another hook's tensor may stand over it, and be given back later
                    tensor._borrowed_over = own  # type: ignore[attr-defined]
                ended()

    def end_all(self) -> None:
        """Every call ends."""
        while self._calls:
            self.end()


def _beneath(tensor: Tensor) -> Tensor:
    """A tensor, or what it stood over if its own loan has ended meanwhile."""
    while (own := vars(tensor).get("_borrowed_over")) is not None:
        tensor = own
    return tensor


class _Refusal:
    """Raises when the gradient of a lent parameter has been computed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, grad: Tensor) -> NoReturn:
        raise OffloadError(
            f"a gradient was computed for {self.name!r}, whose values are only here during the forward, so it would be "
            "lost: freeze what is offloaded (requires_grad_(False)), or take the hook off before training"
        )
