"""Shell completion: commands, flags, choices, topics and files, without Typer where each key press counts.

The scripts that ``accel completion`` prints are Typer's; at every key they call ``accel`` with ``_ACCEL_COMPLETE`` set,
and this module answers, from the schema alone for ``accel launch``.
"""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple

__all__ = ["VARIABLE", "CompletionItem", "answer", "complete", "complete_flags"]

VARIABLE = "_ACCEL_COMPLETE"
"""The variable that Typer's scripts set, to ``complete_SHELL``."""


class CompletionItem(NamedTuple):
    """A possible completion of the word at the cursor.

    Attributes:
        value: the complete word.
        help: one sentence; empty: none.
    """

    value: str
    help: str = ""


def answer(environ: Mapping[str, str]) -> int:
    """Print the completions of the command line that the shell describes in ``environ``.

    Args:
        environ: the environment of this process.

    Returns:
        The exit code.
    """
    action, _, shell = environ.get(VARIABLE, "").partition("_")
    if action != "complete" or shell not in ("bash", "zsh", "fish"):
        return 1
    words, incomplete = _command_line(shell, environ)
    items = complete(words, incomplete)
    if shell == "fish":
        if environ.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args":
            return 1 if items is None else 0  # 1: fish completes files
        lines = [f"{item.value}\t{item.help}" if item.help else item.value for item in items or ()]
    elif shell == "zsh":
        lines = [_for_zsh(items)]
    else:
        # Bash begins a new word at =, so only what follows it is completed.
        lines = [item.value.partition("=")[2] if "=" in item.value else item.value for item in items or ()]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def complete(words: Sequence[str], incomplete: str) -> list[CompletionItem] | None:
    """The possible completions of the word at the cursor.

    Args:
        words: the complete words between ``accel`` and the cursor.
        incomplete: the word at the cursor.

    Returns:
        The possible words; None where a file name belongs.
    """
    if words and words[0] == "launch":
        from accel_cli.launch_topics import OWN

        return complete_flags(words[1:], incomplete, OWN)
    import typer

    from accel_cli.app import app, known_commands

    if not words and not incomplete.startswith("-"):  # without importing the commands
        return [
            CompletionItem(name, entry.summary)
            for name, entry in known_commands().items()
            if name.startswith(incomplete)
        ]
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="accel")
    rest = list(words)
    while rest and hasattr(command, "get_command"):
        name = rest.pop(0)
        if name.startswith("-"):
            taken = _plain(name) in _valued(command.get_params(context))
            if taken and not rest:
                return _complete_typer(command, context, [name], incomplete)
            rest = rest[taken:]
            continue
        command = command.get_command(context, name.replace("_", "-"))
        if command is None:
            return None
        context = typer.Context(command, parent=context, info_name=name)
    own = getattr(command, "own", None)
    if own is not None:
        return complete_flags(rest, incomplete, own)
    return _complete_typer(command, context, rest, incomplete)


def complete_flags(
    words: Sequence[str], incomplete: str, own: Mapping[str, str]
) -> list[CompletionItem] | None:
    """Flags of the schema with their values, until the script; then files.

    Args:
        words: the complete words after the command's name.
        incomplete: the word at the cursor; with ``--flag=`` in front if it was typed so.
        own: flags of the command itself, with the placeholder of a value that they take, and their help.
    """
    from accel_state.config.schema import plain_flag

    taking = {plain_flag(flag.partition(" ")[0]) for flag in own if " " in flag}
    own = {flag.partition(" ")[0]: text for flag, text in {"--help": "Show this help.", **own}.items()}
    typed = _open_flag(words, own, taking)
    if typed is None:
        return None  # the script and its arguments
    flag, equals, start = incomplete.partition("=")
    if typed == "--help":
        from accel_cli.launch_topics import TOPICS

        return _starting([CompletionItem(name, text) for name, text in TOPICS.items()], incomplete)
    if typed and not (_takes_value(typed, taking) == "maybe" and incomplete.startswith("-")):
        found = _values(typed, incomplete)
        return None if not found and _takes_value(typed, taking) == "maybe" else found
    if not incomplete.startswith("-"):
        return None
    if equals:
        values = _values(flag, start)
        return (
            None if values is None else [CompletionItem(f"{flag}={item.value}", item.help) for item in values]
        )
    return list(_flags(incomplete, own))


