"""The report of a rehearsal as text."""

from accel_cli.rehearsal.run import Rehearsed
from accel_cli.rehearsal.show import as_text
from accel_state.host.colors import Colors


def verdict(ended, taken=2):
    sections = {"accelerator": {"optimizer steps taken": taken}}
    found = {"ended": ended, "error": None, "sections": sections, "seconds": 1.5}
    return as_text([], [Rehearsed(0, found, ""), Rehearsed(7, found, "")], Colors(False)).splitlines()[-1]


def test_the_last_line_says_how_far_the_script_ran():
    assert verdict("script").startswith("Nothing would fail on ranks 0, 7. (3.0 s;")
    assert verdict("steps").startswith(
        "Nothing would fail on ranks 0, 7 until optimizer step 2, where the rehearsal ended; what the script does "
        "later was not tried (--steps N goes on)."
    )
