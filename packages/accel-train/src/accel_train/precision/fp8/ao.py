"""fp8 with torchao: linear layers that scale both operands of their products and cast them to fp8."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from accel_ckpt.parts import fsdp_modules, is_sharded, reshard
from accel_state.host.available import torchao_required
from accel_state.log import get_logger
from accel_train.errors import IncompatibleOptionsError
from accel_train.optimizer_parameters import parameter_ids
from accel_train.plugins import AORecipeKwargs
from accel_train.precision.fp8.layers import Fp8Layers

__all__ = [
    "AOLayers",
    "convert_model_to_fp8_ao",
    "filter_first_and_last_linear_layers",
    "filter_linear_layers",
    "find_first_last_linear_layers",
    "has_ao_layers",
    "restore_linear_layers",
]

_logger = get_logger(__name__)

#: Attribute of layers that were converted here; its value: whether the weight is in one place only.
_OURS = "_accel_fp8_ao"
#: Sizes of products must be multiples of this; see torch._scaled_mm.
_MULTIPLE = 16
#: The smallest compute capability of CUDA devices with fp8 products (Ada).
_CAPABILITY = (8, 9)


class AOLayers(Fp8Layers):
    """Replaces linear layers by torchao's `Float8Linear`.

    Raises:
        IncompatibleOptionsError: the device cannot multiply in fp8.
    """

    def __init__(self, recipe: AORecipeKwargs, device_type: str) -> None:
        _check_device(recipe, device_type)
        self._recipe = recipe
        self._scales: list[weakref.ref[_Scales]] = []  # ordered: ranks compute them together

    def convert(self, model: nn.Module) -> nn.Module:
        """Convert the layers that the recipe selects."""
        # Weights are marked for gathering just before they are divided: until then they are plain parameters.
        config = dataclasses.replace(self._recipe.config, enable_fsdp_float8_all_gather=False)
        converted = convert_model_to_fp8_ao(model, config, self._recipe.module_filter_func)
        count = sum(1 for _ in _ours(converted))
        linear = sum(isinstance(module, nn.Linear) for module in converted.modules())
        if not count:
            _logger.warning(
                f"mixed_precision='fp8': none of the {linear} linear layers of {type(model).__name__} computes in fp8. "
                "By default the first, the last, and those with a size that is not divisible by 16 do not; "
                "AORecipeKwargs(module_filter_func=…) selects others"
            )
        else:
            _logger.info(
                f"{count} of {linear} linear layers of {type(model).__name__} compute in fp8 (torchao)"
            )
        return converted

    def before_sharding(self, module: nn.Module, whole: Collection[nn.Parameter]) -> None:
        """Let FSDP gather weights in fp8, if the recipe sets it."""
        if not self._recipe.config.enable_fsdp_float8_all_gather:
            return
        from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

        left = {id(parameter) for parameter in whole}
        for layer in _ours(module):
            weight = layer.weight
            # A tied weight is used by a layer that cannot compute with what is gathered.
            if not layer.__dict__[_OURS] or id(weight) in left or is_sharded(weight) or _is_marked(weight):
                continue
            marked = WeightWithDynamicFloat8CastTensor(
                weight.detach(), layer.linear_mm_config, layer.config.cast_config_weight.target_dtype
            )
            layer.weight = nn.Parameter(marked, requires_grad=weight.requires_grad)

    def after_sharding(self, model: nn.Module, prepared: nn.Module) -> None:
        """From now on, compute the scales of all gathered weights together after each step."""
        marked = [layer for layer in _ours(model) if _is_marked(getattr(layer.weight, "_local_tensor", None))]
        if not marked:
            return
        scales = _Scales(model, marked)
        prepared.register_forward_pre_hook(scales, prepend=True)
        self._scales = [known for known in self._scales if known() is not None] + [weakref.ref(scales)]

    def values_changed(self, model: nn.Module) -> None:
        """Discard the scales of weights whose values have changed."""
        for scales in self._known():
            if scales.model is model:
                scales.forget()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compute the scales of the weights that the optimizer may have changed. Collective."""
        known = self._known()
        if not known:
            return
        stepped = parameter_ids(optimizer)
        for scales in known:
            scales.compute(stepped)

    def _known(self) -> list[_Scales]:
        return [scales for reference in self._scales if (scales := reference()) is not None]


