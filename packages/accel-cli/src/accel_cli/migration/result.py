"""The result of migrating one file."""

from __future__ import annotations

import dataclasses

__all__ = ["Migration", "Remark"]


@dataclasses.dataclass(frozen=True, order=True)
class Remark:
    """A remark about one line.

    Attributes:
        line: its number in the source, from 1.
        text: the problem, and the next step.
    """

    line: int
    text: str


@dataclasses.dataclass(frozen=True)
class Migration:
    """The proposal for one file.

    Attributes:
        before: the text that was read.
        after: the text that is proposed; the same if nothing has to change or something was refused.
        refusals: lines that are not understood. If there are any, the file must not be written.
        notes: changes of behaviour, and steps that are left to do by hand.
    """

    before: str
    after: str
    refusals: tuple[Remark, ...] = ()
    notes: tuple[Remark, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether there is something to write."""
        return self.after != self.before and not self.refusals
