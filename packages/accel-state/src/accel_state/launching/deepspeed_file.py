"""DeepSpeed's own configuration file, read before anything starts or waits in a queue."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from accel_state.config.merge import Resolved
from accel_state.config.schema import build
from accel_state.config.sections.deepspeed import DEEPSPEED_OPTIONS
from accel_state.errors import ConfigError
from accel_state.whole_files import read_whole

__all__ = ["check_deepspeed_file"]

_OPTION = "deepspeed.hf_ds_config"
_PRECISIONS = ("fp16", "bf16")


def check_deepspeed_file(resolved: Resolved) -> Resolved:
    """Check that the file exists, is JSON, and does not contradict the precision of the configuration.

    DeepSpeed also accepts text in place of a path; of that, JSON is read.

    Returns:
        The configuration without the options for which the file has another value, with a note about each: the file
        counts. Where it has ``"auto"``, the option's value is filled in.

    Raises:
        ConfigError: the file is missing or wrong; the message names it.
    """
    config = resolved.local()
    given = config.deepspeed.hf_ds_config
    if config.distributed_type != "DEEPSPEED" or given is None:
        return resolved
    is_text = given.lstrip().startswith("{")
    if not is_text and not _is_path(given):
        return resolved
    found = _read(resolved, None if is_text else Path(given).expanduser(), given)
    on = [name for name in _PRECISIONS if _is_on(found, name)]
    where = resolved.describe(_OPTION)
    if len(on) > 1:
        raise ConfigError(f"{where}: fp16 and bf16 are both enabled in it; disable one of them")
    wanted = config.mixed_precision
    chosen = resolved.sources.of("mixed_precision").path or wanted != "no"
    if on and chosen and wanted in ("no", *_PRECISIONS) and wanted != on[0]:
        raise ConfigError(
            f"{where}: {on[0]} is enabled in it, which contradicts {resolved.describe('mixed_precision')}; give both "
            'the same, or write "enabled": "auto" in the file'
        )
    return _without_overridden(resolved, found)


def _without_overridden(resolved: Resolved, found: dict[str, Any]) -> Resolved:
    values = resolved.values
    notes: list[str] = []
    for path, key in DEEPSPEED_OPTIONS.items():
        mine, there = values[path], _value_of(found, key)
        silent = there is None and (mine in ("none", 0, False) or "." not in key)  # such as: no clipping
        if mine is not None and there not in ("auto", mine) and not silent:
            has = f"has no {key}" if there is None else f"has {key} {there!r}"
            notes.append(f"{resolved.describe(path)} is not used: {resolved.describe(_OPTION)} {has}")
            values[path] = None
    if not notes:
        return resolved
    config = build(type(resolved.config), values)
    return dataclasses.replace(resolved, config=config, notes=(*resolved.notes, *notes))


def _value_of(found: dict[str, Any], key: str) -> Any:
    """The value of a dotted key; None if it is not there."""
    value: Any = found
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _is_path(given: str) -> bool:
    text = given.strip()
    return text.endswith(".json") or "/" in text or Path(text).is_file()


def _read(resolved: Resolved, path: Path | None, text: str) -> dict[str, Any]:
    where = resolved.describe(_OPTION)
    try:
        found = json.loads(text if path is None else read_whole(path).decode())
    except FileNotFoundError:
        raise ConfigError(
            f"{where}: there is no such file (the current folder is {str(Path.cwd())!r}); give its path from here, or "
            "the whole path"
        ) from None
    except OSError as error:
        raise ConfigError(f"{where}: it cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: it is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: it holds {type(found).__name__}; expected a JSON object")
    return found


def _is_on(found: dict[str, Any], name: str) -> bool:
    section = found.get(name)
    return isinstance(section, dict) and section.get("enabled") is True
