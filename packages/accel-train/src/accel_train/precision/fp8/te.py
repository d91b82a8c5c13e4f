"""fp8 with TransformerEngine: its own linear layers and layer norms, inside its own autocast.

The names used here are those of its public documentation (``transformer_engine.pytorch`` and
``transformer_engine.common.recipe``), of versions 1 and 2.
"""

from __future__ import annotations

import importlib
import inspect
import io
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from accel_ckpt.parts import fsdp_modules
from accel_state.errors import MissingDependencyError
from accel_state.host.available import is_transformer_engine_available
from accel_state.log import get_logger
from accel_train.errors import IncompatibleOptionsError
from accel_train.plugins import TERecipeKwargs
from accel_train.precision.autocast import PrecisionForward
from accel_train.precision.fp8.layers import Fp8Layers

__all__ = [
    "TELayers",
    "apply_fp8_autowrap",
    "contextual_fp8_autocast",
    "convert_model",
    "has_transformer_engine_layers",
    "restore_layers",
]

_logger = get_logger(__name__)

#: Attribute of layers that were converted here.
_OURS = "_accel_fp8_te"
#: Sizes of TransformerEngine's products in fp8 must be multiples of this.
_MULTIPLE = 16
#: Devices that TransformerEngine computes on.
DEVICE_TYPES = frozenset({"cuda"})
_EXTRA = "_extra_state"


class TELayers(Fp8Layers):
    """Replaces linear layers and layer norms by TransformerEngine's.

    Raises:
        IncompatibleOptionsError: the device cannot multiply in fp8.
    """

    def __init__(self, recipe: TERecipeKwargs, device_type: str) -> None:
        _check_device(device_type)
        self._during_eval = bool(recipe.use_autocast_during_eval)
        self._recipe = _make_recipe(recipe)
        self._models: list[weakref.ref[nn.Module]] = []  # in the order in which they were converted

    def convert(self, model: nn.Module) -> nn.Module:
        """Replace layers; parameters stay the same objects, so optimizers keep working."""
        converted = convert_model(model)
        ours = [layer for _, layer in _ours(converted)]
        if not any(isinstance(layer, _te().Linear) for layer in ours):
            _logger.warning(
                f"mixed_precision='fp8': no linear layer of {type(model).__name__} computes in fp8; TransformerEngine "
                "needs sizes that are divisible by 16"
            )
        known = [reference for reference in self._models if reference() not in (None, converted)]
        self._models = [*known, weakref.ref(converted)]
        return converted

    def wrap(self, model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Run the forward inside TransformerEngine's autocast; in evaluation only if the recipe sets it."""
        return TEForward(model, forward, self._recipe, self._during_eval)

    @property
    def has_state(self) -> bool:
        """Whether a model was converted."""
        return bool(self._alive())

    def state_dict(self) -> dict[str, Any] | None:
        """The histories from which scaling factors are computed, by model and layer."""
        found = {
            str(index): {name: _portable(layer.get_extra_state()) for name, layer in _ours(model)}
            for index, model in enumerate(self._alive())
        }
        return found or None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; layers that it does not know start without history."""
        for index, model in enumerate(self._alive()):
            saved = state.get(str(index), {})
            for name, layer in _ours(model):
                if saved.get(name) is not None:
                    layer.set_extra_state(_restored(saved[name]))

    def _alive(self) -> list[nn.Module]:
        return [model for reference in self._models if (model := reference()) is not None]


def _portable(state: Any) -> Any:
    """What a layer saves, as tensors: versions before 1.11 give a stream."""
    if isinstance(state, io.BytesIO):
        return {"stream": torch.frombuffer(bytearray(state.getvalue()), dtype=torch.uint8)}
    return state


def _restored(state: Any) -> Any:
    if isinstance(state, Mapping):
        return io.BytesIO(state["stream"].numpy().tobytes())
    return state


class TEForward(PrecisionForward):
    """A model's forward inside TransformerEngine's autocast.

    Args:
        model: the model, whose mode (training or evaluation) decides.
        forward: the forward that is called.
        recipe: a recipe of `transformer_engine.common.recipe`.
        during_eval: compute in fp8 in evaluation mode, too.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any], recipe: Any, during_eval: bool) -> None:
        self.model = model
        self.forward = forward
        self.recipe = recipe
        self.during_eval = during_eval

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs."""
        with _autocast(self.during_eval or self.model.training, self.recipe):
            return self.forward(*args, **kwargs)


def _te() -> Any:
    return importlib.import_module("transformer_engine.pytorch")


def _autocast(enabled: bool, recipe: Any) -> AbstractContextManager[Any]:
    te = _te()
    if hasattr(te, "fp8_autocast"):
        context: AbstractContextManager[Any] = te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)
    else:  # its name since 2.8
        context = te.autocast(enabled=enabled, recipe=recipe)
    return context


def _check_device(device_type: str) -> None:
    if device_type not in DEVICE_TYPES:
        raise IncompatibleOptionsError(
            f"mixed_precision='fp8' with TransformerEngine computes on NVIDIA GPUs, and this device is "
            f"{device_type!r}; use torchao (kwargs_handlers=[AORecipeKwargs()], --fp8_backend ao), or 'bf16'."
        )
    supported, reason = _supports("fp8")
    if not supported:
        raise IncompatibleOptionsError(
            f"mixed_precision='fp8': TransformerEngine cannot use fp8 on this device: {reason} Use 'bf16'."
        )


def _make_recipe(recipe: TERecipeKwargs) -> Any:
    """TransformerEngine's recipe for ours."""
    recipes = importlib.import_module("transformer_engine.common.recipe")
    wanted: dict[str, Any] = {
        "margin": recipe.margin,
        "fp8_format": getattr(recipes.Format, str(recipe.fp8_format)),
    }
    if recipe.use_mxfp8_block_scaling:
        supported, reason = _supports("mxfp8")
        if not supported:
            raise IncompatibleOptionsError(
                f"TERecipeKwargs(use_mxfp8_block_scaling=True): this device cannot use MXFP8: {reason} Leave "
                "it out for delayed scaling."
            )
        return _made(recipes.MXFP8BlockScaling, wanted)
    wanted |= {
        "interval": recipe.interval,
        "amax_history_len": recipe.amax_history_len,
        "amax_compute_algo": recipe.amax_compute_algo,
        "override_linear_precision": recipe.override_linear_precision,
    }
    harmless = {"interval": 1, "override_linear_precision": (False, False, False)}
    known = inspect.signature(recipes.DelayedScaling).parameters
    for name, default in harmless.items():
        if name in known:
            continue
        if wanted.pop(name) != default:
            raise IncompatibleOptionsError(
                f"TERecipeKwargs({name}={getattr(recipe, name)!r}): the installed version of TransformerEngine has no "
                f"such option any more. Leave it out, or set it to {default!r}."
            )
    return _made(recipes.DelayedScaling, wanted)


