"""The base class of all trackers, built-in ones and those of users."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from accel_state.world.process import PartialState
from accel_train.errors import TrackerContractError

__all__ = [
    "GeneralTracker",
    "InertTracker",
    "LogsImages",
    "LogsTables",
    "check_contract",
    "on_main_process",
]

F = TypeVar("F", bound=Callable[..., Any])


def on_main_process(function: F) -> F:
    """Decorator for methods of a tracker: run on the main process only, return None on other ranks.

    A tracker whose `main_process_only` is False runs the method on every rank.
    """

    @functools.wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return cast(F, run)


class GeneralTracker:
    """Base class of all trackers, built-in or your own; by itself it does nothing.

    A subclass has the class attributes `name` and `requires_logging_directory` and the property `tracker`, and
    overrides the methods that its library supports. If it also has `log_images` or `log_table` (see `LogsImages` and
    `LogsTables`), the methods of `Accelerator` with these names call them.

    Given by name, it is constructed by `init_trackers` as `cls(project_name, **init_kwargs[name])`, or as
    `cls(project_name, logging_dir, **init_kwargs[name])` if it requires a logging directory. The constructor only
    stores its arguments; `start` creates files and connections.

    Attributes:
        name: its name in `log_with`, `init_kwargs`, `log_kwargs` and `get_tracker`.
        requires_logging_directory: whether it needs the project's `logging_dir`.
        main_process_only: run on the main process alone; else every rank has its own run.

    Raises:
        TrackerContractError: the subclass lacks one of `name`, `requires_logging_directory` and `tracker`.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True

    def __init__(self, _blank: bool = False) -> None:
        if not _blank:
            check_contract(self)

    @property
    def tracker(self) -> Any:
        """The run, as an object of the tracker's own library; every subclass defines it."""
        return None

    @classmethod
    def install_line(cls) -> str | None:
        """The command that installs the tracker's library; None if it is installed, or if no package is needed."""
        return None

    def check_ready(self) -> None:
        """Raise an `AccelError` if `start` would certainly fail for a reason that the user can fix.

        Called for every tracker before the first one starts. It neither writes a file nor contacts a server.
        """

    def start(self) -> None:
        """Begin the run: create files, connect. Called once, after the constructor."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration of the run.

        Args:
            values: names to numbers, strings, booleans or None; nested if the tracker's library allows it.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the values of one step.

        Args:
            values: names to numbers, strings, or other values that the tracker's library takes.
            step: the step they belong to; None: the library counts.
            kwargs: for the library's own function.
        """

    def finish(self) -> None:
        """End the run: write what is buffered, and disconnect."""


@runtime_checkable
class LogsImages(Protocol):
    """A tracker that stores images."""

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images.

        Args:
            values: names to images; see `accel_train.tracking.images.read_images`.
            step: the step they belong to.
            kwargs: for the library's own function.
        """


@runtime_checkable
class LogsTables(Protocol):
    """A tracker that stores tables."""

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any | None = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, given as columns and rows or as a pandas dataframe."""


class InertTracker(GeneralTracker):
    """Stands for a tracker that does not run on this rank: every attribute is itself, and calling it does nothing.

    So scripts can call a tracker, or the object of its library, on every rank without checking the rank.
    """

    def __init__(self, name: str) -> None:
        super().__init__(_blank=True)
        self.name = name
        self.requires_logging_directory = False

    @property
    def tracker(self) -> Any:
        """Itself."""
        return self

    def __getattr__(self, name: str) -> InertTracker:
        # Protocols of Python (pickling, copying, arrays) look for names with two underscores, and must not find them.
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> InertTracker:
        """Do nothing, and return itself."""
        return self

    def __repr__(self) -> str:
        return f"InertTracker({self.name!r})"


def check_contract(tracker: object) -> None:
    """Refuse a tracker, or a tracker class, that lacks a required attribute.

    Raises:
        TrackerContractError: names all missing attributes.
    """
    kind = tracker if isinstance(tracker, type) else type(tracker)
    missing = [name for name in ("name", "requires_logging_directory") if not hasattr(tracker, name)]
    if getattr(kind, "tracker", None) is GeneralTracker.tracker:
        missing.append("tracker")
    if missing:
        raise TrackerContractError(
            f"{kind.__qualname__} is no complete tracker: it lacks {', '.join(missing)}. A tracker has the class "
            "attributes `name` (a string) and `requires_logging_directory` (True or False), and the property `tracker` "
            "that returns the run, an object of its library."
        )
