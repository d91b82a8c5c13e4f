"""The report of a run that hangs: where each rank is, in Python and in collectives, and which ranks differ."""

from __future__ import annotations

import linecache
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from accel_state.launching.watching.tracebacks import fold_frames, library_of, listed

__all__ = [
    "LastCollective",
    "RankStack",
    "as_data",
    "differing",
    "from_data",
    "is_whole",
    "parse_stack",
    "render_hang",
    "shown_line",
]

_HEAD = "Stack (most recent call first)"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "accel_state/operations/collectives.py",
    "accel_state/world/process_group.py",  # ``join``, in which ranks wait for those that do not come
)
_OWN = ("accel_state/launching/ranks/worker.py", "<frozen runpy>")
_OUTERMOST = re.compile(r"( in (<module>|_run_module_as_main)|^  \.\.\.)$")
"""The last line of a main thread, or of one with more frames than ``faulthandler`` writes."""
_MOST_ROWS = 64
"""Rows of the table of machines, beside those of ranks that differ."""
_LONGEST = 2000
"""Characters of each text about a rank that comes from another machine; its stack may have more."""
_MOST_FRAMES = 200
Frame = tuple[str, int, str]
"""File, line, name of the function."""


class LastCollective(NamedTuple):
    """The last collective that a rank has begun in a process group, as torch's flight recorder has it."""

    group: str
    number: int
    operation: str


@dataclass(frozen=True, slots=True)
class RankStack:
    """The known facts about one rank that hangs.

    Attributes:
        rank: its rank.
        frames: the frames of its main thread, outermost first; empty: it did not answer.
        collectives: the collectives in progress that the rank itself reported.
        note: other facts, such as its phase.
        recorded: the last collective of each process group.
        host: its machine; empty: that of the launcher.
        text: the frames as text with their sources, which only its machine can read; empty: they are read here.
    """

    rank: int
    frames: tuple[Frame, ...] = ()
    collectives: tuple[str, ...] = ()
    note: str = ""
    recorded: tuple[LastCollective, ...] = ()
    host: str = ""
    text: str = ""

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


def as_data(stack: RankStack, *, folded: bool = True) -> dict[str, Any]:
    """A rank's stack as plain data, for another machine.

    Args:
        stack: the stack, taken on this machine.
        folded: show the frames of libraries around the user's as one line.
    """
    return {
        "rank": stack.rank,
        "frames": [list(frame) for frame in stack.frames[-_MOST_FRAMES:]],
        "collectives": [line[:_LONGEST] for line in stack.collectives],
        "note": stack.note,
        "recorded": [list(entry) for entry in stack.recorded],
        "text": _frames(stack, folded=folded),
    }