class _Scales:
    """Forward pre-hook of a divided model: scales are used only with the values that they were computed from.

    Without a computed scale each gathering of a weight computes its own, which gives the same number and costs a
    reduction per weight.

    Args:
        model: without wrappers.
        layers: of the model, whose weights are gathered in fp8.
    """

    def __init__(self, model: nn.Module, layers: list[Any]) -> None:
        self.model = model
        self._layers = layers
        self._weights = [layer.weight for layer in layers]  # divided; in a layer may be the gathered one
        self._versions: list[tuple[int, ...]] | None = None  # of the weights that have scales

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Forget scales if a script changed values since."""
        if torch.compiler.is_compiling():
            return
        if self._versions is not None and self._versions != [*map(_versions_of, self._weights)]:
            self.forget()

    def compute(self, stepped: Collection[int]) -> None:
        """Compute the scales of all weights by one reduction, if one of these parameters is among them."""
        if not any(id(weight) in stepped for weight in self._weights):
            return
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        reshard(self.model)  # torchao finds divided weights only
        precompute_float8_dynamic_scale_for_fsdp(self.model)
        self._versions = [*map(_versions_of, self._weights)]

    def forget(self) -> None:
        """Let the next gathering compute scales."""
        self._versions = None
        for weight in self._weights:
            weight._local_tensor._precomputed_scale = None


def _versions_of(weight: Any) -> tuple[int, ...]:
    # A change of the DTensor counts there, one of this rank's part at one of the tensors below.
    local = weight._local_tensor
    return weight._version, local._version, local._tensor._version


def _is_marked(tensor: object) -> bool:
    return tensor is not None and type(tensor).__name__ == "WeightWithDynamicFloat8CastTensor"


def _check_device(recipe: AORecipeKwargs, device_type: str) -> None:
    config = recipe.config
    if device_type in ("cpu", "xpu") or config.emulate:
        return
    if device_type != "cuda":
        raise IncompatibleOptionsError(
            f"mixed_precision='fp8' with torchao computes on CPU, CUDA and XPU devices, and this one is "
            f"{device_type!r}; use 'bf16'."
        )
    capability = torch.cuda.get_device_capability()
    if capability < _CAPABILITY:
        raise IncompatibleOptionsError(
            f"mixed_precision='fp8' needs a GPU of compute capability 8.9 or later (Ada, Hopper), and "
            f"{torch.cuda.get_device_name()} has {capability[0]}.{capability[1]}; use 'bf16' (or 'fp16' before "
            "Ampere). To try fp8 without its speed, pass AORecipeKwargs(config=Float8LinearConfig(emulate=True))."
        )


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module,
    config: Any = None,
    module_filter_func: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """Replace linear layers of a model by torchao's `Float8Linear`, in place; parameters stay the same objects.

    Layers that are not PyTorch's own (quantised or low-rank ones), or whose forward was replaced, stay as they are, and
    so do layers that were converted before. The new layer takes over the hooks of the old one.

    Args:
        model: the model.
        config: torchao's `Float8LinearConfig`; None: its default.
        module_filter_func: called with a layer and its name; returns whether to convert it. None: all except the
            model's first and last, and those with a size that is not divisible by 16.

    Returns:
        `model`, or the layer that replaces it if `model` itself is a layer to convert.
    """
    from torchao.float8 import convert_to_float8_training

    chosen = module_filter_func or functools.partial(
        filter_linear_layers, layers_to_filter=find_first_last_linear_layers(model)
    )
    replaced = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if _is_plain_linear(module) and chosen(module, name)
    }
    places = _places_of_parameters(model)
    converted: nn.Module = convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: replaced.get(name) is module
    )
    successors: dict[int, Any] = {}  # a layer in two places stays one
    for name, old in replaced.items():
        new = successors.setdefault(id(old), converted.get_submodule(name))
        if new is not converted.get_submodule(name):
            converted.set_submodule(name, new)
            continue
        _carry_over(old, new)
        new.__dict__[_OURS] = places[id(old.weight)] == 1
    return converted


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """The names of the first and the last `nn.Linear` of a model; None if it has none."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Iterable[str | None]) -> bool:
    """Whether a layer can compute in fp8: its sizes are divisible by 16, and its name is not in `layers_to_filter`.

    Args:
        module: the layer.
        fqn: its name.
        layers_to_filter: names of layers to leave out.
    """
    if isinstance(module, nn.Linear) and any(
        size % _MULTIPLE for size in (module.in_features, module.out_features)
    ):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Whether a layer of a model can compute in fp8: like `filter_linear_layers`, but not the first and the last.

    Args:
        module: the model that has the layer, or the layer itself.
        fqn: name of the layer in it.
    """
    layer = module if isinstance(module, nn.Linear) else module.get_submodule(fqn)
    return filter_linear_layers(layer, fqn, find_first_last_linear_layers(module))


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    """Whether a model has layers of torchao that compute in fp8."""
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(module, Float8Linear) for module in model.modules())


def restore_linear_layers(model: nn.Module) -> None:
    """Replace converted layers by plain linear layers again; divided ones stay."""
    if next(fsdp_modules(model), None) is not None:
        return  # the engine manages the weights in the layers that it found
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if not name or _OURS not in layer.__dict__:
            continue
        with torch.device("meta"):
            plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
        plain.weight, plain.bias = layer.weight, layer.bias
        _carry_over(layer, plain)
        model.set_submodule(name, plain)


def _ours(module: nn.Module) -> Iterator[Any]:
    return (layer for layer in module.modules() if _OURS in layer.__dict__)


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether a layer does what `nn.Linear` does; nn.MultiheadAttention's own layer is never called."""
    kind = type(module)
    return (
        isinstance(module, nn.Linear)
        and kind.forward is nn.Linear.forward
        and kind is not NonDynamicallyQuantizableLinear
        and "forward" not in vars(module)
    )


def _places_of_parameters(model: nn.Module) -> dict[int, int]:
    places: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            places[id(parameter)] = places.get(id(parameter), 0) + 1
    return places


def _carry_over(old: nn.Module, new: nn.Module) -> None:
    """Give a layer the mode and the hooks of the one that it replaces."""
    for name, value in vars(old).items():
        if name == "training" or name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
            new.__dict__[name] = value
