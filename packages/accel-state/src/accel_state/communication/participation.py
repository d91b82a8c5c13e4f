"""Which ranks take part in an operation that the main process may call alone, such as saving replicas.

A rank that calls the operation records the call in the world's store. No collective is started, because the other ranks
may be in a backward pass, whose messages would get mixed up with it. Then the rank waits until all ranks have called,
or until it is certain that no other rank will: each has entered a collective that this one has not, or its script has
ended. A collective needs all ranks of its group, so a rank in one waits for this rank, and continues when this rank
gets there. Programs whose ranks exchange messages of their own through gloo's default group
(``torch.distributed.send``) are the exception: gloo counts messages like collectives.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch._C._distributed_c10d import Store

from accel_state.communication.channel import Channels
from accel_state.communication.signed_store import prefixed
from accel_state.communication.torch_collectives import issued, not_begun
from accel_state.communication.watchdog import ENDED, RankStatus, Watchdog
from accel_state.errors import CollectiveMismatchError

__all__ = ["Participation"]

_FIRST_LOOK = 0.1
"""Seconds until the main process asks where the others are; usually all have called by then."""
_WITHDRAWN = b"-"
_logger = logging.getLogger(__name__)

_ALWAYS_COMPARED = ("wait_for_everyone", "gather_object", "all_agree", "gather_to_first")


class Participation:
    """The operations of one world that the main process may call alone.

    Args:
        rank: this process's rank in the world.
        store: a client of the world's store.
        device: the device of this process.
        channels: the channels of this process. Without a watchdog every operation counts as called by all.

    Attributes:
        name: name of this object among the groups that the watchdog knows.
        ranks: all ranks.
    """

    def __init__(self, rank: int, store: Store, device: torch.device, channels: Channels) -> None:
        world = channels.of(None)
        assert world is not None, "a world of one has no channels"
        self.name = "participation"
        self.collective = False
        self.ranks = world.ranks
        self._rank = rank
        self._channels = channels
        self._on_cpu = world.carrier(device).type == "cpu"
        # A second PartialState in this world must not read what the first has left.
        generation = store.add(f"participation/{rank}", 1)
        self._store: Store = prefixed(store, f"participation/{generation}")
        self._world = world
        self._completed = 0
        self._calls = 0
        self._operation: str | None = None
        self._thread = 0
        self._failure: CollectiveMismatchError | None = None
        self._elsewhere: list[RankStatus] = []
        self._some_ended = False
        channels.watch(self)

    def position(self) -> tuple[int, str | None, int]:
        """See ``accel_state.communication.watchdog.WatchedGroup``."""
        return self._completed + (self._operation is not None), self._operation, self._thread

    def mark_failed(self, error: CollectiveMismatchError) -> None:
        """See ``accel_state.communication.watchdog.WatchedGroup``."""
        self._failure = error

    def main_process_alone(self, operation: str, advice: str = "") -> bool:
        """Whether the main process calls ``operation`` alone; False: all ranks do. Called by every rank that does.

        Raises:
            CollectiveMismatchError: some other ranks call it, and not all; or a rank has failed.
        """
        watchdog = self._channels.watchdog
        if watchdog is None:
            return False
        self._operation, self._thread = operation, threading.get_ident()
        try:
            self._elsewhere = self._find_elsewhere(watchdog)
        except RuntimeError as error:
            if isinstance(error, CollectiveMismatchError):
                raise
            raise CollectiveMismatchError(
                f"{operation} cannot complete: the store of this world is gone, and rank 0, which hosts it ({error})"
            ) from error
        finally:
            self._operation = None
        if not self._elsewhere:
            self._completed += 1
            return False
        if self._rank != 0 or len(self._elsewhere) < len(self.ranks) - 1:
            self.refuse(operation, advice=advice)
        return True

    def all_take_part(self, operation: str, advice: str = "") -> None:
        """Return when all ranks call ``operation``; each that does calls this first.

        Args:
            operation: its name.
            advice: the end of the message if not all do.

        Raises:
            CollectiveMismatchError: some ranks do not call it: they are past it, have ended, or one failed.
        """
        if self.main_process_alone(operation, advice):
            self.refuse(operation, advice=advice)

    def refuse(self, operation: str, error: Exception | None = None, *, advice: str = "") -> NoReturn:
        """Raise on this rank, and on ranks that wait in a collective in which ranks compare their calls.

        Args:
            operation: the one that not all ranks call.
            error: raised on this rank; None: that ranks call different operations.
            advice: the end of that message.
        """
        world = self._world
        following = world.reach()[0] + 1
        if all(rank.number == following and self._compares(rank.operation) for rank in self._elsewhere):
            with world.operation(operation):
                world.exchange(
                    operation, lambda: f"not called by all ranks. {advice}".rstrip(), local_error=error
                )
        if error is not None:
            raise error
        listing = "\n".join(f"  {rank}" for rank in self._elsewhere)
        raise CollectiveMismatchError(
            f"rank {self._rank} is in {operation}, which other ranks do not call:\n{listing}\n"
            f"{advice or 'Every rank must call the same collectives in the same order.'}"
        )

    def _compares(self, operation: str | None) -> bool:
        if operation in _ALWAYS_COMPARED:
            return True
        if operation is None or operation.startswith("scatter"):
            return False
        return self._on_cpu and self._world.check_cpu

    def _find_elsewhere(self, watchdog: Watchdog) -> list[RankStatus]:
        """The ranks that do not call; empty when all ranks have called."""
        self._world.raise_failure()
        here, count = f"{self._completed}/{self._rank}", f"{self._completed}/count"
        self._failure = None
        self._calls += 1
        self._store.set(here, str(self._calls))
        called = self._store.add(count, 1)
        try:
            elsewhere = self._wait(watchdog, count) if called < len(self.ranks) else []
        except BaseException:
            self._withdraw(here, count)
            raise
        if elsewhere:
            self._withdraw(here, count)
        else:
            self._clean()
        return elsewhere

    def _wait(self, watchdog: Watchdog, count: str) -> list[RankStatus]:
        # Each look reads the records of all ranks, and only the main process may go on alone.
        every = max(1.0, len(self.ranks) / 64) * (2 * _FIRST_LOOK if self._rank == 0 else 1.0)
        look_at = time.monotonic() + (_FIRST_LOOK if self._rank == 0 else every)
        refused = f"refused/{self._rank}/{self._calls}"
        pause = 0.0002
        while self._store.add(count, 0) < len(self.ranks):
            if self._store.check([refused]):
                absent = json.loads(self._store.get(refused))
                return [rank for rank in watchdog.ask(self._world) if rank.rank in absent]
            if time.monotonic() >= look_at:
                elsewhere = self._look(watchdog)
                if elsewhere:
                    return elsewhere
                # To the watchdog a rank that has ended is a failure; here it is one that does not call.
                if self._failure is not None and not self._some_ended:
                    raise self._failure
                look_at = time.monotonic() + every
            time.sleep(pause)
            pause = min(1.5 * pause, 0.02)
        return []

    def _look(self, watchdog: Watchdog) -> list[RankStatus]:
        """The ranks that do not call; empty while that is unknown of some rank."""
        self._world.raise_failure()
        statuses = watchdog.ask(self._world)
        failed = [rank for rank in statuses if rank.gone not in (None, *ENDED)]
        if failed:
            listing = "\n".join(f"  {rank}" for rank in statuses)
            raise CollectiveMismatchError(
                f"{self._operation} cannot complete: rank {failed[0].rank} is gone ({failed[0].gone})\n{listing}"
            )
        self._some_ended = any(rank.gone is not None for rank in statuses)
        # Read after the positions, so that a rank that called meanwhile is found here, and one that is past because it
        # has refused has said so before.
        present = self._present()
        absent = [rank for rank in statuses if rank.rank not in present]
        mine, begun = watchdog.reach(), issued()
        unknown = not absent or not all(_is_past(rank, mine, begun) for rank in absent)
        if unknown or self._store.check([f"refused/{self._rank}/{self._calls}"]):
            return []
        for rank, call in present.items():
            if rank != self._rank:  # it must not take this rank for one that did not call
                self._store.set(f"refused/{rank}/{call}", json.dumps([status.rank for status in absent]))
        return absent

    def _present(self) -> dict[int, str]:
        """The ranks that have called, with the number of their call."""
        keys = {rank: f"{self._completed}/{rank}" for rank in self.ranks}
        written = [rank for rank, key in keys.items() if self._store.check([key])]
        calls = self._store.multi_get([keys[rank] for rank in written])
        return {rank: call.decode() for rank, call in zip(written, calls, strict=True) if call != _WITHDRAWN}

    def _withdraw(self, here: str, count: str) -> None:
        """Undo the call, so that the next one finds the store as this one has."""
        try:
            self._store.set(here, _WITHDRAWN.decode())
            self._store.add(count, -1)
        except RuntimeError as error:  # the process that hosts the store is gone, which raises elsewhere
            _logger.debug("could not withdraw: %s", error)

    def _clean(self) -> None:
        """Remove what the call before the last has left; every rank that read it has begun a later one."""
        before = self._completed - 1
        if before >= 0:
            self._store.delete_key(f"{before}/{self._rank}")
            if self._rank == 0:
                self._store.delete_key(f"{before}/count")


def _is_past(rank: RankStatus, mine: Mapping[str, Sequence[int]], begun: Mapping[str, int]) -> bool:
    """Whether a rank is in a collective that this process has not entered, or has ended its script."""
    further = any(tuple(theirs) > tuple(mine[group]) for group, theirs in rank.reach.items() if group in mine)
    return rank.gone in ENDED or further or bool(not_begun(rank.torch, begun))
