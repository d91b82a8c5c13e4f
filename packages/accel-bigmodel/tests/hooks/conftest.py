"""What tests of hooks share."""

import pytest
import torch


@pytest.fixture
def fresh_compiler():
    """Compiled code is counted per function, and all hooked modules share one: forget that of other tests."""
    torch.compiler.reset()
