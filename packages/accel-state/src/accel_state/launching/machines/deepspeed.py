"""DeepSpeed's launchers: the command that places ranks on the machines of a hostfile.

``standard`` is this project's own launcher. With every other one, ranks are started by ``deepspeed``, as its
documentation "Getting Started", section "Launching DeepSpeed Training" describes.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from accel_state.clusters.base import DEFAULT_PORT
from accel_state.errors import ConfigError, LaunchError
from accel_state.messages import shown
from accel_state.whole_files import read_whole

if TYPE_CHECKING:
    from accel_state.config.launch import LaunchConfig
    from accel_state.launching.target import Target

__all__ = ["check_deepspeed", "deepspeed_argv", "deepspeed_size", "hosts_of", "uses_deepspeed_launcher"]

_RUNNER = "deepspeed.launcher.runner"
_DEFAULT = "pdsh"
_TOOLS = {
    "pdsh": "pdsh",
    "openmpi": "ompi_info",
    "mpich": "mpirun",
    "impi": "mpirun",
    "mvapich": "mpiname",
    "slurm": "sinfo",
}
"""The program that DeepSpeed looks for before it uses a launcher."""
_WHOLE_HOSTFILE = ("openmpi", "mpich", "impi", "mvapich")
"""Launchers that DeepSpeed runs on all slots of the hostfile or not at all."""
_ENTRY = re.compile(r"^([^\s-]\S*)\s+slots=(\d{1,5})(?!\d)")  # not a host that ssh would take for an option
_LOOPBACK = "127.0.0.1"
_FILTERS = ("deepspeed_inclusion_filter", "deepspeed_exclusion_filter")


def uses_deepspeed_launcher(config: LaunchConfig) -> bool:
    """Whether DeepSpeed's launcher starts the ranks: one of its launchers is chosen, or a hostfile for it."""
    section = config.deepspeed
    if not config.use_deepspeed or section.deepspeed_multinode_launcher == "standard":
        return False
    return section.deepspeed_multinode_launcher is not None or section.deepspeed_hostfile is not None


def hosts_of(hostfile: str) -> dict[str, int]:
    """Host to its number of slots, from a hostfile with lines such as ``worker-0 slots=4``.

    Raises:
        LaunchError: it cannot be read.
        ConfigError: a line has another form, or a host is named twice, or none is.
    """
    try:
        lines = read_whole(Path(hostfile).expanduser()).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise LaunchError(
            f"the hostfile {hostfile!r} cannot be read ({reason}); pass another one with --deepspeed_hostfile"
        ) from error
    found: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _ENTRY.match(text)
        if match is None:
            raise ConfigError(
                f"line {number} of {hostfile} is {shown(text)}; expected a host and its slots: worker-0 slots=4"
            )
        if match[1] in found:
            raise ConfigError(
                f"line {number} of {hostfile} names {match[1]} again; write each host once, with all its slots"
            )
        found[match[1]] = int(match[2])
    if not found:
        raise ConfigError(f"{hostfile} names no host; write lines such as: worker-0 slots=4")
    return found


def check_deepspeed(config: LaunchConfig, environ: Mapping[str, str]) -> None:
    """Check that DeepSpeed's launcher can start.

    Raises:
        LaunchError: DeepSpeed, a tool that the launcher needs, or the hostfile is missing.
        ConfigError: the hostfile, the filters and the launcher do not match.
    """
    launcher = _launcher(config)
    hosts = (
        {} if config.deepspeed.deepspeed_hostfile is None else hosts_of(config.deepspeed.deepspeed_hostfile)
    )
    _check_filters(config, launcher, hosts)
    if config.num_machines > 1 and not hosts:
        raise ConfigError(
            f"--deepspeed_multinode_launcher {launcher} on {config.num_machines} machines needs a list of them: pass "
            "--deepspeed_hostfile, a file with lines such as: worker-0 slots=4"
        )
    if launcher == "slurm" and (config.module or config.no_python):
        flag = "--module" if config.module else "--no_python"
        raise ConfigError(
            f"{flag}: DeepSpeed's slurm launcher starts scripts only; name the script's file, or run srun accel launch"
        )
    if config.dry_run:
        return
    if importlib.util.find_spec("deepspeed") is None:
        raise LaunchError(
            f"--deepspeed_multinode_launcher {launcher} needs DeepSpeed, which is not installed; pip install "
            "deepspeed, or leave the option out: this launcher starts the ranks without it"
        )
    tool = _TOOLS.get(launcher)
    several = len(hosts) > 1
    if tool is not None and several and shutil.which(tool, path=environ.get("PATH")) is None:
        raise LaunchError(
            f"--deepspeed_multinode_launcher {launcher} needs {tool}, which was not found on PATH; install it, or "
            "choose nossh and run this command on every machine"
        )


