"""RAM-efficient loading: which ranks read weights when transformers loads a model that will be sharded."""

from __future__ import annotations

from accel_state import environment
from accel_state.config.codec import encode
from accel_state.config.launch import LaunchConfig
from accel_state.config.sections.fsdp import FsdpSection

__all__ = ["disable_fsdp_ram_efficient_loading", "enable_fsdp_ram_efficient_loading"]


def enable_fsdp_ram_efficient_loading() -> None:
    """Make transformers' `from_pretrained` read weights on rank 0 only; `prepare` sends them to the other ranks.

    Call it before `from_pretrained`, after the process group is created. transformers 4 then leaves the weights of
    other ranks on the meta device or empty; 5.24 still reads them on every rank, with the same result.

    It sets the environment variables of ``--use_fsdp``, unless they are set, so that an `Accelerator` created later
    shards models. It also sets the variable of ``--fsdp_cpu_ram_efficient_loading``, which is the default of
    `FullyShardedDataParallelPlugin.cpu_ram_efficient_loading`.
    """
    environment.provide(**encode(LaunchConfig(distributed_type="FSDP")))
    _say(True)


def disable_fsdp_ram_efficient_loading() -> None:
    """Make transformers' `from_pretrained` read weights on every rank, as for a model that is not sharded."""
    _say(False)


def _say(efficient: bool) -> None:
    environment.assign(**encode(LaunchConfig(fsdp=FsdpSection(cpu_ram_efficient_loading=efficient))))
