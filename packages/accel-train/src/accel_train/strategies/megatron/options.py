"""Megatron-core's options, from the plugin, the model's architecture and the precision; plain mappings."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

import torch

from accel_train.errors import IncompatibleOptionsError, OptionError
from accel_train.strategies.megatron.families import Architecture
from accel_train.strategies.megatron.plugin import MegatronLMPlugin

__all__ = ["divide_other", "gradient_options", "optimizer_options", "provided_options", "transformer_options"]

# Fields of Megatron's configurations that a field of the plugin, or the `Accelerator`, decides.
_DECIDED = {
    "tensor_model_parallel_size": "tp_degree",
    "pipeline_model_parallel_size": "pp_degree",
    "virtual_pipeline_model_parallel_size": "num_layers_per_virtual_pipeline_stage",
    "context_parallel_size": "context_parallel_size",
    "expert_model_parallel_size": "expert_model_parallel_size",
    "expert_tensor_parallel_size": "expert_tensor_parallel_size",
    "sequence_parallel": "sequence_parallelism",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "attention_dropout": "attention_dropout",
    "hidden_dropout": "hidden_dropout",
    "attention_softmax_in_fp32": "attention_softmax_in_fp32",
    "attention_backend": "attention_backend",
    "recompute_granularity": "recompute_granularity",
    "recompute_method": "recompute_method",
    "recompute_num_layers": "recompute_num_layers",
    "calculate_per_token_loss": "calculate_per_token_loss",
    "use_distributed_optimizer": "use_distributed_optimizer",
    "use_megatron_fsdp": "use_custom_fsdp",
    "use_custom_fsdp": "use_custom_fsdp",
    "optimizer_cpu_offload": "optimizer_cpu_offload",
    "use_precision_aware_optimizer": "use_precision_aware_optimizer",
    "clip_grad": "gradient_clipping",
    "lr": "the script's optimizer",
    "weight_decay": "the script's optimizer",
    "optimizer": "the script's optimizer",
    "fp16": "Accelerator(mixed_precision=…)",
    "bf16": "Accelerator(mixed_precision=…)",
    "params_dtype": "Accelerator(mixed_precision=…)",
    "pipeline_dtype": "Accelerator(mixed_precision=…)",
    "variable_seq_lengths": "the length of each batch",
    "finalize_model_grads_func": "the engine",
    "grad_scale_func": "the engine",
    "no_sync_func": "the engine",
    "grad_sync_func": "the engine",
    "param_sync_func": "the engine",
    "timers": "the engine",
    "overlap_grad_reduce": "the engine, which reduces gradients when a window ends",
    "overlap_param_gather": "the engine, which gathers parameters in the step",
}


def divide_other(plugin: MegatronLMPlugin, kinds: Mapping[str, type]) -> dict[str, dict[str, Any]]:
    """Divide `other_megatron_args` by the configuration that has a field of that name.

    Args:
        plugin: the plugin.
        kinds: classes of the configurations, by a name for each.

    Raises:
        OptionError: no configuration has such a field; names the nearest one.
        IncompatibleOptionsError: another option decides the field.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in kinds}
    known = {
        name: {field.name for field in dataclasses.fields(kind) if field.init} for name, kind in kinds.items()
    }
    for key, value in (plugin.other_megatron_args or {}).items():
        if key in _DECIDED:
            raise IncompatibleOptionsError(
                f"other_megatron_args has {key!r}, which {_DECIDED[key]} decides. Set it there."
            )
        owners = [name for name, names in known.items() if key in names]
        if not owners:
            near = difflib.get_close_matches(key, sorted(set().union(*known.values())), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise OptionError(
                f"other_megatron_args has {key!r}, which is no field of Megatron-core's "
                f"{', '.join(kind.__name__ for kind in kinds.values())}; arguments of Megatron-LM's own training loop "
                f"have no effect here.{hint}"
            )
        for owner in owners:
            found[owner][key] = value
    return found


def transformer_options(
    plugin: MegatronLMPlugin, architecture: Architecture, compute: torch.dtype | None
) -> dict[str, Any]:
    """Arguments of `TransformerConfig`.

    Args:
        plugin: has the degrees, recomputation and dropouts.
        architecture: the architecture of the model.
        compute: dtype that the model computes in; None: float32.

    Raises:
        IncompatibleOptionsError: a degree does not divide a size of the model, or the model contradicts the plugin.
    """
    options = dict(architecture.transformer)
    embedding_dropout = options.pop("embedding_dropout", options["hidden_dropout"])
    if plugin.hidden_dropout is None and embedding_dropout != options["hidden_dropout"]:
        raise IncompatibleOptionsError(
            f"The model drops {embedding_dropout} of its embedding and {options['hidden_dropout']} of hidden states, "
            "and Megatron-core has one number for both. Set MegatronLMPlugin(hidden_dropout=…)."
        )
    _check_degrees(plugin, architecture)
    rotary = architecture.gpt["position_embedding_type"] == "rope"
    if plugin.use_rotary_position_embeddings not in (None, rotary):
        raise IncompatibleOptionsError(
            f"use_rotary_position_embeddings={plugin.use_rotary_position_embeddings}, and the model "
            f"{'has them' if rotary else 'has learned position embeddings'}. Leave it out: the model's configuration "
            "decides."
        )
    dtype = compute or torch.float32
    options |= {
        "tensor_model_parallel_size": plugin.tp_degree,
        "pipeline_model_parallel_size": plugin.pp_degree,
        "context_parallel_size": plugin.context_parallel_size or 1,
        "sequence_parallel": plugin.sequence_parallelism,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "gradient_accumulation_fusion": False,
    }
    return options | _set(plugin)


def _set(plugin: MegatronLMPlugin) -> dict[str, Any]:
    """Fields of `TransformerConfig` that the plugin sets."""
    given = {
        "num_layers_in_last_pipeline_stage": plugin.decoder_last_pipeline_num_layers,
        "attention_dropout": plugin.attention_dropout,
        "hidden_dropout": plugin.hidden_dropout,
        "attention_softmax_in_fp32": plugin.attention_softmax_in_fp32,
        "recompute_granularity": plugin.recompute_granularity,
        "recompute_method": plugin.recompute_method,
        "recompute_num_layers": plugin.recompute_num_layers,
    }
    return {name: value for name, value in given.items() if value is not None}


def provided_options(plugin: MegatronLMPlugin) -> dict[str, Any]:
    """Fields that the `TransformerConfig` of a model of the script's own must have.

    Raises:
        OptionError: an option exists only for models of transformers.
    """
    for name in ("attention_backend", "eod_mask_loss", "return_logits", "use_rotary_position_embeddings"):
        if getattr(plugin, name):
            raise OptionError(
                f"{name} is for models that are converted from transformers, but custom_model_provider_function "
                "builds its own model. Do it there, or in custom_loss_function."
            )
    return {
        "tensor_model_parallel_size": plugin.tp_degree,
        "pipeline_model_parallel_size": plugin.pp_degree,
        "context_parallel_size": plugin.context_parallel_size or 1,
        "sequence_parallel": plugin.sequence_parallelism,
        **_set(plugin),
    }


def _check_degrees(plugin: MegatronLMPlugin, architecture: Architecture) -> None:
    options = architecture.transformer
    tp, pp = plugin.tp_degree or 1, plugin.pp_degree or 1
    for what, count in (
        ("attention heads", options["num_attention_heads"]),
        ("heads of keys and values", options["num_query_groups"]),
        ("elements of its feed-forward layers", options["ffn_hidden_size"]),
    ):
        if count % tp:
            raise IncompatibleOptionsError(
                f"tp_degree={tp} does not divide the model's {count} {what}. Choose a degree that does."
            )
    layers, last = options["num_layers"], plugin.decoder_last_pipeline_num_layers
    rest, stages = (layers, pp) if last is None else (layers - last, pp - 1)
    if rest < stages or rest % stages:
        where = "" if last is None else f", of which the last stage has {last},"
        raise IncompatibleOptionsError(
            f"The model's {layers} layers{where} cannot be divided evenly among pp_degree={pp} stages. Choose another "
            "degree, or say with decoder_last_pipeline_num_layers how many the last stage has."
        )


def gradient_options(plugin: MegatronLMPlugin) -> dict[str, Any]:
    """Arguments of `DistributedDataParallelConfig`: gradients are kept and reduced in float32."""
    return {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": False,
        "use_distributed_optimizer": plugin.use_distributed_optimizer,
    }


def optimizer_options(
    plugin: MegatronLMPlugin, optimizer: torch.optim.Optimizer, compute: torch.dtype | None
) -> dict[str, Any]:
    """Arguments of `OptimizerConfig`; hyperparameters stay those of the script's optimizer.

    Raises:
        OptionError: the optimizer's step needs more than one element of a tensor at a time.
    """
    kind = type(optimizer)
    adam = isinstance(optimizer, torch.optim.Adam)  # AdamW is one
    if not adam and kind is not torch.optim.SGD:
        raise OptionError(
            f"The optimizer is {kind.__module__}.{kind.__qualname__}, and Megatron's tensors hold several of the "
            "model's: it takes optimizers that treat every element alone, torch.optim.AdamW, Adam or SGD."
        )
    if plugin.use_distributed_optimizer and not isinstance(optimizer, torch.optim.AdamW):
        raise OptionError(
            f"use_distributed_optimizer divides the states of torch.optim.AdamW, and the optimizer is {kind.__name__}. "
            "Use AdamW, with weight_decay=0 for Adam without weight decay, or leave use_distributed_optimizer out."
        )
    return {
        "optimizer": "adam" if adam else "sgd",
        "lr": float(optimizer.param_groups[0]["lr"]),
        "weight_decay": float(optimizer.param_groups[0].get("weight_decay", 0.0)),
        "clip_grad": plugin.gradient_clipping or 0.0,
        "use_distributed_optimizer": plugin.use_distributed_optimizer,
        "bf16": compute == torch.bfloat16,
        "params_dtype": compute or torch.float32,
    }
