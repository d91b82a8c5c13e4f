"""Options that only have environment variables. They affect a running program, not its launch."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.config.option import Section, option

__all__ = ["RuntimeSection"]


@dataclass(frozen=True, repr=False, eq=False)
class RuntimeSection(Section):
    """Settings of a running program, set by environment variables only."""

    env_prefix = "ACCELERATE_"
    title = "Variables of a running program"

    torch_device: str | None = option(
        help="Device to use instead of the default one.", in_file=False, in_flags=False
    )
    log_level: str | None = option(
        help="Level of loggers from get_logger without an explicit level.",
        in_file=False,
        in_flags=False,
    )
    collective_checks: str | None = option(
        help="Compare collectives across ranks: auto those of CPU tensors, on all, off only where it is free.",
        choices=("auto", "on", "off"),
        in_file=False,
        in_flags=False,
    )
    collective_timeout_report: float | None = option(
        help="Seconds until a stuck collective is reported, by default 30; 0: collectives are not watched.",
        low=0,
        in_file=False,
        in_flags=False,
    )
    enable_rich: bool = option(False, help="Show tracebacks with rich.", in_file=False, in_flags=False)
    bypass_device_map: bool = option(
        False,
        help="Allow a model with a device map over several devices in a distributed run.",
        in_file=False,
        in_flags=False,
    )
    allow_cp_standalone: bool = option(
        False, help="Allow context parallelism without FSDP.", in_file=False, in_flags=False
    )
    init_include_buffers: bool = option(
        False,
        help="Default of include_buffers of init_empty_weights: create buffers on the meta device too.",
        in_file=False,
        in_flags=False,
    )
    in_tpu_pod: bool = option(False, help="Set on the machines of a TPU pod.", in_file=False, in_flags=False)
    proof: str | None = option(
        help="Path of the job of a proof (accel prove): this process records its first steps beside it, and ends.",
        in_file=False,
        in_flags=False,
    )
    rehearsal: int | None = option(
        help="Optimizer steps of a rehearsal (accel rehearse): this process simulates one rank of a larger world.",
        low=1,
        in_file=False,
        in_flags=False,
    )
