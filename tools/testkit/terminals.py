"""A program in a real pseudo-terminal, and the screen that its user sees."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pexpect
import pyte

__all__ = ["CTRL_C", "DOWN", "ENTER", "Terminal"]

CTRL_C = "\x03"
ENTER = "\r"
DOWN = "\x1b[B"
_HISTORY = 2000


class Terminal:
    """A running program whose input and output are a pseudo-terminal.

    Args:
        argv: the command line.
        env: the complete environment.
        cwd: the folder that it runs in.
        columns: width of the terminal.
        lines: its height.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, columns: int = 100, lines: int = 40
    ) -> None:
        self.screen = pyte.HistoryScreen(columns, lines, history=_HISTORY, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._child = pexpect.spawn(
            argv[0],
            list(argv[1:]),
            env=dict(env),
            cwd=cwd,
            dimensions=(lines, columns),
            timeout=5,
            echo=False,
        )
        self._child.delaybeforesend = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close(force=True)

    def shown(self) -> str:
        """The screen, as lines without trailing spaces."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def transcript(self) -> str:
        """What was scrolled away, and the screen."""
        columns = range(self.screen.columns)
        above = ["".join(line[at].data for at in columns).rstrip() for line in self.screen.history.top]
        return "\n".join([*above, self.shown()])

    def wait_for(self, text: str, after: str = "", seconds: float = 20.0) -> None:
        """Read until the text is on the screen, wherever its lines break.

        Args:
            text: what to wait for.
            after: it must come after the last line that begins with this.
            seconds: how long to wait.

        Raises:
            AssertionError: it does not come in time, or the program ends first.
        """
        end = time.monotonic() + seconds
        wanted = "".join(text.split())
        while wanted not in "".join(self._after(after).split()):
            if not self._read(0.05) or time.monotonic() > end:
                raise AssertionError(f"{text!r} is not on the screen:\n{self.transcript()}")

    def send(self, keys: str) -> None:
        """Type the keys."""
        self._child.send(keys)

    def wait_for_end(self, seconds: float = 20.0) -> None:
        """Wait until the program itself has ended, as a shell does before it shows its prompt."""
        end = time.monotonic() + seconds
        while self._child.isalive():
            self._read(0.05)
            assert time.monotonic() < end, f"the program does not end:\n{self.transcript()}"

    def code(self, seconds: float = 20.0) -> int:
        """Wait for the end of the program; its exit code, or 128 + n after signal n."""
        end = time.monotonic() + seconds
        while self._read(0.05):
            assert time.monotonic() < end, f"the program does not end:\n{self.transcript()}"
        self._child.close()
        status, number = self._child.exitstatus, self._child.signalstatus
        return 128 + int(number or 0) if status is None else int(status)

    def _after(self, start: str) -> str:
        shown = f"\n{self.shown()}"
        return shown.rpartition(f"\n{start}")[2] if start else shown

    def _read(self, seconds: float) -> bool:
        """Show new output; False once the program has ended and all of it is shown."""
        try:
            found = self._child.read_nonblocking(65536, timeout=seconds)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += found
        self._stream.feed(found)
        # prompt_toolkit asks where the cursor is, and draws only after the answer.
        for _ in range(found.count(b"\x1b[6n")):
            self.send(f"\x1b[{self.screen.cursor.y + 1};{self.screen.cursor.x + 1}R")
        return True
