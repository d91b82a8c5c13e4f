"""Weights & Biases."""

from __future__ import annotations

import inspect
from typing import Any

from accel_state.host.available import is_wandb_available
from accel_train.tracking.base import GeneralTracker, on_main_process
from accel_train.tracking.engines import check_arguments, install_line, not_logged_in
from accel_train.tracking.images import read_images
from accel_train.tracking.tables import read_table
from accel_train.tracking.values import plain, storable

__all__ = ["WandBTracker"]


class WandBTracker(GeneralTracker):
    """Logs to a run of Weights & Biases.

    Args:
        run_name: the project.
        kwargs: for `wandb.init`.
    """

    name = "wandb"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @classmethod
    def install_line(cls) -> str | None:
        """The command that installs wandb; None if it is there."""
        return install_line("wandb", available=is_wandb_available)

    def check_ready(self) -> None:
        """Refuse arguments that `wandb.init` does not have, and an online run without credentials.

        Without this, `wandb.init` would ask at the terminal, where nobody may be.
        """
        import wandb

        check_arguments(self.name, wandb.init, self.init_kwargs)
        settings = self.init_kwargs.get("settings") or {}
        own = settings if isinstance(settings, dict) else settings.model_dump()
        mode = self.init_kwargs.get("mode") or own.get("mode") or wandb.setup().settings.mode
        if mode not in ("online", "shared", None) or own.get("api_key") or wandb.run is not None:
            return
        if "prompt" in inspect.signature(wandb.login).parameters:
            logged_in = wandb.login(prompt=False)
        else:  # an older version
            logged_in = wandb.api.api_key is not None
        if not logged_in:
            raise not_logged_in(
                self.name,
                "Run `wandb login`, set WANDB_API_KEY, or log to files with WANDB_MODE=offline or "
                'init_kwargs={"wandb": {"mode": "offline"}}.',
            )

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        import wandb

        self.run = wandb.init(**{"project": self.run_name, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        """The `wandb.Run`."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the values in the configuration of the run."""
        self.run.config.update(storable(values), allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values, which may be any that `wandb.Run.log` takes.

        Args:
            values: names to values.
            step: the step.
            kwargs: for `wandb.Run.log`.
        """
        self.run.log(plain(values), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images.

        Args:
            values: names to images; see `read_images`.
            step: the step.
            kwargs: for `wandb.Run.log`.
        """
        import wandb

        images = {}
        for name, several in read_images(values).items():
            # The engine stores captions of all images of a name, or if the first has none, of none.
            missing = "" if any(image.caption for image in several) else None
            images[name] = [
                wandb.Image(image.squeezed, caption=image.caption or missing) for image in several
            ]
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
        """Log a table; cells may be any value that `wandb.Table` takes.

        Args:
            table_name: the name.
            columns: names of columns.
            data: rows.
            dataframe: instead of both.
            step: the step.
            kwargs: for `wandb.Run.log`.
        """
        import wandb

        table = read_table(columns, data, dataframe)
        self.run.log({table_name: wandb.Table(columns=table.columns, data=table.rows)}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        if self.run is not None:
            self.run.finish()
