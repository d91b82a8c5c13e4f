"""What `Accelerator.offload_states` returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from accel_train.offload.host_copies import Offloaded

__all__ = ["OffloadReport"]


@dataclass(frozen=True)
class OffloadReport:
    """How much memory of this rank's devices `offload_states` freed, in bytes.

    Attributes:
        by_kind: freed, by kind of state ("parameters", "gradients", "optimizer").
        by_device: freed, by device ("cuda:0"); empty if everything was in host memory already.
        kept: not freed, by the reason.
    """

    by_kind: Mapping[str, int]
    by_device: Mapping[str, int]
    kept: Mapping[str, int]

    @classmethod
    def of(cls, moved: Iterable[Offloaded]) -> OffloadReport:
        """The sums over what was moved."""
        by_kind: Counter[str] = Counter()
        by_device: Counter[str] = Counter()
        kept: Counter[str] = Counter()
        for states in moved:
            kept.update(states.kept)
            for (kind, device), size in states.freed.items():
                by_kind[kind] += size
                by_device[device] += size
        return cls(dict(by_kind), dict(by_device), dict(kept))

    @property
    def total(self) -> int:
        """All bytes that were freed."""
        return sum(self.by_kind.values())

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {_size(size)}" for kind, size in self.by_kind.items())
        text = (
            f"freed {_size(self.total)} on {', '.join(self.by_device)} ({kinds})" if self.total else _NOTHING
        )
        kept = "; ".join(f"{_size(size)} stay: {reason}" for reason, size in self.kept.items())
        return f"{text}; {kept}" if kept else text


_NOTHING = "freed nothing: all states are in host memory"


def _size(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size} bytes"
