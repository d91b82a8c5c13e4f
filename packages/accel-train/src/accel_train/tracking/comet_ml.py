"""Comet."""

from __future__ import annotations

import io
from typing import Any

from accel_state.host.available import is_comet_ml_available
from accel_train.tracking.base import GeneralTracker, on_main_process
from accel_train.tracking.engines import check_arguments, install_line, not_logged_in
from accel_train.tracking.images import read_images
from accel_train.tracking.tables import read_table
from accel_train.tracking.values import plain, storable

__all__ = ["CometMLTracker"]


class CometMLTracker(GeneralTracker):
    """Logs to an experiment of Comet.

    Args:
        run_name: the project.
        kwargs: for `comet_ml.start`; `online=False` logs to an archive.
    """

    name = "comet_ml"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.writer: Any = None

    @classmethod
    def install_line(cls) -> str | None:
        """The command that installs comet_ml; None if it is installed."""
        return install_line("comet-ml", available=is_comet_ml_available)

    def check_ready(self) -> None:
        """Refuse arguments that `comet_ml.start` does not have, and an online experiment without a key."""
        import comet_ml

        check_arguments(self.name, comet_ml.start, self.init_kwargs)
        config = comet_ml.get_config()
        online = config.get_bool(self.init_kwargs.get("online"), "comet.start.online", default=True)
        if online and not (self.init_kwargs.get("api_key") or config["comet.api_key"]):
            raise not_logged_in(
                self.name,
                "Run `comet login`, set COMET_API_KEY, or log to files with COMET_START_ONLINE=0 or "
                'init_kwargs={"comet_ml": {"online": False}}.',
            )

    @on_main_process
    def start(self) -> None:
        """Begin the experiment."""
        import comet_ml

        kwargs = dict(self.init_kwargs)
        if not {"project", "project_name"} & kwargs.keys():
            kwargs["project_name"] = self.run_name
        self.writer = comet_ml.start(**kwargs)

    @property
    def tracker(self) -> Any:
        """Comet's experiment."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the values as parameters of the experiment."""
        self.writer.log_parameters(storable(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, strings with `log_other`, and mappings as metrics under the mapping's name.

        Args:
            values: names to values.
            step: the step.
            kwargs: for the experiment's `log_metric`, `log_other` or `log_metrics`.
        """
        if step is not None:
            self.writer.set_step(step)
        for name, value in plain(values).items():
            if isinstance(value, str):
                self.writer.log_other(name, value, **kwargs)
            elif isinstance(value, dict):
                self.writer.log_metrics(value, prefix=name, step=step, **kwargs)
            else:
                self.writer.log_metric(name, value, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; several images of one name as `name/0`, `name/1`, ….

        Args:
            values: names to images; see `read_images`.
            step: the step.
            kwargs: for the experiment's `log_image`.
        """
        for name, several in read_images(values).items():
            for place, image in enumerate(several):
                one = name if len(several) == 1 else f"{name}/{place}"
                # Without the range, each image is stretched to its own.
                options: dict[str, Any] = {"image_minmax": (0, 255), **kwargs}
                if image.caption is not None:
                    options.setdefault("metadata", {"caption": image.caption})
                self.writer.log_image(image.squeezed, name=one, step=step, **options)

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
        """Log a table as a CSV file.

        Args:
            table_name: name of the file; ``.csv`` is added.
            columns: names of columns.
            data: rows.
            dataframe: instead of both.
            step: the step.
            kwargs: for the experiment's `log_asset`.
        """
        import csv

        table = read_table(columns, data, dataframe)
        text = io.StringIO()
        csv.writer(text).writerows([table.columns, *table.rows])
        name = table_name if table_name.endswith(".csv") else f"{table_name}.csv"
        text.seek(0)
        self.writer.log_asset(text, file_name=name, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the experiment, and wait until it is sent or written."""
        if self.writer is not None:
            self.writer.end()
