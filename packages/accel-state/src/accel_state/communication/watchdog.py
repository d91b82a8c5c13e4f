"""A watchdog for collectives that do not complete.

One daemon thread per process. It answers queries of other ranks for the position of this rank, and queries them
when a collective of this rank has been waiting for a while. It uses its own store client and no collective. The only
cost per collective is recording the position (``WatchedGroup.position``).

There are two outcomes:

- a report, after ``report_after`` seconds and then at doubling intervals, printed by one of the waiting
  ranks: which ranks arrived, which did not, where they are, and the stacks of the absent ranks;
- an error on every waiting rank, immediately, once there is proof that the collective cannot complete: a rank is
  gone, or is in another collective at the same sequence number.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from accel_state.communication.signed_store import prefixed
from accel_state.communication.torch_collectives import (
    PendingCollective,
    Waits,
    cannot_meet,
    end_collectives,
    groups,
    issued,
    not_begun,
)
from accel_state.errors import AccelError, CollectiveMismatchError
from accel_state.host.process_identity import has_ended, process_identity
from accel_state.messages import module_of, say

__all__ = [
    "ENDED",
    "GRACE",
    "REPORT_AFTER",
    "RankStatus",
    "Watchdog",
    "WatchedGroup",
    "call_site",
    "diagnose",
    "error_site",
]

REPORT_AFTER = 30.0
"""Seconds that a collective may wait before it is reported."""

ENDED = ("exited", "destroyed its process group")
"""Reasons of a rank that left the world without an error."""

_LIBRARIES = frozenset(
    {
        "accel_state",
        "accel_ckpt",
        "accel_bigmodel",
        "accel_train",
        "accel_cli",
        "torch",
        "contextlib",
        "functools",
        "typing_extensions",  # wraps what torch deprecates
    }
)
_LOST = re.compile(
    r"Connection (?:closed|reset) by peer|caused pair closure|Broken pipe|NCCL (?:error|communicator)|remote process",
    re.IGNORECASE,
)
"""What gloo and NCCL say when another rank is gone, or when collectives were ended."""
_FEWER_STEPS = (
    "Usual causes: it makes fewer steps, because its data are shorter or because it leaves the loop earlier (break, an "
    "exception that the script catches, an early return)."
)
_OTHER_STEPS = (
    "Usual causes: ranks make different numbers of steps (data of different lengths, a break, or an exception that one "
    "rank catches), or only some ranks call a function in which all must take part (clip_grad_norm_, evaluation)."
)
GRACE = 1.0
"""Seconds to find out which rank caused a broken connection."""
_STACK_DEPTH = 16
_PATIENCE = timedelta(seconds=10)
"""Timeout of one store operation; no call here waits for a missing key."""
_logger = logging.getLogger(__name__)


class WatchedGroup(Protocol):
    """The collectives of one group, as the watchdog sees them."""

    name: str
    ranks: list[int]
    collective: bool
    """Whether all ranks must take part."""

    def position(self) -> tuple[int, str | None, int]:
        """Sequence number of the latest collective, its name until it completes, and the waiting thread."""

    def mark_failed(self, error: CollectiveMismatchError) -> None:
        """Record that the collective in progress cannot complete."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The last known position of one rank in one group.

    Attributes:
        rank: global rank.
        number: sequence number of its latest collective, from 1; None: the rank has not answered.
        operation: name of that collective while it is in progress.
        site: location of the call in user code, ``file:line``.
        gone: why the rank left the world; None if it has not.
        reach: how far it is in the collectives of each of its groups (``Channel.reach``).
        torch: the collectives of torch that it waits in, by group, if it has been there for a while.
        begun: collectives that it has begun in each of its groups.
        torch_site: where, ``file:line``.
    """

    rank: int
    number: int | None = None
    operation: str | None = None
    site: str | None = None
    gone: str | None = None
    reach: Mapping[str, Sequence[int]] = field(default_factory=dict)
    torch: Mapping[str, PendingCollective] = field(default_factory=dict)
    begun: Mapping[str, int] = field(default_factory=dict)
    torch_site: str | None = None

    def __str__(self) -> str:
        if self.number is None:
            return f"rank {self.rank}: no answer"
        if self.operation is not None:
            place = f"in {self.operation} (#{self.number}) at {self.site or 'an unknown line'}"
        elif self.torch:
            place = f"in {self.torch_words()}" + (f", after #{self.number}" if self.number else "")
        else:
            place = f"in no collective, after #{self.number}" if self.number else "in no collective so far"
        return f"rank {self.rank}: {place}" + (f"; gone: {self.gone}" if self.gone else "")

    def torch_words(self) -> str:
        """The collectives of torch that it waits in, and where."""
        return f"{' and '.join(map(str, self.torch.values()))} at {self.torch_site or 'an unknown line'}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Which ranks reached a collective, which did not, and the proof that it cannot complete, if any."""

    arrived: list[RankStatus]
    absent: list[RankStatus]
    proof: str | None


