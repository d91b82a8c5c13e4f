"""Transformers models under context parallelism, where no rank holds a whole attention mask."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["attach_context_parallel_hooks"]


def attach_context_parallel_hooks(model: nn.Module) -> None:
    """Make modules named ``…self_attn`` attend causally and ignore the attention mask they are given.

    Args:
        model: changed in place.

    Raises:
        ValueError: the model's configuration has layers other than full attention, such as a sliding window; without
            their mask they would be trained as full attention.
    """
    narrow = _narrow_layers(model)
    if narrow:
        raise ValueError(
            f"{type(model).__name__} has attention layers of type {', '.join(narrow)}, which need their mask, but "
            "context parallelism supports full causal attention only. Use a model without such layers, or turn context "
            "parallelism off"
        )
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            # Prepended, so that no other hook moves or converts the mask in vain.
            module.register_forward_pre_hook(_causal_instead_of_mask, with_kwargs=True, prepend=True)


def _causal_instead_of_mask(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if "attention_mask" not in kwargs:
        return args, kwargs
    return args, {**kwargs, "attention_mask": None, "is_causal": True}


def _narrow_layers(model: nn.Module) -> list[str]:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        # Older configurations have one window for all layers.
        return ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    return sorted(set(kinds) - {"full_attention"})
