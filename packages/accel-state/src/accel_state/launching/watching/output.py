"""Output of ranks: prefixed whole lines, log files, and the last traceback of each rank."""

from __future__ import annotations

import collections
import contextlib
import errno
import io
import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Protocol, TextIO

from accel_state.host.colors import Colors, wants_colors
from accel_state.launching.watching.redrawn_lines import LastStates
from accel_state.launching.watching.tracebacks import HEADER
from accel_state.messages import message

__all__ = ["Console", "RankOutput", "StreamName", "TextSink", "open_log"]

StreamName = Literal["stdout", "stderr"]

_PARTIAL_AFTER = 0.1
"""Seconds after which an unfinished line is shown: a debugger prompt, or the state of a progress bar."""
_LONGEST = 1 << 20
"""Maximum buffered bytes of an unfinished line; then the received part is shown, and the rest follows."""
_CAN_POLL = sys.platform != "win32"
"""Windows can only select sockets."""
_TAIL_LINES = 400
_TAIL_WIDTH = 4000
_HEADER = HEADER.encode()
_BEGINNINGS = (_HEADER, b'  File "', b"Fatal Python error: init_")
"""First lines of what the report shows: of a traceback, of a syntax error in the script, which has no header, and of an
interpreter that was interrupted or failed while it started."""
_HELD = 5.0
"""Seconds for which a traceback is held back: if its rank ends by then, the launcher's report shows it once.

An interpreter with torch takes up to two seconds to end, longer with a device, and as much longer as its machine has
more work than CPUs.
"""
_MOST_HELD = 60.0
_PALETTE = (36, 35, 33, 32, 34, 96, 95, 93, 92, 94)
"""Colours of ranks: cyan, magenta, yellow, green, blue, and the bright ones. Red is left to errors."""


class ByteSink(Protocol):
    """A destination of output bytes; an unbuffered binary file qualifies."""

    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> object: ...

    def isatty(self) -> bool: ...


class Console:
    """Standard output and error of the launcher, shared by all ranks; lines never mix.

    Args:
        stdout: sink of the ranks' standard output.
        stderr: sink of the ranks' standard error and of the launcher's own messages.
    """

    def __init__(self, stdout: ByteSink | None = None, stderr: ByteSink | None = None) -> None:
        self._sinks: dict[str, ByteSink] = {
            "stdout": stdout or _standard_sink(sys.stdout),
            "stderr": stderr or _standard_sink(sys.stderr),
        }
        # Two streams of one terminal share its cursor; each file or pipe has its own.
        one_cursor = all(sink.isatty() for sink in self._sinks.values())
        self._cursor = {name: "terminal" if one_cursor else name for name in self._sinks}
        self._terminal = {name: sink.isatty() for name, sink in self._sinks.items()}
        self._colors = {name: wants_colors(sink.isatty()) for name, sink in self._sinks.items()}
        self._lines: dict[str, _Line] = {}
        self._bars: set[tuple[str, StreamName]] = set()
        # One lock per cursor: a paused reader of standard output must not block messages to the terminal.
        self._locks = {cursor: threading.Lock() for cursor in self._cursor.values()}

    def redraws(self, stream: StreamName) -> bool:
        """Whether a later text can take the place of a line: on terminals and in notebooks."""
        return self._terminal[stream] or isinstance(self._sinks[stream], TextSink)

    def colors(self, stream: StreamName) -> Colors:
        """The colours of a stream."""
        return Colors(self._colors[stream])

    def painted(self, stream: StreamName, prefix: str, rank: int) -> str:
        """The prefix of a rank's lines in its colour, where the stream has colours."""
        if not prefix or not self._colors[stream]:
            return prefix
        text = prefix.rstrip()
        return f"\033[{_PALETTE[rank % len(_PALETTE)]}m{text}\033[0m{prefix[len(text) :]}"

    def write(self, stream: StreamName, prefix: str, piece: bytes) -> None:
        """Print one piece of a rank's output: a line with its newline or carriage return, or part of a line."""
        sink, cursor = self._sinks[stream], self._cursor[stream]
        with self._locks[cursor]:
            line, owner = self._lines.get(cursor), (prefix, stream)
            data = b""
            if line is not None and line.owner != owner:
                data = line.ending(on_terminal=self._terminal[stream])
                line = None
            if line is None and self._terminal[stream]:
                text = piece.decode(errors="surrogateescape")
                piece = message(text, sink, prefix).removeprefix(prefix).encode(errors="surrogateescape")
            line = line or _Line(owner, redrawn=owner in self._bars)
            data += line.extend(prefix.encode(), piece)
            if piece.endswith(b"\n"):
                self._lines.pop(cursor, None)
                self._bars.discard(owner)
            else:
                self._lines[cursor] = line
            if piece.endswith(b"\r"):
                self._bars.add(owner)  # it will be redrawn, even after another writer has used the line
            sink.write(data)
            sink.flush()

    def say(self, text: str) -> None:
        """Print a message of the launcher on a separate line of standard error."""
        sink = self._sinks["stderr"]
        text = message(text, sink)
        cursor = self._cursor["stderr"]
        with self._locks[cursor]:
            line = self._lines.pop(cursor, None)
            ending = line.ending(on_terminal=self._terminal["stderr"], keep=True) if line is not None else b""
            with contextlib.suppress(OSError):  # the reader has closed the stream; the run continues
                sink.write(ending + text.encode(errors="replace") + b"\n")
                sink.flush()


