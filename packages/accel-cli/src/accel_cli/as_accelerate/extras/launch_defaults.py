"""Values of Accelerate's launch parser for what a command line does not give.

They are only read: a launch takes what a command line leaves out from the configuration file and the environment.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

__all__ = ["ABSENT", "UNSET", "note_given"]

_VALUES: dict[Any, str] = {
    None: "debug module no_python quiet",
    "default": "dynamo_mode role",
    0: "fp8_margin max_restarts",
    1: "fp8_enable_fsdp_float8_all_gather fp8_interval fp8_pad_inner_dim parallelism_config_cp_size "
    "parallelism_config_dp_replicate_size parallelism_config_dp_shard_size parallelism_config_sp_size "
    "parallelism_config_tp_size",
    "true": "fsdp_cpu_ram_efficient_loading fsdp_reshard_after_forward fsdp_sync_module_states fsdp_use_orig_params",
    "false": "fsdp_activation_checkpointing fsdp_activation_checkpointing_offload fsdp_forward_prefetch "
    "fsdp_offload_params",
    "most_recent": "fp8_amax_compute_algo",
    1024: "fp8_amax_history_len",
    "HYBRID": "fp8_format",
    "O2": "fp8_opt_level",
    (False, False, False): "fp8_override_linear_precision",
    100_000_000: "fsdp_min_num_params",
    "FULL_SHARD": "fsdp_sharding_strategy",
    "1": "fsdp_version",
    0.1: "monitor_interval",
    "torch": "parallelism_config_cp_backend",
    "allgather": "parallelism_config_cp_comm_strategy",
    "sdpa": "parallelism_config_sp_attn_implementation",
    "deepspeed": "parallelism_config_sp_backend",
    "static": "rdzv_backend",
    "": "rdzv_conf",
    "0": "tee",
}
_MEGATRON: dict[Any, str] = {
    None: "attention_backend attention_dropout attention_softmax_in_fp32 calculate_per_token_loss "
    "context_parallel_size decoder_last_pipeline_num_layers expert_model_parallel_size expert_tensor_parallel_size "
    "hidden_dropout num_micro_batches recompute_activations recompute_granularity recompute_method "
    "recompute_num_layers sequence_parallelism use_distributed_optimizer use_rotary_position_embeddings",
    False: "eod_mask_loss no_load_optim no_save_optim optimizer_cpu_offload overlap_cpu_optimizer_d2h_h2d "
    "use_custom_fsdp use_precision_aware_optimizer",
    1.0: "gradient_clipping",
}

UNSET: dict[str, Any] = {name: value for value, names in _VALUES.items() for name in names.split()}
UNSET |= {"parallelism_config_sp_seq_length_is_variable": True}
"""By the name of the attribute, for options that have a flag here."""

ABSENT: dict[str, Any] = {
    f"megatron_lm_{name}": value for value, names in _MEGATRON.items() for name in names.split()
}
ABSENT |= dict.fromkeys(("aws_access_key_id", "aws_secret_access_key", "env", "vm"))
ABSENT |= {"megatron_lm_pp_degree": 1, "megatron_lm_tp_degree": 1, "use_megatron_lm": False}
"""Likewise, for options that have none."""


def note_given(parser: argparse.ArgumentParser) -> None:
    """Let namespaces of a parser have the names of what was given, as the set ``nondefault``.

    Arguments that were added before are not noted.
    """
    for name in (None, "store_true", "append"):
        parser.register("action", name, _noting(parser._registry_get("action", name)))


def _noting(kind: type[argparse.Action]) -> type[argparse.Action]:
    class Noting(kind):  # type: ignore[valid-type, misc]
        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: str | Sequence[Any] | None,
            option_string: str | None = None,
        ) -> None:
            super().__call__(parser, namespace, values, option_string)
            namespace.nondefault = {*getattr(namespace, "nondefault", ()), self.dest}

    return Noting
