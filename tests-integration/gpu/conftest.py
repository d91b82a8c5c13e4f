"""Judges what yields figures: at full size on an accelerator, at small size on the CPU."""

import dataclasses

import pytest

from testkit.checks import measured
from testkit.figures import NotRunError


@pytest.fixture
def judge(tmp_path, record_property, request):
    """Record what a check yields, and see that every figure that has a goal met it.

    The figures are listed at the end of the run; `--junitxml` keeps them.
    """

    def judge(check, *arguments, seconds=60.0):
        try:
            figures = measured(check, arguments, tmp_path, seconds)
        except NotRunError as error:
            pytest.skip(str(error))
        for figure in figures:
            about = {"check": request.node.name.removeprefix("test_"), **dataclasses.asdict(figure)}
            record_property("figure", about)
        assert [figure for figure in figures if figure.passed is False] == []
        assert any(figure.passed for figure in figures), "nothing was compared with anything"

    return judge