def deepspeed_size(config: LaunchConfig) -> tuple[int, int]:
    """Ranks and machines of the run: those of the flags, else those of the hostfile."""
    section = config.deepspeed
    hosts = {"localhost": 1} if section.deepspeed_hostfile is None else hosts_of(section.deepspeed_hostfile)
    machines = max(config.num_machines, len(hosts))
    return config.num_processes or sum(hosts.values()), machines


def deepspeed_argv(
    config: LaunchConfig,
    target: Target,
    python: str,
    changes: Mapping[str, str],
    port: int | None = None,
) -> tuple[str, ...]:
    """The command of DeepSpeed's launcher.

    Args:
        config: the resolved configuration.
        target: the script, module or program that each rank runs.
        python: the interpreter, at the same place on every machine.
        changes: variables of the ranks. DeepSpeed passes on few of them to other machines, so ``env`` sets them there.
        port: the port of rank 0, if none is configured.
    """
    section = config.deepspeed
    launcher = _launcher(config)
    words = [] if section.deepspeed_hostfile is None else ["--hostfile", section.deepspeed_hostfile]
    if launcher == "nossh":
        words += ["--no_ssh", "--node_rank", str(config.machine_rank)]
    else:
        words += ["--launcher", launcher]
        words += (
            [] if launcher == _DEFAULT else ["--no_ssh_check"]
        )  # only pdsh reaches the machines by ssh itself
        hosts = [] if section.deepspeed_hostfile is None else [*hosts_of(section.deepspeed_hostfile)]
        if len(hosts) == 1 and (launcher != _DEFAULT or hosts != ["localhost"]):
            words.append(
                "--force_multi"
            )  # otherwise DeepSpeed starts one host's ranks itself, on this machine
    words.append("--no_local_rank")
    for flag, value in zip(
        ("--include", "--exclude"), (getattr(section, name) for name in _FILTERS), strict=True
    ):
        words += [] if value is None else [flag, value]
    filtered = any(getattr(section, name) is not None for name in _FILTERS)
    if config.num_processes is not None and not filtered and launcher not in _WHOLE_HOSTFILE:
        _, machines = deepspeed_size(config)
        words += ["--num_accelerators", str(config.num_processes // machines)]
    address, chosen = _address(config), config.main_process_port or port or DEFAULT_PORT
    words += ["--master_addr", address, "--master_port", str(chosen)]
    command = target.argv(python)
    if (
        launcher == "slurm"
    ):  # srun passes on all variables, and DeepSpeed puts the interpreter before the script
        return (python, "-m", _RUNNER, *words, target.name, *target.args)
    known = {**changes, "MASTER_ADDR": address, "MASTER_PORT": str(chosen)}
    settings = [f"{name}={value}" for name, value in sorted(known.items())]
    return (python, "-m", _RUNNER, *words, "--no_python", "env", *settings, *command)


def _launcher(config: LaunchConfig) -> str:
    return config.deepspeed.deepspeed_multinode_launcher or _DEFAULT


def _address(config: LaunchConfig) -> str:
    if config.main_process_ip is not None:
        return config.main_process_ip
    if config.deepspeed.deepspeed_hostfile is None:
        return _LOOPBACK
    first = next(iter(hosts_of(config.deepspeed.deepspeed_hostfile)))
    return _LOOPBACK if first == "localhost" else first


def _check_filters(config: LaunchConfig, launcher: str, hosts: Mapping[str, int]) -> None:
    given = {name: value for name in _FILTERS if (value := getattr(config.deepspeed, name)) is not None}
    if len(given) == 2:
        raise ConfigError(
            "--deepspeed_inclusion_filter and --deepspeed_exclusion_filter exclude each other; keep one"
        )
    for name, text in given.items():
        if launcher in _WHOLE_HOSTFILE:
            raise ConfigError(
                f"--{name} {text}: DeepSpeed's {launcher} launcher uses every slot of the hostfile; leave the filter "
                "out and shorten the hostfile, or choose pdsh"
            )
        for part in text.split("@"):
            host, _, slots = part.partition(":")
            if hosts and host not in hosts:
                raise ConfigError(
                    f"--{name} {text} names {host}, which is not in {config.deepspeed.deepspeed_hostfile}; its hosts "
                    f"are {', '.join(hosts)}"
                )
            for slot in filter(None, slots.split(",")):
                if not slot.isdecimal() or (hosts and int(slot) >= hosts[host]):
                    raise ConfigError(
                        f"--{name} {text} names slot {slot} of {host}, which has slots 0 to {hosts.get(host, 1) - 1}; "
                        "expected host:slot,slot@host"
                    )
