"""Fully sharded data parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from accel_state.config.option import Section, option

__all__ = ["FSDP_HYBRID_STRATEGIES", "FSDP_RESHARDS", "FSDP_SHARDING_STRATEGIES", "FsdpSection"]

FSDP_SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""In the order of ``torch.distributed.fsdp.ShardingStrategy``, whose values start at 1."""

FSDP_RESHARDS: Mapping[str, bool] = MappingProxyType(
    {
        "FULL_SHARD": True,
        "SHARD_GRAD_OP": False,
        "NO_SHARD": False,
        "HYBRID_SHARD": True,
        "HYBRID_SHARD_ZERO2": False,
    }
)
"""Sharding strategies of version 1, and the equivalent ``reshard_after_forward`` of version 2."""

FSDP_HYBRID_STRATEGIES = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""The sharding strategies with a replica of the model on each machine."""


@dataclass(frozen=True, repr=False, eq=False)
class FsdpSection(Section):
    """Options of the FSDP plugin; fields are named as in the plugin."""

    file_key = "fsdp_config"
    prefix = "fsdp_"
    env_prefix = "FSDP_"
    title = "FSDP"

    fsdp_version: int | None = option(
        help="FSDP version of the options: 2, or 1, which is translated. Training always uses 2 (fully_shard).",
        name="fsdp_version",
        env=("FSDP_VERSION",),
        low=1,
        high=2,
        launch_default=1,
    )
    sharding_strategy: str | None = option(
        help="Sharding strategy: the part of the training state that is sharded over the ranks (version 1).",
        choices=FSDP_SHARDING_STRATEGIES,
        numbered=True,
        launch_default="FULL_SHARD",
    )
    reshard_after_forward: bool | str | None = option(
        help="Free all-gathered parameters after forward; or a sharding strategy of version 1.",
        choices=FSDP_SHARDING_STRATEGIES,
        unlisted=FSDP_SHARDING_STRATEGIES,
        numbered=True,
        launch_default=True,
        prompt="Do you want to reshard after forward?",
    )
    cpu_offload: bool | None = option(
        help="Keep parameters and gradients in host memory between uses.",
        name="fsdp_offload_params",
        keys=("fsdp_cpu_offload",),
        env=("FSDP_OFFLOAD_PARAMS",),
        launch_default=False,
        prompt="Do you want to offload parameters and gradients to CPU?",
    )
    auto_wrap_policy: str | None = option(
        help="How modules are grouped into sharding units.",
        choices=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
        prompt="Which auto wrap policy do you want to use?",
    )
    transformer_cls_names_to_wrap: tuple[str, ...] | None = option(
        help="Comma-separated classes of the layers to shard, for TRANSFORMER_BASED_WRAP.",
        name="fsdp_transformer_layer_cls_to_wrap",
        keys=("fsdp_transformer_cls_names_to_wrap",),
        env=("FSDP_TRANSFORMER_CLS_TO_WRAP",),
        comma_list=True,
        prompt="Which layer classes are wrapped (comma-separated; none: named by the model)?",
    )
    min_num_params: int | None = option(
        help="Minimum number of parameters of a sharded module, for SIZE_BASED_WRAP.",
        low=0,
        launch_default=100_000_000,
        prompt="What is the minimum number of parameters for size-based wrapping?",
    )
    backward_prefetch: str | None = option(
        help="When the next parameters are all-gathered in backward (version 1).",
        keys=("fsdp_backward_prefetch_policy",),
        flags=("--fsdp_backward_prefetch_policy",),
        choices=("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    )
    state_dict_type: str | None = option(
        help="Layout of saved state dictionaries.",
        choices=("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
        prompt="Which state dict type do you want to use?",
    )
    forward_prefetch: bool | None = option(
        help="All-gather the next parameters during forward.",
        launch_default=False,
    )
    use_orig_params: bool | None = option(
        help="Expose the original parameters (version 1).",
        launch_default=True,
    )
    cpu_ram_efficient_loading: bool | None = option(
        help="Load weights on rank 0 only and broadcast them.",
        launch_default=True,
        prompt="Do you want to load weights on the first process only?",
    )
    sync_module_states: bool | None = option(
        help="Broadcast the weights of rank 0 when modules are wrapped (version 1).",
        launch_default=True,
    )
    activation_checkpointing: bool | None = option(
        help="Recompute activations in backward instead of storing them (activation checkpointing).",
        launch_default=False,
        prompt="Do you want to enable activation checkpointing?",
    )
    activation_checkpointing_offload: bool | None = option(
        help="Keep checkpointed activations in host memory (version 2).",
        launch_default=False,
        prompt="Do you want to keep checkpointed activations in host memory?",
    )
    ignored_modules: str | None = option(
        help="Regular expression for names of modules that are not sharded.",
    )

    def launch_defaults(self) -> dict[str, Any]:
        """As declared; options of the other version of FSDP stay unset."""
        found = super().launch_defaults()
        version = self.fsdp_version or found["fsdp_version"]
        others = {
            1: ("reshard_after_forward", "activation_checkpointing_offload"),
            2: ("sharding_strategy", "forward_prefetch", "use_orig_params", "sync_module_states"),
        }
        for name in others[version]:
            found.pop(name, None)
        if version == 1 and self.reshard_after_forward is not None:
            # One option is the fallback of the other: the plugin would prefer the default to the user's choice.
            found.pop("sharding_strategy", None)
        return found
