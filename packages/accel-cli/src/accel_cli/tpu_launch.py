"""Extra steps of ``accel launch --tpu``: pods of machines, and functions of scripts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping

from accel_state.config.launch import LaunchConfig
from accel_state.config.merge import Origin, Resolved
from accel_state.launching.function import calling
from accel_state.launching.machines.tpu_pod import in_its_pod, run_on_pod, ssh_commands, worker_command
from accel_state.launching.target import Target, check_target
from accel_state.messages import without_secrets

__all__ = ["launch_on_pod", "on_tpu"]


def launch_on_pod(config: LaunchConfig, target: Target, environ: Mapping[str, str]) -> int:
    """Start the script on every machine of a TPU pod; with ``--dry-run`` print gcloud's command lines.

    Returns:
        The exit code of gcloud.

    Raises:
        ConfigError, LaunchError: the pod has no name, or there is no gcloud.
    """
    commands = ssh_commands(config.tpu, worker_command(config, target))
    if config.dry_run:
        sys.stdout.write("".join(f"{shlex.join(without_secrets(words))}\n" for words in commands))
        return 0
    return run_on_pod(commands, environ)


def on_tpu(
    resolved: Resolved, config: LaunchConfig, target: Target, environ: Mapping[str, str]
) -> tuple[LaunchConfig, Target]:
    """The configuration of this machine, and the target of its ranks.

    Raises:
        LaunchError: the place of the machine in its pod is not known, or a program has no functions.
    """
    config = in_its_pod(config, environ)
    path = "tpu.main_training_function"
    # Accelerate's files have ``main_training_function: main`` for any run, so that asks for nothing.
    if resolved.origin(path) >= Origin.ENVIRONMENT or config.tpu.main_training_function != "main":
        check_target(target, environ)
        target = calling(config.tpu.main_training_function, target)
    return config, target
