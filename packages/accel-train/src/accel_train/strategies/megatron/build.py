"""Building this rank's stage of a model from Megatron-core's layers, with the given model's values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accel_ckpt import NamedModel, Part
from accel_state.operations.collectives import broadcast
from accel_train.errors import OptionError, PrepareError
from accel_train.strategies.megatron.attention import FusedAttention
from accel_train.strategies.megatron.families import Architecture, architecture_of
from accel_train.strategies.megatron.layout import Dims, Rule, WholeTensor
from accel_train.strategies.megatron.norms import layer_specs
from accel_train.strategies.megatron.options import (
    divide_other,
    provided_options,
    transformer_options,
)
from accel_train.strategies.megatron.plugin import MegatronLMPlugin
from accel_train.strategies.megatron.runtime import Groups

__all__ = ["Built", "build", "empty_out", "rule_of"]

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")


@dataclass
class Built:
    """A stage of a model.

    Attributes:
        module: Megatron's model, or what `custom_model_provider_function` returned.
        config: its `TransformerConfig`.
        architecture: the architecture; None: a model of the script's own.
        rules: rule for the values of each parameter, by the parameter's own name.
        dims: sizes that determine this rank's shares.
    """

    module: Any
    config: Any
    architecture: Architecture | None
    rules: dict[str, Rule]
    dims: Dims

    def parameters(self) -> Iterator[tuple[Rule, nn.Parameter]]:
        """Every parameter with its rule."""
        for name, parameter in self.module.named_parameters():
            yield self.rules[name], parameter


def build(
    plugin: MegatronLMPlugin,
    model: nn.Module,
    groups: Groups,
    device: torch.device,
    compute: torch.dtype | None,
) -> Built:
    """Build this rank's stage on its device, with the values that rank 0 has in `model`.

    Args:
        plugin: has the degrees and options.
        model: a transformers model; with a model provider of the script its values are not read.
        groups: this rank's index in Megatron's process groups.
        device: device of this rank.
        compute: dtype that the model computes in; None: float32.

    Raises:
        OptionError: Megatron-core's layers cannot compute the model.
        IncompatibleOptionsError: the model does not fit the degrees.
    """
    provider = plugin.custom_model_provider_function
    if provider is not None:
        return _provided(plugin, provider, groups, device, compute)
    architecture = architecture_of(getattr(model, "config", None))
    _check_head(model)
    options = transformer_options(plugin, architecture, compute)
    built = _gpt(plugin, architecture, options, groups, device, compute)
    _fill(built, model)
    return built


def _check_head(model: nn.Module) -> None:
    name = type(model).__name__
    if not name.endswith(("ForCausalLM", "LMHeadModel")):
        raise OptionError(
            f"The model is {name}, and Megatron-core's layers are built for causal language models (…ForCausalLM, "
            "GPT2LMHeadModel). Build the model with its language-model head."
        )


def _gpt(
    plugin: MegatronLMPlugin,
    architecture: Architecture,
    options: Mapping[str, Any],
    groups: Groups,
    device: torch.device,
    compute: torch.dtype | None,
) -> Built:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    kinds = {
        "transformer": TransformerConfig,
        "optimizer": OptimizerConfig,
        "gradients": DistributedDataParallelConfig,
    }
    other = divide_other(plugin, kinds)["transformer"]
    config = TransformerConfig(**{**options, **other}, attention_backend=AttnBackend.local)
    fused = plugin.attention_backend or (plugin.context_parallel_size or 1) > 1
    padded = -(-architecture.vocabulary // groups.tp_size) * groups.tp_size
    module = GPTModel(
        config=config,
        transformer_layer_spec=layer_specs(config, FusedAttention if fused else None),
        vocab_size=padded,
        pre_process=groups.is_first,
        post_process=groups.is_last,
        parallel_output=True,
        **architecture.gpt,
    )
    module.to(device=device, dtype=compute or torch.float32)
    count, queries, head = architecture.heads
    dims = Dims(groups.tp_rank, groups.tp_size, architecture.vocabulary, count, queries, head)
    names = [name for name, _ in module.named_parameters()]
    rules = {name: rule_of(architecture, name, _offset(module)) for name in names}
    return Built(module, config, architecture, rules, dims)


def _offset(module: Any) -> int:
    """Layers of the stages before this one."""
    layers = list(module.decoder.layers)
    return int(layers[0].layer_number) - 1 if layers else 0


def rule_of(architecture: Architecture, name: str, offset: int) -> Rule:
    """Find the rule for the values of one of Megatron's parameters.

    Args:
        architecture: the architecture of the model.
        name: name of the parameter.
        offset: number of layers in the stages before this one.

    Raises:
        OptionError: the model has no such tensor.
    """
    found = _LAYER.match(name)
    rule = (
        architecture.top.get(name)
        if found is None
        else architecture.layer(offset + int(found[1])).get(found[2])
    )
    if rule is None:
        raise OptionError(
            f"Megatron-core's model has a parameter {name!r} for which the given model has none; an option in "
            "other_megatron_args added it. Leave that out."
        )
    return rule


def _fill(built: Built, model: nn.Module) -> None:
    """Copy the model's values, as rank 0 has them."""
    state = {
        name: value for name, value in NamedModel(model).state_dict().items() if isinstance(value, Tensor)
    }
    meta = [name for name, value in state.items() if value.is_meta]
    if meta:
        raise PrepareError(
            f"{meta[0]!r} (of {len(meta)} tensors) has no storage (it is on the meta device). Load the weights before "
            "prepare()."
        )
    broadcast([value.detach() for value in {id(v): v for v in state.values()}.values()])
    used: set[str] = set()
    with torch.no_grad():
        for rule, parameter in built.parameters():
            parameter.zero_()  # padding of the vocabulary
            for name, parts in rule.parts(parameter.detach(), built.dims).items():
                used.add(name)
                _copy(state, name, parts)


