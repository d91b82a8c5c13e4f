"""Flags of ``accel launch`` that were typed after the script, and so would go to the script."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from accel_state.config.flags import ParsedFlags, parse_flags
from accel_state.config.roots import complete_root
from accel_state.config.schema import plain_flag, schema_of
from accel_state.errors import ConfigError
from accel_state.messages import folded

__all__ = ["Misplaced", "ask_to_move", "find_misplaced", "moved", "notes_on"]

_ABOUT_THE_WORLD = {
    "num_processes", "nproc_per_node", "num_machines", "nnodes", "machine_rank", "node_rank", "main_process_ip",
    "main_process_port", "multi_gpu",
}  # fmt: skip
"""Flags that scripts hardly have themselves; nor do they have those that select a strategy (``--use_fsdp``)."""


class Misplaced(NamedTuple):
    """A flag of ``accel launch`` among the arguments of the script.

    Attributes:
        flag: as typed, without a value.
        at: its place among them.
        words: the flag and its value.
    """

    flag: str
    at: int
    words: tuple[str, ...]


def find_misplaced(arguments: Sequence[str], flags: ParsedFlags) -> list[Misplaced]:
    """Flags after the script that were probably meant for the launcher.

    A flag that describes the world, such as ``--num_processes``, must be among them: scripts often have others, such as
    ``--mixed_precision``, themselves. Flags that the script's text contains are its own, and so is everything if ``--``
    comes before the script.

    Args:
        arguments: the words after ``accel launch``.
        flags: as parsed from them.
    """
    script, *words = flags.rest
    if flags.values.get("no_python") or "--" in arguments[: len(arguments) - len(flags.rest)]:
        return []
    found = []
    at = 0
    while at < len(words) and words[at] != "--":
        taken = _flag_at(words, at)
        if taken:
            found.append(Misplaced(words[at].partition("=")[0], at, taken))
        at += max(1, len(taken))
    if not any(map(_describes_the_world, found)):
        return []
    text = _text_of(script)
    found = [each for each in found if not any(form in text for form in _spellings(each.flag))]
    return found if any(map(_describes_the_world, found)) else []


def ask_to_move(misplaced: Sequence[Misplaced], script: str) -> bool:
    """Ask whether the flags were meant for the launcher; False where there is nobody to ask."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    them = "them" if len(misplaced) > 1 else "it"
    question = f"accel: {_described(misplaced, script)}. Give {them} to accel launch instead? [y/N]"
    sys.stderr.write(f"{folded(question, sys.stderr)} ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def moved(arguments: Sequence[str], flags: ParsedFlags, misplaced: Sequence[Misplaced]) -> list[str]:
    """The command line with the misplaced flags before the script."""
    script, *words = flags.rest
    gone = {each.at + step for each in misplaced for step in range(len(each.words))}
    kept = [word for at, word in enumerate(words) if at not in gone]
    before = arguments[: len(arguments) - len(flags.rest)]
    return [*before, *(word for each in misplaced for word in each.words), script, *kept]


def notes_on(misplaced: Sequence[Misplaced], script: str) -> list[str]:
    """The note for the user if the flags are not moved."""
    if not misplaced:
        return []
    return [
        f"{_described(misplaced, script)}; flags of accel launch come before it. If the script has such options "
        f"itself, put -- before it: accel launch -- {script} ..."
    ]


def _described(misplaced: Sequence[Misplaced], script: str) -> str:
    names = ", ".join(dict.fromkeys(each.flag for each in misplaced))
    several = len(misplaced) > 1
    verb, they_go = ("come", "they go") if several else ("comes", "it goes")
    return f"{names} {verb} after {script}, so {they_go} to the script"


def _flag_at(words: Sequence[str], at: int) -> tuple[str, ...]:
    """The flag of ``accel launch`` at a place, and its value; empty if there is none."""
    if not words[at].startswith("--"):
        return ()
    following = words[at + 1 : at + 2]
    if following and following[0].startswith("-"):
        following = []
    return next((taken for taken in ((words[at], *following), (words[at],)) if _are_one_flag(taken)), ())


def _are_one_flag(words: Sequence[str]) -> bool:
    try:
        return not parse_flags(words).rest
    except ConfigError:
        return False


def _spellings(flag: str) -> set[str]:
    name = plain_flag(flag)
    return {f"--{name}", f"--{name.replace('_', '-')}"}


def _text_of(script: str) -> str:
    """The script's text, or nothing if it is a module, or cannot be read twice."""
    try:
        return Path(script).read_text(encoding="utf-8", errors="replace") if Path(script).is_file() else ""
    except OSError:
        return ""


def _describes_the_world(each: Misplaced) -> bool:
    name = plain_flag(each.flag)
    return name in _ABOUT_THE_WORLD or (
        name.startswith("use_") and name in schema_of(complete_root()).switches
    )
