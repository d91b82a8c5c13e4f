"""Lines that a program draws again and again, as progress bars do, and what a file or a pipe gets of them."""

from __future__ import annotations

import re
import time

from accel_state.constants import BAR_INTERVAL

__all__ = ["LastStates"]

_TOKENS = re.compile(rb"(\r|\n|\x1b\[A)|\x1b\[\d*[JK]")
"""What moves the cursor; sequences that erase are dropped."""


class LastStates:
    """Reduces the lines that a stream redraws to their last states, and passes everything else on.

    A nested bar is drawn below another one: newlines, a carriage return, its text, and the same number of moves up. So
    after a newline a bar has ended only if the cursor stays below. A long bar also leaves a line now and then.

    Args:
        interval: seconds between the lines of a long bar.
    """

    def __init__(self, interval: float = BAR_INTERVAL) -> None:
        self._interval = interval
        self._rows: list[bytes] = []  # lines that may be drawn again; empty: text passes
        self._at = 0  # the row of the cursor
        self._returned = False  # the next text takes the place of the row's
        self._wrote = False  # there is text in this row since the cursor has come
        self._shown_at = 0.0
        self._drawn = b""

    @property
    def undecided(self) -> bool:
        """Whether a bar has ended, or the next one is going to be drawn below it."""
        return self._at > 0

    def feed(self, piece: bytes) -> bytes:
        """Take a line with its newline or carriage return, or a part of one; return what a file gets now."""
        if not self._rows:
            if b"\r" not in piece:
                return piece
            self._rows, self._returned, self._wrote = [b""], True, False
            self._shown_at = time.monotonic()
        return b"".join(self._take(token) for token in _TOKENS.split(piece) if token)

    def drawn(self) -> bytes:
        """The state of a bar that was drawn since the last call, to be drawn on a line of its own."""
        state, self._drawn = self._drawn.rstrip(), b""
        return state and state + b"\x1b[K\r"

    def settle(self) -> bytes:
        """The bars that have ended, when nothing has followed for a while."""
        return self._finish(self._at)

    def end(self) -> bytes:
        """The last states of all bars: no more is drawn of them."""
        return self._finish(len(self._rows))

    def _take(self, token: bytes) -> bytes:
        done = b""
        if token == b"\x1b[A":
            self._at, self._wrote = max(0, self._at - 1), False
        elif not self._rows:
            return token
        elif token in (b"\r", b"\n"):
            if self._wrote:
                done = self._finish(self._at)
            if token == b"\r":
                done += self._now_and_then()
                self._returned = True
            else:
                self._at, self._returned, self._wrote = self._at + 1, False, False
                self._rows += [b""] * (self._at + 1 - len(self._rows))
        elif self._returned or self._wrote:
            self._rows[self._at] = token if self._returned else self._rows[self._at] + token
            self._returned, self._wrote, self._drawn = False, True, self._rows[self._at]
        else:  # other text, after bars
            done = self.end() + token
        return done

    def _finish(self, count: int) -> bytes:
        """Write the first rows, which change no more."""
        done = _lines(self._rows[:count])
        self._rows, self._at = self._rows[count:], max(0, self._at - count)
        if not any(map(bytes.strip, self._rows)) and not self._wrote and not self._returned:
            self._rows = []
        return done

    def _now_and_then(self) -> bytes:
        if self._at or time.monotonic() - self._shown_at < self._interval:
            return b""
        self._shown_at = time.monotonic()
        return _lines(self._rows)


def _lines(rows: list[bytes]) -> bytes:
    return b"".join(row.rstrip() + b"\n" for row in rows if row.strip())
