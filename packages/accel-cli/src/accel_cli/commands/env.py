"""``accel env``: the facts that a bug report needs."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import shutil
import sys
from typing import Annotated, Any

import typer

from accel_cli.dialect import App
from accel_cli.render import show_facts
from accel_state.config.merge import Origin, Resolved, resolve
from accel_state.config.schema import schema_of, value_of
from accel_state.errors import ConfigError, ConfigNotFoundError
from accel_state.messages import HIDDEN, without_secrets

__all__ = ["app", "collect"]

_PACKAGES = ("accel_state", "accel_ckpt", "accel_bigmodel", "accel_train", "accel_cli")
_LIBRARIES = ("torch", "numpy", "safetensors", "huggingface_hub", "transformers", "accelerate", "deepspeed")

app = App()


@app.command()
def env(
    config_file: Annotated[
        str | None, typer.Option("--config_file", help="Configuration file to show.")
    ] = None,
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
        "packages": {name.replace("_", "-"): _own_version(name) for name in _PACKAGES},
        "libraries": {name: version for name in _LIBRARIES if (version := _version(name)) is not None},
        "system": _system(),
        "devices": _devices(),
        "configuration": configuration,
    }


def _own_version(package: str) -> str:
    try:
        return str(importlib.import_module(f"{package}.__about__").__version__)
    except ImportError:
        return "not installed"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _system() -> dict[str, Any]:
    import psutil

    memory = psutil.virtual_memory()
    return {
        "platform": platform.platform(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "accel": shutil.which("accel") or "not on PATH",
        "processor cores": f"{psutil.cpu_count(logical=False)} ({psutil.cpu_count()} threads)",
        "memory": f"{memory.total / 1e9:.1f} GB, {memory.available / 1e9:.1f} GB free",
    }


def _devices() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"torch built for": _build(torch.version)}
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return found | {"accelerators": "none"}
    count = torch.accelerator.device_count()
    found["accelerators"] = f"{count} x {device.type}"
    if device.type == "cuda":
        for index in range(count):
            facts = torch.cuda.get_device_properties(index)
            found[f"cuda:{index}"] = f"{facts.name}, {facts.total_memory / 1e9:.1f} GB"
    return found


def _build(version: Any) -> str:
    if version.cuda is not None:
        return f"CUDA {version.cuda}"
    return f"ROCm {version.hip}" if getattr(version, "hip", None) is not None else "the CPU"


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
