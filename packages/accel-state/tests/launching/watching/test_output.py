"""Lines, progress bars and tracebacks out of byte streams."""

import collections
import io
import os
import re
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state.launching.watching.output import (
    Console,
    RankOutput,
    TextSink,
    _DescriptorSink,
    _Splitter,
)
from accel_state.launching.watching.tracebacks import last_traceback


class Terminal(io.BytesIO):
    def __init__(self, tty):
        super().__init__()
        self.tty = tty

    def isatty(self):
        return self.tty


def written(pieces, *, tty=False):
    sink = Terminal(tty)
    console = Console(sink, sink)
    for prefix, piece in pieces:
        console.write("stdout", prefix, piece)
    return sink.getvalue()


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\xff", b""])), st.data())
def test_pieces_do_not_depend_on_how_the_stream_is_cut(parts, data):
    stream = b"".join(parts)
    whole = _Splitter()
    expected = whole.feed(stream)
    cut = _Splitter()
    pieces = []
    at = 0
    while at < len(stream):
        size = data.draw(st.integers(1, 4))
        pieces += cut.feed(stream[at : at + size])
        at += size
    # Returns before a newline change nothing on a screen, however many there are.
    normal = [
        re.sub(rb"\r+\n", b"\n", b"".join(found))
        for found in ((*expected, whole.pending), (*pieces, cut.pending))
    ]
    assert normal[0] == normal[1]
    assert all(piece.endswith((b"\n", b"\r")) for piece in pieces)


def test_lines_get_prefixes():
    assert written([("[a] ", b"1\n"), ("[b] ", b"2\n"), ("[a] ", b"\n")]) == b"[a] 1\n[b] 2\n[a] \n"


def test_a_line_that_comes_in_parts_has_one_prefix():
    assert written([("[a] ", b"1"), ("[a] ", b"2\n")]) == b"[a] 12\n"


def test_another_rank_ends_an_unfinished_line():
    assert written([("[a] ", b"1"), ("[b] ", b"2\n"), ("[a] ", b"3\n")]) == b"[a] 1\n[b] 2\n[a] 3\n"


def test_progress_bars_redraw_in_place():
    bar = [("[a] ", b"\r"), ("[a] ", b" 0%\r"), ("[a] ", b"50%\r"), ("[a] ", b"100%"), ("[a] ", b"\n")]
    assert written(bar, tty=True) == b"[a]  0%\r[a] 50%\r[a] 100%\n"


def shown_of(data, tmp_path, *, tty, prefix="[a] "):
    """What a console shows of a rank's standard error, and its log file."""
    console = Console(sink := Terminal(tty), sink)
    reading, writing = os.pipe()
    with open(tmp_path / "rank_0.log", "wb", 0) as log:
        output = RankOutput(prefix, console, log)
        output.forward("stderr", os.fdopen(reading, "rb", 0))
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(data)
        output.finish(20)
    return sink.getvalue(), (tmp_path / "rank_0.log").read_bytes()


BAR = b"\r 0%\r50%\r100%\n"
NESTED = b"\router 0%\n\rinner 0%\x1b[A\n\rinner 9%\x1b[A\n\r        \x1b[A\router 9%\n"


@pytest.mark.parametrize(
    ("data", "terminal", "shared", "file"),
    [
        (BAR, BAR.removeprefix(b"\r"), b"[a]  0%\x1b[K\r[a] 50%\x1b[K\r[a] 100%\x1b[K\r[a] 100%\n", b"100%\n"),
        (
            NESTED, NESTED.removeprefix(b"\r").replace(b"\n\r", b"\n"), b"".join(
                b"[a] %s\x1b[K\r" % state for state in (b"outer 0%", b"inner 0%", b"inner 9%", b"outer 9%")
            ) + b"[a] outer 9%\n", b"outer 9%\n",
        ),
    ],
)  # fmt: skip
def test_bars_on_a_terminal_on_one_that_ranks_share_and_in_files(
    tmp_path, monkeypatch, data, terminal, shared, file
):
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown_of(data, tmp_path, tty=True, prefix="") == (terminal, file)
    (tmp_path / "rank_0.log").unlink()
    assert shown_of(data, tmp_path, tty=True) == (shared, file)  # nothing that moves to another line
    (tmp_path / "rank_0.log").unlink()
    assert shown_of(data, tmp_path, tty=False) == (b"[a] " + file, file)


def test_a_bar_that_has_ended_is_shown_although_nothing_follows():
    console = Console(sink := Terminal(False), sink)
    reading, writing = os.pipe()
    output = RankOutput("[a] ", console)
    output.forward("stderr", os.fdopen(reading, "rb", 0))
    with os.fdopen(writing, "wb", 0) as pipe:
        pipe.write(b"\r50%\r100%")
        pipe.write(b"\n")
        until = time.monotonic() + 20
        while not sink.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
        assert sink.getvalue() == b"[a] 100%\n"
    output.finish(20)
    assert sink.getvalue() == b"[a] 100%\n"


def test_a_traceback_that_is_dropped_takes_no_bar_with_it():
    console = Console(sink := Terminal(False), sink)
    reading, writing = os.pipe()
    output = RankOutput("", console, hold=True)
    output.forward("stderr", os.fdopen(reading, "rb", 0))
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(b"\r50%Traceback (most recent call last):\n  File\nValueError: no\n")
    output.finish(20)
    output.drop_held()
    assert sink.getvalue() == b"50%\n"


