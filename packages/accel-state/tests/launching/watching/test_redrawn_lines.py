"""Lines that are drawn again and again, in files and pipes."""

import io
import re

import pytest
from tqdm.std import tqdm

from accel_state.constants import BAR_INTERVAL
from accel_state.launching.watching import redrawn_lines
from accel_state.launching.watching.redrawn_lines import LastStates


def shown(*pieces):
    states = LastStates()
    return b"".join([*map(states.feed, pieces), states.end()])


@pytest.mark.parametrize(
    "pieces",
    [
        [b"\r", b" 0%\r", b"50%\r", b"100%", b"\n"],
        [b" 0%\r", b"50%\r", b"100%\r", b"\n"],
        [b"\r", b"0%", b"\r", b"100%\n"],
        [b"\r", b"50%\r", b"1", b"00%", b"\r"],  # its writer has died
        [b"\r 0%", b"\r\x1b[K100%\x1b[K\n"],
    ],
)
def test_a_bar_leaves_one_line(pieces):
    assert shown(*pieces) == b"100%\n"


@pytest.mark.parametrize("pieces", [[b"name? ", b"yes\n"], [b"one\n", b"\n", b"two\n"], [b"\x1b[A\n"], [b""]])
def test_other_text_passes_at_once(pieces):
    states = LastStates()
    assert [states.feed(piece) for piece in pieces] == pieces
    assert states.end() == b""


def test_text_after_a_bar_stands_on_a_line_of_its_own():
    assert shown(b"\r50%", b"\r100%", b"\n", b"done\n", b"more\n") == b"100%\ndone\nmore\n"
    assert shown(b"\router 0%", b"\n", b"\rinner 0%\x1b[A", b"oops\n") == b"outer 0%\ninner 0%\noops\n"


def test_an_ended_bar_is_told_when_nothing_follows():
    states = LastStates()
    assert states.feed(b"\r100%\n") == b""
    assert states.undecided
    assert states.settle() == b"100%\n"
    assert not states.undecided
    assert states.feed(b"\r50%") == states.settle() == b""


def drawn(work):
    """What bars write on a stream, as a file gets it, and as a terminal of so many lines would show it."""
    stream = io.StringIO()
    work(stream)
    text = stream.getvalue()
    tokens = [token.encode() for token in re.split("(?<=[\r\n])|(?=[\r\n])", text) if token]
    return re.sub(r"\s*\d+%\|.*", "", shown(*tokens).decode()).splitlines()


def bars(file, *, leave, depth=1, steps=3):
    settings = {"file": file, "mininterval": 0, "ncols": 60}
    for _ in tqdm(range(2), desc="epoch", **settings):
        for _ in tqdm(range(steps), desc="step", leave=leave, **settings):
            for _ in tqdm(range(2 if depth > 1 else 0), desc="inner", leave=False, **settings):
                pass


@pytest.mark.parametrize("depth", [1, 2])
def test_nested_bars_leave_what_a_terminal_shows_at_the_end(depth):
    assert drawn(lambda file: bars(file, leave=False, depth=depth)) == ["epoch:"]
    assert drawn(lambda file: bars(file, leave=True, depth=depth)) == ["step:", "step:", "epoch:"]


def test_bars_one_after_the_other():
    def work(file):
        for name in ("one", "two"):
            for _ in tqdm(range(3), desc=name, file=file, mininterval=0):
                pass
        file.write("done\n")

    assert drawn(work) == ["one:", "two:", "done"]


def test_a_long_bar_shows_that_it_goes_on(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(redrawn_lines.time, "monotonic", lambda: now[0])
    states = LastStates()
    written = []
    for percent in range(6):
        written.append(states.feed(b"\r%d%%" % percent))
        now[0] += BAR_INTERVAL / 2
    assert written == [b"", b"", b"1%\n", b"", b"3%\n", b""]
    assert states.end() == b"5%\n"
