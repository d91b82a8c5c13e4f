"""Which layers of a model are quantised, and which tensors stay in float32."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import nn

from accel_bigmodel.errors import QuantizationError
from accel_bigmodel.quantization.config import QuantizationConfig
from accel_ckpt.modules.ties import find_tied_parameters

__all__ = [
    "SelectedLayer",
    "get_keys_to_not_convert",
    "is_named",
    "kept_in_float32",
    "select_layers",
    "warn_of_unknown",
]


@dataclass(frozen=True, slots=True, eq=False)
class SelectedLayer:
    """A layer that is to be quantised."""

    module: nn.Linear
    names: tuple[str, ...]
    """All its names in the model; more than one if the module is used in several places."""


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """The modules whose precision counts most: the last one, which makes the output, and those with tied weights.

    Args:
        model: the model, on any device. If it is the body of a transformers model, without a head, only tied modules
            count.

    Returns:
        Their names; the last one first.
    """
    tied = sorted({name.rpartition(".")[0] for group in find_tied_parameters(model) for name in group})
    prefix = getattr(model, "base_model_prefix", None)
    is_body = isinstance(prefix, str) and not hasattr(model, prefix)
    last = [name for name, _ in model.named_children()][-1:]
    return list(dict.fromkeys(tied if is_body and not tied else [*last, *tied]))


def is_named(name: str, wanted: Iterable[str]) -> bool:
    """Whether a name is one of those wanted, lies below one, or has one of them between its dots."""
    dotted = f".{name}."
    return any(f".{each}." in dotted for each in wanted)


def kept_in_float32(model: nn.Module, config: QuantizationConfig) -> list[str]:
    """Names of modules that stay in float32: as configured, or else as transformers says for the model's class.

    What is listed there can also be what fails when it is quantised: T5 converts what goes into ``wo`` to the dtype of
    its weight, and with 4 bits that is uint8.
    """
    if config.keep_in_fp32_modules is not None:
        return list(config.keep_in_fp32_modules)
    listed = (getattr(model, f"_keep_in_fp32_modules{strictly}", None) or () for strictly in ("", "_strict"))
    return sorted({name for names in listed for name in names})


def select_layers(model: nn.Module, config: QuantizationConfig) -> list[SelectedLayer]:
    """The layers that are quantised: of the class ``nn.Linear`` itself, not skipped, with a weight of their own.

    A subclass may compute something else than the engine's layer that would replace it, or lend its weight to
    another module, as `nn.MultiheadAttention`'s does.

    Raises:
        QuantizationError: there is none; or one has hooks, which its replacement would not have.
    """
    skipped = get_keys_to_not_convert(model) if config.skip_modules is None else config.skip_modules
    skipped = [*skipped, *kept_in_float32(model, config)]
    places: dict[nn.Linear, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) is nn.Linear and "weight" in module._parameters and name:
            places.setdefault(module, []).append(name)
    users: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            users.setdefault(id(parameter), set()).add(module)
    layers = [
        SelectedLayer(module, tuple(names))
        for module, names in places.items()
        if len(users[id(module.weight)]) == 1 and not any(is_named(name, skipped) for name in names)
    ]
    _check(model, layers, skipped)
    return layers


def _check(model: nn.Module, layers: Collection[SelectedLayer], skipped: Collection[str]) -> None:
    if not layers:
        raise QuantizationError(
            f"{type(model).__name__} has no layer to quantise: only modules of the class nn.Linear are, inside of a "
            f"model, with a weight that no other module uses, and these are left out: {', '.join(skipped) or 'none'}. "
            "Name other skip_modules, or load the model without quantisation"
        )
    hooked = [layer.names[0] for layer in layers if _has_hooks(layer.module)]
    if hooked:
        raise QuantizationError(
            f"{', '.join(hooked)} have hooks, which would be lost: quantised layers are new modules. Register hooks "
            "after quantising, or name these in skip_modules; undispatch(model) takes off those of a dispatch"
        )


def _has_hooks(module: nn.Module) -> bool:
    tables = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    return any(tables) or "forward" in vars(module)  # as hooks of this library, and Accelerate's, replace it


def warn_of_unknown(model: nn.Module, config: QuantizationConfig) -> None:
    """Warn of names in the configuration that no module of the model has: a typing error would go unnoticed."""
    asked = [*(config.skip_modules or ()), *(config.keep_in_fp32_modules or ())]
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    unknown = [each for each in asked if not any(is_named(name, [each]) for name in names)]
    if unknown:
        warnings.warn(
            f"skip_modules or keep_in_fp32_modules name {', '.join(unknown)}, which no module of "
            f"{type(model).__name__} is called",
            stacklevel=4,
        )
