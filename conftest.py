"""Options and markers that the tests of every package share."""

from __future__ import annotations

import functools

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--full``."""
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`, which take long")


@functools.cache
def _accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with the reason printed, what this machine cannot run or this run did not ask for."""
    for item in items:
        if item.get_closest_marker("gpu") and not _accelerator():
            item.add_marker(pytest.mark.skip(reason="needs an accelerator; none found by torch.accelerator"))
        if item.get_closest_marker("full") and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="long; runs with --full"))
