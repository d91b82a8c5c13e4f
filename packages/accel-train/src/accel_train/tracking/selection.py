"""The trackers that `log_with` selects, checked before anything starts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from accel_ckpt.locations import RemotePath, location
from accel_state.enums import LoggerType
from accel_state.log import get_logger
from accel_state.world.process import current_state
from accel_train.errors import ArgumentTypeError, OptionError
from accel_train.tracking.base import GeneralTracker, check_contract
from accel_train.tracking.registry import LOGGER_TYPE_TO_CLASS

__all__ = [
    "check_names",
    "filter_trackers",
    "get_available_trackers",
    "select_trackers",
    "warn_of_absent",
]

_logger = get_logger(__name__)


def get_available_trackers() -> list[str]:
    """Names of the trackers whose library is installed, or that need none."""
    return [name for name, kind in LOGGER_TYPE_TO_CLASS.items() if kind.install_line() is None]


def filter_trackers(log_with: Any, logging_dir: str | Path | None = None) -> list[str | GeneralTracker]:
    """Resolve `log_with` to trackers, each once, in the given order.

    A tracker whose library is not installed is left out, as in Accelerate, because scripts often name one by default;
    one warning names the command that installs it.

    Args:
        log_with: a name, a `LoggerType`, a `GeneralTracker`, or a list of these; "all": every tracker that is
            installed. None: no tracker.
        logging_dir: the folder for logs; None if there is none.

    Raises:
        ArgumentTypeError: `log_with` has another type.
        OptionError: a name is unknown, two trackers have the same name, or a tracker needs a folder for logs.
        TrackerContractError: an object lacks a required attribute of a tracker.
    """
    chosen, absent = select_trackers(log_with, logging_dir)
    if current_state() is not None:  # otherwise no rank is known that warns for all
        warn_of_absent(absent)
    return chosen


def select_trackers(
    log_with: Any, logging_dir: str | Path | None = None
) -> tuple[list[str | GeneralTracker], list[str]]:
    """Do the same as `filter_trackers`, and also return the names that it leaves out; does not warn."""
    if log_with is None:
        return [], []
    asked = list(log_with) if isinstance(log_with, list | tuple | set | frozenset) else [log_with]
    chosen: dict[str, str | GeneralTracker] = {}
    absent: list[str] = []
    for item in asked:
        if isinstance(item, GeneralTracker):
            check_contract(item)
            if item.name in chosen:
                raise OptionError(f"log_with has two trackers with the name {item.name!r}. Pass one of them.")
            chosen[item.name] = item
    for item in asked:
        if isinstance(item, GeneralTracker):
            continue
        name = item.value if isinstance(item, Enum) else item
        if not isinstance(name, str):
            raise ArgumentTypeError(
                "log_with takes names of trackers, LoggerType members or GeneralTracker objects, got "
                f"{type(item).__name__}: {item!r:.80}."
            )
        everything = name == LoggerType.ALL.value
        names = get_available_trackers() if everything else [name]
        if everything and not names:
            absent.append(name)
        for one in names:
            check_names("log_with", [one])
            if LOGGER_TYPE_TO_CLASS[one].install_line() is not None:
                absent.append(one)
                continue
            _check(one, logging_dir)
            if isinstance(chosen.setdefault(one, one), GeneralTracker) and not everything:
                raise OptionError(
                    f"log_with has {one!r} and also a tracker with that name. Pass one of them."
                )
    return list(chosen.values()), list(dict.fromkeys(absent))


def warn_of_absent(absent: Sequence[str]) -> None:
    """Warn once of each tracker that `select_trackers` left out; the rank of this process must be known."""
    for name in absent:
        if name == LoggerType.ALL.value:
            _logger.warning_once("log_with='all' was given, and no tracker is installed: nothing is logged")
        else:
            line = LOGGER_TYPE_TO_CLASS[name].install_line() or ""
            need = "a package that is not installed" if line.startswith("pip ") else "what is not here"
            _logger.warning_once("log_with=%r needs %s, and nothing is logged with it: %s", name, need, line)


def _check(name: str, logging_dir: str | Path | None) -> None:
    kind = LOGGER_TYPE_TO_CLASS[name]
    if kind.requires_logging_directory and logging_dir is None:
        raise OptionError(
            f"log_with={name!r} needs a folder for its logs. Pass Accelerator(project_dir=…), or "
            "project_config=ProjectConfiguration(logging_dir=…)."
        )
    if kind.requires_logging_directory and isinstance(location(str(logging_dir)), RemotePath):
        raise OptionError(
            f"log_with={name!r} writes to a local folder, and logging_dir is {str(logging_dir)!r} (by default "
            "the project_dir). Pass project_config=ProjectConfiguration(project_dir=…, logging_dir=…) with a folder."
        )


def check_names(argument: str, names: Iterable[str]) -> None:
    """Refuse names of trackers that do not exist.

    Args:
        argument: the argument that holds the names, for the message.
        names: the names.

    Raises:
        OptionError: a name is unknown; the message has the known names and the nearest one.
    """
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = list(LOGGER_TYPE_TO_CLASS)
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"Unknown tracker {name!r} in {argument}; known: {', '.join(known)}.{hint}")
