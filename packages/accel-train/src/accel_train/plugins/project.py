"""`ProjectConfiguration`: where a project's checkpoints and logs are written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accel_train.errors import OptionError

__all__ = ["ProjectConfiguration"]


@dataclass
class ProjectConfiguration:
    """Where checkpoints are written and how they are named; may be changed while training.

    Attributes:
        project_dir: folder of the project, or a URI of object storage.
        logging_dir: folder for logs; by default `project_dir`.
        automatic_checkpoint_naming: write checkpoints to `project_dir/checkpoints/checkpoint_<iteration>`.
        total_limit: how many automatic checkpoints are kept; older ones are deleted after a new one is complete.
        iteration: number of the next checkpoint.
        save_on_each_node: every node writes its own folder; for nodes without a shared file system.

    Raises:
        OptionError: `total_limit` is below 1.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise OptionError(
                f"total_limit must be at least 1, got {self.total_limit}: nothing would be kept."
            )
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | Path | None = None) -> None:
        """Set the project folder, and the logging folder if it has none."""
        self.project_dir = None if project_dir is None else str(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir
