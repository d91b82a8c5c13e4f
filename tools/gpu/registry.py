"""The checks of the acceptance, by name. To add one, write a function and name it in `CHECKS`.

Nothing here imports torch: each check is imported by the process that runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Check:
    """A function that runs in a process of its own.

    Attributes:
        name: what the table calls it.
        target: `module:function`; called with a `Run` and `arguments`, it yields figures.
        seconds: how long it may take.
        needs: packages without which it is not run.
        alone: it measures time, so at full size nothing else runs beside it.
        accelerator_only: nothing of it can run on the CPU.
        arguments: further arguments of the function.
    """

    name: str
    target: str
    seconds: float = 60.0
    needs: tuple[str, ...] = ()
    alone: bool = False
    accelerator_only: bool = False
    arguments: tuple[str, ...] = ()


CHECKS: tuple[Check, ...] = (
    Check("train fp32", "gpu.checks.training:fp32"),
    Check("train bf16", "gpu.checks.training:bf16"),
    Check("train fp16", "gpu.checks.training:fp16"),
    Check("fp16 overflow", "gpu.checks.training:overflow"),
    Check("compile", "gpu.checks.training:compiled", seconds=120),
    Check("collectives", "gpu.checks.collectives:world_of_one"),
    Check("quantise bitsandbytes", "gpu.checks.quantization:bitsandbytes", needs=("bitsandbytes",)),
    Check("quantise torchao", "gpu.checks.quantization:torchao", needs=("torchao",)),
    Check("loader", "gpu.checks.loading:pinned_and_ahead", alone=True),
    Check("step", "gpu.checks.speed:step", alone=True),
    Check("gpt bf16", "gpu.checks.speed:gpt", alone=True),
    Check("offload", "gpu.checks.offload:streamed", seconds=120, alone=True),
    Check("save", "gpu.checks.saving:asynchronous", seconds=90, alone=True),
    Check("sd15", "gpu.checks.diffusion:offloaded", seconds=90, alone=True),
)

# The test that runs the checks above at small size: at full size they are rows of their own.
_OWN_TEST = "tools/tests/test_gpu_acceptance.py"


def marked_files(root: Path = ROOT) -> list[Check]:
    """One check per file with tests that are marked `gpu`."""
    found = []
    for folder in ("packages", "tests-integration", "tools"):
        for path in sorted((root / folder).rglob("test_*.py")):
            name = path.relative_to(root).as_posix()
            if name != _OWN_TEST and "mark.gpu" in path.read_text(encoding="utf-8"):
                found.append(
                    Check(
                        name,
                        "gpu.checks.marked:run_file",
                        seconds=120,
                        needs=("pytest",),
                        accelerator_only=True,
                        arguments=(str(root), name),
                    )
                )
    return found
