"""The part of `Accelerator` that logs to experiment trackers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accel_train.plugins import ProjectConfiguration
from accel_train.tracking.base import GeneralTracker
from accel_train.tracking.running import OnFailure, Trackers

__all__ = ["TrackingView"]


class TrackingView:
    """Starts trackers and logs to them.

    Every method may be called on every rank or on some of them; none waits for another rank. What a rank passes is
    logged where a tracker runs: on the main process, unless the tracker's class has `main_process_only = False`.
    """

    _trackers: Trackers
    project_configuration: ProjectConfiguration

    @property
    def log_with(self) -> list[str | GeneralTracker]:
        """Names and objects of the trackers that were asked for, each once."""
        return self._trackers.chosen

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers that run on this rank, since `init_trackers`."""
        return self._trackers.running

    @trackers.setter
    def trackers(self, trackers: Iterable[GeneralTracker]) -> None:
        self._trackers.keep(trackers)

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
        *,
        on_failure: OnFailure = "warn",
    ) -> None:
        """Start the trackers that `log_with` asked for, and store the configuration of the run in them.

        All are checked before the first starts. A second call ends the runs of the first.

        Args:
            project_name: the project, or what the tracker calls it (experiment, folder of runs).
            config: names to numbers, strings, booleans or None.
            init_kwargs: name of a tracker to a dictionary of keyword arguments, which its engine's own function gets
                (``{"wandb": {"mode": "offline"}}``). Options of trackers that are not used are ignored.
            on_failure: what happens when a tracker fails, here and later: "warn" says it once and goes on without,
                "raise" raises.

        Raises:
            OptionError: a name or an argument is unknown, or a tracker is not logged in.
            TrackerError: a tracker failed, with `on_failure="raise"`.
        """
        logging_dir = self.project_configuration.logging_dir
        self._trackers.start(project_name, config, init_kwargs, on_failure, logging_dir)

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Log values of a step with every tracker.

        Args:
            values: names to values. Tensors and NumPy values of one element become Python numbers, those on a device
                in one copy; anything else goes to the tracker as it is.
            step: the step; None: the tracker counts.
            log_kwargs: name of a tracker to a dictionary of keyword arguments for its `log`.
        """
        self._trackers.log(values, step, log_kwargs)

    def log_images(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Log images with every tracker that stores images; each of the others warns once.

        Args:
            values: names to an image, a list of images, or a batch in one tensor or array. An image is a PIL image, a
                tensor [channels, height, width], an array [height, width, channels], either [height, width], or a pair
                `(image, caption)`; floating values are from 0 to 1, whole numbers from 0 to 255.
            step: the step; None: the tracker counts.
            log_kwargs: name of a tracker to a dictionary of keyword arguments for its `log_images`.

        Raises:
            OptionError: an image has another shape or range.
        """
        self._trackers.log_images(values, step, log_kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any | None = None,
        step: int | None = None,
        log_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Log a table with every tracker that stores tables; each of the others warns once.

        Args:
            table_name: the name.
            columns: names of columns; None with `data`: the first row holds them.
            data: rows.
            dataframe: a pandas dataframe, instead of `columns` and `data`.
            step: the step; None: the tracker counts.
            log_kwargs: name of a tracker to a dictionary of keyword arguments for its `log_table`.

        Raises:
            OptionError: there are no rows, or a row is of another length than `columns`.
        """
        self._trackers.log_table(table_name, columns, data, dataframe, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by name.

        Args:
            name: of a tracker that `log_with` asked for.
            unwrap: return the engine's own object (a SummaryWriter, a run).

        Returns:
            The tracker. On a rank where it does not run, if it failed to start, and if it is not installed, an
            object that does nothing whatever is called on it.

        Raises:
            OptionError: `log_with` did not ask for it, or `init_trackers` was not called.
        """
        return self._trackers.get(name, unwrap)
