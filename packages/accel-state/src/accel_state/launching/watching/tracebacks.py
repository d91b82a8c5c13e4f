"""Tracebacks in the output of ranks: finding the last one, folding the frames of libraries, and classifying errors."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Sequence

__all__ = [
    "HEADER",
    "fold_frames",
    "last_line",
    "last_place",
    "last_traceback",
    "library_of",
    "listed",
    "summarize",
    "timed_out",
    "waited_for_another",
]

HEADER = "Traceback (most recent call last):"
_CHAINS = ("During handling of the above exception", "The above exception was the direct cause")
_FRAME = re.compile(r'^\s*(?:\| )*  File "(?P<path>[^"]+)", line \d+')
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\](?P<name>[^/\\]+)")
_OURS = re.compile(r"[/\\](?P<name>accel_(?:state|ckpt|bigmodel|train|cli))[/\\]")
_PYTHON = re.compile(r"^<frozen |[/\\]lib[/\\]python3\.\d+[/\\]")
_WAITED = re.compile(
    r"Connection (?:closed|reset) by peer|connection(?: was)? closed|Broken pipe|\[.*gloo.*\]|ProcessGroup|"
    r"DistBackendError|DistNetworkError|NCCL (?:error|communicator)|Socket Timeout|"
    r"(?:ended|exited|left|died|is gone|failed) (?:before|during|while)|PeerFailedError|CollectiveMismatchError",
    re.IGNORECASE,
)
"""What a rank reports that waits in a collective for a rank that has ended."""
_TIMED_OUT = re.compile(
    r"Timed out waiting|wait timeout|collective operation timeout|operation timed out|Socket Timeout",
    re.IGNORECASE,
)
"""What torch reports, for gloo and NCCL, of a collective that the other ranks did not enter in time."""


def last_traceback(tail: collections.deque[bytes], fallback_lines: int = 20) -> str:
    """The last traceback in the buffered end of a rank's standard error, with its chained exceptions.

    If there is none (a syntax error, a crash in native code), the last ``fallback_lines`` lines.
    """
    lines = b"".join(tail).decode(errors="replace").splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(HEADER)]
    if not starts:
        return "\n".join(lines[-fallback_lines:])
    start = starts.pop()
    while starts and any(line.startswith(_CHAINS) for line in lines[starts[-1] : start]):
        start = starts.pop()
    return "\n".join(lines[start:])


def fold_frames(text: str, *, keep_last: bool = True) -> str:
    """A traceback with one line in place of neighbouring frames of libraries, except the frame that raised.

    A traceback without a frame of the user's is not changed.

    Args:
        text: the traceback.
        keep_last: the last frame is shown even if it is a library's.
    """
    blocks = _blocks(text.splitlines())
    if not any(path is not None and not library_of(path) for path, _ in blocks):
        return text
    lines: list[str] = []
    run: list[tuple[str, list[str]]] = []
    for index, (path, block) in enumerate(blocks):
        library = library_of(path) if path is not None else ""
        ends = index + 1 == len(blocks) or blocks[index + 1][0] is None
        if library and not (ends and keep_last):
            run.append((library, block))
            continue
        lines += _folded(run)
        run = []
        lines += block
    return "\n".join([*lines, *_folded(run)])


def last_place(text: str) -> str:
    """File and line of the last frame of a traceback that is not a library's; empty: there is none.

    Generated code (``<string>``) has no file to look into.
    """
    frames = [
        block[0]
        for path, block in _blocks(text.splitlines())
        if path is not None and not path.startswith("<") and not library_of(path)
    ]
    return frames[-1].strip().removeprefix("File ").rpartition(", in ")[0].replace('"', "") if frames else ""


def last_line(text: str) -> str:
    """The line of a traceback that names the exception, the first of its message, without gloo's greetings.

    Without a traceback the last line that begins at the margin.
    """
    lines = text.splitlines()
    after = 0
    for number, line in enumerate(lines):
        if line.startswith(HEADER) or _FRAME.match(line):
            after = number + 1
    margin = [line for line in lines[after:] if line and not line[0].isspace()]
    if not margin:
        return ""
    return re.sub(r"\s*\.?\s*GLHF!.*$", "", margin[0] if after else margin[-1])


def waited_for_another(line: str) -> bool:
    """Whether an error, given by the last line of its traceback, is that of a rank whose peer has ended."""
    return _WAITED.search(line) is not None


def timed_out(line: str) -> bool:
    """Whether an error, given by the last line of its traceback, is the time-out of a collective."""
    return _TIMED_OUT.search(line) is not None


def summarize(ends: Iterable[tuple[str, str]], first: str = "", longest: int = 160) -> list[str]:
    """One line for each way in which the other ranks ended.

    Args:
        ends: label of each rank, and the last line of its traceback.
        first: that of the rank that failed first, which is shown in full.
        longest: characters of an error that are shown.
    """
    waited: list[str] = []
    differing: list[str] = []
    failed: dict[str, list[str]] = {}
    for label, line in ends:
        if "CollectiveMismatchError: ranks disagree" in line:
            differing.append(label)
        elif waited_for_another(line):
            waited.append(label)
        else:
            failed.setdefault(line, []).append(label)
    lines = []
    for line, labels in failed.items():
        shown = line if len(line) <= longest else f"{line[: longest - 1]}…"
        same = line == first
        lines.append(f"{listed(labels)} {'raised the same error' if same else f'failed too: {shown}'}")
    if differing:
        lines.append(f"{listed(differing)} raised the same error, because ranks call different collectives")
    if waited:
        lines.append(f"{listed(waited)} waited for it, and ended because it was gone")
    return lines


def _blocks(lines: Sequence[str]) -> list[tuple[str | None, list[str]]]:
    """The frames with the lines of each, and the other lines, whose path is None."""
    found: list[tuple[str | None, list[str]]] = []
    indent = 0
    for line in lines:
        frame = _FRAME.match(line)
        width = len(line) - len(line.lstrip())
        if frame is not None:
            indent = width
            found.append((frame["path"], [line]))
        elif found and found[-1][0] is not None and width > indent:
            found[-1][1].append(line)
        else:
            found.append((None, [line]))
    return found


def library_of(path: str) -> str:
    """The library that a file belongs to; empty: the user's."""
    for pattern in (_INSTALLED, _OURS):
        match = pattern.search(path)
        if match is not None:
            return match["name"].removesuffix(".py")
    return "Python" if _PYTHON.search(path) else ""


def _folded(run: Sequence[tuple[str, list[str]]]) -> list[str]:
    if len(run) < 2:
        return [line for _, block in run for line in block]
    names = ", ".join(dict.fromkeys(name for name, _ in run))
    return [f"  … {len(run)} frames of {names}"]


def listed(labels: Sequence[str]) -> str:
    """Labels of ranks in a sentence: ``ranks 0, 2 and 5``."""
    numbers = [label.removeprefix("rank ") for label in labels]
    if len(labels) < 2 or any(not number.isdecimal() for number in numbers):
        return ", ".join(labels)
    shown = numbers if len(numbers) <= 8 else [*numbers[:7], f"{len(numbers) - 7} more"]
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
