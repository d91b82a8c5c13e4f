"""Which samples of an epoch's order belong to which rank's batch: pure arithmetic.

An epoch is cut into rounds. In each round every rank gets `batch` consecutive samples, rank 0 the first
ones. What is left after the last full round, the tail, is dropped, completed with the first samples of the
epoch so that all ranks get a full batch, or given to ranks as far as it reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BatchLayout", "clip_rows"]


def clip_rows(real: int, batch: int, ranks: int) -> tuple[int, ...]:
    """Number of `real` rows that each of `ranks` ranks gets, if they are distributed in order, `batch` to a rank."""
    return tuple(min(max(real - rank * batch, 0), batch) for rank in range(ranks))


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The rounds of one epoch.

    Args:
        total: samples in the epoch.
        batch: samples in one rank's batch.
        ranks: number of ranks.
        rank: the rank asked about.
        start: position in the order where this iteration begins; earlier positions were consumed before.
        drop_last: an incomplete tail is dropped.
        even: an incomplete tail is completed; otherwise ranks may get less, or nothing.
    """

    total: int
    batch: int
    ranks: int
    rank: int
    start: int = 0
    drop_last: bool = False
    even: bool = True

    @property
    def stride(self) -> int:
        """Samples in one round over all ranks."""
        return self.batch * self.ranks

    @property
    def full(self) -> int:
        """Number of full rounds."""
        return max(self.total - self.start, 0) // self.stride

    @property
    def tail(self) -> int:
        """Real samples in the round after the full ones; 0 when there is none."""
        return 0 if self.drop_last else max(self.total - self.start, 0) % self.stride

    @property
    def batches(self) -> int:
        """Number of batches of this rank."""
        return self.full + (1 if self.tail_span() is not None else 0)

    def tail_span(self) -> tuple[int, int] | None:
        """This rank's part of the tail, as offsets from the tail's first sample; None for no batch.

        When completed, offsets at or beyond `tail` are padding.
        """
        if not self.tail:
            return None
        low = self.rank * self.batch
        high = low + self.batch
        if not self.even:
            high = min(high, self.tail)
        return (low, high) if high > low else None

    def padding(self, offset: int) -> int:
        """The position in the order of the sample that completes the tail at `offset`."""
        return (offset - self.tail) % min(self.total, self.stride)

    def rows(self, batch_index: int) -> int:
        """Rows of this rank's batch number `batch_index`."""
        if batch_index < self.full:
            return self.batch
        span = self.tail_span()
        return 0 if span is None else span[1] - span[0]

    def valid_rows(self, batch_index: int) -> tuple[int, ...] | None:
        """Per rank, how many leading rows of batch `batch_index` are real; None when all are."""
        if batch_index < self.full or not self.even or not self.tail:
            return None
        return clip_rows(self.tail, self.batch, self.ranks)

    def consumed(self, batches: int) -> int:
        """Position in the order after `batches` batches of every rank."""
        return min(self.start + batches * self.stride, max(self.total, self.start))
