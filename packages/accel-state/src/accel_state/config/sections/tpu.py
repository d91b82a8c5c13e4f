"""TPUs."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.config.option import Section, option

__all__ = ["TpuSection"]


@dataclass(frozen=True, repr=False, eq=False)
class TpuSection(Section):
    """TPU machines and pods. In files these options are at the top level."""

    title = "TPU"

    downcast_bf16: bool = option(
        False,
        help="With mixed_precision bf16: torch_xla converts float to bf16 and double to float32 (XLA_DOWNCAST_BF16).",
        env=("ACCELERATE_DOWNCAST_BF16",),
        unset=("auto",),
        toggle=True,
        prompt="Should float be computed in bf16 and double in float32 (downcast_bf16)?",
    )
    tpu_name: str | None = option(
        help="Name of the TPU.", prompt="What is the name of the TPU (none: a list of virtual machines)?"
    )
    tpu_zone: str | None = option(help="Zone of the TPU.", prompt="What is the zone of the TPU?")
    tpu_use_cluster: bool = option(
        False,
        help="The TPU is a pod of several machines.",
        flags=("--tpu_cluster",),
        toggle=True,
        prompt="Is the TPU a pod of several machines?",
    )
    tpu_use_sudo: bool = option(
        False,
        help="Run the script on the pod's machines with sudo.",
        toggle=True,
        prompt="Do the commands on the machines of the pod need sudo?",
    )
    command_file: str | None = option(
        help="File with commands that accel tpu-config runs on every machine of the pod.",
        prompt="Which file has commands for accel tpu-config to run on every machine of the pod?",
    )
    commands: tuple[str, ...] | None = option(
        help="Commands that accel tpu-config runs on every machine of the pod.",
        flags=("--command",),
        prompt="Which commands does accel tpu-config run on every machine, with ; between them?",
    )
    tpu_vm: tuple[str, ...] | None = option(
        help="Name of a virtual machine of the pod, if the pod has no name of its own; repeat the flag for each.",
        flags=("--vm",),
        prompt="Which virtual machines form the pod (comma-separated)?",
    )
    tpu_env: tuple[str, ...] | None = option(
        help="Environment variable for the machines of the pod, as NAME=value; repeat the flag for each.",
        flags=("--env",),
        prompt="Which environment variables do the machines get (NAME=value, comma-separated)?",
    )
    main_training_function: str = option(
        "main",
        help="Function of the script that each TPU process calls, instead of running the script.",
        prompt="Which function of the script does each process call (main: the script runs as it is)?",
    )
