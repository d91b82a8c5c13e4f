"""A launcher to start and look at, for the tests of what it does with its ranks."""

import os
import signal
from pathlib import Path

import pytest

from testkit.launchers import Launcher


@pytest.fixture
def launcher(tmp_path):
    """Starts scripts in `tmp_path`; no process of theirs may be left at the end."""
    made = Launcher(tmp_path, Path(__file__).with_name("launching_driver.py"))
    yield made
    left = made.leftovers()
    for line in left:
        os.kill(int(line.split()[0]), signal.SIGKILL)
    assert not left
