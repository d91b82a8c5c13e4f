"""What ranks print: whole lines with the rank in front, log files, and the last traceback of each rank."""

from __future__ import annotations

import collections
import contextlib
import errno
import io
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Protocol, TextIO

__all__ = ["Console", "RankOutput", "StreamName", "last_traceback", "open_log", "stream_sink"]

StreamName = Literal["stdout", "stderr"]

_PARTIAL_AFTER = 0.1
"""Seconds after which an unfinished line is shown: a prompt of a debugger, or the state of a progress bar."""
_LONGEST = 1 << 20
"""Bytes of an unfinished line that are kept; what has come by then is shown, and the rest of the line follows."""
_TAIL_LINES = 400
_TAIL_WIDTH = 4000
_HEADER = b"Traceback (most recent call last):"
_CHAINS = (b"During handling of the above exception", b"The above exception was the direct cause")


class ByteSink(Protocol):
    """Where bytes for people go; an unbuffered binary file fits."""

    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> object: ...

    def isatty(self) -> bool: ...


class Console:
    """Standard output and error of the launcher, shared by all ranks: lines never mix.

    Args:
        stdout: sink of the ranks' standard output.
        stderr: sink of the ranks' standard error and of the launcher's own messages.
    """

    def __init__(self, stdout: ByteSink | None = None, stderr: ByteSink | None = None) -> None:
        self._sinks: dict[str, ByteSink] = {
            "stdout": stdout or _standard_sink(sys.stdout),
            "stderr": stderr or _standard_sink(sys.stderr),
        }
        # Two streams of one terminal share the cursor; a file or a pipe has a cursor of its own.
        one_cursor = all(sink.isatty() for sink in self._sinks.values())
        self._cursor = {name: "terminal" if one_cursor else name for name in self._sinks}
        self._terminal = {name: sink.isatty() for name, sink in self._sinks.items()}
        self._lines: dict[str, _Line] = {}
        self._bars: set[tuple[str, StreamName]] = set()
        # One per cursor: a reader of standard output who has paused keeps no message from the terminal.
        self._locks = {cursor: threading.Lock() for cursor in self._cursor.values()}

    def write(self, stream: StreamName, prefix: str, piece: bytes) -> None:
        """Print one piece of a rank's output: a line with its end (newline or carriage return), or part of a
        line.
        """
        sink, cursor = self._sinks[stream], self._cursor[stream]
        with self._locks[cursor]:
            line, owner = self._lines.get(cursor), (prefix, stream)
            data = b""
            if line is not None and line.owner != owner:
                data = line.ending(on_terminal=self._terminal[stream])
                line = None
            line = line or _Line(owner, redrawn=owner in self._bars)
            data += line.extend(prefix.encode(), piece)
            if piece.endswith(b"\n"):
                self._lines.pop(cursor, None)
                self._bars.discard(owner)
            else:
                self._lines[cursor] = line
            if piece.endswith(b"\r"):
                self._bars.add(owner)  # it will be drawn again, even after another writer has taken its place
            sink.write(data)
            sink.flush()

    def say(self, text: str) -> None:
        """Print a message of the launcher itself, on a line of its own, to standard error."""
        cursor = self._cursor["stderr"]
        with self._locks[cursor]:
            line = self._lines.pop(cursor, None)
            ending = line.ending(on_terminal=self._terminal["stderr"], keep=True) if line is not None else b""
            sink = self._sinks["stderr"]
            with contextlib.suppress(OSError):  # nobody reads it any more, which is no reason to stop
                sink.write(ending + text.encode(errors="replace") + b"\n")
                sink.flush()


@dataclass(slots=True)
class _Line:
    """A line that is not finished: whose it is, and how the cursor stands in it."""

    owner: tuple[str, StreamName]
    empty: bool = True
    at_start: bool = True
    redrawn: bool = False

    def extend(self, prefix: bytes, piece: bytes) -> bytes:
        """What is written so that ``piece`` follows what stands there."""
        if piece == b"\r":
            self.redrawn = True
            data = b"" if self.at_start else piece
            self.at_start = True
            return data
        ends_bar = piece == b"\n" and not self.empty
        data = prefix + piece if self.at_start and not ends_bar else piece
        self.empty = False
        self.at_start = piece.endswith(b"\r")
        self.redrawn = self.redrawn or self.at_start
        return data

    def ending(self, *, on_terminal: bool, keep: bool = False) -> bytes:
        """What makes room for another writer: a progress bar will be drawn again, all else stays."""
        if self.empty:
            return b""
        return b"\r\x1b[2K" if self.redrawn and on_terminal and not keep else b"\n"


