"""Helpers of all trackers: checks before a tracker's library starts, and a warning about values it does not store."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from accel_state.host.versions import install_extra
from accel_state.log import get_logger
from accel_train.errors import OptionError

__all__ = ["check_arguments", "install_line", "not_logged_in", "say_left_out"]

_logger = get_logger(__name__)


def install_line(extra: str, *, available: Callable[[], bool]) -> str | None:
    """The command that installs the packages of an extra of accel-train; None if they are installed."""
    return None if available() else install_extra("accel-train", extra)


def check_arguments(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that an engine's function does not have.

    Args:
        name: of the tracker.
        function: of the engine.
        arguments: from `init_kwargs`.

    Raises:
        OptionError: names the argument and the nearest one.
    """
    known = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for argument in arguments:
        if argument not in known:
            near = difflib.get_close_matches(argument, list(known), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" It takes {', '.join(known)}."
            raise OptionError(
                f"init_kwargs[{name!r}] has {argument!r}, which {function.__qualname__}() of its library does not take."
                f"{hint}"
            )


def not_logged_in(name: str, how: str) -> OptionError:
    """The error of a tracker without credentials; `how` says how to log in, or how to run without."""
    return OptionError(f"The tracker {name!r} is not logged in. {how}")


def say_left_out(name: str, values: Collection[str], stores: str) -> None:
    """Say once which values an engine does not store."""
    if values:
        _logger.warning_once(
            "The tracker %r stores %s; left out: %s.",
            name,
            stores,
            ", ".join(sorted(values)),
            main_process_only=False,
        )