@dataclass(slots=True)
class _Line:
    """An unfinished line: its owner and the position of the cursor in it."""

    owner: tuple[str, StreamName]
    empty: bool = True
    at_start: bool = True
    redrawn: bool = False

    def extend(self, prefix: bytes, piece: bytes) -> bytes:
        """The bytes to write so that ``piece`` follows the current content."""
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
        """The bytes that free the line for another writer: progress bars are erased, other text is kept."""
        if self.empty:
            return b""
        return b"\r\x1b[2K" if self.redrawn and on_terminal and not keep else b"\n"


class RankOutput:
    """Forwards the streams of one rank, one thread per stream.

    Of a line that is redrawn (a progress bar) files and pipes get the last state. On a terminal that ranks share, the
    bars of a rank have one line, because a nested bar would move the cursor over lines of other ranks.

    Args:
        prefix: prefix of each line; may be empty.
        console: destination of the lines.
        log: log file that receives the output without prefixes, or ``None``.
        logged: the streams that are written to the log file.
        rank: the rank. Torch prefixes each line of its tracebacks with ``[rankN]: ``, which is removed.
        hold: keep a traceback back for five seconds. If the rank ends by then, its supervisor decides between
            ``show_held`` and ``drop_held``.
    """

    def __init__(
        self,
        prefix: str,
        console: Console,
        log: IO[bytes] | None = None,
        logged: frozenset[StreamName] = frozenset({"stdout", "stderr"}),
        rank: int = 0,
        *,
        hold: bool = False,
    ) -> None:
        self._hold = hold
        self._held: list[bytes] = []
        self._held_since: float | None = None
        self._torch_prefix = f"[rank{rank}]: ".encode()
        self.tail: collections.deque[bytes] = collections.deque(maxlen=_TAIL_LINES)
        self.traceback_at: float | None = None
        self._prefixes: dict[StreamName, str] = {
            "stdout": console.painted("stdout", prefix, rank),
            "stderr": console.painted("stderr", prefix, rank),
        }
        self._console = console
        self._log = log
        self._logged = logged
        self._log_lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._states: dict[StreamName, LastStates] = {"stdout": LastStates(), "stderr": LastStates()}
        self._shared: dict[StreamName, LastStates] = {
            stream: LastStates(math.inf) for stream in self._states if prefix and console.redraws(stream)
        }
        self._showing: set[StreamName] = set()
        self._pipes: dict[StreamName, IO[bytes]] = {}
        self._after_end: int | None = None

    def forward(self, stream: StreamName, pipe: IO[bytes]) -> None:
        """Forward ``pipe`` in a thread until its end."""
        self._pipes[stream] = pipe
        thread = threading.Thread(target=self._pump, args=(stream, pipe), daemon=True, name=f"accel-{stream}")
        self._threads.append(thread)
        thread.start()

    def finish(self, timeout: float, impatient: Callable[[], bool] = lambda: False) -> None:
        """Wait until the streams end, after the rank has ended.

        All output of the rank is shown, however slowly it is read, and however busy the machine is. An unrelated
        process may hold the pipe open: if it is silent, this waits ``timeout`` seconds; if it writes, it gets as much
        as one pipe buffer holds.

        Args:
            timeout: seconds.
            impatient: polled; once true, only ``timeout`` counts.
        """
        self._after_end = _LONGEST
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            while thread.is_alive() and (
                time.monotonic() < deadline or (self._is_behind() and not impatient())
            ):
                thread.join(0.05)
        with self._log_lock:
            if self._log is not None:
                self._log.close()
                self._log = None

    def caught_up(self) -> bool:
        """Whether the rank's standard error so far is read and shown, as far as the system can tell."""
        # In this order: whatever left the pipe before it was found empty was marked before it was read.
        return not self._is_waiting("stderr") and (not _CAN_POLL or "stderr" not in self._showing)

    def _is_waiting(self, stream: StreamName) -> bool:
        """Whether a pipe has data, or its end, that its thread has not read yet."""
        pipe = self._pipes.get(stream)
        if pipe is None or pipe.closed or not _CAN_POLL:
            return False
        try:
            return _readable(pipe, 0.0)
        except (OSError, ValueError):  # closed since
            return False

    def _is_behind(self) -> bool:
        """Whether there is something left to read or to show."""
        return bool(self._showing) or any(map(self._is_waiting, self._pipes))

    def show_held(self) -> None:
        """Print the text that is held back."""
        held, self._held, self._held_since = self._held, [], None
        for piece in held:
            self._console.write("stderr", self._prefixes["stderr"], piece)

    def drop_held(self) -> None:
        """Discard the text that is held back, which is shown elsewhere."""
        self._held, self._held_since = [], None

    def _pump(self, stream: StreamName, pipe: IO[bytes]) -> None:
        splitter = _Splitter()
        try:
            with pipe:
                while self._after_end is None or self._after_end > 0:
                    states = self._states[stream]
                    if (splitter.pending or states.undecided) and not _readable(pipe, _PARTIAL_AFTER):
                        if splitter.pending:
                            self._show(stream, splitter.take_pending())
                        self._write(stream, LastStates.settle)
                        continue
                    self._showing.discard(stream)
                    if stream == "stderr" and self._held_since is not None:
                        left = self._held_since + _patience() - time.monotonic()
                        if left <= 0 or not _readable(pipe, left):
                            self.show_held()
                            continue
                    if _CAN_POLL:
                        _readable(pipe, None)
                        self._showing.add(stream)  # before the read: see ``caught_up``
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
                self._write(stream, LastStates.end)
        except BrokenPipeError:
            # The reader of our output is gone. Closing the pipe gives the rank a broken pipe at its next print,
            # as if it wrote to the reader directly.
            return
        finally:
            self._showing.discard(stream)

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
            except OSError as error:  # a full disk ends the log, not the run
                self._log = None
                self._console.say(f"accel: {log.name} ends here: {error.strerror}")

    def _show(self, stream: StreamName, piece: bytes) -> None:
        if stream == "stderr":
            piece = piece.removeprefix(self._torch_prefix)
            bar, header, rest = piece.partition(_HEADER)
            if header and self.tail and not self.tail[-1].endswith(b"\n"):  # a bar has not ended its line
                self._show(stream, bar + b"\n")
                piece = header + rest
            if piece.startswith(_HEADER):
                self._write(stream, LastStates.end)  # before the traceback is held back
                self.traceback_at = time.monotonic()
            self.tail.append(piece[:_TAIL_WIDTH])
            if self._hold and self._held_since is None and piece.startswith(_BEGINNINGS):
                self._held_since = time.monotonic()
        self._write(stream, lambda states: states.feed(piece), piece)

    def _write(self, stream: StreamName, take: Callable[[LastStates], bytes], piece: bytes = b"") -> None:
        """Show output of a rank.

        Args:
            stream: where the rank wrote it.
            take: gives the lines that can be shown now.
            piece: as it was written, for a terminal that this rank has for itself.
        """
        lines = take(self._states[stream])
        if lines:
            self._write_log(stream, lines)  # whole lines, so that the two streams never mix within a line
        shown = lines.splitlines(keepends=True)
        if stream in self._shared:
            shared = self._shared[stream]
            shown = [*take(shared).splitlines(keepends=True), shared.drawn()]
        elif self._console.redraws(stream):
            shown = [piece]
        if stream == "stderr" and self._held_since is not None:
            self._held += shown
            # A progress bar shows that the rank goes on, and a long text is no traceback.
            if piece.endswith(b"\r") or len(self._held) > _TAIL_LINES:
                self.show_held()
            return
        for text in filter(None, shown):
            self._console.write(stream, self._prefixes[stream], text)