def _made(kind: Any, options: dict[str, Any]) -> Any:
    try:
        return kind(**options)
    except (AssertionError, ValueError) as error:
        raise IncompatibleOptionsError(
            f"TERecipeKwargs: TransformerEngine's {kind.__name__} refuses {options!r}: {error}"
        ) from error


def _supports(kind: str) -> tuple[bool, str]:
    """Whether this device computes in "fp8" or "mxfp8", and if not, why not."""
    te = _te()
    if hasattr(te, f"is_{kind}_available"):  # since 2.8
        found: tuple[bool, str] = getattr(te, f"is_{kind}_available")(return_reason=True)
    else:
        found = getattr(importlib.import_module("transformer_engine.pytorch.fp8"), f"check_{kind}_support")()
    return found


def _require(function: str) -> None:
    if not is_transformer_engine_available():
        raise MissingDependencyError(
            f"{function} needs transformer-engine: pip install --no-build-isolation 'transformer-engine[pytorch]'"
        )


def convert_model(
    model: nn.Module,
    to_transformer_engine: bool = True,
    _convert_linear: bool = True,
    _convert_ln: bool = True,
) -> nn.Module:
    """Replace linear layers and layer norms by TransformerEngine's, in place, or back.

    Parameters stay the same objects, so optimizers keep working. Linear layers with a size that is not divisible by 16
    stay as they are, and so do layers that are not PyTorch's own.

    Args:
        model: the model; it is not replaced itself.
        to_transformer_engine: False: restore PyTorch's layers.

    Returns:
        `model`.
    """
    _require("convert_model")
    if not to_transformer_engine:
        restore_layers(model, linear=_convert_linear, norms=_convert_ln)
        return model
    successors: dict[int, nn.Module] = {}  # a layer in two places stays one
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if not name:
            continue
        if id(layer) not in successors:
            new = _successor(layer, linear=_convert_linear, norms=_convert_ln)
            if new is None:
                continue
            successors[id(layer)] = new
        model.set_submodule(name, successors[id(layer)])
    return model


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Whether a model has layers of TransformerEngine."""
    _require("has_transformer_engine_layers")
    te = _te()
    return any(
        isinstance(module, (te.LayerNorm, te.Linear, te.TransformerLayer)) for module in model.modules()
    )


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Wrap `model_forward` in a method that runs it inside TransformerEngine's autocast.

    Args:
        model_forward: the bound forward of the model.
        fp8_recipe: a recipe of `transformer_engine.common.recipe`.
        use_during_eval: also in evaluation mode.

    Returns:
        A function of the model and the arguments of `model_forward`; its ``__wrapped__`` is `model_forward`.
    """
    _require("contextual_fp8_autocast")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _autocast(use_during_eval or self.training, fp8_recipe):
            return model_forward(*args, **kwargs)

    forward.__wrapped__ = model_forward  # type: ignore[attr-defined]
    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: TERecipeKwargs | None) -> nn.Module:
    """Make `model.forward` run inside TransformerEngine's autocast; returns `model`.

    Args:
        model: the model; its layers stay as they are, see `convert_model`.
        fp8_recipe_handler: None: a default recipe.
    """
    _require("apply_fp8_autowrap")
    recipe = fp8_recipe_handler or TERecipeKwargs()
    model.forward = TEForward(
        model, model.forward, _make_recipe(recipe), bool(recipe.use_autocast_during_eval)
    )
    return model


