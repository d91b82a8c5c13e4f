"""Engines that are detached after the test."""

import pytest

from testkit.streamed import Attached


@pytest.fixture
def attach():
    made = []

    def make(model, **options):
        made.append(Attached(model, **options))
        return made[-1]

    yield make
    for attached in made:
        attached.streamer.detach()
