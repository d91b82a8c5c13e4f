"""The command line of scripts that write files of the documentation: write them, or check that they are up to date."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Generated:
    """A file.

    Attributes:
        path: where it is.
        is_current: whether it has the facts of now.
        text: makes it.
    """

    path: Path
    is_current: bool
    text: Callable[[], str]


def write_or_check(
    about: str | None, command: str, files: Iterable[Generated], arguments: Sequence[str] | None = None
) -> int:
    """Write the files; with ``--check`` name those that are not current.

    Args:
        about: the docstring of the script, which ``--help`` shows.
        command: what writes the files, for messages.
        files: all that the script writes.
        arguments: the command line.

    Returns:
        The exit status: 1 if a file is out of date.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    check = parser.parse_args(arguments).check
    stale = 0
    for file in files:
        if not check:
            file.path.write_text(file.text(), encoding="utf-8")
        elif not file.is_current:
            stale = 1
            print(f"{file.path.relative_to(ROOT)}: out of date; run: {command}")
    return stale
