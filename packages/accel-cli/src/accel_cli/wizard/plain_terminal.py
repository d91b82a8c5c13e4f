"""Asks questions line by line, for terminals without cursor control (``TERM=dumb``), logs and screen readers."""

from __future__ import annotations

from typing import Any

from accel_cli.wizard.interview import BACK
from accel_cli.wizard.question import Asked
from accel_state.errors import AccelError, ConfigError

__all__ = ["ask_in_lines"]


def ask_in_lines(asked: Asked) -> Any:
    """Ask a question; an invalid answer is explained, and the question comes again.

    Raises:
        KeyboardInterrupt: the user ended the questions.
    """
    print(f"? {asked.message}")
    for number, choice in enumerate(asked.choices, 1):
        print(f"  {choice.key or number}) {choice.label}")
    while True:
        try:
            text = input(f"  {_instruction(asked)}> ").strip()
        except EOFError:
            raise KeyboardInterrupt from None
        if text == "<":
            return BACK
        if text == "?":
            print(f"  {asked.explanation}")
            continue
        try:
            return _chosen(asked, text) if asked.choices else asked.parse(text)
        except AccelError as error:
            print(f"  {error}")


def _instruction(asked: Asked) -> str:
    if not asked.choices:
        return f"[{asked.hint}] " if asked.hint else ""
    keys = [
        choice.key or str(number)
        for number, choice in enumerate(asked.choices, 1)
        if (choice.value in asked.default if asked.multiple else choice.value == asked.default)
    ]
    several = "comma-separated numbers, 0 for none " if asked.multiple else ""
    return f"{several}[{','.join(keys) or '0'}] "


def _chosen(asked: Asked, text: str) -> Any:
    if not text:
        return asked.default
    if not asked.multiple:
        return _one(asked, text)
    if text == "0":
        return ()
    return tuple(dict.fromkeys(_one(asked, word.strip()) for word in text.split(",")))


def _one(asked: Asked, text: str) -> Any:
    keys = [choice.key or str(number) for number, choice in enumerate(asked.choices, 1)]
    for key, choice in zip(keys, asked.choices, strict=True):
        if text.lower() in (key, choice.label.lower()):
            return choice.value
    raise ConfigError(f"the answer is {text!r}; expected one of {', '.join(keys)}")