def from_data(data: Mapping[str, Any], host: str) -> RankStack:
    """What `as_data` gave on the machine ``host``.

    Raises:
        ValueError: it has another form.
    """
    try:
        frames = tuple((shown_line(file), int(line), shown_line(name)) for file, line, name in data["frames"])
        return RankStack(
            int(data["rank"]),
            frames[-_MOST_FRAMES:],
            tuple(shown_line(line) for line in data["collectives"]),
            shown_line(data["note"]),
            tuple(
                LastCollective(shown_line(group), int(number), shown_line(name))
                for group, number, name in data["recorded"]
            ),
            shown_line(host),
            "\n".join(shown_line(line) for line in str(data["text"]).splitlines()[: 2 * _MOST_FRAMES]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no description of a rank: {error}") from error


def shown_line(value: object) -> str:
    """A text of another machine as one line that a terminal can show."""
    return "".join(one if one.isprintable() else "?" for one in str(value)[:_LONGEST])


def differing(stacks: Sequence[RankStack]) -> list[int]:
    """The ranks that are elsewhere than most.

    Those outside a collective in which others wait, else those that have begun fewer collectives of a process group
    than others, else the smaller groups. Empty if all are at one place, or if no place has more ranks than another.
    """
    waiting = [stack.rank for stack in stacks if stack.waits_in]
    if 0 < len(waiting) < len(stacks):
        return [stack.rank for stack in stacks if not stack.waits_in]
    behind = {rank for ranks, _ in _compare_recorders(stacks) for rank in ranks}
    if behind:
        return sorted(behind)
    groups = _groups(stacks)
    sizes = sorted((len(group) for group in groups), reverse=True)
    if len(groups) < 2 or sizes[0] == sizes[1]:
        return []
    return sorted(stack.rank for group in groups[1:] for stack in group)


def _compare_recorders(stacks: Sequence[RankStack]) -> list[tuple[list[int], str]]:
    """The ranks that are behind the others of a process group, or in another collective, and a sentence about each.

    Every member of a group numbers its collectives in the same way, so the last numbers can be compared.
    """
    members: dict[str, dict[int, LastCollective]] = {}
    for stack in stacks:
        for entry in stack.recorded:
            members.setdefault(entry.group, {})[stack.rank] = entry
    found = []
    for group, entries in members.items():
        newest = max(entry.number for entry in entries.values())
        ahead = {rank: entry.operation for rank, entry in entries.items() if entry.number == newest}
        behind = {rank: entry.number for rank, entry in entries.items() if entry.number < newest}
        operations = Counter(ahead.values()).most_common()
        if behind:
            verb = "has" if len(behind) == 1 else "have"
            found.append(
                (
                    list(behind),
                    f"{_ranks(list(behind))} {verb} begun {max(behind.values())} collectives of group {group}, "
                    f"others {newest}: {operations[0][0]}",
                )
            )
        elif len(operations) > 1:
            fewer = [rank for rank, operation in ahead.items() if operation != operations[0][0]]
            told = "; ".join(
                f"{_ranks([rank for rank in ahead if ahead[rank] == operation])}: {operation}"
                for operation, _ in operations
            )
            # Of two equally large halves neither is the odd one.
            equal = operations[0][1] == operations[1][1]
            found.append(
                (
                    [] if equal else fewer,
                    f"ranks disagree about collective #{newest} of group {group}: {told}",
                )
            )
    return found


def _ranks(ranks: Sequence[int]) -> str:
    return listed([f"rank {rank}" for rank in sorted(ranks)])


def render_hang(stacks: Sequence[RankStack], *, folded: bool = True) -> str:
    """The report: ranks with equal stacks together, then the ranks that differ from the others.

    Where the ranks run on several machines, a table of the machines is first, and the ranks that differ are before the
    others.

    Args:
        stacks: the stacks of the ranks that run.
        folded: show the frames of libraries around the user's as one line.
    """
    different = differing(stacks)
    hosts = {stack.rank: stack.host for stack in stacks}
    groups = _groups(stacks)
    lines = []
    if any(hosts.values()):
        groups.sort(key=lambda group: not any(stack.rank in different for stack in group))
        lines += _table(stacks, different)
    for group in groups:
        first = group[0]
        notes = dict.fromkeys(stack.note for stack in group if stack.note)
        note = f" ({'; '.join(notes)})" if notes else ""
        place = _plural(first.place()) if len(group) > 1 else first.place()
        lines += [f"{_ranks([stack.rank for stack in group])} {place}{note}", _frames(first, folded=folded)]
    lines += [sentence for _, sentence in _compare_recorders(stacks)]
    if different:
        verb = "differs" if len(different) == 1 else "differ"
        on = ", ".join(dict.fromkeys(hosts[rank] for rank in different if hosts[rank]))
        lines.append(f"{_ranks(different)}{f' on {on}' if on else ''} {verb} from the others")
    return "\n".join(line for line in lines if line)


def _table(stacks: Sequence[RankStack], different: Sequence[int]) -> list[str]:
    """A row for each place of each machine, those of ranks that differ first."""
    rows: dict[tuple[bool, str, str], list[int]] = {}
    for stack in sorted(stacks, key=lambda stack: stack.rank):
        rows.setdefault((stack.rank not in different, stack.host, stack.place()), []).append(stack.rank)
    ordered = sorted(rows.items(), key=lambda row: (row[0][0], row[1][0]))
    shown = [
        (host, _ranks(ranks).partition(" ")[2], _plural(place) if len(ranks) > 1 else place)
        for (_, host, place), ranks in ordered[: len([row for row in rows if not row[0]]) + _MOST_ROWS]
    ]
    shown.insert(0, ("machine", "rank", "where"))
    first, second = (max(len(row[column]) for row in shown) for column in (0, 1))
    lines = [f"{host:<{first}}  {ranks:<{second}}  {place}" for host, ranks, place in shown]
    left = len(rows) + 1 - len(shown)
    return [*lines, *([f"… {left} more rows"] if left else [])]


def _frames(stack: RankStack, *, folded: bool) -> str:
    if stack.text:
        return stack.text
    text = "\n".join(_shown(frame) for frame in stack.frames)
    return fold_frames(text, keep_last=False) if folded else text


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
