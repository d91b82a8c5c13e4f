"""Judges the rehearsed ranks: errors that a real run would meet, and oddities."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from accel_cli.rehearsal.run import Rehearsed
from accel_state.launching.watching.tracebacks import fold_frames

__all__ = ["RehearsalFinding", "find", "first_difference", "lost_message"]


class RehearsalFinding(NamedTuple):
    """One result of a rehearsal.

    Attributes:
        kind: an error would fail or hang in the real world; a warning is odd; a note is about the rehearsal.
        text: one sentence or more.
        traceback: the traceback of a failed rank; the first line of its message is in the text alone.
    """

    kind: Literal["error", "warning", "note"]
    text: str
    traceback: str = ""


def find(ranks: Sequence[Rehearsed], size: int) -> list[RehearsalFinding]:
    """All findings, errors first, each once.

    Args:
        ranks: the rehearsed ranks of one world.
        size: number of ranks of the world.
    """
    found: list[RehearsalFinding] = []
    for rank in ranks:
        found += _of_rank(rank, size)
    for one, other in itertools.pairwise(ranks):
        difference = first_difference(one, other)
        if difference is not None:
            found.append(RehearsalFinding("error", difference))
    for sender, receiver in itertools.permutations(ranks, 2):
        lost = lost_message(sender, receiver)
        if lost is not None:
            found.append(RehearsalFinding("error", lost))
    order = ("error", "warning", "note")
    return sorted(dict.fromkeys(found), key=lambda finding: order.index(finding.kind))


def accelerators(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The sections of the report that describe an ``Accelerator``."""
    sections = found["sections"] or {}
    return [section for title, section in sections.items() if title.startswith("accelerator")]


def _of_rank(rank: Rehearsed, size: int) -> Iterator[RehearsalFinding]:
    found = rank.found
    error = found["error"]
    if error is not None:
        kind = f"{error['type']}: " if error["type"] else ""
        first = next(iter(error["message"].splitlines()), "")
        text = f"rank {rank.rank} of {size} would fail here: {kind}{first}"
        yield RehearsalFinding("error", text, _shown_once(error["traceback"], first))
    if found["sections"] is None:
        if error is None:
            yield RehearsalFinding(
                "error",
                "the script created no Accelerator or PartialState, so it would run as "
                f"{size} independent processes",
            )
        return
    for section in accelerators(found):
        for loader in section["loaders"]:
            for problem in loader["problems"]:
                yield RehearsalFinding(problem["kind"], problem["text"])
        if error is None and section["models"] and not section["optimizer steps taken"]:
            yield RehearsalFinding(
                "warning", f"the script of rank {rank.rank} ended before its first optimizer step"
            )
    for note in found["notes"]:
        yield RehearsalFinding("note", note)


def _shown_once(traceback: str, first: str) -> str:
    """A traceback with folded frames of libraries, and without the line of its message that is shown before it."""
    lines = fold_frames(traceback).splitlines()
    at = [number for number, line in enumerate(lines) if first and line.endswith(first) and line[:1] != " "]
    return "\n".join([*lines[: at[-1]], *lines[at[-1] + 1 :]] if at else lines)


def first_difference(one: Rehearsed, other: Rehearsed) -> str | None:
    """The first collective of a common group in which two ranks differ; None if there is none.

    Where one of them failed, only the calls before that count.
    """
    failed = one.found["error"] is not None or other.found["error"] is not None
    groups = [*one.found["groups"], *(new for new in other.found["groups"] if new not in one.found["groups"])]
    for ranks in groups:
        if one.rank not in ranks or other.rank not in ranks:
            continue
        mine, theirs = _calls(one, ranks), _calls(other, ranks)
        for number, (here, there) in enumerate(itertools.zip_longest(mine, theirs), start=1):
            if here is not None and there is not None:
                if here[1] == there[1]:
                    continue
            elif failed:
                break
            return (
                f"ranks {one.rank} and {other.rank} would wait for each other in collective {number} of "
                f"{_named(ranks)}: rank {one.rank} {_shown(here)}, rank {other.rank} {_shown(there)}"
            )
    return None


def lost_message(sender: Rehearsed, receiver: Rehearsed) -> str | None:
    """The first message from one rank to another that is not received as it is sent; None if there is none.

    Where one of them failed, only the messages before that count.
    """
    failed = sender.found["error"] is not None or receiver.found["error"] is not None
    sent = _messages(sender, receiver.rank, sent=True)
    received = _messages(receiver, sender.rank, sent=False)
    for number, (here, there) in enumerate(itertools.zip_longest(sent, received), start=1):
        if here is not None and there is not None:
            if here[2] == there[2]:
                continue
        elif failed:
            break
        gives = "sends no more" if here is None else f"sends {here[2]}{_place(here)}"
        takes = "receives no more" if there is None else f"expects {there[2]}{_place(there)}"
        return (
            f"message {number} from rank {sender.rank} to rank {receiver.rank} would not arrive: rank {sender.rank} "
            f"{gives}, and rank {receiver.rank} {takes}"
        )
    return None


def _messages(rank: Rehearsed, peer: int, *, sent: bool) -> list[list[Any]]:
    return [item for item in rank.found["messages"] if item[0] == peer and item[1] == sent]


def _place(message: Sequence[Any]) -> str:
    return f" at {message[3]}" if message[3] else ""


def _calls(rank: Rehearsed, ranks: list[int]) -> list[list[Any]]:
    if ranks not in rank.found["groups"]:
        return []
    index = rank.found["groups"].index(ranks)
    return [call for call in rank.found["entered"] if call[0] == index]


def _shown(call: Sequence[Any] | None) -> str:
    if call is None:
        return "has entered all of its collectives"
    return f"enters {call[2]}" + (f" at {call[3]}" if call[3] else "")


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) > 8:
        return f"the group of ranks {ranks[0]}, {ranks[1]}, … {ranks[-1]}"
    return f"the group of ranks {', '.join(map(str, ranks))}"