def _copy(state: Mapping[str, Tensor], name: str, parts: list[Part]) -> None:
    source = state.get(name)
    if source is None:
        raise OptionError(f"The model has no tensor {name!r}, which models of its type have.")
    for part in parts:
        if part.is_empty:
            continue
        if tuple(source.shape) != part.shape:
            raise OptionError(
                f"The model's {name!r} has the shape {list(source.shape)}, but its configuration says "
                f"{list(part.shape)}."
            )
        box = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.tensor.shape, strict=True))
        part.tensor.copy_(source[box])


def _provided(
    plugin: MegatronLMPlugin,
    provider: Any,
    groups: Groups,
    device: torch.device,
    compute: torch.dtype | None,
) -> Built:
    """The stage that the script's own function builds."""
    module = provider(pre_process=groups.is_first, post_process=groups.is_last)
    config: Any = getattr(module, "config", None)
    if not isinstance(module, nn.Module) or not hasattr(config, "tensor_model_parallel_size"):
        raise OptionError(
            f"custom_model_provider_function returned {type(module).__name__}; it must return a model of "
            "megatron.core, which has its TransformerConfig in .config."
        )
    for name, asked in provided_options(plugin).items():
        if getattr(config, name) != asked:
            raise OptionError(
                f"The model of custom_model_provider_function has {name}={getattr(config, name)!r} in its "
                f"configuration, but the plugin says {asked!r}. Use the plugin's value."
            )
    module.to(device=device, dtype=compute or torch.float32)
    config.pipeline_dtype = compute or torch.float32
    offset = _offset(module) if hasattr(module, "decoder") else 0
    rules: dict[str, Rule] = {
        name: WholeTensor(_global_name(name, offset), _divided_along(parameter))
        for name, parameter in module.named_parameters()
    }
    return Built(module, config, None, rules, Dims(groups.tp_rank, groups.tp_size, 0, 0, 0, 0))


def _global_name(name: str, offset: int) -> str:
    """A parameter's name with the layer's number in the whole model."""
    found = _LAYER.match(name)
    return name if found is None else f"decoder.layers.{offset + int(found[1])}.{found[2]}"


def _divided_along(parameter: Any) -> int | None:
    """The dimension along which ranks of tensor parallelism divide a parameter."""
    return int(parameter.partition_dim) if getattr(parameter, "tensor_model_parallel", False) else None


def empty_out(model: nn.Module) -> None:
    """Free the memory of a model's values; its modules, names and configuration stay."""
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in replaced:
                replaced[id(parameter)] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
            setattr(module, name, replaced[id(parameter)])
