"""Which ranks read the weights when transformers loads a model that will be divided."""

from __future__ import annotations

from accel_state import environment

__all__ = ["disable_fsdp_ram_efficient_loading", "enable_fsdp_ram_efficient_loading"]


def enable_fsdp_ram_efficient_loading() -> None:
    """Tell transformers that `from_pretrained` needs to read weights on rank 0 only, which sends them in `prepare`.

    Call it before `from_pretrained`, after the process group is made. transformers 4 then leaves the weights of other
    ranks on the meta device or empty; 5.24 still reads them on every rank, with the same result.

    It sets ``ACCELERATE_USE_FSDP``, unless that is set, so an `Accelerator` that is constructed later divides models,
    and ``FSDP_CPU_RAM_EFFICIENT_LOADING``, the default of `FullyShardedDataParallelPlugin.cpu_ram_efficient_loading`;
    ``--fsdp_cpu_ram_efficient_loading true`` of `accel launch` does the same.
    """
    environment.provide(ACCELERATE_USE_FSDP="True")
    environment.assign(FSDP_CPU_RAM_EFFICIENT_LOADING="True")


def disable_fsdp_ram_efficient_loading() -> None:
    """Tell transformers that `from_pretrained` reads weights on every rank, as for a model that is not divided."""
    environment.assign(FSDP_CPU_RAM_EFFICIENT_LOADING="False")