def _open_flag(words: Sequence[str], own: Mapping[str, str], taking: Collection[str]) -> str | None:
    """The flag whose value the cursor is at, empty if at none; None if it is after the script."""
    from accel_state.config.schema import plain_flag

    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word == "--" or not word.startswith("-") or word == "-":
            return None
        flag, equals, _ = word.partition("=")
        if at < len(words) and words[at] == "=":  # bash's own words
            equals, at = "=", at + 1
            if at == len(words):
                return flag
            at += 1
            continue
        if equals:
            continue
        if plain_flag(flag) in ("help", "-h") and "--help-all" in own:
            if at == len(words):
                return "--help"
            continue
        takes = _takes_value(flag, taking)
        if takes and at == len(words):
            return flag
        if takes == "always" or (takes and _is_truth(words[at])):
            at += 1
    return ""


def _takes_value(flag: str, taking: Collection[str]) -> Literal["", "always", "maybe"]:
    """Whether a value follows; ``maybe``: it can be left out."""
    from accel_state.config.option_types import Bool, BoolOrName
    from accel_state.config.schema import plain_flag

    if plain_flag(flag) in taking:
        return "always"
    bound = _option(flag)
    if bound is None or (isinstance(bound.option_type, Bool) and bound.about.toggle):
        return ""
    return "maybe" if isinstance(bound.option_type, Bool | BoolOrName) else "always"


def _is_truth(word: str) -> bool:
    from accel_state.config.option_types import Bool

    try:
        Bool().parse(word)
    except ValueError:
        return False
    return True


def _option(flag: str) -> Any:
    from accel_state.config.roots import complete_root
    from accel_state.config.schema import plain_flag, schema_of

    name = plain_flag(flag)
    local = schema_of(complete_root())
    found = local.by_flag.get(name)
    if found is None and name not in local.switches:
        from accel_state.config.sagemaker import SageMakerConfig

        found = schema_of(SageMakerConfig).by_flag.get(name)
    return found


def _values(flag: str, start: str) -> list[CompletionItem] | None:
    """The choices of a flag; None if it takes a file; empty if only the user knows its value."""
    from accel_state.config.option_types import Bool, BoolOrName
    from accel_state.config.schema import plain_flag
    from accel_state.config.sections.hardware import PROCESSES_PER
    from accel_state.config.sources import PER_MACHINE

    bound = _option(flag)
    if bound is None:
        return None if _names_a_file(plain_flag(flag)) else []
    words = list(PROCESSES_PER if plain_flag(flag) in PER_MACHINE else bound.choices)
    if isinstance(bound.option_type, Bool | BoolOrName):
        words = ["true", "false", *words]
    if not words and _names_a_file(bound.path):
        return None
    return _starting([CompletionItem(word) for word in words], start)


def _flags(incomplete: str, own: Mapping[str, str]) -> Iterator[CompletionItem]:
    """Flags that begin so, in the spelling that the user began; after ``--no-`` also the denials."""
    from accel_state.config.option_types import Bool, BoolOrName

    denies = incomplete[:5] in ("--no-", "--no_")
    for name, text in _known_flags(own):
        shown = _spelled(name, incomplete[2:])
        if shown.startswith(incomplete):
            yield CompletionItem(shown, text)
        if denies and name not in own and name.startswith("--"):
            bound = _option(name)
            denied = incomplete[:5] + _spelled(name, incomplete[5:])[2:]
            if denied.startswith(incomplete) and (
                bound is None or isinstance(bound.option_type, Bool | BoolOrName)
            ):
                yield CompletionItem(denied, f"Turn {name} off.")


def _spelled(flag: str, like: str) -> str:
    return f"--{flag[2:].replace('_', '-')}" if "-" in like and flag.startswith("--") else flag


