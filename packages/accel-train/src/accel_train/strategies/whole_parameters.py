"""Whole parameters of a divided model for a while: to read, to change, or to call the model without other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import accel_ckpt
from accel_ckpt.parts import fill_part, gathered, is_sharded, reshard
from accel_state.operations.collectives import broadcast
from accel_train.errors import PrepareError

__all__ = ["whole_parameters"]

#: Modules of the hooks that join what ranks compute from their parts of a sequence.
_SEQUENCES = ("accel_train.sequence.",)
#: Modules of these, and of the hooks that gather, cut or compare what ranks hold parts of.
_ENGINES = (
    *_SEQUENCES,
    "torch.distributed.",
    "accel_train.strategies.",
    "transformers.integrations.tensor_parallel",
)


@contextmanager
def whole_parameters(
    model: nn.Module, plain: nn.Module, device: torch.device, *, write_back: bool
) -> Iterator[None]:
    """Replace `DTensor`s by whole parameters inside the context; see `StateAdapter.whole_parameters`.

    Args:
        model: the prepared model.
        plain: the same without wrappers.
        device: device of the whole parameters.
        write_back: whether rank 0's values are kept.
    """
    reshard(plain)
    slots = _slots(plain)
    whole = _gathered([parameter for _, _, parameter in slots], device)
    for module, name, parameter in slots:
        module._parameters[name] = whole.get(id(parameter), parameter)
    removed = _without_engines([model, *plain.modules()], _ENGINES if whole else _SEQUENCES)
    try:
        yield
        values = _written(slots, whole) if write_back else {}
    finally:
        for module, name, parameter in slots:
            module._parameters[name] = parameter
        for hooks, before in removed:
            added = {key: hook for key, hook in hooks.items() if key not in before}
            hooks.clear()
            hooks.update({**before, **added})
    with torch.no_grad():
        for _, _, parameter in slots:
            if id(parameter) in values:
                fill_part(parameter, values[id(parameter)])


def _slots(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


@torch.no_grad()
def _gathered(parameters: list[nn.Parameter], device: torch.device) -> dict[int, nn.Parameter]:
    """A whole copy of each divided parameter, by the `id` of its part. Collective."""
    found: dict[int, nn.Parameter] = {}
    for parameter in parameters:
        if is_sharded(parameter) and id(parameter) not in found:
            values = gathered(parameter).to(device)
            found[id(parameter)] = nn.Parameter(values.clone(), parameter.requires_grad)
    return found


def _without_engines(
    modules: list[nn.Module], sources: tuple[str, ...]
) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Take away the forward hooks of engines; returns the dictionaries of hooks, and what they held."""
    removed = []
    for module in modules:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            engines = [key for key, hook in hooks.items() if _is_from(hook, sources)]
            if engines:
                removed.append((hooks, dict(hooks)))
                for key in engines:
                    del hooks[key]
    return removed


def _is_from(hook: Any, sources: tuple[str, ...]) -> bool:
    hook = getattr(hook, "func", hook)  # of a partial
    return str(getattr(hook, "__module__", "")).startswith(sources)


def _written(
    slots: list[tuple[nn.Module, str, nn.Parameter]], whole: dict[int, nn.Parameter]
) -> dict[int, Tensor]:
    """Rank 0's values of every parameter, on all ranks, by the `id` of what is in the model outside. Collective.

    Raises:
        PrepareError: on all ranks, a parameter of rank 0 has another shape, or is gone.
    """
    values: dict[int, Tensor] = {}
    for _, _, parameter in slots:
        values.setdefault(id(parameter), whole.get(id(parameter), parameter).detach())

    def take() -> None:
        for module, name, parameter in slots:
            there, kept = module._parameters.get(name), values[id(parameter)]
            if there is None or there.shape != kept.shape:
                raise PrepareError(
                    f"whole_parameters(write_back=True): {name!r} of {type(module).__name__} has the shape "
                    f"{None if there is None else list(there.shape)} now, and had {list(kept.shape)}. Nothing was "
                    "written. Change values in place (`parameter.copy_(values)` under torch.no_grad())."
                )
            if there.data_ptr() != kept.data_ptr():
                with torch.no_grad():
                    kept.copy_(there)

    accel_ckpt.run_together(
        take, accel_ckpt.default_coordinator(), doing="writing whole parameters back", error=PrepareError
    )
    broadcast(list(values.values()))
    return values
