"""Pieces of messages."""

from __future__ import annotations

import functools
import math
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

__all__ = [
    "HIDDEN",
    "did_you_mean",
    "first_line",
    "folded",
    "is_secret",
    "message",
    "module_of",
    "nearest",
    "readable_size",
    "say",
    "shown",
    "warn",
    "without_secrets",
]

HIDDEN = "***"
"""Text that is shown in place of a secret."""

_INNER = frozenset(
    (
        *("accel_state", "accel_ckpt", "accel_bigmodel", "accel_train", "accel_cli", "accelerate"),
        *("torch", "contextlib", "functools", "multiprocessing", "threading"),
    )
)
"""Packages whose lines a warning does not show: these, and what stands between them and a script."""

# A tokenizer, and a number of tokens, are none.
_WORDS = (
    r"(?:TOKEN(?!IZ|S)|SECRET|PASSW|CREDENTIAL|PRIVATE|APIKEY|ACCESSKEY|(?<![A-Z])KEY(?![A-Z])|"
    r"(?<![A-Z])PAT(?![A-Z])|(?<![A-Z])AUTH(?![A-Z]))"
)
_SECRET_NAME = re.compile(_WORDS, re.IGNORECASE)
_NAME = rf"[\w.-]*{_WORDS}[\w.-]*"
_SETTING = re.compile(
    rf"(?P<name>\b{_NAME}=|(?<!\S)--{_NAME}\s+(?!-))(?:'[^']*'|\"[^\"]*\"|[^\s'\"]+)", re.IGNORECASE
)


_OWN = re.compile(r"accel: |accel_\w+\.|\S+:\d+: \w*Warning: ")
"""How a message of these packages begins, the line of a traceback that has an error of theirs, and a warning."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message that is not empty; the name of its class if the message is empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def warn(message: str, category: type[Warning] = UserWarning, *, once: bool = False) -> None:
    """Warn, and show the line of the script, or of a library that uses these packages, that led here.

    A depth counted by hand, as ``stacklevel`` of ``warnings.warn`` takes it, is wrong on another way to the same line,
    and after each function that is split.

    Args:
        message: the text.
        category: its class.
        once: show the line that warns, so that Python says the same text once, wherever it is reached from.
    """
    here = sys._getframe(1)
    frame: FrameType | None = here
    while not once and frame is not None and module_of(frame).partition(".")[0] in _INNER:
        frame = frame.f_back
    shown_at = frame or here  # in a thread or process of ours: the line that warns
    warnings.warn_explicit(
        message,
        category,
        shown_at.f_code.co_filename,
        shown_at.f_lineno or 1,  # generated code has no lines
        module=module_of(shown_at),
        # Not module_globals: Python asks the loader there for the source, and fails if it has none or another.
        registry=shown_at.f_globals.setdefault("__warningregistry__", {}),
    )


def module_of(frame: FrameType) -> str:
    """The module whose code a frame runs; code of ``exec`` may have none, or another object for its name."""
    return str(frame.f_globals.get("__name__", "<string>"))


def nearest(name: str, known: Iterable[str], count: int = 2, *, cutoff: float = 0.6) -> list[str]:
    """The known names that resemble ``name``, best first; a second one only if it is about as close as the first."""
    import difflib

    bare = {other.lstrip("-"): other for other in known}  # the dashes of flags are alike in all
    name = name.lstrip("-")
    near = difflib.get_close_matches(name, list(bare), n=count, cutoff=cutoff)
    ratios = [difflib.SequenceMatcher(None, other, name).ratio() for other in near]
    return [bare[other] for other, ratio in zip(near, ratios, strict=True) if ratio > ratios[0] - 0.08]


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """``; did you mean …?`` with the nearest known names; ``otherwise`` if none is near."""
    near = nearest(name, known)
    return f"; did you mean {' or '.join(near)}?" if near else otherwise


def shown(value: object, length: int = 200) -> str:
    """A value as Python writes it, cut to a length that a message can have."""
    text = repr(value[: length + 1] if isinstance(value, str) else value)
    return text if len(text) <= length else f"{text[:length]}…"


def folded(text: str, stream: Any, indent: str = "") -> str:
    """The text for a stream: on a terminal in lines that end between words, for a log as it is.

    Paths are not broken, so that they can be copied.

    Args:
        text: one paragraph in each line.
        stream: its destination, which has ``isatty``.
        indent: in front of each line.
    """
    if not stream.isatty():
        return indent + text
    to_width = textwrap.TextWrapper(
        shutil.get_terminal_size().columns - 1, indent, indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(to_width.fill(line) for line in text.split("\n"))


def message(text: str, stream: Any, indent: str = "") -> str:
    """Several lines for a stream: on a terminal the sentences of a message of these packages are folded.

    Args:
        text: lines. Those before the message may be a traceback; those that begin with a blank are not folded.
        stream: its destination, which has ``isatty``.
        indent: in front of each line that is folded.
    """
    lines = text.split("\n")
    begin = next((number for number, line in enumerate(lines) if _OWN.match(line)), len(lines))
    sentences = [folded(line, stream, indent) if line[:1].strip() else line for line in lines[begin:]]
    return "\n".join(lines[:begin] + sentences)


def say(text: str) -> None:
    """Print a message on standard error; it begins with ``accel: ``."""
    print(message(text, sys.stderr), file=sys.stderr, flush=True)


def readable_size(nbytes: float) -> str:
    """Format a number of bytes for people, such as ``"1.50 kB"``."""
    if nbytes < 1000:
        return f"{nbytes:.0f} bytes"
    units = ("kB", "MB", "GB", "TB")
    power = min(int(math.log10(nbytes)) // 3, len(units))
    return f"{nbytes / 1000**power:.2f} {units[power - 1]}"


@functools.lru_cache(
    maxsize=4096
)  # a plan of a thousand ranks has the same names and values a thousand times
def is_secret(name: str) -> bool:
    """Whether a variable or option of this name usually holds a secret."""
    return _SECRET_NAME.search(name) is not None


def without_secrets(value: Any) -> Any:
    """Data to show: values under names of secrets are replaced, also in texts such as ``NAME=value``.

    Args:
        value: text, or nested lists and dictionaries.
    """
    if isinstance(value, Mapping):
        return {
            key: HIDDEN
            if item not in (None, "", True, False) and is_secret(str(key))
            else without_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(_after_flags([without_secrets(item) for item in value]))
    if isinstance(value, str):
        return _without_settings(value)
    return value


@functools.lru_cache(maxsize=4096)
def _without_settings(text: str) -> str:
    return _SETTING.sub(rf"\g<name>{HIDDEN}", text)


def _after_flags(items: list[Any]) -> list[Any]:
    """Words of a command line: the word after ``--hf_token`` is hidden, too."""
    for before, (place, item) in zip(items, enumerate(items[1:], 1), strict=False):
        if isinstance(before, str) and before.startswith("--") and "=" not in before and is_secret(before):
            items[place] = HIDDEN if isinstance(item, str) and not item.startswith("-") else item
    return items
