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
        help="Compute both float and double in bf16; else float in bf16 and double in float32.",
        env=("ACCELERATE_DOWNCAST_BF16",),
        toggle=True,
        prompt="Should double be computed in bf16 as well (downcast_bf16)?",
    )
    tpu_name: str | None = option(help="Name of the TPU.", prompt="What is the name of your Cloud TPU?")
    tpu_zone: str | None = option(help="Zone of the TPU.", prompt="What is the zone of your Cloud TPU?")
    tpu_use_cluster: bool = option(
        False,
        help="The TPU is a pod of several machines.",
        flags=("--tpu_cluster",),
        toggle=True,
        prompt="Are you using a TPU cluster?",
    )
    tpu_use_sudo: bool = option(
        False,
        help="Run the commands on the pod's machines with sudo.",
        toggle=True,
        prompt="To run a python script in a TPU pod, should `sudo` be used?",
    )
    command_file: str | None = option(
        help="File with commands to run on every machine of the pod before the script.",
        prompt="Which file has commands to run on every machine of the pod before the script?",
    )
    commands: tuple[str, ...] | None = option(
        help="Commands to run on every machine of the pod before the script.",
        flags=("--command",),
        prompt="Which commands run on every machine of the pod before the script, with ; between them?",
    )
    tpu_vm: tuple[str, ...] | None = option(
        help="Names of the machines of the pod; by default all.",
        flags=("--vm",),
        prompt="Which machines of the pod are used, with commas between them (none: all)?",
    )
    tpu_env: tuple[str, ...] | None = option(
        help="Variables, as NAME=value, for the machines of the pod.",
        flags=("--env",),
        prompt="Which variables, as NAME=value with commas between them, do the machines get?",
    )
    main_training_function: str = option(
        "main",
        help="Function of the script that each TPU process calls.",
        prompt="What is the name of the function in your script that each process should run?",
    )
