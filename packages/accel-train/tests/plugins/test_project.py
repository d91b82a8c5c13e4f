"""Folders of a project."""

import pytest

from accel_train import ProjectConfiguration
from accel_train.errors import OptionError


def test_logs_are_written_to_the_project_unless_a_folder_is_given(tmp_path):
    config = ProjectConfiguration(str(tmp_path))
    assert (config.project_dir, config.logging_dir) == (str(tmp_path), str(tmp_path))
    assert ProjectConfiguration(str(tmp_path), logging_dir="logs").logging_dir == "logs"


def test_folders_may_be_set_later(tmp_path):
    config = ProjectConfiguration()
    assert (config.project_dir, config.logging_dir) == (None, None)
    config.set_directories(tmp_path)
    assert (config.project_dir, config.logging_dir) == (str(tmp_path), str(tmp_path))
    config.set_directories("elsewhere")
    assert (config.project_dir, config.logging_dir) == ("elsewhere", str(tmp_path))


def test_at_least_one_checkpoint_is_kept():
    with pytest.raises(OptionError, match="total_limit must be at least 1, got 0"):
        ProjectConfiguration(total_limit=0)
