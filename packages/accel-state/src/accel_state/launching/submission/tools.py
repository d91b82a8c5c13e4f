"""Asking the command-line tool of an engine."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from accel_state.errors import LaunchError

__all__ = ["answer", "lines", "parsed", "printable", "tool"]

_MOST = 1 << 26
"""Characters of an answer that are read as JSON."""


def tool(name: str, environ: Mapping[str, str], remedy: str) -> str:
    """The path of a tool.

    Raises:
        LaunchError: it is not on PATH; the message ends with ``remedy``.
    """
    found = shutil.which(name, path=environ.get("PATH"))
    if found is None:
        raise LaunchError(f"{name} was not found on PATH; {remedy}")
    return found


def answer(path: str, words: Sequence[str], environ: Mapping[str, str], text: str | None = None) -> str:
    """What a tool prints.

    Args:
        path: the tool.
        words: its arguments.
        environ: its environment.
        text: its standard input; None: it has none.

    Raises:
        LaunchError: it failed; the message is its own.
    """
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if text is None else {"input": text}
    done = subprocess.run(
        [path, *words],
        capture_output=True,
        text=True,
        errors="replace",
        env=dict(environ),
        check=False,
        **given,
    )
    if done.returncode:
        told = printable((done.stderr or done.stdout).strip())
        raise LaunchError(
            f"{path} {words[0]} failed with exit code {done.returncode}: {told or 'it says nothing'}"
        )
    return str(done.stdout)


def parsed(text: str, path: str) -> Any:
    """The JSON that a tool has printed.

    Raises:
        LaunchError: it is something else, or cut.
    """
    try:
        if len(text) > _MOST:
            raise ValueError(f"it has {len(text)} characters")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LaunchError(
            f"{path} has answered with something else than JSON ({error}); is it complete?"
        ) from error


def lines(
    path: str, words: Sequence[str], environ: Mapping[str, str], accepted: Collection[int] = ()
) -> Iterator[str]:
    """The lines that a tool prints, as they come.

    Args:
        path: the tool.
        words: its arguments.
        environ: its environment.
        accepted: exit codes beside 0 that are no failure of the tool.

    Raises:
        LaunchError: it failed.
    """
    with subprocess.Popen(
        [path, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=dict(environ),
    ) as process:
        assert process.stdout is not None, "it is a pipe"
        last = ""
        try:
            for line in process.stdout:
                last = line.rstrip("\n")
                yield last
        except BaseException:  # nobody reads on, and it would go on until its job ends
            process.terminate()
            raise
    if process.returncode and process.returncode not in accepted:
        raise LaunchError(f"{path} {words[0]} failed with exit code {process.returncode}: {printable(last)}")


def printable(text: object, most: int = 500) -> str:
    """A text of somebody else for a terminal: control characters, which could move its cursor, are shown as escapes,
    and what is longer than ``most`` characters is cut.
    """
    text = str(text)
    shown = "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in text[:most])
    return shown if len(text) <= most else f"{shown}…"
