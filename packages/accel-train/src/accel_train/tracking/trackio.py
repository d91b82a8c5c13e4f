"""Trackio: runs in a local database, or in a Hugging Face Space."""

from __future__ import annotations

from typing import Any

from accel_state.host.available import is_trackio_available
from accel_train.tracking.engines import Images, ProjectTracker, one_by_one
from accel_train.tracking.tables import LoggedTable

__all__ = ["TrackioTracker"]


class TrackioTracker(ProjectTracker):
    """Logs to a run of Trackio; several images of one name as `name/0`, `name/1`, ….

    Args:
        run_name: the project.
        kwargs: for `trackio.init`.
    """

    name = "trackio"
    begins_with = "trackio:init"
    is_installed = staticmethod(is_trackio_available)

    def _engine_images(self, images: Images) -> dict[str, Any]:
        import trackio

        return {
            name: trackio.Image(image.squeezed, caption=image.caption) for name, image in one_by_one(images)
        }

    def _engine_table(self, table: LoggedTable) -> Any:
        import trackio

        return trackio.Table(columns=table.columns, data=table.rows)