def _known_flags(own: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    from accel_state.config.roots import complete_root
    from accel_state.config.sagemaker import SageMakerConfig
    from accel_state.config.schema import schema_of

    yield from own.items()
    local = schema_of(complete_root())
    for bound in local.options:
        for flag in bound.flags:
            yield flag, bound.about.help
        for switch, (value, _) in bound.about.switches.items():
            yield switch, f"The same as {bound.flags[0]} {value}."
    for bound in schema_of(SageMakerConfig).options:
        for flag in bound.flags:
            if flag[2:] not in local.by_flag:
                yield flag, bound.about.help


def _starting(items: list[CompletionItem], start: str) -> list[CompletionItem]:
    return [item for item in items if item.value.lower().startswith(start.lower())]


def _complete_typer(
    command: Any, context: Any, words: Sequence[str], incomplete: str
) -> list[CompletionItem] | None:
    """Subcommands, flags and choices of a command made of Typer's parameters."""
    params = command.get_params(context)
    if incomplete.startswith("-"):
        flags = [
            CompletionItem(_spelled(flag, incomplete[2:]), param.help or "")
            for param in params
            if param.param_type_name == "option"
            for flag in (*param.opts, *param.secondary_opts)
            if flag.startswith("--") or len(incomplete) == 1
        ]
        return [item for item in flags if item.value.startswith(incomplete)]
    valued = _valued(params)
    last = _plain(words[-1]) if words else ""
    if last in valued:
        return _of_kind(command, valued[last], incomplete)
    if hasattr(command, "get_command"):
        names = [name for name in command.list_commands(context) if name.startswith(incomplete)]
        return [
            CompletionItem(name, command.get_command(context, name).get_short_help_str(200)) for name in names
        ]
    arguments = [param for param in params if param.param_type_name == "argument"]
    at = sum(
        not word.startswith("-") and _plain(before) not in valued
        for before, word in itertools.pairwise(["", *words])
    )
    if at >= len(arguments):
        return None if arguments and arguments[-1].nargs == -1 else []
    found = getattr(command, "complete_argument", None)
    if found is not None:
        return _starting(list(found(arguments[at].name, words[-1] if words else "")), incomplete)
    return _of_kind(command, arguments[at], incomplete)


def _valued(params: Sequence[Any]) -> dict[str, Any]:
    """The options that a value follows, by their flags."""
    options = [param for param in params if param.param_type_name == "option" and not param.is_flag]
    return {_plain(flag): param for param in options for flag in param.opts}


def _plain(flag: str) -> str:
    return flag.replace("-", "_")


def _of_kind(command: Any, param: Any, incomplete: str) -> list[CompletionItem] | None:
    """The completions of a parameter's value: its choices; None for a file; empty where only the user knows it."""
    choices = getattr(command, "choices", {})  # a group has none
    if param.name in choices:
        return _starting([CompletionItem(word) for word in choices[param.name]], incomplete)
    kind = param.type_descriptor.annotation
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _starting([CompletionItem(str(choice.value)) for choice in kind], incomplete)
    if kind in (int, float):
        return []
    return None if kind is Path or param.param_type_name == "argument" or _names_a_file(param.name) else []


def _names_a_file(name: str) -> bool:
    """Whether an option's value is a file or a folder, judged by its name."""
    return any(part in name for part in ("file", "dir", "path", "output"))


def _command_line(shell: str, environ: Mapping[str, str]) -> tuple[list[str], str]:
    """The words between ``accel`` and the cursor, and the word at the cursor."""
    if shell != "bash":
        text = environ.get("_TYPER_COMPLETE_ARGS", "")
        words = _split(text)[1:]
        if words and not text[-1:].isspace():
            return words[:-1], words[-1]
        return words, ""
    text, at = environ.get("COMP_WORDS", ""), int(environ.get("COMP_CWORD") or 0)
    words = [word.strip("'\"") for word in text.split("\n")] if "\n" in text else _split(text)
    words, incomplete = words[1:at], words[at] if at < len(words) else ""
    return (words, "") if incomplete == "=" and not words else _joined(words, incomplete)


def _joined(words: list[str], incomplete: str) -> tuple[list[str], str]:
    """Bash's words ``--flag``, ``=`` and ``value`` as the one word that was typed."""
    if incomplete == "=" and words:
        return words[:-1], f"{words[-1]}="
    if len(words) >= 2 and words[-1] == "=":
        return words[:-2], f"{words[-2]}={incomplete}"
    return words, incomplete


def _split(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    try:
        words.extend(lexer)
    except ValueError:  # the last word has no closing quote yet
        words.append(lexer.token)
    return words


def _for_zsh(items: list[CompletionItem] | None) -> str:
    """A command for zsh, which runs the answer."""
    if items is None:
        return "_files"
    described = " ".join(
        shlex.quote(item.value.replace(":", r"\:") + (f":{item.help}" if item.help else "")) for item in items
    )
    return f"local -a found; found=({described}); _describe accel found"
