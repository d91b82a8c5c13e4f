"""TensorBoard: event files in the project's folder for logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from accel_state.host.available import is_tensorboard_available
from accel_train.tracking.base import on_main_process
from accel_train.tracking.engines import Images, StoresTables, one_by_one, say_left_out
from accel_train.tracking.images import read_images
from accel_train.tracking.tables import LoggedTable
from accel_train.tracking.values import flat

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker(StoresTables):
    """Writes event files to ``<logging_dir>/<run_name>``.

    Numbers are scalars, strings are texts, and mappings of numbers are scalars in one plot; a table is a text in
    Markdown, which TensorBoard shows as a table. Several images of one name are `name/0`, `name/1`, …. The
    configuration is in TensorBoard's tab of hyperparameters, where nested names are joined by a slash and lists are
    text, and in the file ``<time>/hparams.yml``.

    Args:
        run_name: folder of the run.
        logging_dir: folder for logs.
        kwargs: for `SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True
    is_installed = staticmethod(is_tensorboard_available)

    def __init__(self, run_name: str, logging_dir: str | Path, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = str(Path(logging_dir) / run_name)
        self.writer: Any = None

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images.

        Args:
            values: names to images; see `read_images`. With `dataformats=…`, values that `add_images` takes.
            step: the step.
            kwargs: for `add_image`, or with `dataformats` for `add_images`.
        """
        if "dataformats" not in kwargs:
            self._images(read_images(values), step, **kwargs)
            return
        for name, batch in values.items():
            self.writer.add_images(name, batch, global_step=step, **kwargs)
        self.writer.flush()

    def _engine_function(self) -> Callable[..., Any]:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:  # tensorboard is missing, and tensorboardX serves as well
            from tensorboardX import SummaryWriter  # type: ignore[import-not-found, no-redef, unused-ignore]
        return SummaryWriter

    def _start(self) -> None:
        self.writer = self._engine_function()(self.logging_dir, **self.init_kwargs)

    def _store(self, values: dict[str, Any]) -> None:
        folder = str(time.time())
        shown = {
            name: value if isinstance(value, int | float | str) else str(value)
            for name, value in flat(values).items()
        }
        self.writer.add_hparams(shown, {}, run_name=folder)
        self.writer.flush()
        target = Path(self.logging_dir) / folder / "hparams.yml"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")

    def _log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        others = []
        for name, value in values.items():
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

    def _images(self, images: Images, step: int | None, **kwargs: Any) -> None:
        for tag, image in one_by_one(images):
            self.writer.add_image(tag, image.pixels, global_step=step, dataformats="HWC", **kwargs)
            if image.caption is not None:
                self.writer.add_text(f"{tag}/caption", image.caption, global_step=step)
        self.writer.flush()

    def _table(self, name: str, table: LoggedTable, step: int | None, **kwargs: Any) -> None:
        lines = [table.columns, ["---"] * len(table.columns), *table.rows]
        text = "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)
        self.writer.add_text(name, text, global_step=step, **kwargs)
        self.writer.flush()

    def _finish(self) -> None:
        self.writer.close()


def _cell(value: Any) -> str:
    """The text of a cell, in which nothing ends the cell or the row."""
    return str(value).replace("|", "\\|").replace("\n", " ")
