"""Options shared by local runs and SageMaker jobs."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.config.option import Section, option

__all__ = ["CommonOptions"]


@dataclass(frozen=True, repr=False, eq=False)
class CommonOptions(Section):
    """Precision, device and size of a run."""

    mixed_precision: str | None = option(
        help="Precision of the model's computation.",
        env=("ACCELERATE_MIXED_PRECISION",),
        choices=("no", "fp16", "bf16", "fp8"),
        launch_default="no",
        prompt="Do you want to use mixed precision?",
    )
    use_cpu: bool = option(
        False,
        help="Run on the CPU even if there is an accelerator.",
        name="cpu",
        key="use_cpu",
        flags=("--use_cpu",),
        env=("ACCELERATE_USE_CPU",),
        toggle=True,
    )
    debug: bool = option(
        False,
        help="Print where each value comes from, show all frames of tracebacks, and check the arguments of every "
        "collective across ranks, also for tensors on a device.",
        env=("ACCELERATE_DEBUG_MODE",),
        toggle=True,
    )
    num_machines: int = option(
        1,
        help="Number of machines of the run.",
        low=1,
        flags=("--nnodes",),
        prompt="How many machines will you use?",
    )
    gpu_ids: str | None = option(
        help='Comma-separated ids of the accelerators to use on this machine, or "all".',
        launch_default="all",
        prompt="Which accelerators should be used (comma-separated ids)?",
    )
    enable_cpu_affinity: bool = option(
        False,
        help="Bind each process to the CPU cores near its accelerator (NUMA).",
        env=("ACCELERATE_CPU_AFFINITY",),
        toggle=True,
    )
