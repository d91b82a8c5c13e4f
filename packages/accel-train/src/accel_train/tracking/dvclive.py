"""DVCLive: metrics in files beside the code, under DVC's version control."""

from __future__ import annotations

from typing import Any

from accel_state.host.available import is_dvclive_available
from accel_train.tracking.base import GeneralTracker, on_main_process
from accel_train.tracking.engines import check_arguments, install_line, say_left_out
from accel_train.tracking.images import read_images
from accel_train.tracking.values import flat, plain, storable

__all__ = ["DVCLiveTracker"]


class DVCLiveTracker(GeneralTracker):
    """Logs to a `dvclive.Live`.

    Args:
        run_name: unused; DVCLive names experiments by `exp_name`.
        live: an existing object.
        kwargs: for `dvclive.Live`, if there is none.
    """

    name = "dvclive"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, live: Any | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.live: Any = live

    @classmethod
    def install_line(cls) -> str | None:
        """The command that installs dvclive; None if it is installed."""
        return install_line("dvclive", available=is_dvclive_available)

    def check_ready(self) -> None:
        """Refuse arguments that `dvclive.Live` does not have."""
        from dvclive import Live

        check_arguments(self.name, Live, self.init_kwargs)

    @on_main_process
    def start(self) -> None:
        """Create the object, unless one was given."""
        from dvclive import Live

        if self.live is None:
            self.live = Live(**self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The `dvclive.Live`."""
        return self.live

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the values as parameters."""
        self.live.log_params(storable(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and strings as metrics, and go to the next step.

        Args:
            values: names to values; nested names are joined by a slash. Other values are left out, with one warning.
            step: the step; None: the one after the last.
            kwargs: for `log_metric`.
        """
        if step is not None:
            self.live.step = step
        others = []
        for name, value in flat(plain(values)).items():
            if isinstance(value, int | float | str):
                self.live.log_metric(name, value, **kwargs)
            else:
                others.append(name)
        self.live.next_step()
        say_left_out(self.name, others, "numbers and strings")

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images; several images of one name as `name/0.png`, `name/1.png`, ….

        Args:
            values: names to images; see `read_images`. A name without the suffix of an image file gets ``.png``.
            step: the step.
            kwargs: for `log_image`.
        """
        if step is not None:
            self.live.step = step
        for name, several in read_images(values).items():
            stem, dot, suffix = name.rpartition(".")
            if not dot or suffix.lower() not in ("png", "jpg", "jpeg", "gif", "svg"):
                stem, suffix = name, "png"
            for place, image in enumerate(several):
                file = f"{stem}.{suffix}" if len(several) == 1 else f"{stem}/{place}.{suffix}"
                self.live.log_image(file, image.squeezed, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the experiment."""
        if self.live is not None:
            self.live.end()
