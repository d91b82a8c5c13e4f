"""Weights & Biases."""

from __future__ import annotations

import inspect
from typing import Any

from accel_state.host.available import is_wandb_available
from accel_train.tracking.engines import Images, ProjectTracker, not_logged_in
from accel_train.tracking.tables import LoggedTable

__all__ = ["WandBTracker"]


class WandBTracker(ProjectTracker):
    """Logs to a run of Weights & Biases: values, and cells of tables, that `wandb.Run.log` and `wandb.Table` take.

    Args:
        run_name: the project.
        kwargs: for `wandb.init`.
    """

    name = "wandb"
    begins_with = "wandb:init"
    is_installed = staticmethod(is_wandb_available)

    def check_ready(self) -> None:
        """Refuse arguments that `wandb.init` does not have, and an online run without credentials.

        Without this, `wandb.init` would ask at the terminal, where nobody may be.
        """
        import wandb

        super().check_ready()
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

    def _store(self, values: dict[str, Any]) -> None:
        self.run.config.update(values, allow_val_change=True)

    def _engine_images(self, images: Images) -> dict[str, Any]:
        import wandb

        found = {}
        for name, several in images.items():
            # The engine stores captions of all images of a name, or if the first has none, of none.
            missing = "" if any(image.caption for image in several) else None
            found[name] = [wandb.Image(image.squeezed, caption=image.caption or missing) for image in several]
        return found

    def _engine_table(self, table: LoggedTable) -> Any:
        import wandb

        return wandb.Table(columns=table.columns, data=table.rows)
