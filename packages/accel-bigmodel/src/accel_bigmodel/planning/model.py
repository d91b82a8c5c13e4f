"""The shape of an existing model, also on the meta device, for a plan."""

from __future__ import annotations

import copy
import fnmatch
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from accel_bigmodel.errors import EstimateError
from accel_bigmodel.planning.shape import ModelShape, UnitSizes, factored_size
from accel_ckpt.modules.experts import find_experts
from accel_ckpt.modules.tensors import check_is_module

__all__ = ["find_units", "shape_of_model", "text_config", "with_adapters"]


def find_units(model: nn.Module) -> list[nn.Module]:
    """Find the blocks that a strategy gathers at a time, as ``fsdp2`` does.

    They are modules of the classes in ``_no_split_modules`` of a transformers model, else the members of module lists
    with one class; of nested blocks the outer ones.
    """
    names = next(
        (found for module in model.modules() if (found := getattr(module, "_no_split_modules", None))), ()
    )
    named = _outermost(model, frozenset(names))
    return named or _repeated(model)


def text_config(model: nn.Module) -> Any:
    """The part of a transformers configuration that describes the text decoder; None: the model has none."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def shape_of_model(model: nn.Module, adapters: int = 0) -> ModelShape:
    """Count a model's parameters by unit.

    Args:
        model: on any device, meta included. ``requires_grad`` says what is trained.
        adapters: rank of the adapters in it, for reports.

    Raises:
        TypeError: ``model`` is no module.
    """
    check_is_module(model)
    units = find_units(model)
    divided = _divided(model)
    experts = find_experts(model)
    of_experts = {id(parameter) for each in experts for parameter in each.module.parameters()}
    seen: set[int] = set()
    layers = [_layer(unit, seen, divided, of_experts) for unit in units]
    outside = _layer(model, seen, divided, of_experts)
    first, last = _ends(model, units, divided, of_experts)
    text = text_config(model)
    heads = [getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    return ModelShape(
        name=type(model).__name__,
        units=tuple(layers),
        outside=outside,
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        tensors=sum(parameter.requires_grad for parameter in model.parameters()),
        hidden_size=int(getattr(text, "hidden_size", 0) or 0),
        tensor_parallel=tuple(head for head in heads if head) if divided else (),
        adapters=adapters,
        experts=math.gcd(*(each.count for each in experts)),
        routes=int(getattr(text, "num_experts_per_tok", 0) or 0) if experts else 0,
        first=first,
        last=last,
    )


def _ends(
    model: nn.Module, units: Sequence[nn.Module], divided: set[int], of_experts: set[int]
) -> tuple[UnitSizes | None, UnitSizes | None]:
    """The layers before and after the units; None where a pipeline cannot cut the model."""
    config = getattr(getattr(model, "base_model", model), "config", None)
    if hasattr(model, "get_input_embeddings") and not getattr(config, "base_model_pp_plan", None):
        return None, None
    inside = {id(parameter) for unit in units for parameter in unit.parameters()}
    ends: list[dict[int, nn.Parameter]] = [{}, {}]
    begun = False
    for parameter in (p for _, p in model.named_parameters(remove_duplicate=False)):
        begun = begun or id(parameter) in inside
        if id(parameter) not in inside:
            ends[begun][id(parameter)] = parameter
    if not begun or ends[0].keys() & ends[1].keys():  # stages would share a tied weight
        return None, None
    first, last = (_sizes([*end.values()], divided, of_experts) for end in ends)
    return first, last


class _Adapted(nn.Module):
    """A linear layer with a product of two small matrices beside it, as LoRA (Hu et al., 2021) adds."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        # In float32, as PEFT makes them for weights of 16 bits.
        self.down = nn.Linear(base.in_features, rank, bias=False, device="meta")
        self.up = nn.Linear(rank, base.out_features, bias=False, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.up(self.down(x.to(self.down.weight.dtype)))
        base: Tensor = self.base(x)
        return base + adapted.to(base.dtype)


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Copy a model to the meta device with LoRA adapters at every linear layer of its blocks; the rest is frozen.

    Raises:
        EstimateError: the rank is below 1, or no block has a linear layer.
    """
    if rank < 1:
        raise EstimateError(f"the rank of adapters is {rank}; give a number from 1 on")
    adapted = copy.deepcopy(model).requires_grad_(False)
    count = 0
    for unit in find_units(adapted):
        for module in [*unit.modules()]:
            for name, child in [*module.named_children()]:
                if isinstance(child, nn.Linear) and not isinstance(module, _Adapted):
                    setattr(module, name, _Adapted(child, rank))
                    count += 1
    if not count:
        raise EstimateError(
            f"{type(model).__name__} has no blocks with linear layers for adapters; leave the rank out"
        )
    return adapted


def _outermost(module: nn.Module, names: frozenset[str]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        found += [child] if type(child).__name__ in names else _outermost(child, names)
    return found


def _repeated(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        alike = isinstance(child, nn.ModuleList) and len({type(item) for item in child}) == 1
        found += [*child] if alike and isinstance(child, nn.ModuleList) else _repeated(child)
    return found


def _divided(model: nn.Module) -> set[int]:
    """The parameters that the model's own plan for tensor parallelism divides, by ``id``."""
    plan: dict[str, Any] = getattr(model, "_tp_plan", None) or {}
    plan = plan | (getattr(model, "tp_plan", None) or {})
    if not plan:
        return set()
    patterns = [name for name, how in plan.items() if isinstance(how, str) and _divides(how)]
    return {
        id(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if any(
            fnmatch.fnmatchcase(owner, pattern)
            for pattern in patterns
            for owner in (name, name.rpartition(".")[0])
        )
    }


def _divides(how: str) -> bool:
    return how.startswith(("colwise", "rowwise", "local_colwise", "local_rowwise", "packed", "embedding"))


def _layer(module: nn.Module, seen: set[int], divided: set[int], of_experts: set[int]) -> UnitSizes:
    own: list[nn.Parameter] = []
    for parameter in module.parameters():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            own.append(parameter)
    return _sizes(own, divided, of_experts)


def _sizes(own: Sequence[nn.Parameter], divided: set[int], of_experts: set[int]) -> UnitSizes:
    trained: Sequence[nn.Parameter] = [parameter for parameter in own if parameter.requires_grad]
    return UnitSizes(
        parameters=sum(map(Tensor.numel, own)),
        trainable=sum(map(Tensor.numel, trained)),
        factored=sum(factored_size(parameter.shape) for parameter in trained),
        divisible=sum(math.prod(parameter.shape) for parameter in own if id(parameter) in divided),
        largest=max(map(Tensor.numel, trained), default=0),
        experts=sum(parameter.numel() for parameter in own if id(parameter) in of_experts),
        trained_experts=sum(parameter.numel() for parameter in trained if id(parameter) in of_experts),
    )
