"""Collectives in progress that torch runs by itself: those of DDP, FSDP2 and the script.

They are read from torch's flight recorder, and only when ranks ask each other where they are.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as native

__all__ = [
    "PendingCollective",
    "Waits",
    "all_gather_single",
    "break_connections",
    "cannot_meet",
    "counters",
    "end_collectives",
    "groups",
    "hold_outside_python",
    "issued",
    "not_begun",
]

all_gather_single: Callable[..., dist.Work] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
)

_LARGEST = 40
"""Characters of the sizes that are shown."""
_logger = logging.getLogger(__name__)
_NO_TAG = 0x7FFF_0000
"""A tag that no message uses."""
_AGAIN = 2.0
"""Seconds between two looks into the recorder, which grow with the time that nothing has begun."""


class PendingCollective(NamedTuple):
    """The first collective of a group that this process has begun and that has not completed.

    Attributes:
        number: among the collectives of the group, from 1; messages between two ranks do not count.
        name: such as ``all_reduce``.
        what: dtypes and sizes of its inputs.
    """

    number: int
    name: str
    what: str

    def __str__(self) -> str:
        return f"torch's {self.name} ({self.what})"


class Waits:
    """The collectives that this process waits in, looked up rarely: reading the recorder takes tens of milliseconds.

    Args:
        without: returns the names of groups to leave out.
    """

    def __init__(self, without: Callable[[], Collection[str]]) -> None:
        self._without = without
        self._begun: dict[str, int] = {}
        self._looked = 0.0
        self.since = 0.0
        self.found: dict[str, PendingCollective] = {}

    def look(self, now: float, patience: float) -> dict[str, PendingCollective]:
        """The collectives in progress by the names of their groups, once none has begun for ``patience`` seconds."""
        begun = issued()
        if begun != self._begun:
            self._begun, self.since, self.found = begun, now, {}
            self._looked = 0.0
        due = now - self.since >= patience and now - self._looked >= max(_AGAIN, (now - self.since) / 2)
        if due and any(begun.values()):
            without = self._without()
            self.found = {group: entry for group, entry in _recorded().items() if group not in without}
            self._looked = now
        return self.found


def _recorded() -> dict[str, PendingCollective]:
    """The first collective in progress of each group; empty where torch does not record them."""
    dump: Any = getattr(native, "_dump_fr_trace_json", None)
    if dump is None:
        return {}
    found: dict[str, PendingCollective] = {}
    with contextlib.suppress(RuntimeError):  # a build without a recorder
        for entry in json.loads(dump(True, True)).get("entries", []):
            group = entry["process_group"][0]
            if entry.get("retired", True) or entry.get("is_p2p") or group in found:
                continue
            sizes = ", ".join("x".join(map(str, size)) or "1" for size in entry.get("input_sizes", []))
            kinds = ", ".join(dict.fromkeys(entry.get("input_dtypes", [])))
            shown = sizes if len(sizes) <= _LARGEST else f"{sizes[:_LARGEST]}…"
            name = entry["profiling_name"].rpartition(":")[2]
            found[group] = PendingCollective(entry["collective_seq_id"], name, f"{kinds} {shown}")
    return found


def hold_outside_python(*tensors: Tensor) -> Any:
    """Make an additional owner of ``tensors``, to be kept while a thread of the backend may hold them.

    Gloo's thread releases its tensors some time after a work completes. If Python is then the only other owner, the
    thread takes the GIL; if the interpreter is shutting down at that moment, the process aborts (one in ten exits
    shortly after a collective, with torch 2.13). The price is that the tensors of a rank's last collective stay in host
    memory until its next one.
    """
    return torch._C.ScriptList(list(tensors))


def groups() -> dict[dist.ProcessGroup, str]:
    """All process groups of this process, with their names."""
    world: Any = dist.distributed_c10d._world
    return dict(world.pg_names)


def issued() -> dict[str, int]:
    """At least how many collectives this process has begun in each of its groups; messages may be counted too."""
    return {
        name: sum(counter._get_sequence_number_for_group() for counter in found)
        for group, name in groups().items()
        if (found := counters(group))
    }


def break_connections(group: dist.ProcessGroup) -> None:
    """Fail every collective and message in progress of a group on the CPU, on this rank and on its peers.

    Gloo closes the connections of a group when one of its messages times out. Aborting the group would close none in
    which a collective waits (torch 2.13).

    Args:
        group: one that this process is a member of.
    """
    someone = 1 if group.rank() == 0 else 0
    try:
        group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], someone, _NO_TAG).wait(
            timedelta(milliseconds=1)
        )
    except RuntimeError as error:
        _logger.debug("broke the connections of group %s: %s", group.group_name, error)


def end_collectives(group: dist.ProcessGroup) -> None:
    """Fail every collective in progress of a group, which cannot be used afterwards.

    Args:
        group: one that this process is a member of.
    """
    if "gloo" in str(dist.get_backend_config(group)):
        break_connections(group)
    for backend in _backends(group):  # the abort() of a group that was split off ends but one of them
        backend.abort()


def counters(group: dist.ProcessGroup) -> list[Any]:
    """The backends of a group that count the collectives they are given.

    Args:
        group: one that this process is a member of.
    """
    found: list[Any] = []
    for backend in _backends(group):
        try:
            backend._get_sequence_number_for_group()
        except RuntimeError as error:
            _logger.debug("group %s: %s does not count collectives: %s", group.group_name, backend, error)
        else:
            found.append(backend)
    return found


def _backends(group: dist.ProcessGroup) -> list[Any]:
    """The backends of a group, each once."""
    config = str(dist.get_backend_config(group))
    found: list[Any] = []
    for device_type in sorted({part.partition(":")[0] for part in config.split(",")}):
        try:
            backend: Any = group._get_backend(torch.device(device_type))
        except RuntimeError as error:
            _logger.debug("group %s has no backend on %s: %s", group.group_name, device_type, error)
        else:
            if all(backend is not other for other in found):
                found.append(backend)
    return found


def not_begun(theirs: Mapping[str, PendingCollective], begun: Mapping[str, int]) -> list[PendingCollective]:
    """The collectives in which another rank waits and that this process, a member of the group, has not begun.

    Args:
        theirs: collectives in progress on the other rank.
        begun: collectives of each group that have begun here.
    """
    return [their for group, their in theirs.items() if group in begun and their.number > begun[group]]


def cannot_meet(
    mine: Mapping[str, PendingCollective],
    begun: Mapping[str, int],
    theirs: Mapping[str, PendingCollective],
    begun_there: Mapping[str, int],
) -> bool:
    """Whether two ranks wait in collectives of which each has begun one that the other has not, or differently.

    Args:
        mine: collectives in progress here.
        begun: collectives of each group that have begun here.
        theirs: collectives in progress on the other rank.
        begun_there: collectives of each group that have begun on the other rank.
    """
    for group, their in theirs.items():
        my = mine.get(group)
        if my is not None and my.number == their.number and my.name != their.name:
            return True
    return bool(not_begun(theirs, begun) and not_begun(mine, begun_there))
