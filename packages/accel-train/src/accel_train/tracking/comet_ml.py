"""Comet."""

from __future__ import annotations

import csv
import io
from typing import Any

from accel_state.host.available import is_comet_ml_available
from accel_train.tracking.engines import Images, StoresTables, not_logged_in, one_by_one
from accel_train.tracking.tables import LoggedTable

__all__ = ["CometMLTracker"]


class CometMLTracker(StoresTables):
    """Logs to an experiment of Comet: numbers as metrics, strings with `log_other`, tables as CSV files.

    The numbers of a mapping are metrics under its name. Several images of one name are `name/0`, `name/1`, ….

    Args:
        run_name: the project.
        kwargs: for `comet_ml.start`; `online=False` logs to an archive.
    """

    name = "comet_ml"
    begins_with = "comet_ml:start"
    is_installed = staticmethod(is_comet_ml_available)
    writer: Any = None

    def check_ready(self) -> None:
        """Refuse arguments that `comet_ml.start` does not have, and an online experiment without a key."""
        import comet_ml

        super().check_ready()
        config = comet_ml.get_config()
        online = config.get_bool(self.init_kwargs.get("online"), "comet.start.online", default=True)
        if online and not (self.init_kwargs.get("api_key") or config["comet.api_key"]):
            raise not_logged_in(
                self.name,
                "Run `comet login`, set COMET_API_KEY, or log to files with COMET_START_ONLINE=0 or "
                'init_kwargs={"comet_ml": {"online": False}}.',
            )

    def _start(self) -> None:
        named = {"project", "project_name"} & self.init_kwargs.keys()
        project = {} if named else {"project_name": self.run_name}
        self.writer = self._engine_function()(**self.init_kwargs, **project)

    def _store(self, values: dict[str, Any]) -> None:
        self.writer.log_parameters(values)

    def _log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        if step is not None:
            self.writer.set_step(step)
        for name, value in values.items():
            if isinstance(value, str):
                self.writer.log_other(name, value, **kwargs)
            elif isinstance(value, dict):
                self.writer.log_metrics(value, prefix=name, step=step, **kwargs)
            else:
                self.writer.log_metric(name, value, step=step, **kwargs)

    def _images(self, images: Images, step: int | None, **kwargs: Any) -> None:
        for name, image in one_by_one(images):
            # Without the range, each image is stretched to its own.
            options: dict[str, Any] = {"image_minmax": (0, 255), **kwargs}
            if image.caption is not None:
                options.setdefault("metadata", {"caption": image.caption})
            self.writer.log_image(image.squeezed, name=name, step=step, **options)

    def _table(self, name: str, table: LoggedTable, step: int | None, **kwargs: Any) -> None:
        text = io.StringIO()
        csv.writer(text).writerows([table.columns, *table.rows])
        text.seek(0)
        file = name if name.endswith(".csv") else f"{name}.csv"
        self.writer.log_asset(text, file_name=file, step=step, **kwargs)

    def _finish(self) -> None:
        self.writer.end()  # waits until it is sent or written
