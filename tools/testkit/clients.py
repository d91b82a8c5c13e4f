"""Clients of Accelerate, run unmodified on the real package and on this library, with their results compared.

A scenario is a script in ``tests-integration/engines/clients`` that imports only clients and, as they do,
``accelerate``; its first argument names what it does, its second a folder of its own. Rank 0 prints ``RESULT`` and
a line of JSON.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests-integration/engines/clients"
SOURCES = [str(ROOT / f"packages/accel-{name}/src") for name in ("state", "ckpt", "bigmodel", "train", "cli")]
_TIMEOUT = 600


@dataclass(frozen=True)
class Scenario:
    """What one client does.

    Attributes:
        client: the name of the script.
        name: of what it does.
        ranks: numbers of processes that it runs with.
        packages: modules that must be installed.
        engine: one that has an environment of its own.
        tolerance: relative, of numbers; for those that the two compute in another order.
        launched: whether one process is launched too, and the CPU is used because there is nothing else: Accelerate
            leaves DeepSpeed out where it is asked for the CPU.
    """

    client: str
    name: str
    ranks: tuple[int, ...] = (1, 2)
    packages: tuple[str, ...] = ("transformers",)
    engine: str = ""
    tolerance: float = 0.0
    launched: bool = False

    def __str__(self) -> str:
        return f"{self.client}-{self.name}"

    def missing(self) -> list[str]:
        """Modules that it needs and that are not installed."""
        needed = ["accelerate", *self.packages, *filter(None, [self.engine])]
        return [name for name in needed if importlib.util.find_spec(name) is None]


SCENARIOS = (
    Scenario("trainer", "train"),
    Scenario("trainer", "bf16"),
    Scenario("trainer", "accumulate"),
    Scenario("trainer", "resume"),
    Scenario("trainer", "predict"),
    Scenario("trainer", "evaluate"),
    Scenario("trainer", "search", packages=("transformers", "optuna")),
    Scenario("trainer", "fsdp2", ranks=(2,), tolerance=1e-5),
    Scenario("trainer", "zero2", engine="deepspeed", tolerance=1e-5, launched=True),
    Scenario("lora", "merge", packages=("transformers", "peft")),
    Scenario("lora", "fsdp2", ranks=(2,), packages=("transformers", "peft"), tolerance=1e-5),
    Scenario("lora", "placed", ranks=(1,), packages=("transformers", "peft")),
    Scenario("models", "device_map", ranks=(1,)),
    Scenario("models", "offload", ranks=(1,)),
    Scenario("models", "pipeline", ranks=(1,)),
    Scenario("tuning", "sft", packages=("trl", "datasets")),
    Scenario("tuning", "dpo", packages=("trl", "datasets")),
    *(
        Scenario("tuning", f"{name}_fsdp2", ranks=(2,), packages=("trl", "datasets"), tolerance=1e-4)
        for name in ("dpo", "kto", "grpo", "rloo")
    ),
    Scenario("sentences", "pairs", packages=("sentence_transformers", "datasets")),
    Scenario("sentences", "scores", packages=("sentence_transformers", "datasets")),
    *(
        Scenario("images", name, packages=("diffusers", "peft", "transformers", "datasets", "trl"))
        for name in ("unconditional", "text", "lora", "inversion", "dreambooth")
    ),
)


class ClientError(RuntimeError):
    """A run failed; the message has its output."""


def run(scenario: Scenario, ranks: int, ours: bool, folder: Path) -> Any:
    """Run a scenario, and return what rank 0 printed.

    Args:
        scenario: which.
        ranks: number of processes, on the CPU.
        ours: whether ``accelerate`` is answered by this library; otherwise the real one must be installed.
        folder: an empty folder, for the files of the run.

    Raises:
        ClientError: it failed, or printed no result.
    """
    script = [str(FOLDER / f"{scenario.client}.py"), scenario.name, str(folder)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    variables |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "false" if scenario.launched else "true",
        "HF_HOME": str(folder),
    }
    if ours:
        variables["PYTHONPATH"] = os.pathsep.join(SOURCES)
        flags = ["--cpu", "--num_processes", str(ranks), "--as_accelerate", "--quiet"]
        command = [sys.executable, "-m", "accel_cli", "launch", *flags, *script]
    elif ranks == 1 and not scenario.launched:
        command = [sys.executable, *script]
    else:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={ranks}",
            *script,
        ]
    done = subprocess.run(
        command, env=variables, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT
    )
    found = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    # Ranks of the real one that do not destroy their process group are now and then ended by gloo's threads at exit.
    ended = not ours and "terminate called without an active exception" in done.stderr
    if (done.returncode and not ended) or len(found) != 1:
        who = "accel" if ours else "accelerate"
        raise ClientError(
            f"{scenario} on {ranks} with {who}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
    return json.loads(found[0])


def differences(ours: Any, real: Any, tolerance: float = 0.0, at: str = "") -> list[str]:
    """Places where two results differ by more than a relative tolerance."""
    if isinstance(real, dict) and isinstance(ours, dict):
        places = [f"{at}.{key}" for key in sorted(ours.keys() ^ real.keys())]
        for key in sorted(ours.keys() & real.keys()):
            places += differences(ours[key], real[key], tolerance, f"{at}.{key}")
        return places
    if isinstance(real, list) and isinstance(ours, list) and len(real) == len(ours):
        return [
            place
            for index, pair in enumerate(zip(ours, real, strict=True))
            for place in differences(*pair, tolerance, f"{at}[{index}]")
        ]
    if isinstance(real, float) and isinstance(ours, float):
        near = math.isclose(ours, real, rel_tol=tolerance, abs_tol=tolerance) or (
            math.isnan(ours) and math.isnan(real)
        )
        return [] if near else [f"{at}: {ours!r} is not {real!r}"]
    return [] if ours == real else [f"{at}: {ours!r} is not {real!r}"]
