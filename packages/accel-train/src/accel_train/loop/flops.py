"""Floating-point operations of a training step, counted from a model's sizes or from a run of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from accel_train.errors import OptionError

__all__ = ["flops_per_token", "measured_flops"]


def flops_per_token(
    model: nn.Module,
    sequence_length: int,
    *,
    layers: int | None = None,
    heads: int | None = None,
    head_size: int | None = None,
    causal: bool = False,
    parameters: int | None = None,
) -> float:
    """FLOPs of forward and backward for one token of a transformer: 6 N + 12 L H Q T.

    As in appendix B of Chowdhery et al., "PaLM" (2022): N parameters that multiply each token, L layers with H heads of
    size Q, sequences of T tokens. Recomputation in the backward pass (activation checkpointing) does not count, because
    model FLOPs utilisation does not count it.

    Args:
        model: the model, prepared or not; divided parameters count whole.
        sequence_length: T. For packed sequences the mean of ``sum(n**2) / sum(n)`` over samples of n tokens.
        layers: L; None: `num_hidden_layers` of `model.config`.
        heads: H; None: `num_attention_heads` there.
        head_size: Q; None: `head_dim` there, or `hidden_size` divided by the heads.
        causal: count half of the attention, for kernels that leave the masked half out.
        parameters: N; None: all parameters except embeddings, which are only looked up, unless the output layer shares
            them. Pass the number for models in which a token uses only some of the parameters (experts).

    Raises:
        OptionError: a number is neither given nor in `model.config`, or is not positive.
    """
    count = _multiplying(model) if parameters is None else parameters
    layers = _size(model, "layers", layers, "num_hidden_layers")
    heads = _size(model, "heads", heads, "num_attention_heads")
    if head_size is None and getattr(_config(model), "head_dim", None) is None:
        hidden = getattr(_config(model), "hidden_size", None)
        head_size = None if hidden is None else int(hidden) // heads
    head_size = _size(model, "head_size", head_size, "head_dim")
    if sequence_length <= 0:
        raise OptionError(f"sequence_length must be positive, got {sequence_length}.")
    attention = 12 * layers * heads * head_size * sequence_length
    return float(6 * count + (attention / 2 if causal else attention))


def _config(model: nn.Module) -> Any:
    return getattr(model, "config", None) or getattr(getattr(model, "module", None), "config", None)


def _size(model: nn.Module, argument: str, given: int | None, key: str) -> int:
    found = getattr(_config(model), key, None) if given is None else given
    if not isinstance(found, int) or found <= 0:
        raise OptionError(
            f"flops_per_token() needs {argument} as a positive whole number, got {found!r} from "
            f"{'the argument' if given is not None else f'{type(model).__name__}.config.{key}'}. "
            f"Pass flops_per_token(model, sequence_length, {argument}=…)."
        )
    return found


def _multiplying(model: nn.Module) -> int:
    """Parameters that multiply each token; of tied ones the output layer counts."""
    looked_up: set[int] = set()
    multiplied: set[int] = set()
    for module in model.modules():
        here = looked_up if isinstance(module, nn.Embedding) else multiplied
        here.update(map(id, module.parameters(recurse=False)))
    only_looked_up = looked_up - multiplied
    return sum(p.numel() for p in model.parameters() if id(p) not in only_looked_up)


def measured_flops(step: Callable[[], Any]) -> int:
    """Count the FLOPs that `step` computes, with torch's `FlopCounterMode`; runs it once.

    Matrix products, convolutions and attention count. `step` does the work of one micro-batch (forward, loss,
    backward), so the recomputation of activation checkpointing counts, too.

    Raises:
        OptionError: no operation has a known number of FLOPs.
    """
    with FlopCounterMode(display=False) as counter, torch.enable_grad():
        step()
    total = int(counter.get_total_flops())
    if total == 0:
        raise OptionError(
            "measured_flops(step) found no operation whose FLOPs torch knows. Call the model in `step`, not before; "
            "for custom kernels pass the number yourself."
        )
    return total
