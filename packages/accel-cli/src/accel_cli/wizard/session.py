"""One run of ``accel config``: the known facts, the questions, the file."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import typer

from accel_cli.machine import describe, detect
from accel_cli.render import show_text
from accel_cli.wizard.answers import Situation
from accel_cli.wizard.interview import BACK, Asker, Interview
from accel_cli.wizard.outcome import (
    configuration,
    existing_values,
    next_steps,
    offers,
    text_of,
    warnings_about,
)
from accel_cli.wizard.question import Asked, Choice
from accel_cli.wizard.table import QUESTIONS
from accel_state.config.files import default_path, find_default, save
from accel_state.errors import ConfigError
from accel_state.host.colors import Colors, colors_for
from accel_state.messages import folded

__all__ = ["ask_and_write", "asker_for"]

_KEYS = "Enter takes the marked answer, < goes back, ? explains, Ctrl-C ends without writing."


def asker_for(environ: Mapping[str, str]) -> Asker:
    """How questions are asked in the terminal that ``environ`` describes."""
    if environ.get("TERM") in ("dumb", "unknown"):
        from accel_cli.wizard.plain_terminal import ask_in_lines

        return ask_in_lines
    from accel_cli.wizard.terminal import ask_in_terminal

    return ask_in_terminal


def ask_and_write(path: Path, environ: Mapping[str, str], ask: Asker) -> bool:
    """Ask all questions, show the file, and write it.

    Args:
        path: the file to write.
        environ: the environment of this process.
        ask: asks a question.

    Returns:
        False if the user does not want it written.

    Raises:
        ConfigError: the file cannot be written, which is checked before the first question.
        KeyboardInterrupt: the user ended the questions; nothing is written.
    """
    _check_writable(path)
    colors = colors_for()
    machine = detect(environ)
    for line in describe(machine):
        typer.echo(colors("cyan", folded(line, sys.stdout)))
    situation = Situation(machine, _existing(path, environ), offers)
    typer.echo(folded(_KEYS, sys.stdout) + "\n")
    interview = Interview(QUESTIONS, situation, ask)
    while True:
        answers = interview.run()
        config = configuration(answers)
        try:
            text = text_of(config, path)
        except ConfigError as error:
            typer.echo(colors("red", folded(f"{error}; change an answer", sys.stdout)))
            interview.back()
            continue
        typer.echo("\n" + _colored(text, colors))
        for warning in warnings_about(answers, config):
            note = folded(f"note: {warning}", sys.stdout)
            typer.echo(note.replace("note:", colors("yellow", "note:"), 1))
        answer = ask(_may_write(path))
        if answer is BACK:
            interview.back()
        elif not answer:
            return False
        else:
            show_text(f"wrote {save(config, path)}")
            for line in next_steps(config, path, default_path(environ)):
                typer.echo(colors("bold", line) if line.startswith(" ") else line)
            return True


def _existing(path: Path, environ: Mapping[str, str]) -> dict[str, object]:
    """The values of the file that the new one replaces, else of the default file."""
    found = find_default(environ)
    source = path if path.is_file() else (found.path if found is not None else None)
    if source is None:
        return {}
    try:
        values = existing_values(source)
    except ConfigError as error:
        show_text(f"{source} cannot be read, so its values are not the defaults: {error}")
        return {}
    foreign = found is not None and found.foreign and source == found.path
    whose = ", Accelerate's file, which is not changed" if foreign else ""
    show_text(f"The defaults are the values of {source}{whose}.")
    return values


def _check_writable(path: Path) -> None:
    """Refuse a path that cannot be written before the first question, not after the last."""
    place = path if path.exists() else next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or (place != path and not place.is_dir()):
        problem = f"{place} is a {'folder' if place.is_dir() else 'file'}"
    elif not os.access(place, os.W_OK):
        problem = f"{place} may not be written by this user"
    else:
        return
    raise ConfigError(f"configuration file {path} cannot be written: {problem}; name another --config_file")


def _may_write(path: Path) -> Asked:
    message = f"{path} exists. Replace it?" if path.exists() else f"Write this to {path}?"
    return Asked(
        name="write",
        message=message,
        explanation="no ends without writing; < changes the answers.",
        choices=(Choice(True, "yes", "y"), Choice(False, "no", "n")),
        multiple=False,
        default=True,
        hint="",
        file=False,
        parse=str,
    )


def _colored(text: str, colors: Colors) -> str:
    """YAML or JSON with coloured keys."""
    return re.sub(r'(?m)^(\s*)("?[\w.]+"?)(?=:)', lambda match: match[1] + colors("cyan", match[2]), text)
