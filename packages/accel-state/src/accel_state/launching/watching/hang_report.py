"""The report of a run that hangs: where each rank is, in Python and in collectives, and which ranks differ."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass

from accel_state.launching.watching.tracebacks import fold_frames, library_of, listed

__all__ = ["RankStack", "differing", "is_whole", "parse_stack", "render_hang"]

_HEAD = "Stack (most recent call first)"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "accel_state/operations/collectives.py")
_OWN = ("accel_state/launching/ranks/worker.py", "<frozen runpy>")
_OUTERMOST = re.compile(r"( in (<module>|_run_module_as_main)|^  \.\.\.)$")
"""The last line of a main thread, or of one with more frames than ``faulthandler`` writes."""
Frame = tuple[str, int, str]
"""File, line, name of the function."""


@dataclass(frozen=True, slots=True)
class RankStack:
    """The known facts about one rank that hangs.

    Attributes:
        rank: its rank.
        frames: the frames of its main thread, outermost first; empty: it did not answer.
        collectives: the collectives in progress that the rank itself reported.
        note: other facts, such as its phase.
    """

    rank: int
    frames: tuple[Frame, ...] = ()
    collectives: tuple[str, ...] = ()
    note: str = ""

    @property
    def site(self) -> str:
        """``file:line`` of the innermost frame that belongs to no library."""
        own = [frame for frame in self.frames if not library_of(frame[0])]
        return f"{own[-1][0]}:{own[-1][1]}" if own else ""

    @property
    def waits_in(self) -> str:
        """The collective that it waits in; empty: none that is known."""
        if self.collectives:
            return "; ".join(self.collectives)
        names = [name for file, _, name in self.frames if file.replace("\\", "/").endswith(_COLLECTIVES)]
        return next((name for name in names if not name.startswith(("_", "<", "wrapper"))), "")

    def place(self) -> str:
        """Where it is, in words."""
        at = f" at {self.site}" if self.site and " at " not in self.waits_in else ""
        if self.waits_in:
            return f"waits in {self.waits_in}{at}"
        if not self.frames:
            return "does not answer"
        return f"is in no collective,{at}" if at else "is in no collective"


def parse_stack(text: str) -> tuple[Frame, ...]:
    """The frames in the output of ``faulthandler`` for one thread, outermost first.

    Args:
        text: the output; of several, the last one counts.
    """
    found: list[Frame] = []
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if frame is not None:
            number = int(frame["line"]) if frame["line"].isdecimal() else 0
            found.append((frame["file"], number, frame["name"]))
        elif line.startswith(_HEAD):
            found.clear()
    return tuple(frame for frame in reversed(found) if not frame[0].replace("\\", "/").endswith(_OWN))


def is_whole(text: str) -> bool:
    """Whether the output of ``faulthandler``, which is written line by line, has come to the outermost frame.

    Args:
        text: the output so far.
    """
    return text.endswith("\n") and _OUTERMOST.search(text.splitlines()[-1]) is not None


def differing(stacks: Sequence[RankStack]) -> list[int]:
    """The ranks that are elsewhere than most: those outside a collective in which others wait, else the smaller groups.

    Empty if all are at one place, or if no place has more ranks than another.
    """
    waiting = [stack.rank for stack in stacks if stack.waits_in]
    if 0 < len(waiting) < len(stacks):
        return [stack.rank for stack in stacks if not stack.waits_in]
    groups = _groups(stacks)
    sizes = sorted((len(group) for group in groups), reverse=True)
    if len(groups) < 2 or sizes[0] == sizes[1]:
        return []
    return sorted(stack.rank for group in groups[1:] for stack in group)


def render_hang(stacks: Sequence[RankStack], *, folded: bool = True) -> str:
    """The report: ranks with equal stacks together, then the ranks that differ from the others.

    Args:
        stacks: the stacks of the ranks that run.
        folded: show the frames of libraries around the user's as one line.
    """
    lines = []
    for group in _groups(stacks):
        ranks = listed([f"rank {stack.rank}" for stack in group])
        first = group[0]
        notes = dict.fromkeys(stack.note for stack in group if stack.note)
        note = f" ({'; '.join(notes)})" if notes else ""
        lines.append(f"{ranks} {_plural(first.place()) if len(group) > 1 else first.place()}{note}")
        text = "\n".join(_shown(frame) for frame in first.frames)
        lines.append(fold_frames(text, keep_last=False) if folded else text)
    different = differing(stacks)
    if different:
        verb = "differs" if len(different) == 1 else "differ"
        lines.append(f"{listed([f'rank {rank}' for rank in different])} {verb} from the others")
    return "\n".join(line for line in lines if line)


def _plural(place: str) -> str:
    for one, several in (("waits in", "wait in"), ("does not", "do not"), ("is in", "are in")):
        if place.startswith(one):
            return several + place[len(one) :]
    return place


def _groups(stacks: Sequence[RankStack]) -> list[list[RankStack]]:
    """Ranks with equal stacks and collectives, the largest group first."""
    found: dict[object, list[RankStack]] = {}
    for stack in stacks:
        found.setdefault((stack.frames, stack.collectives), []).append(stack)
    return sorted(found.values(), key=lambda group: (-len(group), group[0].rank))


def _shown(frame: Frame) -> str:
    file, line, name = frame
    source = linecache.getline(file, line).strip()
    return f'  File "{file}", line {line}, in {name}' + (f"\n    {source}" if source else "")
