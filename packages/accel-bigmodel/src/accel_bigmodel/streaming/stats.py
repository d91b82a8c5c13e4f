"""What moving weights cost."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StreamStats"]


@dataclass(frozen=True)
class StreamStats:
    """Counts since weights began to move.

    Attributes:
        bytes_moved: bytes of the copies that were asked for, without those of resident weights.
        seconds_moving: seconds that copies took.
        seconds_waited: seconds for which forwards stood still because weights were not there yet. On an accelerator
            only the host's: there the device waits by itself, for what was asked for.
        hits: uses of groups whose copy had been asked for ahead.
        misses: uses of groups that were asked for when they were needed.
        slot_bytes: bytes on the device for weights that come and go, now.
        resident_bytes: bytes on the device of weights that stay.
        peak_bytes: most bytes on the device at one time, of both kinds.
        page_locked_bytes: bytes of weights that come and go, and wait in page-locked host memory. What comes from
            elsewhere is packed by a thread first, which is slower than the link.
    """

    bytes_moved: int
    seconds_moving: float
    seconds_waited: float
    hits: int
    misses: int
    slot_bytes: int
    resident_bytes: int
    peak_bytes: int
    page_locked_bytes: int = 0

    @property
    def rate(self) -> float:
        """Bytes per second of the copies; 0 before the first."""
        return self.bytes_moved / self.seconds_moving if self.seconds_moving else 0.0
