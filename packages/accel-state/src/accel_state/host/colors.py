"""Colours of plain text, on terminals that support them and where the user did not switch them off."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TextIO

from accel_state.environment import snapshot

__all__ = ["Colors", "colors_for", "wants_colors"]

_CODES = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "yellow": "33", "cyan": "36"}


class Colors:
    """Wraps text in the escape sequences of a terminal, or returns it as it is.

    Args:
        enabled: whether the destination shows colours.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def __call__(self, name: str, text: str) -> str:
        """``text`` in the style ``name``: bold, dim, red, green, yellow or cyan."""
        return f"\033[{_CODES[name]}m{text}\033[0m" if self.enabled and text else text


def colors_for(stream: TextIO | None = None, environ: Mapping[str, str] | None = None) -> Colors:
    """The colours of a stream.

    Args:
        stream: by default standard output.
        environ: by default that of this process; see ``wants_colors``.
    """
    stream = sys.stdout if stream is None else stream
    return Colors(wants_colors(stream.isatty(), environ))


def wants_colors(terminal: bool, environ: Mapping[str, str] | None = None) -> bool:
    """Whether output is coloured.

    Args:
        terminal: whether it goes to a terminal; only there it is coloured, unless ``FORCE_COLOR`` is set.
        environ: by default that of this process. ``NO_COLOR`` with any text (https://no-color.org), and ``TERM=dumb``,
            turn colours off.
    """
    environ = snapshot() if environ is None else environ
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return False
    return terminal or bool(environ.get("FORCE_COLOR"))
