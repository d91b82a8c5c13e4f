"""Parsers and functions of ``accelerate.commands``, over the commands of ``accel``."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib
import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_cli.as_accelerate.extras.arguments import add_option, parser_of, run
from accel_cli.commands.tpu_config import refuse_to_install
from accel_cli.dialect import App
from accel_state.config.files import parse_text, read_text
from accel_state.config.fsdp_conversion import convert_fsdp_options, converted
from accel_state.config.merge import resolve
from accel_state.config.sections.tpu import TpuSection
from accel_state.environment import snapshot
from accel_state.errors import ConfigError
from accel_state.launching.machines.tpu_pod import ssh_commands
from accel_state.whole_files import read_whole

_logger = logging.getLogger(__name__)


def _app(module: str) -> App:
    app: App = importlib.import_module(f"accel_cli.commands.{module}").app
    return app


def _parser(module: str, name: str, subparsers: Any, function: Any) -> argparse.ArgumentParser:
    parser = parser_of(_app(module), name, subparsers)
    if subparsers is not None:
        parser.set_defaults(func=function)
    return parser


def _run(module: str, args: argparse.Namespace) -> None:
    code = run(_app(module), args)
    if code:
        sys.exit(code)


def main() -> None:
    """The command ``accelerate``, which is ``accel`` here.

    Raises:
        SystemExit: with the exit code.
    """
    from accel_cli.app import main as accel

    sys.exit(accel(sys.argv[1:]))


# env


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The flags of ``accel env``."""
    return _parser("env", "env", subparsers, env_command)


def env_command(args: argparse.Namespace) -> None:
    """Print versions, devices and the configuration."""
    _run("env", args)


# estimate


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The flags of ``accel estimate-memory``."""
    return _parser("estimate_memory", "estimate-memory", subparsers, estimate_command)


def estimate_command(args: argparse.Namespace) -> None:
    """Print how much memory a model takes.

    Raises:
        EstimateError: there is no such model.
    """
    _run("estimate_memory", args)


# merge


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The flags of ``accel merge-weights``."""
    return _parser("merge_weights", "merge-weights", subparsers, merge_command)


def merge_command(args: argparse.Namespace) -> None:
    """Merge the parts of a sharded checkpoint into whole files."""
    _run("merge_weights", args)


# test


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:  # noqa: PT028
    """The flag of ``accelerate test``; ``accel test`` takes those of ``accel launch`` as well."""
    text = "Start the configured world and check it (accel test)."
    parser: argparse.ArgumentParser
    if subparsers is None:
        parser = argparse.ArgumentParser("accel test", description=text)
    else:
        parser = subparsers.add_parser("test", description=text)
        parser.set_defaults(func=test_command)
    add_option(parser, ["--config_file"], help="Configuration file to read.")
    return parser


def test_command(args: argparse.Namespace) -> None:
    """Check the configured world.

    Raises:
        SystemExit: a check failed, with the exit code.
    """
    from accel_cli.commands.test import main as test

    code = test([] if args.config_file is None else ["--config_file", str(args.config_file)])
    if code:
        sys.exit(code)


# to-fsdp2


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The flags of ``accel to-fsdp2``."""
    return _parser("to_fsdp2", "to-fsdp2", subparsers, to_fsdp2_command)


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Convert a configuration file from FSDP version 1 to version 2.

    Raises:
        ConfigError: the file has nothing to convert, or no output is given.
        FileExistsError: the file to write exists, and is not to be overwritten.
    """
    target = args.output_file
    if target is not None and not args.overwrite and Path(target).exists():
        raise FileExistsError(
            f"{target} exists; name another --output_file, or pass --overwrite to replace it"
        )
    _run("to_fsdp2", args)


def load_config(config_file: str | Path) -> dict[str, Any]:
    """The data of a configuration file.

    Raises:
        ConfigError: it does not exist, or is no mapping.
    """
    return parse_text(read_text(Path(config_file)), Path(config_file))


def convert_config_to_fsdp2(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the options of FSDP version 2 in place of those of version 1; the one given stays.

    Args:
        config: the data of a configuration file.

    Raises:
        ConfigError: it has no ``fsdp_config``, or a value that version 1 does not know.
    """
    options = config.get("fsdp_config")
    if not options:
        raise ConfigError("the configuration has no fsdp_config, so there is nothing to convert")
    found = copy.deepcopy(dict(config))
    if str(options.get("fsdp_version", 1)) == "2":
        _logger.warning("The configuration is of FSDP version 2 already; nothing is converted.")
        return found
    changes = convert_fsdp_options(options)
    for change in changes:
        if change.warn:
            _logger.warning("fsdp_config.%s: %s", change.key, change.why)
    return found | {"fsdp_config": converted(changes)}


# tpu


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The flags of ``accel tpu-config``, as Accelerate names them."""
    return _parser("tpu_config", "tpu-config", subparsers, tpu_command_launcher)


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Run commands on all machines of a TPU pod.

    They are joined as Accelerate joins them: each runs even if others fail. ``accel tpu-config`` stops at the first
    that fails.

    Raises:
        ConfigError: the pod has no name, or there is nothing to run.
        SystemExit: gcloud failed, with its exit code.
    """
    if args.install_accelerate:
        refuse_to_install()
    tpu = resolve(args.config_file, snapshot()).local().tpu
    named = {"tpu_name": args.tpu_name, "tpu_zone": args.tpu_zone, "command_file": args.command_file}
    changed: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if args.command_file is not None or args.command:
        changed |= {"command_file": args.command_file, "commands": tuple(args.command or ())}
    tpu = dataclasses.replace(tpu, tpu_vm=None, **changed)
    script = "; ".join(["cd /usr/share", *_commands(tpu)])
    (words,) = ssh_commands(tpu, [script], alpha=args.use_alpha)
    if args.debug:
        print(f"Running {' '.join(words)}")
        return
    code = subprocess.call(words)
    if code:
        sys.exit(code)
    print("Successfully setup pod.")


def _commands(tpu: TpuSection) -> list[str]:
    lines = [] if tpu.command_file is None else read_whole(Path(tpu.command_file)).decode().splitlines()
    found = [line for line in (*lines, *(tpu.commands or ())) if line.strip()]
    if not found:
        raise ConfigError("there is nothing to run; pass --command or --command_file")
    return found
