"""Rank-aware logging. Only the requested logger is changed."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from accel_state import environment
from accel_state.constants import RANK_PREFIXED
from accel_state.errors import ConfigError, StateError
from accel_state.world.process import PartialState, current_state

__all__ = ["MultiProcessAdapter", "get_logger"]

# Stack depth added by a method of this class: its own frame is 1, its caller 2. Frames of the logging module do not
# count.
_CALLER = 2


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger whose messages are prefixed with the rank and, by default, logged on rank 0 only.

    Where the launcher prefixes each line of output with the rank, the messages have no prefix of their own.

    Every logging method takes two more arguments: ``main_process_only`` (default True), and ``in_order``
    (default False), which lets all ranks log one after the other and is a collective.
    """

    def __init__(self, logger: logging.Logger, extra: dict[str, object] | None = None) -> None:
        super().__init__(logger, extra if extra is not None else {})
        self._said: set[tuple[str, str]] = set()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        """Prefix the rank, unless the launcher does, and point the record at the caller."""
        kwargs.setdefault("stacklevel", _CALLER)
        if environment.get(RANK_PREFIXED):
            return str(msg), kwargs
        return f"[RANK {PartialState().process_index}] {msg}", kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log ``msg % args`` on the selected ranks.

        Args:
            level: as in ``logging``.
            msg: the message.
            *args: arguments of the message.
            **kwargs: ``main_process_only``, ``in_order``, and those of ``logging.Logger.log``. A ``stacklevel``
                counts this method as 1, so its caller is 2.

        Raises:
            StateError: there is no PartialState or Accelerator yet, so the rank is unknown.
        """
        state = current_state()
        if state is None:
            raise StateError(
                "the rank of this process is unknown; create a PartialState() or an Accelerator() before logging"
            )
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if in_order:
            # Ranks with a higher log level take part too: a barrier that some ranks skip would never complete.
            for rank in range(state.num_processes):
                if rank == state.process_index and self.isEnabledFor(level):
                    text, rest = self.process(msg, dict(kwargs))
                    self.logger.log(level, text, *args, **rest)
                state.wait_for_everyone()
        elif self.isEnabledFor(level) and (state.is_main_process or not main_process_only):
            text, rest = self.process(msg, kwargs)
            self.logger.log(level, text, *args, **rest)

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Warn only the first time that this logger gets this message with these arguments."""
        key = (str(msg), repr((args, sorted(kwargs.items()))))
        if key not in self._said:
            self._said.add(key)
            kwargs.setdefault("stacklevel", _CALLER + 1)
            self.warning(msg, *args, **kwargs)


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """A rank-aware logger for ``logging.getLogger(name)``; other loggers, including the root logger, are not changed.

    Args:
        name: usually ``__name__``.
        log_level: its level, by name in any case or by number; by default ACCELERATE_LOG_LEVEL, else the
            logger's current level.

    Raises:
        ConfigError: there is no such level.
    """
    source = "log_level"
    if log_level is None:
        source = "environment variable ACCELERATE_LOG_LEVEL"
        log_level = environment.get("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    if log_level is not None:
        level = log_level.upper() if isinstance(log_level, str) else log_level
        try:
            logger.setLevel(level)
        except ValueError:
            levels = ", ".join(logging.getLevelNamesMapping())
            raise ConfigError(
                f"{source} is {log_level!r}, which is not a logging level; use one of {levels}"
            ) from None
    return MultiProcessAdapter(logger)
