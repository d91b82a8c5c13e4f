"""SwanLab."""

from __future__ import annotations

from typing import Any

from accel_state.host.available import is_swanlab_available
from accel_train.tracking.engines import Images, ProjectTracker, not_logged_in
from accel_train.tracking.tables import LoggedTable

__all__ = ["SwanLabTracker"]


class SwanLabTracker(ProjectTracker):
    """Logs to a run of SwanLab: numbers, strings as texts, and objects of SwanLab.

    Args:
        run_name: the project.
        kwargs: for `swanlab.init`.
    """

    name = "swanlab"
    begins_with = "swanlab:init"
    is_installed = staticmethod(is_swanlab_available)

    def check_ready(self) -> None:
        """Refuse arguments that `swanlab.init` does not have, and an online run without a key."""
        import swanlab

        super().check_ready()
        given = self.init_kwargs.get("settings")
        settings = swanlab.Settings() if given is None else given
        mode = self.init_kwargs.get("mode") or settings.mode
        if mode == "online" and settings.api_key is None:
            raise not_logged_in(
                self.name,
                "Run `swanlab login`, set SWANLAB_API_KEY, or log to files with SWANLAB_MODE=offline or "
                'init_kwargs={"swanlab": {"mode": "offline"}}.',
            )

    def _log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        import swanlab

        texts = {
            name: swanlab.Text(value) if isinstance(value, str) else value for name, value in values.items()
        }
        self.run.log(texts, step=step, **kwargs)

    def _engine_images(self, images: Images) -> dict[str, Any]:
        import swanlab

        return {
            name: [swanlab.Image(image.squeezed, caption=image.caption) for image in several]
            for name, several in images.items()
        }

    def _engine_table(self, table: LoggedTable) -> Any:
        import swanlab

        shown = swanlab.echarts.Table()
        shown.add(table.columns, table.rows)
        return shown
