"""Aim: runs in a repository, a folder on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accel_state.host.available import is_aim_available
from accel_train.tracking.base import on_main_process
from accel_train.tracking.engines import EngineTracker, Images, say_left_out
from accel_train.tracking.images import read_images
from accel_train.tracking.values import split_numbers

__all__ = ["AimTracker"]


class AimTracker(EngineTracker):
    """Logs to a run of Aim: the configuration as "hparams", numbers, strings as texts, and Aim's own objects.

    Args:
        run_name: name of the run.
        logging_dir: folder of the repository.
        kwargs: for `aim.Run`; `repo` instead of `logging_dir`.
    """

    name = "aim"
    requires_logging_directory = True
    begins_with = "aim:Run"
    is_installed = staticmethod(is_aim_available)

    def __init__(self, run_name: str, logging_dir: str | Path | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir
        self.writer: Any = None

    @on_main_process
    def log_images(  # type: ignore[override]  # the arguments of Accelerate's tracker
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
        options = kwargs or {}
        for_image, for_track = aim_image or options.get("aim_image", {}), track or options.get("track", {})
        self._images(read_images(values), step, for_image=for_image, for_track=for_track)

    def _start(self) -> None:
        self.writer = self._engine_function()(**{"repo": self.aim_repo_path, **self.init_kwargs})
        self.writer.name = self.run_name

    def _store(self, values: dict[str, Any]) -> None:
        self.writer["hparams"] = values

    def _log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        from aim import Text
        from aim.sdk.objects import Audio, Distribution, Figure, Image

        own: Any = (Audio, Distribution, Figure, Image, Text)
        numbers, others = split_numbers(values)
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

    def _images(self, images: Images, step: int | None, **kwargs: Any) -> None:
        import aim
        from PIL import Image

        for name, several in images.items():
            pictures = [
                aim.Image(Image.fromarray(image.squeezed), caption=image.caption or "", **kwargs["for_image"])
                for image in several
            ]
            # One call for all of a step: a second one would take the place of the first.
            shown = pictures if len(pictures) > 1 else pictures[0]
            self.writer.track(shown, name=name, step=step, **kwargs["for_track"])

    def _finish(self) -> None:
        self.writer.close()
