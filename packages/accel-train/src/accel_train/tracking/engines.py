"""What the trackers of this package share: checks before an engine starts, and reading what is logged.

An engine is the library that a tracker logs to.
"""

from __future__ import annotations

import difflib
import inspect
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar, TypeAlias

from accel_state.host.versions import install_extra
from accel_state.log import get_logger
from accel_train.errors import OptionError
from accel_train.tracking.base import GeneralTracker, on_main_process
from accel_train.tracking.images import LoggedImage, read_images
from accel_train.tracking.tables import LoggedTable, read_table
from accel_train.tracking.values import plain, storable

__all__ = [
    "EngineTracker",
    "Images",
    "ProjectTracker",
    "StoresTables",
    "check_arguments",
    "not_logged_in",
    "one_by_one",
    "say_left_out",
]

_logger = get_logger(__name__)

Images: TypeAlias = Mapping[str, list[LoggedImage]]
"""Names to the images of a step."""


class EngineTracker(GeneralTracker):
    """A tracker that keeps to the main process, and hands over to its engine what it has read.

    A subclass has `name`, which is also the extra of accel-train that installs the engine, and what follows; and it
    overrides the methods that begin with an underscore, which run only where the tracker does (`main_process_only`).

    Args:
        run_name: the project, from `init_trackers`.
        kwargs: for the engine's function that begins a run.

    Attributes:
        is_installed: whether the engine is installed.
        begins_with: the engine's function that takes `init_kwargs`, as `module:name`.
        run_is_in: the attribute that has the run, under the name that it has in Accelerate.
    """

    requires_logging_directory = False
    is_installed: ClassVar[Callable[[], bool]]
    begins_with: ClassVar[str]
    run_is_in: ClassVar[str] = "writer"

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The engine's run, or what its library has in place of one; None before it begins."""
        return getattr(self, self.run_is_in)

    @classmethod
    def install_line(cls) -> str | None:
        """The command that installs the engine; None if it is installed."""
        return None if cls.is_installed() else install_extra("accel-train", cls.name.replace("_", "-"))

    def check_ready(self) -> None:
        """Refuse arguments that the engine's function does not have."""
        check_arguments(self.name, self._engine_function(), self.init_kwargs)

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        self._start()

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration of the run; a value that an engine may not be able to write becomes text."""
        self._store(storable(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the values of a step.

        Args:
            values: names to values.
            step: the step.
            kwargs: for the engine's function.
        """
        self._log(plain(values), step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images.

        Args:
            values: names to images; see `read_images`.
            step: the step.
            kwargs: for the engine's function.
        """
        self._images(read_images(values), step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run, if it began."""
        if self.tracker is not None:
            self._finish()

    def _engine_function(self) -> Callable[..., Any]:
        """The engine's function that takes `init_kwargs`, imported."""
        function: Callable[..., Any] = pkgutil.resolve_name(self.begins_with)
        return function

    def _start(self) -> None:
        """Begin the run, which `tracker` returns from then on."""

    def _store(self, values: dict[str, Any]) -> None:
        """Store the configuration; see `storable`."""

    def _log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        """Log values; see `plain`."""

    def _images(self, images: Images, step: int | None, **kwargs: Any) -> None:
        """Log images."""

    def _finish(self) -> None:
        """End the run."""


class StoresTables(EngineTracker):
    """An `EngineTracker` whose engine also stores tables."""

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any | None = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table.

        Args:
            table_name: the name.
            columns: names of columns.
            data: rows.
            dataframe: instead of both.
            step: the step.
            kwargs: for the engine's function.
        """
        self._table(table_name, read_table(columns, data, dataframe), step, **kwargs)

    def _table(self, name: str, table: LoggedTable, step: int | None, **kwargs: Any) -> None:
        """Log a table."""


class ProjectTracker(StoresTables, ABC):
    """The tracker of an engine that is called as Weights & Biases is: a run has `config`, `log` and `finish`.

    Attributes:
        run: the engine's run.
    """

    run: Any = None
    run_is_in = "run"

    def _start(self) -> None:
        self.run = self._engine_function()(**{"project": self.run_name, **self.init_kwargs})

    def _store(self, values: dict[str, Any]) -> None:
        self.run.config.update(values)

    def _log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        self.run.log(values, step=step, **kwargs)

    def _images(self, images: Images, step: int | None, **kwargs: Any) -> None:
        self.run.log(self._engine_images(images), step=step, **kwargs)

    def _table(self, name: str, table: LoggedTable, step: int | None, **kwargs: Any) -> None:
        self.run.log({name: self._engine_table(table)}, step=step, **kwargs)

    def _finish(self) -> None:
        self.run.finish()

    @abstractmethod
    def _engine_images(self, images: Images) -> dict[str, Any]:
        """The images as the engine's objects."""

    @abstractmethod
    def _engine_table(self, table: LoggedTable) -> Any:
        """The table as the engine's object."""


def one_by_one(images: Images) -> Iterator[tuple[str, LoggedImage]]:
    """Each image with its name; several of one name are `name/0`, `name/1`, …."""
    for name, several in images.items():
        for place, image in enumerate(several):
            yield name if len(several) == 1 else f"{name}/{place}", image


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
