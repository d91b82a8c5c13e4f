"""``accel env``: the facts that a bug report needs."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from accel_cli.config_files import FileOption
from accel_cli.dialect import App
from accel_cli.machine import PACKAGES, facts_of_devices, facts_of_system, package_versions, versions_of
from accel_cli.render import show_facts
from accel_state.config.merge import Origin, Resolved, resolve
from accel_state.config.schema import schema_of, value_of
from accel_state.errors import ConfigError, ConfigNotFoundError
from accel_state.messages import HIDDEN, without_secrets

__all__ = ["app", "collect"]

_LIBRARIES = ("torch", "numpy", "safetensors", "huggingface_hub", "transformers", "accelerate", "deepspeed")

app = App()


@app.command()
def env(
    config_file: FileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show versions, devices, memory and the configuration in effect, for bug reports."""
    facts = collect(config_file)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    show_facts(facts)


def collect(config_file: str | None = None) -> dict[str, dict[str, Any]]:
    """The facts, by topic. Imports torch.

    Args:
        config_file: configuration file to show; by default the one that ``accel launch`` would read.

    Raises:
        ConfigNotFoundError: ``config_file`` does not exist.
    """
    configuration = _configuration(config_file)
    return {
        "packages": dict.fromkeys(PACKAGES, "not installed") | package_versions(),
        "libraries": versions_of({name: (name,) for name in _LIBRARIES}),
        "system": facts_of_system(),
        "devices": facts_of_devices(),
        "configuration": configuration,
    }


def _configuration(config_file: str | None) -> dict[str, Any]:
    try:
        return _in_force(resolve(config_file))
    except ConfigNotFoundError:
        raise
    except ConfigError as error:
        return {"error": str(error)}  # it may be the subject of the bug report


def _in_force(resolved: Resolved) -> dict[str, Any]:
    config = resolved.config
    rows: dict[str, Any] = {"file": str(resolved.file) if resolved.file else "none"}
    for bound in schema_of(type(config)).options:
        origin = resolved.origin(bound.path)
        if origin != Origin.DEFAULT:
            value = HIDDEN if bound.about.secret else without_secrets(value_of(config, bound))
            rows[bound.path] = value if origin == Origin.FILE else f"{value} (from the environment)"
    return rows
