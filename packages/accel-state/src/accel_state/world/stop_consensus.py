"""All ranks stop after the same boundary, once one of them is told to stop.

A *boundary* is a point of the program that all ranks pass equally often, the end of an optimizer step. Each rank
counts those it has passed, and nothing else happens at one. When a rank is told to stop, each rank's thread here

1. sets ``asked``; from then on the question ``due()`` waits for the decision;
2. reads the rank's count and posts it, in the store of the world;
3. takes as the decision the highest count posted, plus one.

The answer is "stop" from the boundary of that number on. It is the same on all ranks at the same place of the
program, however often and by whomever it is asked: it depends on the count alone, and every answer that was given
without waiting was given before step 1, so at a count that is smaller than the decision. The decision waits for
threads only, never for a rank's program, which may stand in a collective until another rank comes on.

No lock is needed between the program and the thread: a boundary that is passed between 1 and 2 is posted or not,
and either way the next question waits.
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

from torch._C._distributed_c10d import PrefixStore, Store

from accel_state.host.process_identity import has_ended, process_identity

__all__ = ["Boundaries", "StopConsensus", "StopDecision"]

_LOOK = 0.5
"""Seconds between two looks whether another rank was told to stop."""
_POLL = 0.01
_PATIENCE = 60.0
"""Seconds that ranks get to post their count."""
_LINGER = 5.0
"""Seconds that rank 0, with which the store may end, waits at its end for ranks that have not read the decision."""
_logger = logging.getLogger(__name__)


class Boundaries:
    """The number of boundaries that this rank has passed."""

    __slots__ = ("passed",)

    def __init__(self) -> None:
        self.passed = 0


@dataclass(frozen=True, slots=True)
class StopDecision:
    """What all ranks have agreed on.

    Attributes:
        stop_after: number of the boundary after which they stop; None: they could not agree, and go on.
        reason: the signal and the rank that it came to, or why they could not agree.
    """

    stop_after: int | None
    reason: str


class StopConsensus:
    """One rank's part.

    Args:
        boundaries: the count.
        rank: this rank.
        size: number of ranks.
        on_failure: called in a thread when this rank was told to stop and the ranks cannot agree.

    Attributes:
        asked: whether ``due()`` has to be asked. Read at every step; it is all that a step costs.
        decision: None until there is one.
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
        self._posted = self._heard = False
        self._store: Store | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self, store: Store | None) -> None:
        """Begin to listen to the other ranks.

        Args:
            store: a connection that nothing else uses, under a prefix of its own; None in a world of one.
        """
        if store is None:
            return
        store.set_timeout(timedelta(seconds=10))  # nothing here waits for a key that is not there
        # The n-th agreement of this process is the n-th of every other one.
        store = self._store = PrefixStore(str(store.add(f"generation/{self._rank}", 1)), store)
        store.set(f"member/{self._rank}", json.dumps(process_identity()))
        self._thread = threading.Thread(target=self._run, args=(store,), name="accel-stop", daemon=True)
        self._thread.start()

    def request(self, reason: str) -> None:
        """Ask all ranks to stop. Repeats change nothing.

        Not to be called by a signal handler, which may interrupt whoever holds the locks in here.
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
        """Whether it is time to stop; waits until the ranks have agreed when."""
        self._known.wait()
        assert self.decision is not None
        stop_after = self.decision.stop_after
        return stop_after is not None and self._boundaries.passed >= stop_after

    def close(self) -> None:
        """Leave: the other ranks can agree without this one, which passes no further boundary."""
        if self._closing or os.getpid() != self._pid:  # a forked child is no rank
            return
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_LINGER)
        if self._store is not None:
            try:
                self._announce_exit(self._store)
            except RuntimeError as error:  # whoever kept the store has left before; nobody is to be told
                _logger.debug("could not say goodbye: %s", error)
            self._store = None
        if self.decision is None:
            self._decide(StopDecision(None, "training has ended"))

    def _announce_exit(self, store: Store) -> None:
        if getattr(sys, "last_value", None) is not None:
            return  # an exception ends the program; the others find that this rank is gone
        self._post(store)
        if not self._heard:
            store.add("heard", 1)
        if self._rank == 0 and store.check(["asked"]):
            until = time.monotonic() + _LINGER
            while store.add("heard", 0) < self._size and time.monotonic() < until:
                time.sleep(_POLL)

    # --- the thread ---

    def _run(self, store: Store) -> None:
        decision = StopDecision(None, "the thread that talks to the other ranks has failed")
        try:
            while not self._wake.wait(_LOOK) and not store.check(["asked"]):
                pass
            if self._closing:
                decision = StopDecision(None, "training has ended")
                return
            self.pending = True  # before the count is read
            decision = self._agree(store)
        except RuntimeError as error:
            lost = str(error).partition("\n")[0]
            decision = StopDecision(None, f"the store, which rank 0 keeps, cannot be reached: {lost}")
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

    def _agree(self, store: Store) -> StopDecision:
        if self._reason is not None:
            store.compare_set("asked", "", self._reason)
        self._post(store)
        started = looked = time.monotonic()
        while not store.check(["decision"]):
            found = self._count(store)
            if found is None and time.monotonic() - looked > _LOOK:
                looked = time.monotonic()
                found = self._give_up(store, late=looked - started > _PATIENCE)
            if found is None:
                time.sleep(_POLL)
            else:
                # The first one written is everybody's, so ranks also agree about having given up.
                store.compare_set("decision", "", json.dumps(asdict(found)))
        decision = StopDecision(**json.loads(store.get("decision")))
        self._heard = True
        store.add("heard", 1)
        return decision

    def _count(self, store: Store) -> StopDecision | None:
        keys = [f"passed/{rank}" for rank in range(self._size)]
        if not store.check(keys):
            return None
        return StopDecision(max(map(int, store.multi_get(keys))) + 1, store.get("asked").decode())

    def _give_up(self, store: Store, late: bool) -> StopDecision | None:
        """Whether a rank that has not posted will never do so."""
        missing = [rank for rank in range(self._size) if not store.check([f"passed/{rank}"])]
        for rank in missing:
            ended = store.check([f"member/{rank}"]) and has_ended(json.loads(store.get(f"member/{rank}")))
            if ended and not store.check([f"passed/{rank}"]):
                return StopDecision(None, f"rank {rank} is gone")
        if missing and late:
            return StopDecision(
                None,
                f"ranks {missing} have not answered for {_PATIENCE:g} s; they may be stuck, or were not asked to "
                "listen for signals as this one was",
            )
        return None
