"""What transformers models need for context parallelism, where no rank sees a whole attention mask."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["_attach_context_parallel_hooks"]


def _attach_context_parallel_hooks(model: nn.Module) -> None:
    """Let modules called ``…self_attn`` attend causally instead of by the mask that they are given.

    Args:
        model: changed in place.

    Raises:
        ValueError: the model's configuration has layers that attend to less than all that came before, which would be
            trained as if they did not.
    """
    narrow = _narrow_layers(model)
    if narrow:
        raise ValueError(
            f"{type(model).__name__} has attention layers of type {', '.join(narrow)}, which need their mask; context "
            "parallelism can only express full causal attention. Use a model without them, or no context parallelism"
        )
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            # First, so that no other hook spends work on the mask.
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
        # Older configurations only say how far every layer sees.
        return ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    return sorted(set(kinds) - {"full_attention"})
