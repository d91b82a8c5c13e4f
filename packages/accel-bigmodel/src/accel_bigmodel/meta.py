"""Building models without allocating memory for their weights.

PyTorch calls global registration hooks when a parameter, buffer or module is registered. The three that this module
installs act only inside its context managers, and only for the thread that entered them.
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
    """Context in which new modules have their parameters on the meta device: shapes without memory.

    Args:
        include_buffers: put persistent buffers there too. Non-persistent buffers keep their values, because only the
            constructor can make these again. By default the environment variable ``ACCELERATE_INIT_INCLUDE_BUFFERS``,
            otherwise False.

    Example:
        >>> with init_empty_weights():
        ...     model = torch.nn.Linear(100_000, 100_000)
        >>> model.weight.device
        device(type='meta')

    A parameter keeps its class, its attributes and ``requires_grad``, and one that is registered under two names stays
    one parameter. ``load_checkpoint_and_dispatch`` loads values into the model.
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Context in which new modules have their parameters on ``device``. The innermost context applies.

    Args:
        device: device of the parameters.
        include_buffers: put buffers there too; on the meta device, only persistent ones. On other devices, all tensors
            created in the context without a device are created there, as under ``with device:``. By default the
            environment variable ``ACCELERATE_INIT_INCLUDE_BUFFERS``, otherwise False.

    Raises:
        RuntimeError: this machine has no such device.
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
    """Makes empty tensors that do not fit in host memory on the meta device.

    A parameter is made with memory, which costs nothing until it is touched, and is freed when the parameter is
    registered. But the kernel refuses an allocation larger than its memory, such as the stacked experts of a large
    model.
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
    """One context, and how it moves the parameters and buffers registered in it."""

    def __init__(self, device: torch.device, include_buffers: bool) -> None:
        self._device = device
        self._include_buffers = include_buffers
        # Tensor as registered → its replacement, so that ties are kept.
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
        # The constructor may still compute with the values, and the module knows only after this registration whether
        # the buffer is persistent. So the buffer is moved when its module is complete: when it is registered in another
        # one.
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
        """Do this for all modules that were not registered in another one."""
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
    """A parameter or buffer without shape and data (lazy), as it would have been made for another device."""
    lazy = type(tensor)(tensor.requires_grad, device, tensor.dtype)
    lazy.__dict__.update(tensor.__dict__)
    return lazy


# A context variable: each thread has its own, and contexts nest.
_current: ContextVar[_InitContext | None] = ContextVar("accel_bigmodel_init_context", default=None)
_installing = threading.Lock()


def _active() -> _InitContext | None:
    # A forward may make modules, such as a slice of a ModuleList; torch.compile does not support context variables.
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

    They stay installed, and do nothing outside a context: PyTorch iterates over its hooks during a registration, so
    removing one would make a concurrent registration in another thread fail.
    """
    with _installing:
        if _parameter_hook not in hooks_of_torch._global_parameter_registration_hooks.values():
            # PyTorch's types declare hooks that return None; its documentation allows a replacement.
            hooks_of_torch.register_module_parameter_registration_hook(_parameter_hook)  # type: ignore[arg-type]
            hooks_of_torch.register_module_buffer_registration_hook(_buffer_hook)  # type: ignore[arg-type]
            hooks_of_torch.register_module_module_registration_hook(_module_hook)
