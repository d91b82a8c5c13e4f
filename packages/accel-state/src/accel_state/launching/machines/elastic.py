"""Several machines: torch's elastic agent starts the ranks, one agent per machine.

The launcher itself only builds the agent's command, which ``agent.py`` runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel_state.config.launch import LaunchConfig
    from accel_state.launching.target import Target

__all__ = ["DEFAULT_SIGNALS", "elastic_argv"]

_MODULE = "accel_state.launching.machines.agent"
DEFAULT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
"""Signals that reach the ranks: torch's default, and SIGUSR1, which is common under Slurm."""

_ALWAYS = ("SIGTERM", "SIGINT")
"""Signals that the launcher sends to end a run: at others than those it handles the agent ends without its ranks."""


def _signals(config: LaunchConfig) -> tuple[str, ...]:
    chosen = tuple(name.upper() for name in config.signals_to_handle or DEFAULT_SIGNALS)
    return tuple(dict.fromkeys((*_ALWAYS, *chosen)))


def elastic_argv(
    config: LaunchConfig, local_size: int, target: Target, python: str, *, cpu: bool = False
) -> tuple[str, ...]:
    """The command of this machine's agent.

    Args:
        config: the resolved configuration.
        local_size: ranks on this machine.
        target: the script, module or program that each rank runs.
        python: the interpreter.
        cpu: the ranks compute on the CPU.

    Raises:
        ConfigError: the rendezvous address or port is missing, or two options contradict each other.
    """
    _check(config, cpu)
    least = config.min_machines or config.num_machines
    backend = _backend(config)
    restarts = max(config.max_restarts, config.spares)
    words = [
        f"--nnodes={config.num_machines if least == config.num_machines else f'{least}:{config.num_machines}'}",
        f"--nproc-per-node={local_size}",
        f"--max-restarts={restarts}",
        f"--monitor-interval={config.monitor_interval}",
        f"--role={config.role}",
        f"--signals-to-handle={','.join(_signals(config))}",
    ]
    endpoint = f"{config.main_process_ip}:{config.main_process_port}"
    if backend == "static" or config.same_network:
        words += [f"--master-addr={config.main_process_ip}", f"--master-port={config.main_process_port}"]
    if backend == "static":
        words.append(f"--node-rank={config.machine_rank}")
    else:  # the rendezvous assigns the machine ranks
        words += [
            f"--rdzv-backend={backend}",
            f"--rdzv-endpoint={endpoint}",
            f"--rdzv-id={config.rdzv_id or endpoint}",
        ]
    if config.rdzv_conf:
        words.append(f"--rdzv-conf={config.rdzv_conf}")
    if config.grace_period is not None:
        words.append(f"--shutdown-timeout={max(1, round(config.grace_period))}")
    if config.numa_binding is not None:
        words.append(f"--numa-binding={config.numa_binding}")
    if config.virtual_local_rank:
        words.append("--virtual-local-rank")
    if config.log_dir is not None:
        words += [f"--log-dir={config.log_dir}", f"--tee={config.tee or '3'}"]
    elif config.tee not in (None, "", "0"):
        words.append(f"--tee={config.tee}")
    # Ranks run in a process of ours that leaves their error where the agent reads it; a program runs as it is.
    program = target.kind == "program"
    words += ["--no-python", *target.argv()] if program else ["--module", *target.watched_argv()[2:]]
    own = [f"--connect-timeout={config.connect_timeout:g}"]
    for name in ("start", "step", "checkpoint"):
        limit = getattr(config, f"{name}_timeout")
        own += [f"--{name}-timeout={limit:g}"] if limit is not None else []
    own += ["--straggler-report"] if config.straggler_report else []
    own += ["--all-frames"] if config.debug else []
    own += ["--program"] if program else []
    if config.spares:
        own += [f"--spares={config.spares}", *(["--cpu"] if cpu else [])]
    return (python, "-m", _MODULE, *own, "--", *words)


def _backend(config: LaunchConfig) -> str:
    # A static rendezvous has fixed members: it neither lets a machine go nor takes another one in.
    changes = config.spares or (config.min_machines or config.num_machines) < config.num_machines
    return "c10d" if changes and config.rdzv_backend == "static" else config.rdzv_backend


def _check(config: LaunchConfig, cpu: bool) -> None:
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
    if config.min_machines is not None and config.min_machines > config.num_machines:
        raise ConfigError(
            f"--min_machines {config.min_machines} is more than --num_machines {config.num_machines}, the largest "
            "number of machines; lower the first, or raise the second"
        )
    if config.numa_binding is not None and cpu:
        raise ConfigError(
            f"--numa_binding {config.numa_binding} on several machines binds each rank near its GPU, but the ranks "
            "compute on the CPU; leave it out"
        )