def diagnose(
    number: int, operation: str, peers: Iterable[RankStatus], begun: Mapping[str, int] | None = None
) -> Diagnosis:
    """Compare the positions of a group's ranks with a rank that waits in collective ``number``.

    Args:
        number: the collective's number.
        operation: its name.
        peers: the ranks of the group.
        begun: collectives of torch that the waiting rank has begun in each of its groups.
    """
    arrived: list[RankStatus] = []
    absent: list[RankStatus] = []
    proofs: list[str] = []
    for peer in peers:
        here = peer.number is not None and peer.number >= number
        (arrived if here else absent).append(peer)
        waiting = peer.number == number and peer.operation is not None
        if waiting and peer.operation != operation:
            proofs.append(f"rank {peer.rank} entered {peer.operation} instead")
        if not here and not_begun(peer.torch, begun or {}):
            proofs.append(f"rank {peer.rank} waits in {peer.torch_words()} instead")
        if peer.gone is not None and (waiting or not here):
            proofs.append(f"rank {peer.rank} is gone ({peer.gone})")
    return Diagnosis(arrived, absent, "; ".join(proofs) or None)


def error_site(error: BaseException) -> str | None:
    """``file:line`` of the innermost frame of a traceback that belongs to neither this project nor torch."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        if module_of(trace.tb_frame).partition(".")[0] not in _LIBRARIES:
            found = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def call_site(frame: FrameType | None) -> str | None:
    """``file:line`` of the innermost frame that belongs to neither this project nor torch."""
    while frame is not None:
        if module_of(frame).partition(".")[0] not in _LIBRARIES:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@dataclass
class _PendingCollective:
    """A collective that the watchdog has seen waiting."""

    number: int
    since: float
    last_poll: float = 0.0
    asked: bool = False
    reports: int = 0
    next_report: float = field(default=0.0)


class _World(NamedTuple):
    """All ranks, whatever their groups are."""

    name: str
    ranks: list[int]


class Watchdog:
    """The watchdog thread of this process.

    Args:
        store: a dedicated client of the world's store.
        rank: this process's global rank.
        size: number of ranks in the world.
        report_after: seconds until the first report; the interval doubles after each report.
        reach: how far this process is in the collectives of each of its groups.
        own_groups: names of groups that only ``WatchedGroup`` s use.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        report_after: float = REPORT_AFTER,
        *,
        reach: Callable[[], Mapping[str, Sequence[int]]] = dict,
        own_groups: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._base = store
        self._store: Store | None = None
        self._rank = rank
        self._size = size
        self._channels: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waits: dict[str, _PendingCollective] = {}
        self._known: set[int] = set()
        self._abandoned: dict[str, int] = {}
        self._rank_0_exit: str | None = None
        self._acknowledged = False
        self._answered = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._identity = process_identity()
        self.report_after = report_after
        self.reach = reach
        self._asked_lately = 0.0
        self._torch = Waits(own_groups)
        self._torch_wait: _PendingCollective | None = None
        self._verdict: str | None = None

    @property
    def poll_interval(self) -> float:
        """Seconds between two polls while no collective waits; a fifth of it otherwise."""
        return min(1.0, max(0.05, self.report_after / 4))

    def add(self, channel: WatchedGroup) -> None:
        """Watch a group's collectives; the first call starts the thread."""
        self._channels.add(channel)
        if self._thread is None:
            store = self._store = self._connect()
            self._thread = threading.Thread(target=self._run, args=(store,), name="accel-watch", daemon=True)
            self._thread.start()
            atexit.register(self._at_exit)

    def leave(self, reason: str | None) -> None:
        """Stop, and announce ``reason`` to the other ranks if this one leaves the world."""
        atexit.unregister(self._at_exit)
        if self._stop.is_set() or os.getpid() != self._identity["pid"]:  # a forked child is not a rank
            return
        self._stop.set()
        with self._lock:
            store, self._store = self._store, None
            if store is not None and reason is not None:
                try:
                    self._announce_exit(store, reason)
                except RuntimeError as error:  # the process that hosts the store exited first
                    _logger.debug("could not announce the exit: %s", error)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)

    def wait_for_others(self, channel: WatchedGroup) -> None:
        """Wait until the other ranks know that ``channel`` is abandoned, before connections break."""
        store = self._store
        if store is not None:
            try:
                self._wait_for(store, f"abandoned by/{channel.name}", self._abandoned.get(channel.name, 0))
            except RuntimeError as error:
                _logger.debug("the store is gone: %s", error)

    def all_live(self, channel: WatchedGroup) -> bool:
        """Whether a collective of ``channel`` was found impossible, and no rank of it was gone then."""
        return self._abandoned.get(channel.name) == len(channel.ranks)

    def ask(self, group: WatchedGroup) -> list[RankStatus]:
        """The known positions of a group's ranks; requests new ones, which ranks send within ``poll_interval``.

        Raises:
            RuntimeError: the store is gone, and with it the process that hosted it.
        """
        with self._lock:
            if self._store is None:
                raise RuntimeError(
                    self._rank_0_exit or "the process that hosted the store of this world is gone"
                )
            self._store.add("ask", 1)
            return self._peers(self._store, group)

    def explain(self, channel: WatchedGroup, grace: float) -> tuple[str | None, str]:
        """Find out why a collective of ``channel`` failed.

        Args:
            channel: the group.
            grace: seconds to wait for the final record of a rank.

        Returns:
            the proof, if any, and one line per rank.
        """
        number, operation, _ = channel.position()
        deadline = time.monotonic() + grace
        while True:
            try:
                with self._lock:
                    peers = self._peers(self._store, channel) if self._store is not None else []
            except RuntimeError as error:
                _logger.debug("the store is gone: %s", error)
                peers = []
            if not peers:
                return self._rank_0_exit or "the process that hosted the store of this world is gone", ""
            diagnosis = diagnose(number, operation or "", peers, issued())
            if diagnosis.proof is not None or time.monotonic() > deadline:
                return diagnosis.proof, "\n".join(f"  {peer}" for peer in peers)
            time.sleep(0.02)

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # set by the interpreter when an exception ends the program
        if error is None:
            self.leave("exited")
            return
        lost = _LOST.search(str(error)) is not None and not isinstance(
            error, AccelError
        )  # which explains itself
        why = self._explain_loss(error) if lost else None
        if why is not None:
            say(f"accel: {why}")
        told = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        self.leave(f"exited after {told} at {error_site(error) or 'an unknown line'}")

    def _explain_loss(self, error: BaseException) -> str | None:
        """Why a collective of torch lost its connections; None if no other rank is known to be the cause."""
        deadline = time.monotonic() + GRACE
        what = f"rank {self._rank} waited at {error_site(error) or 'an unknown line'}"
        while True:
            if self._verdict is not None:
                return self._verdict
            try:
                with self._lock:
                    if self._store is None:
                        return f"{what} for rank 0, which is gone" if self._rank else None
                    if self._store.check(["verdict/torch"]):
                        return self._store.get("verdict/torch").decode()
                    peers = self._peers(self._store, _World("torch", list(range(self._size))))
            except RuntimeError as lost:
                _logger.debug("the store is gone: %s", lost)
                return f"{what} for {self._rank_0_exit or 'rank 0, which is gone, and with it the store of this world'}"
            gone = [peer for peer in peers if peer.gone is not None and peer.rank != self._rank]
            if gone:
                ends = "; ".join(f"rank {peer.rank}, which is gone ({peer.gone})" for peer in gone)
                ended = all(peer.gone in ENDED for peer in gone)
                return f"{what} for {ends}" + (f". {_FEWER_STEPS}" if ended else "")
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)

    def _announce_exit(self, store: Store, reason: str) -> None:
        self._publish(store, gone=reason)
        if self._rank != 0:
            self._acknowledge_rank_0(store)
            return
        # The store usually ends with this process; later requests fail with broken connections.
        store.add("ask", 1)
        self._wait_for(store, "heard rank 0", self._size - 1)

    def _wait_for(self, store: Store, counter: str, count: int) -> None:
        deadline = time.monotonic() + 1.5 * self.poll_interval
        while store.add(counter, 0) < count and time.monotonic() < deadline:
            time.sleep(0.01)

    def _acknowledge_rank_0(self, store: Store) -> None:
        if not self._acknowledged:
            self._acknowledged = True
            store.add("heard rank 0", 1)

    # --- the thread ---

    def _run(self, store: Store) -> None:
        try:
            while not self._stop.wait(self._pause()):
                channels = list(self._channels)
                if not channels:
                    break
                with self._lock:
                    if self._stop.is_set():
                        return
                    if not dist.is_initialized():  # destroyed by the script itself
                        self._announce_exit(store, "destroyed its process group")
                        break
                    if not self._poll(store, channels):
                        break
                del channels  # this thread must not keep a group alive
            else:
                return  # `leave` still needs the store, to announce the exit
        except RuntimeError as error:
            # The store ends with the process that hosts it. A collective that waits for that process then fails
            # with a broken connection.
            _logger.debug("the collective watchdog lost its store: %s", error)
        self._store = None

    def _pause(self) -> float:
        """Seconds until the next poll."""
        alert = bool(self._waits) or time.monotonic() - self._asked_lately < 2 * self.poll_interval
        return self.poll_interval / 5 if alert else self.poll_interval

    def _connect(self) -> Store:
        self._base.set_timeout(_PATIENCE)
        # A second PartialState in this world must not read the records of the first.
        generation = self._base.add(f"generation/{self._rank}", 1)
        store = prefixed(self._base, str(generation))
        self._publish(store)
        return store

    def _poll(self, store: Store, channels: Sequence[WatchedGroup]) -> bool:
        """Answer queries, query other ranks, diagnose; False once rank 0, which hosts the store, is gone."""
        now = time.monotonic()
        asked = store.add("ask", 0)
        waiting = [
            (channel, wait) for channel in channels if (wait := self._waiting(channel, now)) is not None
        ]
        alone = False
        if asked != self._answered:
            self._answered = asked
            self._asked_lately = now
            store.set(f"stack/{self._rank}", _stack())
            self._publish(store)
            self._apply_verdicts(store, channels)
            self._apply_torch_verdict(store)
            alone = self._rank != 0 and self._rank_0_is_gone(store)
        for channel, wait in waiting:
            # Large groups are polled less often, because each poll reads the records of all ranks.
            if alone or now - wait.last_poll >= self.poll_interval / 5 * max(1.0, len(channel.ranks) / 64):
                wait.last_poll = now
                if wait.asked or alone:
                    self._investigate(store, channel, wait, now)
                wait.asked = True
                store.add("ask", 1)
        if not alone:
            self._look_at_torch(store, now, bool(waiting))
        if alone:
            self._acknowledge_rank_0(store)
        return not alone

    def _rank_0_is_gone(self, store: Store) -> bool:
        if not store.check(["rank/0"]):
            return False
        record = json.loads(store.get("rank/0"))
        if record["gone"]:
            self._rank_0_exit = f"rank 0 is gone ({record['gone']})"
        return bool(record["gone"])

    def _apply_verdicts(self, store: Store, channels: Sequence[WatchedGroup]) -> None:
        """Abandon collectives that another rank has proved impossible."""
        for channel in channels:
            key = f"verdict/{channel.name}"
            if channel.name not in self._abandoned and store.check([key]):
                verdict = json.loads(store.get(key))
                self._abandon(store, channel, verdict["text"], verdict["living"])

    def _abandon(self, store: Store, channel: WatchedGroup, text: str, living: int) -> None:
        self._abandoned[channel.name] = living
        store.add(f"abandoned by/{channel.name}", 1)
        channel.mark_failed(CollectiveMismatchError(text))
        if channel.collective and channel.position()[1] is None:
            # It waits in a collective of torch instead, and on a device no peer that gives up releases it.
            self._end_collectives_of_torch()

    def _waiting(self, channel: WatchedGroup, now: float) -> _PendingCollective | None:
        """The pending collective of ``channel``, if an earlier poll saw it too."""
        number, operation, _ = channel.position()
        wait = self._waits.get(channel.name)
        if operation is None:
            self._waits.pop(channel.name, None)
            return None
        if wait is None or wait.number != number:
            self._waits[channel.name] = _PendingCollective(number, now, next_report=self.report_after)
            return None
        return wait

    def _investigate(self, store: Store, channel: WatchedGroup, wait: _PendingCollective, now: float) -> None:
        number, operation, thread = channel.position()
        if number != wait.number or operation is None:
            return
        peers = self._peers(store, channel)
        diagnosis = diagnose(number, operation, peers, issued() if channel.collective else None)
        here = call_site(sys._current_frames().get(thread)) or "an unknown line"
        if diagnosis.proof is not None:
            listing = "\n".join(f"  {peer}" for peer in peers)
            elsewhere = any(peer.torch for peer in diagnosis.absent)
            text = (
                f"collective #{number}, {operation} at {here}, cannot complete: {diagnosis.proof}\n{listing}\n"
                f"Every rank must call the same collectives in the same order.{f' {_OTHER_STEPS}' if elsewhere else ''}"
            )
            living = sum(peer.gone is None for peer in peers)
            store.set(f"verdict/{channel.name}", json.dumps({"text": text, "living": living}))
            store.add("ask", 1)
            self._abandon(store, channel, text, living)
            return
        age = now - wait.since
        if age >= wait.next_report:
            wait.next_report = age * 2
            wait.reports += 1
            if store.add(f"report/{channel.name}/{number}/{wait.reports}", 1) == 1:
                self._report(store, f"collective #{number}, {operation} at {here}", age, diagnosis)

    # --- collectives that torch runs without this project ---

    def _look_at_torch(self, store: Store, now: float, watched: bool) -> None:
        """Report or end a wait in a collective of torch, unless this rank waits in one that is ``watched``."""
        found = self._torch.look(now, max(2.0, min(10.0, self.report_after / 2)))
        if not found or watched:
            self._torch_wait = None
            return
        first = next(iter(found.values()))
        wait = self._torch_wait
        if wait is None or wait.number != first.number:
            self._torch_wait = _PendingCollective(
                first.number, self._torch.since, next_report=self.report_after
            )
            store.add("ask", 1)
            return
        if self._verdict is not None or now - wait.last_poll < self.poll_interval:
            return
        wait.last_poll = now
        peers = self._peers(store, _World("torch", list(range(self._size))))
        begun = issued()
        others = [peer for peer in peers if peer.rank != self._rank]
        stuck = [peer for peer in others if cannot_meet(found, begun, peer.torch, peer.begun)]
        [mine] = [peer for peer in peers if peer.rank == self._rank]
        if stuck:
            self._refuse_torch(store, mine, stuck, peers)
        elif now - wait.since >= wait.next_report:
            wait.next_report = 2 * (now - wait.since)
            wait.reports += 1
            if store.add(f"report/torch/{next(iter(found))}/{first.number}/{wait.reports}", 1) == 1:
                arrived = [peer for peer in peers if peer.torch or peer.operation]
                absent = [peer for peer in peers if peer not in arrived]
                self._report(store, mine.torch_words(), now - wait.since, Diagnosis(arrived, absent, None))
        store.add("ask", 1)

    def _refuse_torch(
        self, store: Store, mine: RankStatus, stuck: Sequence[RankStatus], peers: Sequence[RankStatus]
    ) -> None:
        listing = "\n".join(f"  {peer}" for peer in peers)
        text = (
            f"{mine.torch_words()} cannot complete on rank {mine.rank}: "
            + "; ".join(f"rank {peer.rank} waits in {peer.torch_words()} instead" for peer in stuck)
            + f"\n{listing}\nEvery rank must call the same collectives in the same order. {_OTHER_STEPS}"
        )
        if store.add("refused torch", 1) == 1:
            store.set("verdict/torch", text)
            say(f"accel: {text}")
        store.add("ask", 1)

    def _apply_torch_verdict(self, store: Store) -> None:
        """End the collectives that cannot complete."""
        if self._verdict is None and store.check(["verdict/torch"]):
            self._verdict = store.get("verdict/torch").decode()
            self._end_collectives_of_torch()

    def _end_collectives_of_torch(self) -> None:
        """End the collective that this rank waits in, and those that are queued behind it in other groups."""
        if self._torch.look(time.monotonic(), 0.0):
            for group in groups():
                end_collectives(group)

    def _report(self, store: Store, what: str, age: float, diagnosis: Diagnosis) -> None:
        lines = [f"accel: rank {self._rank} has been waiting for {age:.1f} s in {what}"]
        lines += [f"  arrived: {peer}" for peer in diagnosis.arrived]
        for peer in diagnosis.absent:
            lines.append(f"  not arrived: {peer}")
            key = f"stack/{peer.rank}"
            if store.check([key]):
                lines.append(f"    stack of rank {peer.rank}:")
                lines += [f"    {line}" for line in store.get(key).decode().splitlines()]
        say("\n".join(lines))

    # --- records ---

    def _publish(self, store: Store, gone: str | None = None) -> None:
        # Rarely in the recorder, and not while collectives go on.
        torch = self._torch.look(time.monotonic(), 1.0) if gone is None else {}
        frames = sys._current_frames()
        try:
            at: dict[str, Any] = {}
            for channel in list(self._channels):
                number, operation, thread = channel.position()
                at[channel.name] = [number, operation, call_site(frames.get(thread)) if operation else None]
            torch_at = call_site(frames.get(threading.main_thread().ident or 0)) if torch else None
        finally:
            frames.clear()  # the frame of this call is among them: a cycle, with the variables of all threads in it
        record = {
            **self._identity,
            "at": at,
            "gone": gone,
            "reach": self.reach(),
            "torch": torch,
            "begun": issued() if torch else {},
            "torch at": torch_at,
        }
        store.set(f"rank/{self._rank}", json.dumps(record))

    def _peers(self, store: Store, channel: WatchedGroup | _World) -> list[RankStatus]:
        self._publish(store)
        unseen = [rank for rank in channel.ranks if rank not in self._known]
        self._known.update(rank for rank in unseen if store.check([f"rank/{rank}"]))
        ranks = [rank for rank in channel.ranks if rank in self._known]
        records = {
            rank: json.loads(text)
            for rank, text in zip(ranks, store.multi_get([f"rank/{rank}" for rank in ranks]), strict=True)
        }
        return [_peer(rank, channel.name, records.get(rank)) for rank in channel.ranks]


def _peer(rank: int, channel: str, record: dict[str, Any] | None) -> RankStatus:
    if record is None:
        return RankStatus(rank)
    number, operation, site = record["at"].get(channel, (0, None, None))
    gone = record["gone"]
    if gone is None and has_ended(record):
        gone = f"process {record['pid']} has ended"
    torch = {group: PendingCollective(*entry) for group, entry in record["torch"].items()}
    return RankStatus(
        rank, number, operation, site, gone, record["reach"], torch, record["begun"], record["torch at"]
    )


def _stack() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-_STACK_DEPTH:]) if frame is not None else "unknown"
