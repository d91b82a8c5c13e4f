"""Check that the search of the built site finds guides first, for the words that people search for.

``hatch run docs:build`` runs it after the build. The worker that searches in a reader's browser runs in Node.js; this
prints that nothing was checked where that is not installed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What is searched for, and the pages of which one must be found first.
EXPECTED: Mapping[str, Sequence[str]] = {
    "OOM": ("troubleshooting",),
    "out of memory": ("troubleshooting",),
    "fsdp": ("fsdp",),
    "deepspeed": ("deepspeed",),
    "tpu": ("xla",),
    "multi node": ("multi-node",),
    "multi gpu": ("launching", "multi-node"),
    "slurm": ("clusters", "multi-node"),
    "sagemaker": ("clusters",),
    "restart": ("restarts",),
    "straggler": ("restarts",),
    "nccl": ("timeouts",),
    "timeout": ("timeouts",),
    "hang": ("timeouts", "troubleshooting"),
    "gradient accumulation": ("gradient-accumulation",),
    "cross entropy": ("chunked-cross-entropy",),
    "logits": ("chunked-cross-entropy",),
    "mixed precision": ("mixed-precision",),
    "bf16": ("mixed-precision",),
    "fp8": ("mixed-precision",),
    "gather_for_metrics": ("evaluation",),
    "save_state": ("checkpoints",),
    "resume": ("preemption", "checkpoints"),
    "preemption": ("preemption",),
    "s3": ("object-storage",),
    "safetensors": ("saving-models", "big-models"),
    "device map": ("big-models",),
    "cpu offload": ("big-models", "fsdp"),
    "quantization": ("quantization",),
    "lora": ("hugging-face",),
    "transformers": ("hugging-face",),
    "wandb": ("trackers",),
    "tensorboard": ("trackers",),
    "jupyter": ("notebooks",),
    "kubernetes": ("containers",),
    "docker": ("containers",),
    "gan": ("several-models",),
    "learning rate": ("learning-rate-schedules",),
    "muon": ("muon",),
    "torch.compile": ("compile",),
    "mfu": ("throughput",),
    "seed": ("reproducibility",),
    "mixture": ("data-mixtures",),
    "interleave_datasets": ("data-mixtures",),
}


def misses(found: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each query whose first page is none of the expected guides.

    Args:
        found: of each query the addresses of the pages, best first.
    """
    return [
        f"{query!r} finds {next(iter(found[query]), 'nothing')!r} first, not one of {', '.join(guides)}"
        for query, guides in EXPECTED.items()
        if not found[query] or found[query][0] not in {f"guides/{guide}/" for guide in guides}
    ]


def main() -> int:
    """Search, and print what is not found first."""
    node = shutil.which("node")
    if node is None:
        print("search: not checked, because node (Node.js) is not installed")
        return 0
    command = [node, str(ROOT / "tools/search_site.mjs"), str(ROOT / "site"), *EXPECTED]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = misses(json.loads(done.stdout))
    print(*lines, f"search: {len(lines)} of {len(EXPECTED)} queries find something else first", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
