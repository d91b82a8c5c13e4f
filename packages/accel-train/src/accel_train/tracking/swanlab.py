"""SwanLab."""

from __future__ import annotations

from typing import Any

from accel_state.host.available import is_swanlab_available
from accel_train.tracking.base import GeneralTracker, on_main_process
from accel_train.tracking.engines import check_arguments, install_line, not_logged_in
from accel_train.tracking.images import read_images
from accel_train.tracking.tables import read_table
from accel_train.tracking.values import plain, storable

__all__ = ["SwanLabTracker"]


class SwanLabTracker(GeneralTracker):
    """Logs to a run of SwanLab.

    Args:
        run_name: the project.
        kwargs: for `swanlab.init`.
    """

    name = "swanlab"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @classmethod
    def install_line(cls) -> str | None:
        """The command that installs swanlab; None if it is installed."""
        return install_line("swanlab", available=is_swanlab_available)

    def check_ready(self) -> None:
        """Refuse arguments that `swanlab.init` does not have, and an online run without a key."""
        import swanlab

        check_arguments(self.name, swanlab.init, self.init_kwargs)
        given = self.init_kwargs.get("settings")
        settings = swanlab.Settings() if given is None else given
        mode = self.init_kwargs.get("mode") or settings.mode
        if mode == "online" and settings.api_key is None:
            raise not_logged_in(
                self.name,
                "Run `swanlab login`, set SWANLAB_API_KEY, or log to files with SWANLAB_MODE=offline or "
                'init_kwargs={"swanlab": {"mode": "offline"}}.',
            )

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        import swanlab

        self.run = swanlab.init(**{"project": self.run_name, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        """SwanLab's run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the values in the configuration of the run."""
        self.run.config.update(storable(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values: numbers, strings as texts, and objects of SwanLab.

        Args:
            values: names to values.
            step: the step.
            kwargs: for the run's `log`.
        """
        import swanlab

        texts = {
            name: swanlab.Text(value) if isinstance(value, str) else value
            for name, value in plain(values).items()
        }
        self.run.log(texts, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images.

        Args:
            values: names to images; see `read_images`.
            step: the step.
            kwargs: for the run's `log`.
        """
        import swanlab

        images = {
            name: [swanlab.Image(image.squeezed, caption=image.caption) for image in several]
            for name, several in read_images(values).items()
        }
        self.run.log(images, step=step, **kwargs)

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
        import swanlab

        table = read_table(columns, data, dataframe)
        shown = swanlab.echarts.Table()
        shown.add(table.columns, table.rows)
        self.run.log({table_name: shown}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        if self.run is not None:
            self.run.finish()
