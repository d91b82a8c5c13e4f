"""ClearML."""

from __future__ import annotations

from typing import Any

from accel_state import environment
from accel_state.host.available import is_clearml_available
from accel_train.tracking.engines import Images, StoresTables, not_logged_in, say_left_out
from accel_train.tracking.tables import LoggedTable
from accel_train.tracking.values import split_numbers

__all__ = ["ClearMLTracker"]

_SERIES = ("eval", "test", "train")


class ClearMLTracker(StoresTables):
    """Logs to a ClearML task. If a task is running already, logs to that one, and does not close it at the end.

    Numbers are scalars of the step, or without a step single values; strings go to the task's log. A name such as
    `eval_loss` is drawn as series "eval" of the plot "loss"; the prefixes are `eval_`, `test_` and `train_`. Other
    names are plots with the series "train". Several images of one name are series, numbered by their place.

    Args:
        run_name: name of project and task; `CLEARML_PROJECT` and `CLEARML_TASK` have precedence.
        kwargs: for `Task.init`.
    """

    name = "clearml"
    begins_with = "clearml:Task.init"
    is_installed = staticmethod(is_clearml_available)
    run_is_in = "task"
    task: Any = None
    _is_own = False

    def check_ready(self) -> None:
        """Refuse arguments that `Task.init` does not have, and an online task without credentials."""
        from clearml import Task
        from clearml.backend_api import Session
        from clearml.backend_config.defs import get_active_config_file

        super().check_ready()
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

    @property
    def user_provided_run_name(self) -> str | None:
        """Accelerate's name of `run_name`."""
        return self.run_name

    def _start(self) -> None:
        from clearml import Task

        self.task = Task.current_task()
        if self.task is None:
            named = {
                "project_name": environment.get("CLEARML_PROJECT") or self.run_name,
                "task_name": environment.get("CLEARML_TASK") or self.run_name,
            }
            self.task = Task.init(**{**named, **self.init_kwargs})
            self._is_own = True

    def _store(self, values: dict[str, Any]) -> None:
        self.task.connect_configuration(values)

    def _log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        logger = self.task.get_logger()
        numbers, others = split_numbers(values)
        for name, value in numbers.items():
            if step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = _place(name)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)
        texts = [name for name in others if isinstance(values.get(name), str)]
        for name in texts:
            logger.report_text(f"{name}: {values[name]}", print_console=False)
        say_left_out(self.name, sorted({*others} - {*texts}), "numbers and texts")

    def _images(self, images: Images, step: int | None, **kwargs: Any) -> None:
        logger = self.task.get_logger()
        for name, several in images.items():
            title, series = _place(name)
            for place, image in enumerate(several):
                one = series if len(several) == 1 else f"{series}/{place}"
                logger.report_image(title=title, series=one, iteration=step, image=image.squeezed, **kwargs)

    def _table(self, name: str, table: LoggedTable, step: int | None, **kwargs: Any) -> None:
        title, series = _place(name)
        self.task.get_logger().report_table(
            title=title, series=series, table_plot=[table.columns, *table.rows], iteration=step, **kwargs
        )

    def _finish(self) -> None:
        if self._is_own:
            self.task.close()


def _place(name: str) -> tuple[str, str]:
    """Title and series of the plot that a name belongs to."""
    series, underscore, title = name.partition("_")
    return (title, series) if underscore and series in _SERIES else (name, "train")
