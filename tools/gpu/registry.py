"""The checks of the acceptance, by name. To add one, write a function and name it in `CHECKS`.

Nothing here imports torch: each check is imported by the process that runs it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """A function that runs in a process of its own.

    Attributes:
        name: what the table calls it.
        target: `module:function`; called with a `Run`, it yields figures.
        seconds: how long it may take.
        needs: packages without which it is not run.
    """

    name: str
    target: str
    seconds: float = 60.0
    needs: tuple[str, ...] = ()


CHECKS: tuple[Check, ...] = (
    Check("train fp32", "gpu.checks.training:fp32"),
    Check("train bf16", "gpu.checks.training:bf16"),
    Check("train fp16", "gpu.checks.training:fp16"),
    Check("fp16 overflow", "gpu.checks.training:overflow"),
    Check("compile", "gpu.checks.training:compiled", seconds=120),
    Check("collectives", "gpu.checks.collectives:world_of_one"),
    Check("quantise bitsandbytes", "gpu.checks.quantization:bitsandbytes", needs=("bitsandbytes",)),
    Check("quantise torchao", "gpu.checks.quantization:torchao", needs=("torchao",)),
    Check("loader", "gpu.checks.loading:pinned_and_ahead"),
    Check("step", "gpu.checks.speed:step"),
    Check("gpt bf16", "gpu.checks.speed:gpt"),
    Check("offload", "gpu.checks.offload:streamed", seconds=120),
    Check("save", "gpu.checks.saving:asynchronous", seconds=90),
    Check("sd15", "gpu.checks.diffusion:offloaded", seconds=90),
)
