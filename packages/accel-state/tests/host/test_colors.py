"""When plain text is coloured."""

import io

import pytest

from accel_state.host.colors import Colors, colors_for


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "environ", "enabled"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
        (io.StringIO(), {"FORCE_COLOR": "1"}, True),
        (io.StringIO(), {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_who_gets_colours(stream, environ, enabled):
    assert colors_for(stream, environ).enabled is enabled


def test_a_style_surrounds_the_text():
    assert Colors(True)("bold", "x") == "\033[1mx\033[0m"
    assert Colors(True)("bold", "") == ""
    assert Colors(False)("bold", "x") == "x"
