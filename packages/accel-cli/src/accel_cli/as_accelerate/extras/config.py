"""Names of ``accelerate.commands.config``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from accel_state import default_config_file, load_config_from_file

__all__ = ["config_args"]

_FILE = Path(default_config_file)

config_args = SimpleNamespace(
    cache_dir=str(_FILE.parent),
    default_config_file=str(_FILE),
    default_json_config_file=str(_FILE.with_suffix(".json")),
    default_yaml_config_file=str(_FILE),
    load_config_from_file=load_config_from_file,
)
"""The module ``accelerate.commands.config.config_args``: where the default configuration is."""
