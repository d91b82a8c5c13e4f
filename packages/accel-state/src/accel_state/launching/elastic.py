"""Several machines: torch's elastic agent starts the ranks, one agent per machine.

The launcher itself only builds the agent's command; torch is imported in the agent's process. Run as a module, this
file is the agent: torch's, except that it exits with the code of the rank that failed first instead of 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel_state.config.launch import LaunchConfig
    from accel_state.launching.target import Target

__all__ = ["elastic_argv", "main"]

_MODULE = "accel_state.launching.elastic"
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""Signals that the agent forwards to ranks: torch's default, and SIGUSR1, which is common under Slurm."""

_NEWER = "--signals-to-handle="
"""A flag that torch 2.9 does not have; its agent forwards SIGTERM, SIGINT, SIGHUP and SIGQUIT."""


def elastic_argv(config: LaunchConfig, local_size: int, target: Target, python: str) -> tuple[str, ...]:
    """The command of this machine's agent.

    Args:
        config: the resolved configuration.
        local_size: ranks on this machine.
        target: what each rank runs.
        python: the interpreter.

    Raises:
        ConfigError: the rendezvous address or port is missing.
    """
    missing = [
        flag
        for flag, value in (
            ("--main_process_ip", config.main_process_ip),
            ("--main_process_port", config.main_process_port or None),
        )
        if value is None
    ]
    if missing:
        raise ConfigError(
            f"{config.num_machines} machines need a rendezvous address: pass {' and '.join(missing)}, the same on "
            "every machine. They belong to the machine with --machine_rank 0, where the port must be free"
        )
    words = [
        f"--nnodes={config.num_machines}",
        f"--nproc-per-node={local_size}",
        f"--max-restarts={config.max_restarts}",
        f"--monitor-interval={config.monitor_interval}",
        f"--role={config.role}",
        f"--signals-to-handle={_SIGNALS}",
    ]
    endpoint = f"{config.main_process_ip}:{config.main_process_port}"
    if config.rdzv_backend == "static" or config.same_network:
        words += [f"--master-addr={config.main_process_ip}", f"--master-port={config.main_process_port}"]
    if config.rdzv_backend == "static":
        words.append(f"--node-rank={config.machine_rank}")
    else:  # the rendezvous assigns the machine ranks
        words += [
            f"--rdzv-backend={config.rdzv_backend}",
            f"--rdzv-endpoint={endpoint}",
            f"--rdzv-id={endpoint}",
        ]
    if config.rdzv_conf:
        words.append(f"--rdzv-conf={config.rdzv_conf}")
    if config.grace_period is not None:
        words.append(f"--shutdown-timeout={max(1, round(config.grace_period))}")
    if config.log_dir is not None:
        words += [f"--log-dir={config.log_dir}", f"--tee={config.tee or '3'}"]
    elif config.tee not in (None, "", "0"):
        words.append(f"--tee={config.tee}")
    words += {"module": ["--module"], "program": ["--no-python"], "script": []}[target.kind]
    return (python, "-m", _MODULE, *words, target.name, *target.args)


def main(arguments: Sequence[str]) -> int:
    """Run the agent: start this machine's ranks, and wait for the end of the run.

    Returns:
        the exit code of the rank that failed first, or 128 + n if signal n ended it or the agent.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    known = torchrun.get_args_parser().format_help()
    words = [word for word in arguments if not word.startswith(_NEWER) or _NEWER.rstrip("=") in known]
    try:
        torchrun.run(torchrun.parse_args(words))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        sys.stderr.write(f"accel: rank {rank} failed first, with exit code {code}\n")
        return code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
