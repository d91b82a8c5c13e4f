"""Timelines of a model in the dtypes in which strategies compute, each traced at its first use."""

from __future__ import annotations

import torch
from torch import nn

from accel_bigmodel.errors import EstimateError
from accel_bigmodel.planning.footprints.base import Timelines
from accel_bigmodel.planning.shape import Timeline
from accel_bigmodel.planning.trace import MakeInputs, Numbers, trace_model

__all__ = ["text_inputs", "timelines_of"]


def timelines_of(
    model: nn.Module, make_inputs: MakeInputs, *, frozen: torch.dtype | None = None
) -> Timelines:
    """Make a function from the name of a `Numbers`, and whether units are recomputed, to a timeline.

    Args:
        model: on any device, meta included; not changed.
        make_inputs: makes the keyword inputs for a number of samples.
        frozen: dtype of weights that are not trained; None: that of trained weights.
    """
    known: dict[tuple[str, bool], Timeline] = {}

    def timeline(name: str, checkpointing: bool) -> Timeline:
        key = (name, checkpointing)
        if key not in known:
            known[key] = trace_model(model, make_inputs, _numbers(name, frozen), checkpointing=checkpointing)
        return known[key]

    return timeline


def _numbers(name: str, frozen: torch.dtype | None) -> Numbers:
    weights, _, autocast = name.partition(" autocast")
    dtype: torch.dtype = getattr(torch, weights)
    low = dtype if dtype != torch.float32 else None
    given = autocast.strip()
    # FSDP2 gathers frozen weights in the dtype that computes, and so do engines.
    return Numbers(
        dtype,
        frozen if dtype == torch.float32 else None,
        getattr(torch, given) if given else (low if " autocast" in name else None),
    )


def text_inputs(model: nn.Module, sequence_length: int) -> MakeInputs:
    """Make inputs of a transformers text model, with labels if its head has a loss over tokens.

    Raises:
        EstimateError: the model does not take tokens.
    """
    name = getattr(model, "main_input_name", None)
    if name != "input_ids":
        raise EstimateError(f"{type(model).__name__} does not take tokens (main_input_name is {name!r})")
    config = getattr(model, "config", None)
    kind = type(model).__name__
    per_token = kind.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM"))
    encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))

    def inputs(samples: int) -> dict[str, object]:
        ids = torch.empty((samples, sequence_length), dtype=torch.long, device="meta")
        found: dict[str, object] = {"input_ids": ids}
        if per_token:
            found["labels"] = ids
        elif encoder_decoder:
            found["decoder_input_ids"] = ids
        return found

    return inputs
