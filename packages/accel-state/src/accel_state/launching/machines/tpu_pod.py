"""TPU pods: one command on every machine of the pod, by gcloud's ssh, and the place of a machine in its pod.

gcloud passes a command as one text to the login shell of each machine, so whatever is in it is quoted once, for that
shell. The flags are those of ``gcloud compute tpus tpu-vm ssh``; torch_xla has had no launcher for pods since 2.9.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from accel_state.clusters.base import DEFAULT_PORT
from accel_state.config.flags import to_flags
from accel_state.config.sections.runtime import RuntimeSection
from accel_state.config.sections.tpu import TpuSection
from accel_state.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from accel_state.config.launch import LaunchConfig
    from accel_state.launching.target import Target

__all__ = ["PodPlace", "in_its_pod", "pod_place", "run_on_pod", "ssh_commands", "worker_command"]

"""Port of rank 0, if none is given: torch's default. The machines of a pod are one user's."""

_METADATA = "http://{}/computeMetadata/v1/instance/attributes/{}"


@dataclasses.dataclass(frozen=True, slots=True)
class PodPlace:
    """One machine of a pod.

    Attributes:
        index: its index, from 0.
        hosts: addresses of all machines, by index.
    """

    index: int
    hosts: tuple[str, ...]


def ssh_commands(tpu: TpuSection, command: Sequence[str], *, alpha: bool = False) -> list[tuple[str, ...]]:
    """The gcloud command lines that run a shell command on the machines of a pod.

    Args:
        tpu: name, zone, and ``tpu_vm``: nothing for all machines; their numbers (``0``, ``2-3``); or names of virtual
            machines, each of which gets a command line of its own.
        command: the shell command; for named machines one for each, else one.
        alpha: use ``gcloud alpha``.

    Raises:
        ConfigError: the pod has no name, or numbers and names are mixed.
    """
    given = [("tpu_name", tpu.tpu_name), ("tpu_zone", tpu.tpu_zone), *(("vm", vm) for vm in tpu.tpu_vm or ())]
    for flag, name in given:
        if name and (name.startswith("-") or not name.isprintable()):
            raise ConfigError(
                f"--{flag} is {name[:80]!r}, which gcloud does not accept as a name; correct it"
            )
    start = ("gcloud", *(("alpha",) if alpha else ()), "compute")
    zone = ("--zone", tpu.tpu_zone) if tpu.tpu_zone else ()
    names = _named(tpu)
    if names:
        return [
            (*start, "ssh", name, *zone, "--command", words)
            for name, words in zip(names, command, strict=True)
        ]
    if not tpu.tpu_name:
        raise ConfigError(
            "the TPU has no name; pass --tpu_name (gcloud compute tpus tpu-vm list shows the names), or write tpu_name "
            "into the configuration file"
        )
    workers = ",".join(tpu.tpu_vm) if tpu.tpu_vm else "all"
    (words,) = command
    return [(*start, "tpus", "tpu-vm", "ssh", tpu.tpu_name, *zone, "--command", words, "--worker", workers)]


def _named(tpu: TpuSection) -> tuple[str, ...]:
    """The machines that are given by name; empty if by number, or not at all."""
    given = tpu.tpu_vm or ()
    numbers = [name for name in given if name.replace("-", "").replace(",", "").isdecimal()]
    if not numbers:
        return given
    if len(numbers) != len(given):
        raise ConfigError(
            f"--vm {', '.join(given)} has numbers and names; give numbers of the pod's machines, or names of machines"
        )
    return ()


def worker_command(config: LaunchConfig, target: Target) -> list[str]:
    """The shell commands that start the ranks of each machine, for ``ssh_commands``.

    Each is ``accel launch`` with the options of ``config``, run where ssh arrives: the home folder of the user there. A
    machine finds its own place in the pod; named machines receive theirs as flags.

    Raises:
        ConfigError: an item of ``tpu_env`` is not NAME=value, or the target cannot run there.
    """
    tpu = config.tpu
    if wrong := [item for item in tpu.tpu_env or () if not item.partition("=")[0].isidentifier()]:
        raise ConfigError(f"--env is {wrong[0]!r}; expected NAME=value")
    names = _named(tpu)
    if tpu.tpu_vm and not names:
        raise ConfigError(
            f"--vm {', '.join(tpu.tpu_vm)} are only some of the pod's machines, and a run needs all of them; leave "
            "--vm out, or give names of machines"
        )
    if not names:
        return [_worker_words(config, target, {"ACCELERATE_IN_TPU_POD": "true"})]
    if len(names) == 1:
        return [_worker_words(config, target, {})]
    return [_worker_words(_at(config, PodPlace(index, names)), target, {}) for index in range(len(names))]


def _worker_words(config: LaunchConfig, target: Target, variables: Mapping[str, str]) -> str:
    tpu = config.tpu
    kept = TpuSection(downcast_bf16=tpu.downcast_bf16, main_training_function=tpu.main_training_function)
    there = dataclasses.replace(config, tpu=kept, dry_run=False, runtime=RuntimeSection())
    settings = [f"{name}={value}" for name, value in variables.items()] + list(tpu.tpu_env or ())
    words = ["sudo"] if tpu.tpu_use_sudo else []
    words += ["env", *settings] if settings else []
    words += ["python3", "-m", "accel_cli", "launch", *to_flags(there), target.name, *target.args]
    return shlex.join(words)


def in_its_pod(config: LaunchConfig, environ: Mapping[str, str]) -> LaunchConfig:
    """The configuration of this machine of a pod: its rank, the number of machines, and the address of rank 0.

    Unchanged if the launch does not come from a pod's launcher, or says where the machine is.

    Raises:
        LaunchError: the place of the machine cannot be found.
    """
    if not (config.use_tpu and config.runtime.in_tpu_pod) or config.num_machines > 1:
        return config
    place = pod_place(environ)
    return config if len(place.hosts) == 1 else _at(config, place)


def _at(config: LaunchConfig, place: PodPlace) -> LaunchConfig:
    return dataclasses.replace(
        config,
        num_machines=len(place.hosts),
        machine_rank=place.index,
        main_process_ip=place.hosts[0],
        main_process_port=config.main_process_port or DEFAULT_PORT,
    )


def pod_place(environ: Mapping[str, str]) -> PodPlace:
    """The place of this machine: from TPU_WORKER_ID and TPU_WORKER_HOSTNAMES, else from Google's metadata server.

    Raises:
        LaunchError: neither has it.
    """
    index = environ.get("TPU_WORKER_ID") or environ.get("CLOUD_TPU_TASK_ID")
    names = environ.get("TPU_WORKER_HOSTNAMES")
    index = index or _metadata("agent-worker-number", environ)
    if names is None:
        # A list of id:name:address; newer machines leave the first two empty.
        endpoints = _metadata("worker-network-endpoints", environ)
        names = ",".join(endpoint.split(":")[-1] for endpoint in endpoints.split(","))
    hosts = tuple(name.strip() for name in names.split(",") if name.strip())
    if not index.strip().isdecimal() or int(index) >= len(hosts):
        raise LaunchError(
            f"this machine is number {index!r} of the TPU pod, which has {len(hosts)} ({', '.join(hosts)}); set "
            "TPU_WORKER_ID and TPU_WORKER_HOSTNAMES (all addresses, with commas between them) on every machine"
        )
    return PodPlace(int(index), hosts)


def _metadata(name: str, environ: Mapping[str, str]) -> str:
    import urllib.error
    import urllib.request

    host = environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
    request = urllib.request.Request(_METADATA.format(host, name), headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            text: str = answer.read().decode()
            return text
    except (OSError, urllib.error.URLError) as error:
        raise LaunchError(
            f"the place of this machine in the TPU pod is not known: {name} of {host} cannot be read ({error}); set "
            "TPU_WORKER_ID and TPU_WORKER_HOSTNAMES (all addresses, with commas between them) on every machine"
        ) from error


def run_on_pod(commands: Sequence[Sequence[str]], environ: Mapping[str, str]) -> int:
    """Run gcloud's command lines at the same time, with the standard streams of this process, and wait for all.

    Returns:
        The exit code of the first that failed, in the order of the list; 0 if none did.

    Raises:
        LaunchError: there is no gcloud.
    """
    gcloud = shutil.which("gcloud", path=environ.get("PATH", os.defpath))
    if gcloud is None:
        raise LaunchError(
            "gcloud was not found on PATH; install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), "
            "and log in with gcloud auth login"
        )
    running = [subprocess.Popen([gcloud, *words[1:]], env=dict(environ)) for words in commands]
    try:
        codes = [process.wait() for process in running]
    except KeyboardInterrupt:
        for process in running:  # they have the signal of the terminal as well
            process.wait()
        raise
    failed = next((code for code in codes if code), 0)
    return failed if failed >= 0 else 128 - failed