def test_another_ranks_line_takes_the_place_of_a_bar_on_a_terminal():
    bar = [("[a] ", b"50%\r"), ("[b] ", b"hello\n"), ("[a] ", b"60%\r")]
    assert written(bar, tty=True) == b"[a] 50%\r\r\x1b[2K[b] hello\n[a] 60%\r"


def test_bars_of_several_ranks_leave_nothing_behind_on_a_terminal():
    # Every state of a bar ends at the next one's return, or is shown unfinished when that is late.
    rounds = [(rank, piece) for state in (b"10%", b"20%", b"30%") for rank in ("[0] ", "[1] ")
              for piece in (b"\r", state)]  # fmt: skip
    screen = written([*rounds, ("[0] ", b"\r"), ("[0] ", b"done\n")], tty=True)
    assert screen.endswith(b"[0] done\n")
    assert screen.count(b"\n") == 1
    # Without a carriage return it is a line like any other, also after a bar.
    screen = written(
        [("[0] ", b"10%\r"), ("[0] ", b"20%\n"), ("[0] ", b"name? "), ("[1] ", b"x\n")], tty=True
    )
    assert screen.endswith(b"[0] name? \n[1] x\n")


def test_the_other_stream_of_the_same_rank_does_not_run_into_a_bar():
    sink = Terminal(True)
    console = Console(sink, sink)
    for stream, piece in (("stderr", b"\r"), ("stderr", b"50%"), ("stdout", b"done\n"), ("stderr", b"\r")):
        console.write(stream, "[a] ", piece)
    assert sink.getvalue() == b"[a] 50%\r\x1b[2K[a] done\n"


def test_messages_of_the_launcher_stand_on_their_own_line():
    sink = Terminal(True)
    console = Console(sink, sink)
    console.write("stdout", "[a] ", b"unfinished")
    console.say("accel: note")
    assert sink.getvalue() == b"[a] unfinished\naccel: note\n"


def test_what_a_rank_says_is_folded_on_a_terminal_behind_its_prefix(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    said = [("[a] ", b"accel: rank 0 waits for rank 1 at train.py:12\n"), ("[a] ", b"x" * 40 + b"\n")]
    folded = b"[a] accel: rank 0 waits for\n[a] rank 1 at train.py:12\n"
    assert written(said, tty=True) == folded + b"[a] " + b"x" * 40 + b"\n"
    assert written(said) == b"".join(prefix.encode() + piece for prefix, piece in said)


def test_text_streams_can_be_written_to():
    text = io.StringIO()
    sink = TextSink(text)
    Console(sink, sink).write("stdout", "[a] ", b"caf\xc3\xa9 \xff\n")
    assert text.getvalue() == "[a] caf\u00e9 \ufffd\n"


def told(*lines):
    return last_traceback(collections.deque(line.encode() + b"\n" for line in lines))


HEADER = "Traceback (most recent call last):"


def test_the_last_of_several_tracebacks():
    assert told(
        HEADER, "  File a", "ValueError: old", "warning", HEADER, "  File b", "ValueError: new"
    ).endswith(f"{HEADER}\n  File b\nValueError: new")
    assert "old" not in told(
        HEADER, "  File a", "ValueError: old", "warning", HEADER, "  File b", "ValueError: new"
    )


@pytest.mark.parametrize(
    "link",
    [
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    ],
)
def test_causes_belong_to_a_traceback(link):
    lines = (HEADER, "  File a", "KeyError: cause", "", link, "", HEADER, "  File b", "ValueError: effect")
    assert told("noise", *lines) == "\n".join(lines)


def test_without_a_traceback_the_end_is_told():
    assert told(*(str(number) for number in range(50))) == "\n".join(str(number) for number in range(30, 50))
    assert told() == ""


def forwarded(data, log=None):
    pieces, said = [], []

    class Collecting(Console):
        def write(self, stream, prefix, piece):
            pieces.append(piece)

        def say(self, text):
            said.append(text)

    reading, writing = os.pipe()
    output = RankOutput("", Collecting(io.BytesIO(), io.BytesIO()), log)
    output.forward("stdout", os.fdopen(reading, "rb", 0))
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(data)
    output.finish(20)
    return pieces, said


def test_a_line_without_end_is_shown_in_parts():
    # Kept whole it would take the launcher's memory, and a time that grows with its square.
    pieces, _ = forwarded(b"x" * (5 << 20))
    assert sum(map(len, pieces)) == 5 << 20
    assert max(map(len, pieces)) <= 2 << 20


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full: Linux only")
def test_a_full_disk_ends_the_log_and_not_the_run():
    with open("/dev/full", "ab", buffering=0) as log:
        pieces, said = forwarded(b"one\ntwo\n", log)
    assert pieces == [b"one\n", b"two\n"]
    assert said == ["accel: /dev/full ends here: No space left on device"]


@pytest.mark.skipif(os.name != "posix", reason="terminals and pipes of POSIX systems")
def test_a_closed_terminal_takes_output_without_an_error():
    # Ranks that still save their state would meet a broken pipe otherwise.
    master, slave = os.openpty()
    sink = _DescriptorSink(slave)
    assert sink.isatty()
    os.close(master)
    sink.write(b"saving\n")
    os.close(slave)


@pytest.mark.skipif(os.name != "posix", reason="terminals and pipes of POSIX systems")
def test_a_descriptor_that_does_not_block_is_waited_for():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    data = os.urandom(1 << 20)  # more than a pipe holds
    with os.fdopen(reading, "rb") as reader:
        writer = threading.Thread(target=lambda: (_DescriptorSink(writing).write(data), os.close(writing)))
        writer.start()
        assert reader.read() == data
        writer.join()
