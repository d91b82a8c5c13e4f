"""The configuration file that a command reads or changes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from accel_state.config.files import accelerates_folder, default_path, find_default
from accel_state.environment import snapshot
from accel_state.errors import ConfigNotFoundError

__all__ = ["FileOption", "file_to_read", "is_accelerates"]

FileOption = Annotated[
    str | None,
    typer.Option("--config_file", help="The file; by default the one that accel launch reads."),
]


def file_to_read(config_file: str | None) -> Path:
    """The file that the user names, else the one that ``accel launch`` reads.

    Raises:
        ConfigNotFoundError: none is named, and there is none.
    """
    if config_file is not None:
        return Path(config_file).expanduser()
    environ = snapshot()
    found = find_default(environ)
    if found is None:
        raise ConfigNotFoundError(
            f"there is no configuration file {default_path(environ)}; name one, or write it: accel config default "
            "makes one for this machine, accel config asks questions"
        )
    return found.path


def is_accelerates(path: Path) -> bool:
    """Whether a file is in Accelerate's folder, in which nothing is changed."""
    return path.resolve().parent == accelerates_folder(snapshot()).resolve()
