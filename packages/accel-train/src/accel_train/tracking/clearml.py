"""ClearML."""

from __future__ import annotations

from typing import Any

from accel_state import environment
from accel_state.host.available import is_clearml_available
from accel_train.tracking.base import GeneralTracker, on_main_process
from accel_train.tracking.engines import check_arguments, install_line, not_logged_in, say_left_out
from accel_train.tracking.images import read_images
from accel_train.tracking.tables import read_table
from accel_train.tracking.values import plain, split_numbers, storable

__all__ = ["ClearMLTracker"]

_SERIES = ("eval", "test", "train")


class ClearMLTracker(GeneralTracker):
    """Logs to a ClearML task. If a task is running already, logs to that one, and does not close it at the end.

    Args:
        run_name: name of project and task; `CLEARML_PROJECT` and `CLEARML_TASK` have precedence.
        kwargs: for `Task.init`.
    """

    name = "clearml"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.user_provided_run_name = run_name
        self.init_kwargs = kwargs
        self.task: Any = None
        self._is_own = False

    @classmethod
    def install_line(cls) -> str | None:
        """The command that installs clearml; None if it is installed."""
        return install_line("clearml", available=is_clearml_available)

    def check_ready(self) -> None:
        """Refuse arguments that `Task.init` does not have, and an online task without credentials."""
        from clearml import Task
        from clearml.backend_api import Session
        from clearml.backend_config.defs import get_active_config_file

        check_arguments(self.name, Task.init, self.init_kwargs)
        keys = ("CLEARML_API_ACCESS_KEY", "CLEARML_AUTH_TOKEN", "TRAINS_API_ACCESS_KEY")
        if not (
            Task.is_offline()
            or Task.current_task()
            or any(environment.get(key) for key in keys)
            or Session.default_key
            or get_active_config_file()
        ):
            raise not_logged_in(
                self.name,
                "Run `clearml-init`, set CLEARML_API_ACCESS_KEY and CLEARML_API_SECRET_KEY, or log to files with "
                "CLEARML_OFFLINE_MODE=1.",
            )

    @on_main_process
    def start(self) -> None:
        """Take the current task, or begin one."""
        from clearml import Task

        self.task = Task.current_task()
        if self.task is None:
            named = {
                "project_name": environment.get("CLEARML_PROJECT") or self.user_provided_run_name,
                "task_name": environment.get("CLEARML_TASK") or self.user_provided_run_name,
            }
            self.task = Task.init(**{**named, **self.init_kwargs})
            self._is_own = True

    @property
    def tracker(self) -> Any:
        """ClearML's task."""
        return self.task

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the values as a configuration of the task."""
        self.task.connect_configuration(storable(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report numbers: as scalars of the step, or without a step as single values.

        A name such as `eval_loss` is drawn as series "eval" of the plot "loss"; the prefixes are `eval_`, `test_` and
        `train_`. Other names are plots with the series "train". Strings go to the task's log; other values are left
        out, with one warning.

        Args:
            values: names to values; those of mappings get the names joined by a slash.
            step: the step.
            kwargs: for `report_scalar` or `report_single_value`.
        """
        logger = self.task.get_logger()
        given = plain(values)
        numbers, others = split_numbers(given)
        for name, value in numbers.items():
            if step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = _place(name)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)
        texts = [name for name in others if isinstance(given.get(name), str)]
        for name in texts:
            logger.report_text(f"{name}: {given[name]}", print_console=False)
        say_left_out(self.name, sorted({*others} - {*texts}), "numbers and texts")

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report images; several images of one name are series, numbered by their place in the list.

        Args:
            values: names to images; see `read_images`.
            step: the step.
            kwargs: for `report_image`.
        """
        logger = self.task.get_logger()
        for name, several in read_images(values).items():
            title, series = _place(name)
            for place, image in enumerate(several):
                one = series if len(several) == 1 else f"{series}/{place}"
                logger.report_image(title=title, series=one, iteration=step, image=image.squeezed, **kwargs)

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
        """Report a table.

        Args:
            table_name: the name.
            columns: names of columns.
            data: rows.
            dataframe: instead of both.
            step: the step.
            kwargs: for `report_table`.
        """
        table = read_table(columns, data, dataframe)
        title, series = _place(table_name)
        self.task.get_logger().report_table(
            title=title, series=series, table_plot=[table.columns, *table.rows], iteration=step, **kwargs
        )

    @on_main_process
    def finish(self) -> None:
        """Close the task, if this tracker began it."""
        if self.task is not None and self._is_own:
            self.task.close()


def _place(name: str) -> tuple[str, str]:
    """Title and series of the plot that a name belongs to."""
    series, underscore, title = name.partition("_")
    return (title, series) if underscore and series in _SERIES else (name, "train")
