"""Selects the layers of a model to quantise, and the modules that stay in float32."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import nn

from accel_bigmodel.errors import QuantizationError
from accel_bigmodel.quantization.config import QuantizationConfig
from accel_ckpt.modules.ties import find_tied_parameters
from accel_state.messages import warn

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
    """A layer to quantise."""

    module: nn.Linear
    names: tuple[str, ...]
    """All its names in the model; several if the module is shared."""


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Find the modules that are most sensitive to precision: the output layer, and those with tied weights.

    Args:
        model: on any device. For the body of a transformers model, without a head, only tied modules are returned.

    Returns:
        Their names; the output layer, which is the last module, comes first.
    """
    tied = sorted({name.rpartition(".")[0] for group in find_tied_parameters(model) for name in group})
    prefix = getattr(model, "base_model_prefix", None)
    is_body = isinstance(prefix, str) and not hasattr(model, prefix)
    last = [name for name, _ in model.named_children()][-1:]
    return list(dict.fromkeys(tied if is_body and not tied else [*last, *tied]))


def is_named(name: str, wanted: Iterable[str]) -> bool:
    """Whether a name is one of `wanted`, is below one of them, or contains one of them between dots."""
    dotted = f".{name}."
    return any(f".{each}." in dotted for each in wanted)


def kept_in_float32(model: nn.Module, config: QuantizationConfig) -> list[str]:
    """Names of modules that stay in float32: as configured, otherwise those that transformers lists for the model's
    class.

    That list also contains modules that would fail when quantised: T5 converts the input of ``wo`` to the dtype of its
    weight, which is uint8 with 4 bits.
    """
    if config.keep_in_fp32_modules is not None:
        return list(config.keep_in_fp32_modules)
    listed = (getattr(model, f"_keep_in_fp32_modules{strictly}", None) or () for strictly in ("", "_strict"))
    return sorted({name for names in listed for name in names})


def select_layers(model: nn.Module, config: QuantizationConfig) -> list[SelectedLayer]:
    """Select the layers to quantise: of the class ``nn.Linear`` itself, not skipped, with a weight that is not shared.

    A subclass may compute something else than the engine's layer that would replace it, or another module may use its
    weight, as in `nn.MultiheadAttention`.

    Raises:
        QuantizationError: there is no such layer, or one has hooks, which its replacement would not have.
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
            f"{type(model).__name__} has no layer to quantise: only submodules of the class nn.Linear whose weight no "
            f"other module uses can be quantised, and these are skipped: {', '.join(skipped) or 'none'}. Choose other "
            "skip_modules, or load the model without quantisation"
        )
    hooked = [layer.names[0] for layer in layers if _has_hooks(layer.module)]
    if hooked:
        raise QuantizationError(
            f"{', '.join(hooked)} have hooks, which would be lost, because quantised layers are new modules. Register "
            "hooks after quantising, or name these layers in skip_modules; undispatch(model) removes the hooks of a "
            "dispatched model"
        )


def _has_hooks(module: nn.Module) -> bool:
    tables = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    return any(tables) or "forward" in vars(module)  # hooks of this library and of Accelerate replace it


def warn_of_unknown(model: nn.Module, config: QuantizationConfig) -> None:
    """Warn about names in the configuration that no module has, which would otherwise hide a typing error."""
    asked = [*(config.skip_modules or ()), *(config.keep_in_fp32_modules or ())]
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    unknown = [each for each in asked if not any(is_named(name, [each]) for name in names)]
    if unknown:
        warn(
            f"skip_modules or keep_in_fp32_modules contain {', '.join(unknown)}, but no module of "
            f"{type(model).__name__} has such a name",
        )
