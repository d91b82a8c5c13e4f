"""What a migration of one file says and proposes."""

from __future__ import annotations

import dataclasses

__all__ = ["Migration", "Remark"]


@dataclasses.dataclass(frozen=True, order=True)
class Remark:
    """Something about one line.

    Attributes:
        line: its number in the source, from 1.
        text: what is there, and what to do.
    """

    line: int
    text: str


@dataclasses.dataclass(frozen=True)
class Migration:
    """The proposal for one file.

    Attributes:
        before: the text that was read.
        after: the text that is proposed; the same if nothing has to change or something was refused.
        refusals: what is not understood. If there is any, the file must not be written.
        notes: what changes for the reader, or stays to be done by hand.
    """

    before: str
    after: str
    refusals: tuple[Remark, ...] = ()
    notes: tuple[Remark, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether there is something to write."""
        return self.after != self.before and not self.refusals
