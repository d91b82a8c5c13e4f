"""DVCLive: metrics in files beside the code, under DVC's version control."""

from __future__ import annotations

from typing import Any

from accel_state.host.available import is_dvclive_available
from accel_train.tracking.engines import EngineTracker, Images, say_left_out
from accel_train.tracking.values import flat

__all__ = ["DVCLiveTracker"]


class DVCLiveTracker(EngineTracker):
    """Logs to a `dvclive.Live`: numbers and strings as metrics; each `log` goes to the next step.

    Nested names are joined by a slash. Several images of one name are `name/0.png`, `name/1.png`, …; a name without
    the suffix of an image file gets ``.png``.

    Args:
        run_name: unused; DVCLive names experiments by `exp_name`.
        live: an existing object.
        kwargs: for `dvclive.Live`, if there is none.
    """

    name = "dvclive"
    begins_with = "dvclive:Live"
    is_installed = staticmethod(is_dvclive_available)
    run_is_in = "live"

    def __init__(self, run_name: str | None = None, live: Any | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.live: Any = live

    def _start(self) -> None:
        if self.live is None:
            self.live = self._engine_function()(**self.init_kwargs)

    def _store(self, values: dict[str, Any]) -> None:
        self.live.log_params(values)

    def _log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        if step is not None:
            self.live.step = step
        others = []
        for name, value in flat(values).items():
            if isinstance(value, int | float | str):
                self.live.log_metric(name, value, **kwargs)
            else:
                others.append(name)
        self.live.next_step()
        say_left_out(self.name, others, "numbers and strings")

    def _images(self, images: Images, step: int | None, **kwargs: Any) -> None:
        if step is not None:
            self.live.step = step
        for name, several in images.items():
            stem, dot, suffix = name.rpartition(".")
            if not dot or suffix.lower() not in ("png", "jpg", "jpeg", "gif", "svg"):
                stem, suffix = name, "png"
            for place, image in enumerate(several):
                file = f"{stem}.{suffix}" if len(several) == 1 else f"{stem}/{place}.{suffix}"
                self.live.log_image(file, image.squeezed, **kwargs)

    def _finish(self) -> None:
        self.live.end()
