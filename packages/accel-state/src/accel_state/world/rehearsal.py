"""A rehearsal: this process is one rank of a simulated world; the other ranks do not exist.

``accel rehearse`` starts such a process. It has the environment that the rank would have, and ACCELERATE_REHEARSAL, by
which ``PartialState`` makes the process groups of ``accel_state.communication.mirrored`` in place of real ones. Nothing
waits for another rank: there is no rendezvous, no watchdog and no consensus about stopping.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_state.clusters.topology import Topology
from accel_state.communication import mirrored
from accel_state.communication.watchdog import call_site
from accel_state.messages import module_of
from accel_state.world.process_group import Membership

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Entered", "Rehearsal", "RehearsedMessage", "rehearse"]

_OURS = "accel_state.communication."
_TORCH = ("torch", "typing_extensions", "contextlib", "functools")


@dataclass(frozen=True, slots=True)
class Entered:
    """A collective that the rehearsed rank entered.

    Attributes:
        ranks: global ranks of the group.
        call: the part of the call that must be equal on all ranks of the group, as text.
        shown: the call as reports show it.
        site: ``file:line`` of the call in the script.
    """

    ranks: tuple[int, ...]
    call: str
    shown: str
    site: str | None


@dataclass(frozen=True, slots=True)
class RehearsedMessage:
    """A tensor that the rehearsed rank sent to another rank, or received from it.

    Attributes:
        peer: global rank of the other one.
        sent: False: it was received.
        shown: its shape and dtype.
        site: ``file:line`` of the call in the script.
    """

    peer: int
    sent: bool
    shown: str
    site: str | None


class Rehearsal:
    """Observations of the rehearsed rank.

    Args:
        steps: optimizer steps after which the rehearsal ends.

    Attributes:
        entered: the collectives, in order.
        messages: between this rank and another one, in order.
        bytes_given: bytes that this rank passed to collectives, by operation.
        notes: parts that the rehearsal leaves out or cannot know, each once.
        sections: by title, functions that return a part of the report as plain data; packages above this one add
            theirs.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.entered: list[Entered] = []
        self.messages: list[RehearsedMessage] = []
        self.bytes_given: dict[str, int] = {}
        self.notes: list[str] = []
        self.sections: dict[str, Callable[[], Any]] = {}
        self._aside = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context in which collectives are not recorded: the real rank would not enter them."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def note(self, text: str) -> None:
        """Record a note for the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def record(self, ranks: Sequence[int], call: mirrored.EnteredCollective) -> None:
        """Record a collective or a message that torch runs."""
        if self._aside:
            return
        self.bytes_given[call.operation] = self.bytes_given.get(call.operation, 0) + call.bytes
        frame = _beyond_torch(sys._getframe(1))
        if frame is not None and module_of(frame).startswith(_OURS):
            return  # part of an operation that `compared` has; its messages may have other sizes on other ranks
        if call.operation in ("send", "recv"):
            if call.peer is not None:
                sent = call.operation == "send"
                self.messages.append(RehearsedMessage(ranks[call.peer], sent, call.shapes, call_site(frame)))
            return
        shown = f"{call.operation}({call.shapes})"
        # Sizes of pickled objects and of what ranks exchange in pairs may differ.
        same = call.operation if call.operation == "all_to_all" or "uint8" in call.shapes else shown
        self.entered.append(Entered(tuple(ranks), same, shown, call_site(frame)))

    def compared(self, ranks: Sequence[int], operation: str, fingerprint: int, description: str) -> None:
        """Record a collective of this project, which ranks compare by its fingerprint."""
        if self._aside:
            return
        call = f"{operation}#{fingerprint:x}"
        site = call_site(sys._getframe(1))
        self.entered.append(Entered(tuple(ranks), call, f"{operation}({description})", site))

    def report(self) -> dict[str, Any]:
        """All sections."""
        return {title: describe() for title, describe in self.sections.items()}


def rehearse(
    rehearsal: Rehearsal, topology: Topology, choose: Callable[[], tuple[torch.device, str]]
) -> Membership:
    """Join a simulated world as one of its ranks.

    Args:
        rehearsal: the observer of this rank.
        topology: ranks and nodes, as the environment describes them.
        choose: gives the device, and the backend that real ranks would choose.
    """
    device, backend = choose()
    mirrored.register(rehearsal.record)
    store: Store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(mirrored.BACKEND, store=store, rank=topology.rank, world_size=topology.world_size)
    return Membership(topology, device, backend, store, store)


def _beyond_torch(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that belongs neither to torch nor to the process group."""
    while frame is not None:
        module = module_of(frame)
        if module != mirrored.__name__ and module.partition(".")[0] not in _TORCH:
            return frame
        frame = frame.f_back
    return None
