"""Aim: runs in a repository, a folder on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accel_state.host.available import is_aim_available
from accel_train.tracking.base import GeneralTracker, on_main_process
from accel_train.tracking.engines import check_arguments, install_line, say_left_out
from accel_train.tracking.images import read_images
from accel_train.tracking.values import plain, split_numbers, storable

__all__ = ["AimTracker"]


class AimTracker(GeneralTracker):
    """Logs to a run of Aim.

    Args:
        run_name: name of the run.
        logging_dir: folder of the repository.
        kwargs: for `aim.Run`; `repo` instead of `logging_dir`.
    """

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | Path | None = ".", **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.aim_repo_path = logging_dir
        self.init_kwargs = kwargs
        self.writer: Any = None

    @classmethod
    def install_line(cls) -> str | None:
        """The command that installs aim, older than 4; None if it is installed."""
        return install_line("aim", available=is_aim_available)

    def check_ready(self) -> None:
        """Refuse arguments that `aim.Run` does not have."""
        from aim import Run

        check_arguments(self.name, Run, self.init_kwargs)

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        from aim import Run

        self.writer = Run(**{"repo": self.aim_repo_path, **self.init_kwargs})
        self.writer.name = self.run_name

    @property
    def tracker(self) -> Any:
        """Aim's run."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the values as the run's "hparams"."""
        self.writer["hparams"] = storable(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Track numbers, and strings as texts.

        Args:
            values: names to values; those of mappings get the names joined by a slash.
            step: the step.
            kwargs: for the run's `track`.
        """
        from aim import Text
        from aim.sdk.objects import Audio, Distribution, Figure, Image

        own: Any = (Audio, Distribution, Figure, Image, Text)
        numbers, others = split_numbers(plain(values))
        for name, value in numbers.items():
            self.writer.track(value, name=name, step=step, **kwargs)
        left = []
        for name in others:
            item = values.get(name)
            if isinstance(item, str):
                self.writer.track(Text(item), name=name, step=step, **kwargs)
            elif isinstance(item, own):
                self.writer.track(item, name=name, step=step, **kwargs)
            else:
                left.append(name)
        say_left_out(self.name, left, "numbers, texts and its own objects")

    @on_main_process
    def log_images(
        self,
        values: dict[str, Any],
        step: int | None = None,
        kwargs: dict[str, Any] | None = None,
        *,
        aim_image: dict[str, Any] | None = None,
        track: dict[str, Any] | None = None,
    ) -> None:
        """Track images.

        Args:
            values: names to images; see `read_images`.
            step: the step.
            kwargs: `aim_image` and `track` in one dictionary.
            aim_image: keyword arguments of `aim.Image`.
            track: keyword arguments of the run's `track`.
        """
        import aim
        from PIL import Image

        options = kwargs or {}
        for_image, for_track = aim_image or options.get("aim_image", {}), track or options.get("track", {})
        for name, several in read_images(values).items():
            pictures = [
                aim.Image(Image.fromarray(image.squeezed), caption=image.caption or "", **for_image)
                for image in several
            ]
            # One call for all of a step: a second one would take the place of the first.
            self.writer.track(
                pictures if len(pictures) > 1 else pictures[0], name=name, step=step, **for_track
            )

    @on_main_process
    def finish(self) -> None:
        """Close the run."""
        if self.writer is not None:
            self.writer.close()
