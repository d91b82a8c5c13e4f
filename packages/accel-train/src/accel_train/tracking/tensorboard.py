"""TensorBoard: event files in the project's folder for logs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from accel_state.host.available import is_tensorboard_available
from accel_train.tracking.base import GeneralTracker, on_main_process
from accel_train.tracking.engines import check_arguments, install_line, say_left_out
from accel_train.tracking.images import read_images
from accel_train.tracking.tables import read_table
from accel_train.tracking.values import flat, plain, storable

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker(GeneralTracker):
    """Writes event files to ``<logging_dir>/<run_name>``.

    Args:
        run_name: folder of the run.
        logging_dir: folder for logs.
        kwargs: for `SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | Path, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = str(Path(logging_dir) / run_name)
        self.init_kwargs = kwargs
        self.writer: Any = None

    @classmethod
    def install_line(cls) -> str | None:
        """The command that installs tensorboard; None if it, or tensorboardX, is installed."""
        return install_line("tensorboard", available=is_tensorboard_available)

    def check_ready(self) -> None:
        """Refuse arguments that `SummaryWriter` does not have."""
        check_arguments(self.name, _summary_writer(), self.init_kwargs)

    @on_main_process
    def start(self) -> None:
        """Create the writer, and with it the folder."""
        self.writer = _summary_writer()(self.logging_dir, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The `SummaryWriter`."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the values to TensorBoard's tab of hyperparameters, and to the file ``<time>/hparams.yml`` beside it.

        Nested names are joined by a slash there; lists are text.
        """
        stored = storable(values)
        folder = str(time.time())
        shown = {
            name: value if isinstance(value, int | float | str) else str(value)
            for name, value in flat(stored).items()
        }
        self.writer.add_hparams(shown, {}, run_name=folder)
        self.writer.flush()
        target = Path(self.logging_dir) / folder / "hparams.yml"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(yaml.safe_dump(stored, sort_keys=False), encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers as scalars, strings as texts, and mappings of numbers as scalars in one plot.

        Args:
            values: names to values; others are left out, with one warning.
            step: the step.
            kwargs: for `add_scalar`, `add_text` or `add_scalars`.
        """
        others = []
        for name, value in plain(values).items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
            else:
                others.append(name)
        self.writer.flush()
        say_left_out(self.name, others, "numbers and texts")

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images; those of one name are shown together if their sizes agree.

        Args:
            values: names to images; see `read_images`. With `dataformats=…`, values that `add_images` takes.
            step: the step.
            kwargs: for `add_images`.
        """
        if "dataformats" in kwargs:
            for name, batch in values.items():
                self.writer.add_images(name, batch, global_step=step, **kwargs)
        else:
            for name, images in read_images(values).items():
                for place, image in enumerate(images):
                    tag = name if len(images) == 1 else f"{name}/{place}"
                    self.writer.add_image(tag, image.pixels, global_step=step, dataformats="HWC", **kwargs)
                    if image.caption is not None:
                        self.writer.add_text(f"{tag}/caption", image.caption, global_step=step)
        self.writer.flush()

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
        """Write a table as Markdown text, which TensorBoard shows as a table.

        Args:
            table_name: the name.
            columns: names of columns.
            data: rows.
            dataframe: instead of both.
            step: the step.
            kwargs: for `add_text`.
        """
        table = read_table(columns, data, dataframe)
        lines = [table.columns, ["---"] * len(table.columns), *table.rows]
        text = "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)
        self.writer.add_text(table_name, text, global_step=step, **kwargs)
        self.writer.flush()

    @on_main_process
    def finish(self) -> None:
        """Close the writer."""
        if self.writer is not None:
            self.writer.close()


def _cell(value: Any) -> str:
    """The text of a cell, in which nothing ends the cell or the row."""
    return str(value).replace("|", "\\|").replace("\n", " ")


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # tensorboard is missing, and tensorboardX serves as well
        from tensorboardX import SummaryWriter  # type: ignore[import-not-found, no-redef, unused-ignore]
    return SummaryWriter
