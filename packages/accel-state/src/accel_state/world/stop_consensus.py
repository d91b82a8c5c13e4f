"""Consensus of all ranks on the boundary after which they stop, once one rank receives a stop request.

A *boundary* is a point that all ranks pass the same number of times: the end of an optimizer step. Each rank only
counts the boundaries it passes. After a stop request, a background thread on each rank

1. sets ``pending``; from then on ``should_stop()`` blocks until there is a decision;
2. reads the rank's count and publishes it in the world's store;
3. decides: stop after the highest published count plus one.

``should_stop()`` is true from that boundary on. All ranks get the same answer at the same point of the program,
however often it is called: the answer depends only on the count, and every call that did not block happened before
step 1, at a count below the decided one. The decision waits for threads only, never for a rank's main program, which
may be blocked in a collective until another rank arrives.

Counting calls of ``should_stop()`` instead of boundaries would force all ranks to ask equally often.

The program and the thread need no lock: whether or not a boundary passed between steps 1 and 2 is included in the
published count, the next call to ``should_stop()`` blocks.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from accel_state.communication.signed_store import prefixed
from accel_state.host.process_identity import has_ended, process_identity, ranks_here

__all__ = ["Boundaries", "StopConsensus", "StopDecision"]

_LOOK = 0.5
"""Seconds between two checks whether another rank received a stop request; more in large worlds, see `_FEW`."""
_FEW = 512
"""Ranks that ask the store, which is one process, every `_LOOK` seconds; twice as many ask half as often."""
_POLL = 0.01
_PATIENCE = 60.0
"""Seconds that ranks have to publish their count."""
_LINGER = 5.0
"""Seconds that rank 0, which may host the store, waits at exit for ranks that have not read the decision."""
_logger = logging.getLogger(__name__)


class Boundaries:
    """The number of boundaries that this rank has passed."""

    __slots__ = ("passed",)

    def __init__(self) -> None:
        self.passed = 0


@dataclass(frozen=True, slots=True)
class StopDecision:
    """The decision of all ranks.

    Attributes:
        stop_after: number of the boundary after which they stop; None: no consensus, training continues.
        reason: the signal and the rank that received it, or why there is no consensus.
    """

    stop_after: int | None
    reason: str


class StopConsensus:
    """This rank's participant in the consensus.

    Args:
        boundaries: counts the boundaries that this rank passed.
        rank: this rank.
        size: number of ranks.
        on_failure: called in a background thread if this rank received a stop request and no consensus is reached.

    Attributes:
        pending: whether ``should_stop()`` must be called. Read at every step; this is the whole cost per step.
        decision: None until it is made.
    """

    def __init__(
        self, boundaries: Boundaries, *, rank: int, size: int, on_failure: Callable[[], None]
    ) -> None:
        self.pending = False
        self.decision: StopDecision | None = None
        self._boundaries = boundaries
        self._rank = rank
        self._size = size
        self._on_failure = on_failure
        self._reason: str | None = None
        self._known = threading.Event()
        self._wake = threading.Event()
        self._closing = False
        self._posted = self._heard = self._posted_last = False
        self._look = _LOOK * max(1.0, size / _FEW)
        self._store: Store | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self, store: Store | None) -> None:
        """Start the background thread.

        Args:
            store: a dedicated connection with its own prefix; None in a world of one.
        """
        if store is None:
            return
        store.set_timeout(timedelta(seconds=10))  # no call here waits for a missing key
        # The n-th consensus of this process belongs to the n-th of every other process.
        store = self._store = prefixed(store, str(store.add(f"generation/{self._rank}", 1)))
        store.set(f"member/{self._rank}", json.dumps(process_identity()))
        self._thread = threading.Thread(target=self._run, args=(store,), name="accel-stop", daemon=True)
        self._thread.start()

    def request(self, reason: str) -> None:
        """Request that all ranks stop. Repeated requests have no effect.

        Must not be called from a signal handler, which may interrupt code that holds the locks used here.
        """
        if self.decision is not None:
            if self.decision.stop_after is None:
                self._on_failure()
            return
        self._reason = self._reason or reason
        if self._size == 1:
            self._decide(StopDecision(self._boundaries.passed + 1, self._reason))
        else:
            self._wake.set()

    def should_stop(self) -> bool:
        """Whether to stop now; blocks until the ranks have decided when."""
        self._known.wait()
        assert self.decision is not None
        stop_after = self.decision.stop_after
        return stop_after is not None and self._boundaries.passed >= stop_after

    def close(self) -> None:
        """Leave: this rank passes no further boundary, so the other ranks can decide without it."""
        if self._closing or os.getpid() != self._pid:  # a forked child is not a rank
            return
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_LINGER)
        if self._store is not None:
            try:
                self._announce_exit(self._store)
            except RuntimeError as error:  # the process that hosts the store exited first
                _logger.debug("could not announce the exit: %s", error)
            self._store = None
        if self.decision is None:
            self._decide(StopDecision(None, "training has ended"))

    def _announce_exit(self, store: Store) -> None:
        if getattr(sys, "last_value", None) is not None:
            return  # the program ends with an exception; the other ranks detect that this rank is gone
        self._post(store)
        if not self._heard:
            store.add("heard", 1)
        if self._rank == 0 and store.check(["asked"]):
            until = time.monotonic() + _LINGER
            while store.add("heard", 0) < self._size and time.monotonic() < until:
                time.sleep(_POLL)

    # --- the thread ---

    def _run(self, store: Store) -> None:
        decision = StopDecision(None, "the thread that communicates with the other ranks failed")
        try:
            while not self._wake.wait(self._look) and not store.check(["asked"]):
                pass
            if self._closing:
                decision = StopDecision(None, "training has ended")
                return
            self.pending = True  # before the count is read
            decision = self._agree(store)
        except RuntimeError as error:
            lost = str(error).partition("\n")[0]
            decision = StopDecision(None, f"the store, which rank 0 hosts, cannot be reached: {lost}")
        finally:
            self._decide(decision)
        if decision.stop_after is None:
            self._store = None
            if self._reason is not None:
                _logger.warning(
                    "accel: %s, but ranks cannot stop together: %s", self._reason, decision.reason
                )
                self._on_failure()
        elif self._rank == 0:
            _logger.warning(
                "accel: %s: all ranks stop after optimizer step %d of this run",
                decision.reason,
                decision.stop_after,
            )

    def _decide(self, decision: StopDecision) -> None:
        self.decision = decision
        self._known.set()
        self.pending = True

    def _post(self, store: Store) -> None:
        if not self._posted:
            self._posted = True
            store.set(f"passed/{self._rank}", str(self._boundaries.passed))
            self._posted_last = store.add("posted", 1) == self._size

    def _agree(self, store: Store) -> StopDecision:
        if self._reason is not None:
            store.compare_set("asked", "", self._reason)
        self._post(store)
        started = looked = time.monotonic()
        pause = _POLL
        while not store.check(["decision"]):
            found = self._count(store) if self._posted_last else None
            if found is None and time.monotonic() - looked > self._look:
                looked = time.monotonic()
                # The last one may have ended before it decided.
                found = self._count(store) or self._give_up(store, late=looked - started > _PATIENCE)
            if found is None:
                time.sleep(pause)
                pause = min(2 * pause, self._look)
            else:
                # The first decision written is final, so ranks also agree when they give up.
                store.compare_set("decision", "", json.dumps(asdict(found)))
        decision = StopDecision(**json.loads(store.get("decision")))
        self._heard = True
        store.add("heard", 1)
        return decision

    def _count(self, store: Store) -> StopDecision | None:
        return None if store.add("posted", 0) < self._size else self._highest(store)

    def _highest(self, store: Store) -> StopDecision:
        keys = [f"passed/{rank}" for rank in range(self._size)]
        return StopDecision(max(map(int, store.multi_get(keys))) + 1, store.get("asked").decode())

    def _give_up(self, store: Store, late: bool) -> StopDecision | None:
        """A decision without consensus, if a rank that has not published its count never will."""

        def process_of(rank: int) -> dict[str, Any] | None:
            key = f"member/{rank}"
            return json.loads(store.get(key)) if store.check([key]) else None

        for rank, process in ranks_here(self._rank, self._size, process_of):
            if has_ended(process) and not store.check([f"passed/{rank}"]):
                return StopDecision(None, f"rank {rank} is gone")
        if late:
            missing = [rank for rank in range(self._size) if not store.check([f"passed/{rank}"])]
            if not missing:  # a rank has ended before it was counted
                return self._highest(store)
            return StopDecision(
                None,
                f"ranks {missing} have not answered for {_PATIENCE:g} s; they may be stuck, or do not listen for "
                "signals as this one does",
            )
        return None
