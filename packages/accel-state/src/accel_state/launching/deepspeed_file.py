"""DeepSpeed's own configuration file, read before anything starts or waits in a queue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accel_state.config.merge import Resolved
from accel_state.errors import ConfigError

__all__ = ["check_deepspeed_file"]

_OPTION = "deepspeed.hf_ds_config"
_PRECISIONS = ("fp16", "bf16")


def check_deepspeed_file(resolved: Resolved) -> None:
    """Check that the file exists, is JSON, and does not contradict the precision of the configuration.

    DeepSpeed also accepts text in place of a path; that is not checked here.

    Raises:
        ConfigError: the file is missing or wrong; the message names it.
    """
    config = resolved.local()
    given = config.deepspeed.hf_ds_config
    if config.distributed_type != "DEEPSPEED" or given is None or not _is_path(given):
        return
    found = _read(resolved, Path(given).expanduser())
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


def _is_path(given: str) -> bool:
    text = given.strip()
    return not text.startswith("{") and (text.endswith(".json") or "/" in text or Path(text).is_file())


def _read(resolved: Resolved, path: Path) -> dict[str, Any]:
    where = resolved.describe(_OPTION)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{where}: there is no such file (the current folder is {str(Path.cwd())!r}); give its path from here, or "
            "the whole path"
        ) from None
    except OSError as error:
        raise ConfigError(f"{where}: it cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: it is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: it holds {type(found).__name__}; expected a JSON object")
    return found


def _is_on(found: dict[str, Any], name: str) -> bool:
    section = found.get(name)
    return isinstance(section, dict) and section.get("enabled") is True
