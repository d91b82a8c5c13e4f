"""Continuing from the newest checkpoint when the launcher asks for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accel_ckpt
from accel_state.config.launched import launched_config
from accel_train.checkpoints import accelerate_checkpoints
from accel_train.checkpoints.checkpoint import automatic_folder
from accel_train.errors import OptionError
from accel_train.setup.prepared import Prepared

__all__ = ["newest_of_all", "resume"]

_logger = logging.getLogger(__name__)


def resume(prepared: Prepared, load: Callable[[Path], Any]) -> bool:
    """See `Accelerator.resume`; `load` is given the folder."""
    if not launched_config().resume:
        return False
    if not prepared.project.automatic_checkpoint_naming:
        raise OptionError(
            "resume() looks for automatic checkpoints: give the Accelerator a "
            "ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True)."
        )
    folder = automatic_folder(prepared.project)
    newest = newest_of_all(folder)
    if newest is None:
        if prepared.process.is_main_process:
            _logger.warning(
                "accel: there is no complete checkpoint in %s yet; training starts from the beginning", folder
            )
        return False
    if prepared.process.is_main_process:
        accelerate_checkpoints.warn_of_newer(folder / newest)
    load(folder / newest)
    return True


def newest_of_all(folder: Path) -> str | None:
    """The newest checkpoint that is complete for all ranks, which need not share a file system.

    Raises:
        CheckpointNotFoundError: there are checkpoints, but none that all ranks have.
    """

    def look() -> list[str]:
        return [path.name for path in accelerate_checkpoints.all_checkpoints(folder)]

    found = accel_ckpt.run_together(look, accel_ckpt.default_coordinator(), doing="looking for checkpoints")
    common = [name for name in found[0] if all(name in names for names in found)]
    if common:
        return common[-1]
    if any(found):
        lacking = [rank for rank, names in enumerate(found) if not names]
        raise accel_ckpt.CheckpointNotFoundError(
            f"No checkpoint in {folder} is complete for all ranks"
            + (f"; ranks {lacking} see none at all" if lacking else "")
            + ". Copy a complete one to where they can read it, or remove the checkpoints to start from the beginning."
        )
    return None
