"""What a command does at the moment: on a terminal alone, and gone at the end."""

from __future__ import annotations

import subprocess
import sys
import time

import pexpect
import pyte

from accel_cli.progress import progress

SHOWS = """
import time
from accel_cli.progress import progress

with progress("first") as shown:
    time.sleep(0.3)
    shown.now("second [bold]")
    time.sleep(0.3)
    with shown.paused():
        print("a result")
    time.sleep(0.3)
print("the end")
"""


def test_a_pipe_gets_nothing_of_it():
    done = subprocess.run([sys.executable, "-c", SHOWS], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("a result\nthe end\n", "")


def test_a_pipe_gets_a_line_of_what_takes_long(monkeypatch, capsys):
    monkeypatch.setattr("accel_cli.progress._LATE", 0.1)
    with progress("first") as shown:
        shown.now("second")
        time.sleep(0.5)
        shown.now("third")
    assert capsys.readouterr() == ("", "accel: second\n")


def test_a_terminal_shows_what_is_done_and_keeps_the_results():
    output = []
    child = pexpect.spawn(sys.executable, ["-c", SHOWS], timeout=30, dimensions=(24, 60), env=None)
    while True:
        try:
            output.append(child.read_nonblocking(4096, 10))
        except pexpect.EOF:
            break
    child.close()
    written = b"".join(output)
    for text in (b"first", b"second [bold]"):
        assert text in written
    screen = pyte.Screen(60, 24)
    pyte.ByteStream(screen).feed(written)
    assert [line.rstrip() for line in screen.display if line.strip()] == ["a result", "the end"]
