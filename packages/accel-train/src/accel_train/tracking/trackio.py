"""Trackio: runs in a local database, or in a Hugging Face Space."""

from __future__ import annotations

from typing import Any

from accel_state.host.available import is_trackio_available
from accel_train.tracking.base import GeneralTracker, on_main_process
from accel_train.tracking.engines import check_arguments, install_line
from accel_train.tracking.images import read_images
from accel_train.tracking.tables import read_table
from accel_train.tracking.values import plain, storable

__all__ = ["TrackioTracker"]


class TrackioTracker(GeneralTracker):
    """Logs to a run of Trackio.

    Args:
        run_name: the project.
        kwargs: for `trackio.init`.
    """

    name = "trackio"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @classmethod
    def install_line(cls) -> str | None:
        """The command that installs trackio; None if it is installed."""
        return install_line("trackio", available=is_trackio_available)

    def check_ready(self) -> None:
        """Refuse arguments that `trackio.init` does not have."""
        import trackio

        check_arguments(self.name, trackio.init, self.init_kwargs)

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        import trackio

        self.run = trackio.init(**{"project": self.run_name, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        """Trackio's run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the values in the configuration of the run."""
        self.run.config.update(storable(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values.

        Args:
            values: names to values.
            step: the step.
            kwargs: for the run's `log`.
        """
        self.run.log(plain(values), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; several images of one name as `name/0`, `name/1`, ….

        Args:
            values: names to images; see `read_images`.
            step: the step.
            kwargs: for the run's `log`.
        """
        import trackio

        self.run.log(
            {
                name if len(several) == 1 else f"{name}/{place}": trackio.Image(
                    image.squeezed, caption=image.caption
                )
                for name, several in read_images(values).items()
                for place, image in enumerate(several)
            },
            step=step,
            **kwargs,
        )

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
            kwargs: for the run's `log`.
        """
        import trackio

        table = read_table(columns, data, dataframe)
        self.run.log({table_name: trackio.Table(columns=table.columns, data=table.rows)}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        if self.run is not None:
            self.run.finish()