def restore_layers(model: nn.Module, *, linear: bool = True, norms: bool = True) -> None:
    """Replace converted layers by PyTorch's again, with the same parameters."""
    if next(fsdp_modules(model), None) is not None:
        return  # the engine manages the weights in the layers that it found
    te = _te()
    for name, layer in list(_ours(model)):
        if not (linear if isinstance(layer, te.Linear) else norms):
            continue
        plain: Any
        with torch.device("meta"):
            if isinstance(layer, te.Linear):
                plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
            else:
                plain = nn.LayerNorm(tuple(layer.weight.shape), eps=layer.eps)
        bias = layer.__dict__[_OURS]
        plain.weight, plain.bias = layer.weight, layer.bias if bias else None
        plain.train(layer.training)
        model.set_submodule(name, plain)


def _ours(model: nn.Module) -> Iterator[tuple[str, Any]]:
    named = model.named_modules(remove_duplicate=False)
    return ((name, module) for name, module in named if _OURS in module.__dict__)


def _successor(layer: nn.Module, *, linear: bool, norms: bool) -> Any:
    """TransformerEngine's layer for one of PyTorch's, with its parameters; None: it stays."""
    kind, te = type(layer), _te()
    if "forward" in vars(layer):
        return None
    if linear and isinstance(layer, nn.Linear) and kind.forward is nn.Linear.forward:
        if any(size % _MULTIPLE for size in layer.weight.shape):
            return None
        has_bias = layer.bias is not None
        new = te.Linear(
            layer.in_features,
            layer.out_features,
            bias=has_bias,
            params_dtype=layer.weight.dtype,
            device="meta",  # the parameters below take the place of its own
        )
    elif norms and isinstance(layer, nn.LayerNorm) and kind.forward is nn.LayerNorm.forward:
        # TransformerEngine normalises over the last dimension, and always has both parameters.
        if len(layer.normalized_shape) != 1 or layer.weight is None or layer.bias is None:
            return None
        has_bias = True
        new = te.LayerNorm(
            layer.normalized_shape[0], eps=layer.eps, params_dtype=layer.weight.dtype, device="meta"
        )
    else:
        return None
    new.weight = layer.weight
    if has_bias:
        new.bias = layer.bias
    new.train(layer.training)
    new.__dict__[_OURS] = has_bias
    _hide_extra_state(new)
    return new


def _hide_extra_state(layer: Any) -> None:
    """Keep what a layer saves beside its parameters out of state dicts, so that their names are the plain model's.

    `TELayers.state_dict` saves it.
    """

    def hide(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state.pop(prefix + _EXTRA, None)

    def excuse(module: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [key for key in keys.missing_keys if key.rpartition(".")[2] != _EXTRA]

    layer.register_state_dict_post_hook(hide)
    layer.register_load_state_dict_post_hook(excuse)
