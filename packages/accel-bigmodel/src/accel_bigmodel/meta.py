"""Building models without memory for their weights.

Registering a parameter, buffer or module passes through PyTorch's global registration hooks. The three that this
module installs act only inside of its context managers, and there only for the thread that entered them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks_of_torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from accel_ckpt.modules.tensors import rewrap
from accel_state import environment

__all__ = ["init_empty_weights", "init_on_device"]

_INCLUDE_BUFFERS = "ACCELERATE_INIT_INCLUDE_BUFFERS"


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Inside of this context new modules have their parameters on the meta device: shapes, but no memory.

    Args:
        include_buffers: put buffers there too, but only those that checkpoints hold. The values of non-persistent
            buffers are kept: nothing but the constructor could make them again. By default the variable
            ``ACCELERATE_INIT_INCLUDE_BUFFERS``, or else False.

    Example:
        >>> with init_empty_weights():
        ...     model = torch.nn.Linear(100_000, 100_000)
        >>> model.weight.device
        device(type='meta')

    A parameter keeps its class, its attributes and ``requires_grad``, and one that is registered under two names
    stays one parameter. ``load_checkpoint_and_dispatch`` fills the model.
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Inside of this context new modules have their parameters on ``device``. The innermost context counts.

    Args:
        device: where they go.
        include_buffers: put buffers there too; on the meta device, the persistent ones. On other devices every
            tensor that is made in the context without a device is made there, as under ``with device:``. By
            default the variable ``ACCELERATE_INIT_INCLUDE_BUFFERS``, or else False.

    Raises:
        RuntimeError: there is no such device.
    """
    if include_buffers is None:
        include_buffers = environment.parse_flag_from_env(_INCLUDE_BUFFERS, False)
    target = torch.empty(0, device=device).device  # with its index
    context = _InitContext(target, include_buffers)
    everything: AbstractContextManager[Any] = nullcontext()
    if target.type == "meta":
        everything = _EmptyWithoutRoom()
    elif include_buffers:
        everything = target
    _install()
    token = _current.set(context)
    try:
        with everything:
            yield
    finally:
        _current.reset(token)
        context.finish_all()


class _EmptyWithoutRoom(TorchFunctionMode):
    """Makes an empty tensor that the host has no room for on the meta device.

    A parameter is made with memory, which costs nothing as long as it is not touched, and leaves it when it is
    registered. But the kernel refuses to promise more than there is: the stacked experts of a large model, for one.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        try:
            return func(*args, **options)
        except RuntimeError:
            if func is not torch.empty or torch.device(options.get("device") or "cpu").type != "cpu":
                raise
            return func(*args, **{**options, "device": "meta"})


class _InitContext:
    """What one context does to the parameters and buffers that are registered in it."""

    def __init__(self, device: torch.device, include_buffers: bool) -> None:
        self._device = device
        self._include_buffers = include_buffers
        # Tensor as it was registered → what stands for it, so that ties stay ties.
        self._moved = WeakIdKeyDictionary()
        # Modules with buffers that will move to the meta device, by id.
        self._unfinished: dict[int, nn.Module] = {}

    def parameter(self, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.device == self._device:
            return None
        if parameter not in self._moved:
            self._moved[parameter] = self._move_parameter(parameter)
        moved: nn.Parameter = self._moved[parameter]
        return moved

    def _move_parameter(self, parameter: Any) -> nn.Parameter:
        if is_lazy(parameter):
            lazy: nn.Parameter = _lazy_on(self._device, parameter)
            return lazy
        return rewrap(parameter, parameter.detach().to(self._device))

    def buffer(self, module: nn.Module, buffer: torch.Tensor | None) -> torch.Tensor | None:
        if not self._include_buffers:
            return None
        if self._device.type != "meta":
            return None if buffer is None else self._move_buffer(buffer)
        # The constructor may still compute with the values, and only after this registration the module knows
        # whether the buffer is persistent. So it is emptied when the module is given to another one, as it is when
        # it is complete.
        self._unfinished[id(module)] = module
        return None

    def finish(self, module: nn.Module | None) -> None:
        """Move the persistent buffers of a module to the meta device."""
        if module is None or self._unfinished.pop(id(module), None) is None:
            return
        for name, buffer in module._buffers.items():
            hidden = name in module._non_persistent_buffers_set
            if buffer is not None and not hidden:
                module._buffers[name] = self._move_buffer(buffer)

    def finish_all(self) -> None:
        """Do this for all modules that were given to no other one."""
        for module in list(self._unfinished.values()):
            self.finish(module)

    def _move_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        if buffer not in self._moved:
            self._moved[buffer] = (
                _lazy_on(self._device, buffer) if is_lazy(buffer) else buffer.to(self._device)
            )
        moved: torch.Tensor = self._moved[buffer]
        return moved


def _lazy_on(device: torch.device, tensor: Any) -> Any:
    """A parameter or buffer that has neither shape nor data yet, as it would have been made for another device."""
    lazy = type(tensor)(tensor.requires_grad, device, tensor.dtype)
    lazy.__dict__.update(tensor.__dict__)
    return lazy


# A context variable: each thread has its own, and contexts nest.
_current: ContextVar[_InitContext | None] = ContextVar("accel_bigmodel_init_context", default=None)
_installing = threading.Lock()


def _active() -> _InitContext | None:
    # A forward may make modules, as a slice of a ModuleList is one; torch.compile knows no context variables.
    return None if torch.compiler.is_compiling() else _current.get()


def _parameter_hook(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    context = _active()
    return None if context is None else context.parameter(parameter)


def _buffer_hook(module: nn.Module, name: str, buffer: torch.Tensor | None) -> torch.Tensor | None:
    context = _active()
    return None if context is None else context.buffer(module, buffer)


def _module_hook(module: nn.Module, name: str, child: nn.Module | None) -> None:
    context = _active()
    if context is not None:
        context.finish(child)


def _install() -> None:
    """Install the hooks, once per process.

    They stay, and do nothing outside of a context: PyTorch iterates over its hooks while it registers, and
    removing one would fail a registration that another thread is in the midst of.
    """
    with _installing:
        if _parameter_hook not in hooks_of_torch._global_parameter_registration_hooks.values():
            # PyTorch declares hooks that return None, and documents ones that return a replacement.
            hooks_of_torch.register_module_parameter_registration_hook(_parameter_hook)  # type: ignore[arg-type]
            hooks_of_torch.register_module_buffer_registration_hook(_buffer_hook)  # type: ignore[arg-type]
            hooks_of_torch.register_module_module_registration_hook(_module_hook)
