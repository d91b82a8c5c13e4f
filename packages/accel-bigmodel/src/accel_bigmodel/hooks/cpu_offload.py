"""CPU offload of whole models in a pipeline: each stays on the accelerator until another one is called."""

from __future__ import annotations

import itertools
from typing import Any, TypeVar

import torch
from torch import nn

from accel_bigmodel.hooks.base import ModelHook, add_hook_to_module, outside_graphs, remove_hook_from_module
from accel_bigmodel.hooks.devices import concrete_device
from accel_state.host.devices import default_device
from accel_state.host.memory import clear_device_cache
from accel_state.trees import send_to_device

__all__ = ["CpuOffload", "UserCpuOffloadHook", "cpu_offload_with_hook"]

Model = TypeVar("Model", bound=nn.Module)
_CPU = torch.device("cpu")


class CpuOffload(ModelHook):
    """Hook that keeps a model on the CPU until it is called; it then stays on the device until it is offloaded.

    Args:
        execution_device: the device that computes. Default: this machine's accelerator, or the CPU.
        prev_module_hook: hook of the previous model of the pipeline, which is moved to the CPU before this one is moved
            to the device.

    Raises:
        TypeError: ``prev_module_hook`` is not what :func:`cpu_offload_with_hook` returns.
        DeviceMapError: this machine has no such device.
    """

    def __init__(
        self,
        execution_device: str | int | torch.device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        if prev_module_hook is not None and not isinstance(prev_module_hook, UserCpuOffloadHook):
            raise TypeError(
                "prev_module_hook must be the hook that cpu_offload_with_hook returned for the previous model, got "
                f"{type(prev_module_hook).__name__}"
            )
        self.prev_module_hook = prev_module_hook
        self.execution_device = concrete_device(
            default_device() if execution_device is None else execution_device
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to the CPU."""
        return module.to(_CPU)

    @outside_graphs
    def pre_forward(
        self, module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Offload the previous model, then move this one and its inputs to the device."""
        previous = self.prev_module_hook
        if previous is not None and _device_of(previous.model) not in (None, _CPU):
            previous.offload()
            clear_device_cache()
        device = self.execution_device
        if _device_of(module) not in (None, device):
            try:
                module.to(device)
            except BaseException:  # the device is full: a later call would take the model as moved completely
                module.to(_CPU)
                raise
        return send_to_device(args, device), send_to_device(kwargs, device)


class UserCpuOffloadHook:
    """Controls a model that was given to :func:`cpu_offload_with_hook`.

    Attributes:
        model: the model.
        hook: the hook on it.
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model to the CPU, until it is called again."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hooks from the model, which stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: Model,
    execution_device: int | str | torch.device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[Model, UserCpuOffloadHook]:
    """Move a model to the CPU until it is called, and then to a device, where it stays until it is offloaded.

    For pipelines in which one model is called several times in a row, such as the denoiser of a diffusion model: pass
    each model the hook of the previous one, so that only one is on the device at a time.

    Args:
        model: changed in place.
        execution_device: the device that computes. Default: this machine's accelerator, or the CPU.
        prev_module_hook: the hook that this function returned for the previous model.

    Returns:
        The model, and the hook that moves it back (``offload()``) or is taken off it (``remove()``).

    Raises:
        TypeError, DeviceMapError: see :class:`CpuOffload`.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def _device_of(module: nn.Module) -> torch.device | None:
    """The device of the first tensor; a model moves as a whole."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return None if first is None else first.device
