"""The questions of ``accel config``, with the texts of the configuration schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_state.config.launch import LaunchConfig
from accel_state.config.option_types import Bool
from accel_state.config.schema import BoundOption, build, schema_of
from accel_state.errors import ConfigError
from accel_state.launching.engines import missing_engine

__all__ = ["Asker", "ask_launch_config", "may_replace", "questionary_asker"]

Asker = Callable[[BoundOption, Any], Any]
"""Asks for an option, given the value that Enter selects; returns ``None`` if the user cancelled."""


def ask_launch_config(ask: Asker, accelerators: int) -> LaunchConfig | None:
    """Ask for the options of a plain data-parallel run: devices, number of processes, precision.

    Args:
        ask: asks one question.
        accelerators: number of accelerators of this machine.

    Returns:
        The configuration; ``None`` if the user cancelled.
    """
    values: dict[str, Any] = {}
    try:
        values["use_cpu"] = _answer(ask, "use_cpu", accelerators == 0)
        machines = values["num_machines"] = _answer(ask, "num_machines", 1)
        if machines > 1:
            values["machine_rank"] = _answer(ask, "machine_rank", 0, high=machines - 1)
            values["main_process_ip"] = _answer(ask, "main_process_ip", None)
            values["main_process_port"] = _answer(ask, "main_process_port", None, low=1)
        here = 1 if values["use_cpu"] else max(1, accelerators)
        each = {"prompt": "How many processes will you use on each machine?"} if machines > 1 else {}
        values["num_processes"] = machines * _answer(ask, "num_processes", here, **each)
        if not values["use_cpu"] and accelerators > 1:
            values["gpu_ids"] = _answer(ask, "gpu_ids", "all")
        values["mixed_precision"] = _answer(ask, "mixed_precision", "no")
    except _GaveUpError:
        return None
    config: LaunchConfig = build(LaunchConfig, values)
    return dataclasses.replace(config, distributed_type=_kind(config))


def questionary_asker() -> Asker:
    """Ask in the terminal; for an invalid answer, show the reason below the line and ask again."""
    import questionary

    def ask(bound: BoundOption, default: Any) -> Any:
        about = bound.about
        if about.choices:
            choices = [choice for choice in about.choices if missing_engine(bound.path, choice) is None]
            return questionary.select(about.prompt, choices=choices, default=default).ask()
        if isinstance(bound.option_type, Bool):
            return questionary.confirm(about.prompt, default=default).ask()
        # The default is shown, not filled in: typing "2" after a filled-in "1" would mean twelve.
        hint = None if default is None else f"[{bound.option_type.format(default)}]"

        def check(text: str) -> bool | str:
            try:
                missing = bound.parse(text, "the answer") is None and default is None
            except ConfigError as error:
                return str(error)
            return "a value is needed" if missing else True

        text = questionary.text(about.prompt, instruction=hint, validate=check).ask()
        if text is None:
            return None  # Ctrl-C
        value = bound.parse(text, about.prompt)
        return default if value is None else value

    return ask


def may_replace(path: Path) -> bool | None:
    """Whether a file may be written: it does not exist, or the user agrees to replace it.

    Returns:
        ``None`` if the user cancelled.
    """
    if not path.exists():
        return True
    import questionary

    answer: bool | None = questionary.confirm(f"{path} exists. Replace it?", default=False).ask()
    return answer


class _GaveUpError(Exception):
    """Ctrl-C at a question."""


def _answer(ask: Asker, path: str, default: Any, **narrower: Any) -> Any:
    """Ask for an option; ``narrower`` overrides parts of its description according to earlier answers."""
    bound = schema_of(LaunchConfig).by_path[path]
    value = ask(dataclasses.replace(bound, about=dataclasses.replace(bound.about, **narrower)), default)
    if value is None:
        raise _GaveUpError
    return value


def _kind(config: LaunchConfig) -> str:
    if config.num_processes == 1:
        return "NO"
    return "MULTI_CPU" if config.use_cpu else "MULTI_GPU"
