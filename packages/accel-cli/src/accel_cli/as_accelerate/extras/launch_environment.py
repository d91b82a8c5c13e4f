"""Command lines and environments of launches, for programs that start them themselves."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from accel_cli.as_accelerate.extras.launch import flags_of, resolve_namespace
from accel_cli.commands.launch import target_of
from accel_state.config.codec import encode, rank_environment
from accel_state.config.launch import LaunchConfig
from accel_state.config.schema import schema_of
from accel_state.environment import snapshot
from accel_state.host.system import get_free_port
from accel_state.launching.machines.deepspeed import deepspeed_argv, uses_deepspeed_launcher
from accel_state.launching.machines.mpi import check_mpi
from accel_state.launching.plan import Host, World, plan
from accel_state.launching.submission.sagemaker_job import hyperparameters_of


def _convert_nargs_to_dict(nargs: Sequence[str]) -> dict[str, Any]:
    """The options of a script for SageMaker, with values as booleans and numbers where they read as such.

    Raises:
        ConfigError: a word is not an option with exactly one value.
    """
    return hyperparameters_of(nargs)


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """The value of a variable that lists paths, this process's and one more."""
    paths = [path for path in snapshot().get(env_var_name, "").split(os.pathsep) if path]
    return os.pathsep.join([*paths, str(path_to_add)])


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of a script as one process, or under mpirun where a hostfile is given.

    Args:
        args: the namespace from the parser of ``launch_command_parser``.

    Raises:
        ConfigError: a value is wrong.
    """
    environ = snapshot()
    config = resolve_namespace(args).local()
    hostfile = config.mpirun.hostfile
    several = config.num_processes or 1 if hostfile is not None else 1
    machines = config.num_machines if hostfile is not None else 1
    world = World(several, max(1, several // machines), machines, config.machine_rank, config.use_cpu)
    host = Host(open_mpi=hostfile is None or check_mpi(hostfile, environ))
    prepared = plan(config, target_of(config, flags_of(args)), world, environ, host, port=get_free_port())
    (process,) = prepared.processes
    return list(process.argv), process.environment(environ)


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """The environment of ranks that torchrun starts; the attributes that torchrun reads are set in the namespace.

    ``nproc_per_node``, ``nnodes``, ``node_rank``, ``master_addr`` and ``master_port`` are texts; for a port of 0 on
    one machine a free one is chosen.

    Raises:
        ConfigError: a value is wrong.
    """
    config = resolve_namespace(args).local()
    machines, size = config.num_machines, config.num_processes or 1
    port = config.main_process_port
    args.nproc_per_node = str(max(1, size // machines))
    args.nnodes, args.node_rank = str(machines), str(config.machine_rank)
    args.master_addr = config.main_process_ip or "127.0.0.1"
    args.master_port = str(port or (29500 if machines > 1 else get_free_port()))
    return rank_environment(config, snapshot())


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """Command line of DeepSpeed's launcher and the environment of its ranks.

    Where torchrun starts the ranks, the command line is None, and the namespace is changed as by
    ``prepare_multi_gpu_env``.

    Raises:
        ConfigError: a value is wrong.
    """
    config = resolve_namespace(args).local()
    if not uses_deepspeed_launcher(config):
        return None, prepare_multi_gpu_env(args)
    environ = snapshot()
    changed: MutableMapping[str, str] = rank_environment(config, environ)
    new = {name: value for name, value in changed.items() if environ.get(name) != value}
    argv = deepspeed_argv(config, target_of(config, flags_of(args)), Host().python, new, None)
    return list(argv), dict(changed)


def setup_fp8_env(args: argparse.Namespace, current_env: Mapping[str, str]) -> dict[str, str]:
    """An environment with the options of fp8 that a namespace has, as ranks read them.

    Raises:
        ConfigError: a value is wrong.
    """
    return _with_section(args, current_env, "fp8")


def prepare_extend_env_parallelism_config(
    args: argparse.Namespace, current_env: Mapping[str, str]
) -> dict[str, str]:
    """An environment with the degrees of parallelism that a namespace has, as ranks read them.

    Raises:
        ConfigError: a value is wrong, or the degrees do not fit the number of processes.
    """
    return _with_section(args, current_env, "parallelism")


def _with_section(args: argparse.Namespace, current_env: Mapping[str, str], section: str) -> dict[str, str]:
    encoded = encode(resolve_namespace(args).local())
    names = {
        name
        for bound in schema_of(LaunchConfig).options
        if bound.section == section or bound.path == f"use_{section}_config"
        for name in bound.variables
    }
    return {**current_env, **{name: value for name, value in encoded.items() if name in names}}
