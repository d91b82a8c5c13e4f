"""The trackers of one `Accelerator`: which run on this rank, and what happens when one fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from accel_state.errors import AccelError
from accel_state.log import get_logger
from accel_state.world.process import PartialState
from accel_train.errors import ArgumentTypeError, OptionError, TrackerError
from accel_train.tracking.base import GeneralTracker, InertTracker, LogsImages, LogsTables
from accel_train.tracking.images import read_images
from accel_train.tracking.registry import LOGGER_TYPE_TO_CLASS
from accel_train.tracking.selection import check_names, warn_of_absent
from accel_train.tracking.tables import read_table
from accel_train.tracking.values import plain, plain_step

__all__ = ["OnFailure", "Trackers"]

OnFailure = Literal["warn", "raise"]

_logger = get_logger(__name__)

#: A server that is gone lets each call wait for a time-out; after so many failures in a row the tracker is left alone.
_FAILURES_IN_A_ROW = 3


class _Running:
    """A tracker that was started here, and how it fares."""

    def __init__(self, tracker: GeneralTracker, on_failure: OnFailure) -> None:
        self.tracker = tracker
        self.name = tracker.name
        self._on_failure = on_failure
        self._in_a_row = 0
        self._said = False
        self._unable: set[str] = set()
        self.failed = 0
        self.given_up = False

    def call(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> bool:
        """Call one of the tracker's methods; whether it succeeded.

        Raises:
            TrackerError: it failed, and `on_failure` is "raise".
        """
        if self.given_up:
            self.failed += 1
            return False
        try:
            function(*args, **kwargs)
        except Exception as error:  # whatever an engine raises: training does not depend on it
            self._note(getattr(function, "__name__", "call"), error)
            return False
        self._in_a_row = 0
        return True

    def _note(self, method: str, error: Exception) -> None:
        text = f"The tracker {self.name!r} failed in {method}(): {type(error).__name__}: {error}"
        if self._on_failure == "raise":
            raise TrackerError(f"{text}. on_failure='raise' was asked for.") from error
        self.failed += 1
        self._in_a_row += 1
        self.given_up = self._in_a_row >= _FAILURES_IN_A_ROW or method == "start"
        if not self._said:
            self._said = True
            _logger.warning(
                "%s. Training continues without these logs; further failures are not reported. "
                "init_trackers(on_failure='raise') raises instead.",
                text,
                main_process_only=False,
            )

    def able(self, protocol: type, what: str) -> bool:
        """Whether the tracker has an optional ability; one warning if not."""
        if isinstance(self.tracker, protocol):
            return True
        if what not in self._unable:
            self._unable.add(what)
            _logger.warning(
                "The tracker %r stores no %s: they are left out.", self.name, what, main_process_only=False
            )
        return False

    def finish(self) -> None:
        """End the run, and say how much is missing in it."""
        self.given_up = False
        try:
            self.call(self.tracker.finish)
        finally:
            if self.failed > 1:
                _logger.warning(
                    "The tracker %r did not take %d calls.", self.name, self.failed, main_process_only=False
                )


class Trackers:
    """The trackers of an `Accelerator`.

    A pickled copy keeps the chosen trackers, but none of them is running: a run belongs to the process that began it.

    Args:
        chosen: names and objects, from `filter_trackers`.
        absent: names in `log_with` of trackers that are not installed.
    """

    def __init__(self, chosen: list[str | GeneralTracker], absent: Iterable[str] = ()) -> None:
        self.chosen = chosen
        self._absent = tuple(absent)
        self._names = {item if isinstance(item, str) else item.name for item in chosen} | {*self._absent}
        self._running: list[_Running] = []
        self._state: Literal["new", "started", "ended"] = "new"
        self._lost_said = False
        self._known_keys = set(self._names)

    def __getstate__(self) -> dict[str, Any]:
        # Objects of engines hold files, threads and connections, so those of a script travel as their names.
        names = [item if isinstance(item, str) else item.name for item in self.chosen]
        return {**self.__dict__, "chosen": names, "_running": [], "_state": "new", "_lost_said": False}

    def warn_of_absent(self) -> None:
        """Warn once of each tracker in `log_with` that is not installed; the rank must be known."""
        warn_of_absent(self._absent)

    @property
    def running(self) -> list[GeneralTracker]:
        """The trackers that were started on this rank, in the order of `log_with`; ended ones too."""
        return [running.tracker for running in self._running]

    def keep(self, trackers: Iterable[GeneralTracker]) -> None:
        """Log with these trackers only; trackers that were not started here count as started.

        Args:
            trackers: in the order in which values are logged.
        """
        known = {id(running.tracker): running for running in self._running}
        self._running = [known.get(id(tracker)) or _Running(tracker, "warn") for tracker in trackers]

    # Beginning and ending

    def start(
        self,
        project_name: str,
        config: Mapping[str, Any] | None,
        init_kwargs: Mapping[str, Any] | None,
        on_failure: OnFailure,
        logging_dir: str | Path | None,
    ) -> None:
        """Check all trackers, then start those that belong on this rank; end those of an earlier call.

        Raises:
            OptionError: `on_failure` or a name in `init_kwargs` is unknown, or a tracker's settings cannot be used.
            ArgumentTypeError: an argument has another type.
            TrackerError: a tracker failed, and `on_failure` is "raise".
        """
        if on_failure not in ("warn", "raise"):
            raise OptionError(f"init_trackers(on_failure={on_failure!r}): expected 'warn' or 'raise'.")
        if config is not None and not isinstance(config, Mapping):
            raise ArgumentTypeError(
                f"init_trackers(config=…) takes a dictionary, got {type(config).__name__}: {config!r:.80}. "
                "Pass vars(config) of a namespace."
            )
        self._check_options("init_kwargs", init_kwargs)
        self.finish()
        self._running = []
        self._state = "started"
        if PartialState().rehearsal is not None:
            return  # a simulated rank must leave no runs behind
        here = [item for item in self.chosen if _belongs_here(item)]
        built = [_Running(_built(item, project_name, logging_dir, init_kwargs), on_failure) for item in here]
        for running in built:
            try:
                running.tracker.check_ready()
            except AccelError:
                raise
            except Exception as error:
                raise OptionError(
                    f"The tracker {running.name!r} cannot be used: {type(error).__name__}: {error}"
                ) from error
        for running in built:
            if running.call(running.tracker.start):
                self._running.append(running)
                if config is not None:
                    running.call(running.tracker.store_init_configuration, plain(config))

    def finish(self) -> None:
        """End all runs.

        Raises:
            TrackerError: a tracker failed, and `on_failure` is "raise"; the others are ended too.
        """
        if self._state != "started":
            return
        self._state = "ended"
        failure: TrackerError | None = None
        for running in self._running:
            try:
                running.finish()
            except TrackerError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    # Logging

    def log(self, values: Mapping[str, Any], step: int | None, log_kwargs: Mapping[str, Any] | None) -> None:
        """Log values with every tracker that runs here."""
        if not isinstance(values, Mapping):
            raise ArgumentTypeError(
                f"log() takes a dictionary of names to values, got {type(values).__name__}: {values!r:.80}."
            )
        if self._is_silent(log_kwargs):
            return
        numbers = plain(values)
        step = plain_step(step)
        for running in self._running:
            running.call(
                running.tracker.log, dict(numbers), step=step, **_given_for(log_kwargs, running.name)
            )

    def log_images(
        self, values: Mapping[str, Any], step: int | None, log_kwargs: Mapping[str, Any] | None
    ) -> None:
        """Log images with every tracker that runs here and stores images."""
        if self._is_silent(log_kwargs):
            return
        read_images(
            values
        )  # an image that cannot be read is a mistake of the script, no failure of a tracker
        step = plain_step(step)
        for running in self._running:
            if running.able(LogsImages, "images"):
                kwargs = _given_for(log_kwargs, running.name)
                running.call(running.tracker.log_images, dict(values), step=step, **kwargs)  # type: ignore[attr-defined]

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None,
        data: list[list[Any]] | None,
        dataframe: Any | None,
        step: int | None,
        log_kwargs: Mapping[str, Any] | None,
    ) -> None:
        """Log a table with every tracker that runs here and stores tables."""
        if self._is_silent(log_kwargs):
            return
        read_table(columns, data, dataframe)
        step = plain_step(step)
        for running in self._running:
            if running.able(LogsTables, "tables"):
                running.call(
                    running.tracker.log_table,  # type: ignore[attr-defined]
                    table_name,
                    columns=columns,
                    data=data,
                    dataframe=dataframe,
                    step=step,
                    **_given_for(log_kwargs, running.name),
                )

    def get(self, name: str, unwrap: bool) -> Any:
        """Return a tracker by name, or with `unwrap` its library's object; an inert one where it does not run.

        Raises:
            OptionError: the name is not in `log_with`, or the trackers were not started.
        """
        if name not in self._names:
            asked = ", ".join(sorted(self._names)) or "none"
            raise OptionError(f"get_tracker({name!r}): this tracker is not in log_with, which has {asked}.")
        for running in self._running:
            if running.name == name:
                return running.tracker.tracker if unwrap else running.tracker
        if self._state == "new" and any(map(_belongs_here, self.chosen)) and name not in self._absent:
            raise OptionError(f"get_tracker({name!r}): no tracker runs yet. Call init_trackers() first.")
        return InertTracker(name)

    def _is_silent(self, log_kwargs: Mapping[str, Any] | None) -> bool:
        """Whether nothing is logged here; one warning if that is not what was asked for."""
        if log_kwargs:
            self._check_options("log_kwargs", log_kwargs)
        if self._running and self._state == "started":
            return False
        asked = self._state != "started" and any(map(_belongs_here, self.chosen))
        if asked and not self._lost_said:
            self._lost_said = True
            why = (
                "init_trackers() was not called"
                if self._state == "new"
                else "the trackers were ended by end_training()"
            )
            _logger.warning("What is logged is lost: %s on this rank.", why, main_process_only=False)
        return True

    def _check_options(self, argument: str, options: Mapping[str, Any] | None) -> None:
        if options is None:
            return
        if not isinstance(options, Mapping):
            raise ArgumentTypeError(
                f"{argument} takes a dictionary of names of trackers to options, got {type(options).__name__}: "
                f"{options!r:.80}."
            )
        if options.keys() <= self._known_keys:
            return
        # Options of a tracker that is not used in this run are fine: scripts choose trackers by an argument.
        check_names(argument, options.keys() - self._known_keys)
        self._known_keys.update(options)


def _belongs_here(item: str | GeneralTracker) -> bool:
    """Whether a tracker runs on this rank."""
    kind = LOGGER_TYPE_TO_CLASS[item] if isinstance(item, str) else item
    return PartialState().is_main_process or not kind.main_process_only


def _built(
    item: str | GeneralTracker,
    project_name: str,
    logging_dir: str | Path | None,
    init_kwargs: Mapping[str, Any] | None,
) -> GeneralTracker:
    """The tracker, constructed if it was given by name."""
    if isinstance(item, GeneralTracker):
        return item
    kind: Callable[..., GeneralTracker] = LOGGER_TYPE_TO_CLASS[item]
    folder = [logging_dir] if LOGGER_TYPE_TO_CLASS[item].requires_logging_directory else []
    return kind(project_name, *folder, **_given_for(init_kwargs, item))


def _given_for(options: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    """The options of one tracker among those keyed by tracker; {} if there are none."""
    return (options or {}).get(name) or {}
