"""The report of a rehearsal as text."""

from accel_cli.rehearsal.run import Rehearsed
from accel_cli.rehearsal.show import as_text, facts
from accel_state.host.colors import Colors
from accel_state.launching.plan import World


def test_what_a_save_would_cost():
    found = {
        "sections": {"save_state": {"files": 2, "bytes": 3_000_000, "seconds": 0.25, "described in": 40_000}}
    }
    found |= {"memory": {}, "given": {}}
    shown = facts(Rehearsed(7, found, ""), World(4096, 8, 512, 0, cpu=True))["save_state"]
    assert shown == {
        "this rank writes": "2 files of 3.00 MB",
        "planning": "0.25 s of a processor",
        "told to other ranks": "32 bytes, or 40.00 kB if ranks differ",
    }


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