def _patience() -> float:
    """Seconds to hold a traceback back on this machine now."""
    if not hasattr(os, "getloadavg"):  # Windows
        return _HELD
    return min(_MOST_HELD, _HELD * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


class _Splitter:
    """Splits a byte stream after each newline and carriage return; CR LF counts as one newline."""

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


def _readable(pipe: IO[bytes], timeout: float | None) -> bool:
    if not _CAN_POLL:  # unfinished lines are shown when they end
        return True
    return bool(select.select([pipe], [], [], timeout)[0])


def open_log(path: Path, title: str) -> IO[bytes]:
    """Open a rank's log file for appending, and write a header line for this run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("ab", buffering=0)
    log.write(os.fsencode(f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} {title}\n"))
    log.flush()
    return log


def _standard_sink(stream: TextIO) -> ByteSink:
    if sys.platform == "win32" and stream.isatty():
        return stream.buffer  # the Windows console takes text; Python decodes the bytes
    try:
        stream.flush()
        return _DescriptorSink(stream.fileno())
    except io.UnsupportedOperation:
        return TextSink(stream)


class _DescriptorSink:
    """Writes to the file descriptor, bypassing Python's buffers.

    Buffered data that could not be written would be retried at exit, and a thread blocked in a buffered write would
    hold a lock that the interpreter needs to exit.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def write(self, data: bytes, /) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._number, left) :]
            except BlockingIOError:  # another process made the shared terminal non-blocking
                select.select([], [self._number], [])
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                return  # the terminal was closed: ranks that still save their state must not fail on a print

    def flush(self) -> None:
        """Does nothing: there is no buffer."""

    def isatty(self) -> bool:
        return os.isatty(self._number)


class TextSink:
    """A sink that writes to a text stream, for notebooks, whose streams do not accept bytes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, data: bytes, /) -> None:
        """Write it; what is no text is replaced."""
        self._stream.write(data.decode(errors="replace"))

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()
