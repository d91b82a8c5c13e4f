"""Counts and times of copying weights."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StreamStats"]


@dataclass(frozen=True)
class StreamStats:
    """Counts and times since streaming or paging began.

    Attributes:
        bytes_moved: bytes of the requested copies, without those of resident weights.
        seconds_moving: seconds that copies took.
        seconds_waited: seconds that forwards waited for weights. On an accelerator only the host's waiting counts; the
            device waits for requested copies by itself.
        hits: uses of groups whose copy was requested ahead of time.
        misses: uses of groups whose copy was requested only when they were needed.
        slot_bytes: bytes on the device for streamed weights, now.
        resident_bytes: bytes on the device of resident weights.
        peak_bytes: the most bytes on the device at one time, of both kinds.
        page_locked_bytes: bytes of streamed weights in page-locked host memory. Weights in other memory are staged by a
            thread first, which is slower than the link.
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
        """Bytes per second of the copies; 0 before the first one."""
        return self.bytes_moved / self.seconds_moving if self.seconds_moving else 0.0