class RankOutput:
    """Forwards the streams of one rank, one thread per stream.

    Args:
        prefix: put before each line; empty for none.
        console: where lines go.
        log: file that gets everything unchanged, ``None`` for none.
        logged: the streams that go to the file.
        rank: number of the rank. Torch puts ``[rankN]: `` before each line of its tracebacks: one prefix
            too many.
    """

    def __init__(
        self,
        prefix: str,
        console: Console,
        log: IO[bytes] | None = None,
        logged: frozenset[StreamName] = frozenset({"stdout", "stderr"}),
        rank: int = 0,
    ) -> None:
        self._torch_prefix = f"[rank{rank}]: ".encode()
        self.tail: collections.deque[bytes] = collections.deque(maxlen=_TAIL_LINES)
        self.traceback_at: float | None = None
        self._prefix = prefix
        self._console = console
        self._log = log
        self._logged = logged
        self._log_lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._showing: set[StreamName] = set()
        self._after_end: int | None = None

    def forward(self, stream: StreamName, pipe: IO[bytes]) -> None:
        """Start to forward ``pipe`` until its end."""
        thread = threading.Thread(target=self._pump, args=(stream, pipe), daemon=True, name=f"accel-{stream}")
        self._threads.append(thread)
        thread.start()

    def finish(self, timeout: float, impatient: Callable[[], bool] = lambda: False) -> None:
        """Wait for the streams' ends, now that the rank has ended.

        What the rank has printed is shown, however slowly it is read. A stranger may hold a pipe open: a
        silent one is waited for ``timeout`` seconds, a talkative one gets as much as a pipe can hold.

        Args:
            timeout: in seconds.
            impatient: whether only ``timeout`` counts from now on; asked again and again.
        """
        self._after_end = _LONGEST
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            while thread.is_alive() and (time.monotonic() < deadline or (self._showing and not impatient())):
                thread.join(0.05)
        with self._log_lock:
            if self._log is not None:
                self._log.close()
                self._log = None

    def _pump(self, stream: StreamName, pipe: IO[bytes]) -> None:
        splitter = _Splitter()
        try:
            with pipe:
                while self._after_end is None or self._after_end > 0:
                    if splitter.pending and not _readable(pipe, _PARTIAL_AFTER):
                        self._show(stream, splitter.take_pending())
                        continue
                    self._showing.discard(stream)
                    data = os.read(pipe.fileno(), 1 << 16)
                    if not data:
                        break
                    self._showing.add(stream)
                    if self._after_end is not None:
                        self._after_end -= len(data)
                    for piece in splitter.feed(data):
                        self._show(stream, piece)
                    if len(splitter.pending) > _LONGEST:
                        self._show(stream, splitter.take_pending())
                if splitter.pending:
                    self._show(stream, splitter.take_pending())
        except BrokenPipeError:
            # Whoever read our output is gone. With the pipe closed the rank itself meets the broken pipe at
            # its next print, as it would without us in between.
            return

    def _write_log(self, stream: StreamName, data: bytes) -> None:
        if stream not in self._logged:
            return
        with self._log_lock:
            log = self._log
            if log is None:
                return
            try:
                log.write(data)
                log.flush()
            except OSError as error:  # a full disk takes the log, not the run
                self._log = None
                self._console.say(f"accel: {log.name} ends here: {error.strerror}")

    def _show(self, stream: StreamName, piece: bytes) -> None:
        if stream == "stderr":
            piece = piece.removeprefix(self._torch_prefix)
            self.tail.append(piece[:_TAIL_WIDTH])
            if piece.startswith(_HEADER):
                self.traceback_at = time.monotonic()
        self._write_log(stream, piece)  # whole lines, so that the two streams do not mix within one
        self._console.write(stream, self._prefix, piece)


class _Splitter:
    """Cuts a byte stream behind each newline and each carriage return; both together count as a newline."""

    def __init__(self) -> None:
        self.pending = b""

    def feed(self, data: bytes) -> list[bytes]:
        lines = (self.pending + data).split(b"\n")
        pieces: list[bytes] = []
        for line in lines[:-1]:
            *redrawn, final = line.removesuffix(b"\r").split(b"\r")
            pieces += [state + b"\r" for state in redrawn]
            pieces.append(final + b"\n")
        *redrawn, self.pending = lines[-1].split(b"\r")
        return pieces + [state + b"\r" for state in redrawn]

    def take_pending(self) -> bytes:
        taken, self.pending = self.pending, b""
        return taken


def _readable(pipe: IO[bytes], timeout: float) -> bool:
    try:
        return bool(select.select([pipe], [], [], timeout)[0])
    except OSError:  # Windows can only select sockets: there an unfinished line waits for its end
        return True


def last_traceback(tail: collections.deque[bytes], fallback_lines: int = 20) -> str:
    """The last traceback in the kept end of a rank's standard error, with the exceptions that caused it.

    Without one (a syntax error, a crash in native code) the last ``fallback_lines`` lines are returned.
    """
    lines = b"".join(tail).decode(errors="replace").splitlines()
    header, chains = _HEADER.decode(), tuple(chain.decode() for chain in _CHAINS)
    starts = [number for number, line in enumerate(lines) if line.startswith(header)]
    if not starts:
        return "\n".join(lines[-fallback_lines:])
    start = starts.pop()
    while starts and any(line.startswith(chains) for line in lines[starts[-1] : start]):
        start = starts.pop()
    return "\n".join(lines[start:])


def open_log(path: Path, title: str) -> IO[bytes]:
    """Open a rank's log file for appending, and mark where this run begins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("ab", buffering=0)
    log.write(os.fsencode(f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} {title}\n"))
    log.flush()
    return log


def stream_sink(stream: TextIO) -> ByteSink:
    """A sink that writes to a text stream: the one of a notebook takes no bytes."""
    return _TextSink(stream)


def _standard_sink(stream: TextIO) -> ByteSink:
    if sys.platform == "win32" and stream.isatty():
        return stream.buffer  # a console there takes text, which Python makes of the bytes
    try:
        stream.flush()
        return _DescriptorSink(stream.fileno())
    except io.UnsupportedOperation:
        return stream_sink(stream)


class _DescriptorSink:
    """Writes past Python's buffers.

    There, what could not be written would be tried again at exit, and a thread that hangs in a write would
    hold a lock that the interpreter needs to end.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def write(self, data: bytes, /) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._number, left) :]
            except BlockingIOError:  # somebody who shares the terminal has made it so
                select.select([], [self._number], [])
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                return  # the terminal was closed: ranks that still save their state must not fail over a print

    def flush(self) -> None:
        """There is no buffer."""

    def isatty(self) -> bool:
        return os.isatty(self._number)


class _TextSink:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, data: bytes, /) -> None:
        self._stream.write(data.decode(errors="replace"))

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()
