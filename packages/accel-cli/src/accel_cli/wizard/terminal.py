"""Asks questions with questionary: keys or arrows choose, ``<`` goes back, ``?`` explains."""

from __future__ import annotations

import sys
import textwrap
from typing import Any

import questionary
from prompt_toolkit.application import get_app, run_in_terminal
from prompt_toolkit.filters import Condition
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent, merge_key_bindings
from prompt_toolkit.output import ColorDepth
from questionary.prompts.common import InquirerControl

from accel_cli.wizard.interview import BACK
from accel_cli.wizard.question import Asked
from accel_state.errors import AccelError
from accel_state.host.colors import colors_for
from accel_state.messages import folded

__all__ = ["ask_in_terminal"]

_BACK_TITLE = "back (<)"
_NO_INSTRUCTION = " "
_STYLE = questionary.Style(
    [("pointer", "bold"), ("highlighted", "bold"), ("selected", "noreverse fg:ansigreen")]
)


def ask_in_terminal(asked: Asked) -> Any:
    """Ask a question; an invalid answer is explained below its line, and the question comes again.

    Raises:
        KeyboardInterrupt: the user ended the questions.
    """
    if asked.multiple:
        return _select_several(asked)
    return _select(asked) if asked.choices else _type(asked)


def _select(asked: Asked) -> Any:
    values = [choice.value for choice in asked.choices]
    # Positions instead of values, because questionary replaces the value None by the title.
    choices = [
        questionary.Choice(_label(choice.label), value=at, shortcut_key=choice.key or None)
        for at, choice in enumerate(asked.choices)
    ]
    question = questionary.select(
        _wrapped(asked.message),
        choices=[*choices, questionary.Choice(_BACK_TITLE, value=-1, shortcut_key=False)],
        default=choices[values.index(asked.default)],
        instruction=_NO_INSTRUCTION,
        use_shortcuts=True,
        use_jk_keys=False,
        **_looks(),
    )
    chosen = _run(question, asked)
    return BACK if chosen == -1 else values[chosen]


def _select_several(asked: Asked) -> Any:
    values = [choice.value for choice in asked.choices]
    question = questionary.checkbox(
        _wrapped(asked.message),
        choices=[
            *(
                questionary.Choice(_label(choice.label), value=at, checked=choice.value in asked.default)
                for at, choice in enumerate(asked.choices)
            ),
            questionary.Choice(_BACK_TITLE, value=-1),
        ],
        instruction="(space selects, Enter accepts)",
        use_jk_keys=False,
        **_looks(),
    )
    chosen = _run(question, asked)
    return BACK if -1 in chosen else tuple(values[at] for at in chosen)


def _type(asked: Asked) -> Any:
    # The default is shown, not filled in: typing "2" after a filled-in "1" would mean twelve.
    message = _wrapped(f"{asked.message} [{asked.hint}]" if asked.hint else asked.message)
    while True:
        question = (questionary.path if asked.file else questionary.text)(message, **_looks())
        text = _run(question, asked).strip()
        if text == "<":
            return BACK
        try:
            return asked.parse(text)
        except AccelError as error:
            print(colors_for()("red", folded(str(error), sys.stdout, "  ")))


def _looks() -> dict[str, Any]:
    """Style and colours, by the rules of all commands; old versions of prompt_toolkit do not know NO_COLOR."""
    return {"style": _STYLE, "color_depth": None if colors_for().enabled else ColorDepth.DEPTH_1_BIT}


def _columns() -> int:
    import shutil

    return max(30, shutil.get_terminal_size().columns)


def _run(question: questionary.Question, asked: Asked) -> Any:
    """Show a question with the keys that all questions have."""
    application = question.application
    bindings = KeyBindings()
    lists = [found for found in application.layout.find_all_controls() if isinstance(found, InquirerControl)]
    empty = Condition(lambda: not get_app().current_buffer.text)

    @bindings.add("?", eager=True, filter=empty)
    def explain(event: KeyPressEvent) -> None:
        run_in_terminal(lambda: print(folded(asked.explanation, sys.stdout, "  ")))

    for shown in lists:
        _add_back(bindings, shown, asked.multiple)
    assert application.key_bindings is not None
    application.key_bindings = merge_key_bindings([application.key_bindings, bindings])
    try:
        return question.unsafe_ask()
    except EOFError:
        raise KeyboardInterrupt from None


def _add_back(bindings: KeyBindings, shown: InquirerControl, multiple: bool) -> None:
    """``<`` moves to the choice that goes back, which Enter accepts, as it does after a typed ``<``."""
    last = len(shown.choices) - 1

    @bindings.add("<", eager=True)
    def move(event: KeyPressEvent) -> None:
        shown.pointed_at = last

    if not multiple:
        return

    @bindings.add("enter", eager=True, filter=Condition(lambda: shown.pointed_at == last))
    def accept(event: KeyPressEvent) -> None:
        shown.selected_options = [-1]
        shown.is_answered = True
        event.app.exit(result=[-1])


def _wrapped(message: str) -> str:
    """The message in lines that end between words, where those of the terminal would end anywhere."""
    return textwrap.fill(message, _columns() - 4, subsequent_indent="  ")


def _label(text: str) -> str:
    """A choice in lines that end between words; the later ones begin below its text."""
    return textwrap.fill(
        text, _columns() - 8, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False
    )
