"""The communication channel of one process group: compare fingerprints, transfer bytes, wait.

On the CPU every collective starts with an exchange of one small block of fixed size per rank (``blocks.py``). The block
holds a fingerprint of the call (operation, arguments, structure, dtypes, shapes) and, if it fits, the data itself. So
ranks detect a mismatch before any message of unequal size is sent, and a small collective needs only this block.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from types import FrameType, TracebackType
from typing import Any, Literal, NoReturn, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from accel_state.communication.blocks import BlockPlan, Blocks
from accel_state.communication.serialization import aligned
from accel_state.communication.torch_collectives import (
    all_gather_single,
    break_connections,
    counters,
    end_collectives,
    hold_outside_python,
)
from accel_state.communication.watchdog import GRACE, REPORT_AFTER, Watchdog, WatchedGroup, call_site
from accel_state.errors import CollectiveMismatchError, ConfigError, DistributedOperationException, StateError
from accel_state.messages import first_line
from accel_state.trees import TreeSpec

__all__ = ["Channel", "Channels", "CheckMode", "CheckSettings", "RankPayloads", "fingerprint"]

CheckMode = Literal["auto", "on", "off"]

_LOCAL_ERROR = 1
_PLANS = 256
"""Plans that are kept; a script calls collectives with few different shapes."""
_TEXT = 4096
"""Bytes available to each rank to describe its call when ranks disagree."""
_logger = logging.getLogger(__name__)

Compared = Callable[[Sequence[int], str, int, str], None]
"""Called with the group's ranks, the operation, its fingerprint, and a description of this rank's input."""


class CheckSettings:
    """Which collectives are checked, and when a stuck one is reported.

    Attributes:
        mode: "on": compare fingerprints before every collective; "off": only where it is free; "auto": on
            for CPU tensors, off for tensors on a device, where the host would have to wait for the comparison.
        report_after: seconds until a stuck collective is reported; 0: no watchdog.
    """

    __slots__ = ("mode", "report_after")

    def __init__(self, mode: str = "auto", report_after: float = REPORT_AFTER) -> None:
        if mode not in get_args(CheckMode):
            raise ConfigError(
                f"collective checks are {mode!r}; expected one of {', '.join(get_args(CheckMode))}"
            )
        if not (math.isfinite(report_after) and report_after >= 0):
            raise ConfigError(
                f"report_after is {report_after!r}; expected a finite number of seconds of at least 0"
            )
        self.mode = mode
        self.report_after = report_after


class RankPayloads:
    """One payload per rank, as bytes; valid until the next exchange on the channel."""

    __slots__ = ("sizes", "table")

    def __init__(self, table: Tensor, sizes: Sequence[int]) -> None:
        self.table = table
        """uint8, (ranks, at least the largest size)"""
        self.sizes = sizes

    def __getitem__(self, index: int) -> Tensor:
        return self.table[index, : self.sizes[index]]

    def raw(self, index: int) -> bytearray:
        """A copy of one payload as plain bytes."""
        row = self[index]
        copy = bytearray(row.numel())
        if copy:
            torch.frombuffer(copy, dtype=torch.uint8).copy_(row)
        return copy


class Channel:
    """The collectives of one process group on this rank.

    Args:
        group: the process group.
        device: device of the payloads if the group cannot transfer CPU tensors.
        settings: which collectives are checked.
        watchdog: the watchdog of this process, if the world has a store.
        wire: a group of the same ranks that nothing else uses, through which all is sent; None: ``group``. With such a
            group, messages of torch's collectives, such as DDP's, are never mistaken for those of this channel, even if
            a rank skips one.
        compared: called before every exchange of a rehearsal, where other ranks are simulated; None in a real world.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        settings: CheckSettings,
        watchdog: Watchdog | None,
        wire: dist.ProcessGroup | None = None,
        compared: Compared | None = None,
    ) -> None:
        self.group = group
        self.wire = group if wire is None else wire
        self.collective = True
        self._compared = compared
        self.name = str(group.group_name)
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.rank = self.ranks.index(dist.get_rank())
        self.size = len(self.ranks)
        self.count = torch.tensor(float(self.size), device="cpu")
        """Number of ranks; torch divides by it in a quarter of the time that it takes to divide by a number."""
        config = str(dist.get_backend_config(group))
        self._backends = dict(part.split(":", 1) for part in config.split(","))
        self.device = torch.device("cpu") if "cpu" in self._backends else device
        self.settings = settings
        self.failure: DistributedOperationException | None = None
        self._fatal_error: CollectiveMismatchError | None = None
        self._position: tuple[int, str | None, int] = (0, None, 0)
        self._counters = counters(group)
        self._issued_before = self._issued()
        self._entering = ""
        self._vacant = threading.Lock()
        """Held while a thread is in a collective. No thread waits for it."""
        self._in_message = False
        self._streams = 0
        self._pending: deque[tuple[int, str, dist.Work]] = deque(maxlen=256)
        self._blocks = Blocks(self.wire, self._backends.get("cpu", ""))
        self.plans: dict[Hashable, BlockPlan] = {}
        self._held: Any = None
        self.watchdog = watchdog
        self._patience = timedelta(seconds=0.2)
        self.apply(settings)
        if watchdog is not None:
            watchdog.add(self)

    def apply(self, settings: CheckSettings) -> None:
        """Apply new settings; they must be the same on every rank."""
        self.settings = settings
        self.check_cpu = settings.mode != "off"
        self.check_device = settings.mode == "on"
        self.plans.clear()
        if self.watchdog is not None:
            self.watchdog.report_after = settings.report_after or math.inf
            self._patience = timedelta(seconds=self.watchdog.poll_interval / 5)

    def checked(self, device: torch.device) -> bool:
        """Whether collectives of tensors on ``device`` start with an exchange of fingerprints."""
        kind = device.type
        on_cpu = kind == "cpu" if kind in self._backends else self.device.type == "cpu"
        return self.check_cpu if on_cpu else self.check_device

    def carrier(self, device: torch.device) -> torch.device:
        """The device on which this group transfers tensors of ``device``."""
        return device if device.type in self._backends else self.device

    def next_stream(self) -> int:
        """The number of a new stream of messages, from 1; the same on all ranks that begin the same streams."""
        self._streams += 1
        return self._streams

    @property
    def rehearsed(self) -> bool:
        """Whether the other ranks are simulated: each is assumed to send what this rank sends."""
        return self._compared is not None

    # --- position of this rank; read by the watchdog ---

    def operation(self, name: str) -> Channel:
        """``with channel.operation("gather"):`` encloses one collective."""
        self.raise_failure()
        self._entering = name
        return self

    def __enter__(self) -> Channel:
        if not self._vacant.acquire(blocking=False):
            raise self._occupied()
        self._position = (self._position[0] + 1, self._entering, threading.get_ident())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._position = (self._position[0], None, 0)
        self._issued_before = self._issued()
        self._vacant.release()

    def _occupied(self) -> StateError:
        """The error for a thread that enters a collective while another is in one, and could get its data."""
        number, operation, ident = self._position
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        here = threading.get_ident()
        mine = call_site(_frame(here)) or "an unknown line"
        other = call_site(_frame(ident)) or "an unknown line"
        return StateError(
            f"thread {names.get(here, here)!r} calls {self._entering} at {mine} while thread "
            f"{names.get(ident, ident)!r} is in {operation} (#{number}) at {other}, in the same group. Ranks match "
            "collectives by their order, and two threads have no order. Call them from one thread, or give each thread "
            "a group of its own: group=torch.distributed.new_group()"
        )

    def raise_failure(self) -> None:
        """Raise if a collective of this group has failed, after which no other can succeed."""
        if self.failure is not None:
            raise self.failure
        if self._fatal_error is not None:
            raise self._abort(self._fatal_error)

    def reach(self) -> tuple[int, int]:
        """Number of collectives entered, and how many others the backend has been given since the last of them.

        The others are those of torch and of the script, such as DDP's. A rank that has reached further than this one
        waits for it, or will, because a collective needs all ranks.
        """
        return self._position[0], self._issued() - self._issued_before

    def _issued(self) -> int:
        counted = 0
        for counter in self._counters:
            counted += counter._get_sequence_number_for_group()
        return counted

    def position(self) -> tuple[int, str | None, int]:
        """See ``accel_state.communication.watchdog.WatchedGroup``."""
        position = self._position
        if position[1] is None:
            # On a device the host only issues a collective and continues.
            self.release_completed()
            if self._pending:
                number, name, _ = self._pending[0]
                return number, name, threading.main_thread().ident or 0
        return position

    def release_completed(self) -> None:
        """Release the tensors of collectives that are done, which are kept until somebody looks."""
        with contextlib.suppress(IndexError, ValueError):  # the watchdog does the same in its thread
            while (first := self._pending[0])[2].is_completed():
                self._pending.remove(first)

    def mark_failed(self, error: CollectiveMismatchError) -> None:
        """See ``accel_state.communication.watchdog.WatchedGroup``."""
        self._fatal_error = error
        if self._in_message and self.device.type == "cpu":
            if self.watchdog is not None:
                self.watchdog.wait_for_others(self)
            break_connections(self.wire)  # wakes the thread that waits for a message, through a timeout
        elif self.device.type != "cpu" or self._pending:
            self._abort(error)  # the host may be waiting for the device: release it

    # --- exchanges ---

    def barrier(self) -> None:
        """Wait until every rank of the group has called this."""
        with self.operation("wait_for_everyone"):
            self.exchange("wait_for_everyone", str)

    def exchange(
        self,
        key: Hashable,
        describe: Callable[[], str],
        payload: Tensor | None = None,
        *,
        source: int | None = None,
        local_error: BaseException | None = None,
    ) -> RankPayloads:
        """Compare the calls of all ranks, and share one payload of bytes per rank.

        Args:
            key: must be equal on all ranks: operation, arguments, structure.
            describe: returns a description of this rank's input; called only if ranks disagree.
            payload: uint8, 1-D, of any size.
            source: the only group rank with a payload; a large one is broadcast.
            local_error: an error in this rank's input: all ranks raise.

        Raises:
            CollectiveMismatchError: keys differ, on every rank.
            BaseException: ``local_error``, on the rank that passed it.
        """
        size = 0 if payload is None else payload.numel()
        blocks = self._blocks
        if payload is not None:
            blocks.put(payload)
        # In a large group payloads follow the blocks, unless marks say that all are equal, as where ranks compare.
        marked = payload is not None and not blocks.capacity
        mark = _mark(payload.numpy().tobytes()) if payload is not None and marked else 0
        agree = self._meet(fingerprint(key), size, describe, local_error, mark)
        if agree or blocks.same_size():
            sizes = [size] * self.size
        elif source is not None:
            sizes = [blocks.largest() if rank == source else 0 for rank in range(self.size)]
        else:
            sizes = blocks.sizes() or self._sizes(size)
        if payload is not None and marked and agree:
            return RankPayloads(payload.expand(self.size, size), sizes)
        largest = max(sizes)
        if largest <= blocks.capacity:
            return RankPayloads(blocks.payloads, sizes)
        return RankPayloads(self._share(payload, largest, source), sizes)

    def agree(self, key: Hashable, value: bytes) -> bool:
        """Whether all ranks give the same bytes; costs a rank the same in a group of any size.

        Args:
            key: must be equal on all ranks.
            value: of any size; ranks compare a digest of 64 bits.

        Raises:
            CollectiveMismatchError: keys differ, on every rank.
        """
        return self._meet(fingerprint(key), 0, str, None, _mark(value)) or self._blocks.same_mark()

    def gather_to_first(self, key: Hashable, payload: Tensor) -> list[Tensor] | None:
        """The payloads of all ranks, on the first rank of the group; None on the others.

        Args:
            key: must be equal on all ranks.
            payload: uint8, 1-D, of any size.

        Raises:
            CollectiveMismatchError: keys differ, on every rank.
        """
        self._meet(fingerprint(key), payload.numel(), str, None)
        if self.rehearsed:
            return [payload] * self.size if self.rank == 0 else None
        row = _with_size(payload, self._blocks.largest())
        on_device = row.to(self.device)
        rows = [torch.empty_like(on_device) for _ in range(self.size)] if self.rank == 0 else None
        work = dist.gather(on_device, rows, self.ranks[0], group=self.wire, async_op=True)
        self.wait(work, on_device, *(rows or ()))
        if rows is None:
            return None
        return [row[8 : 8 + int(row[:8].view(torch.int64))] for row in (row.cpu() for row in rows)]

    def _sizes(self, size: int) -> list[int]:
        """Bytes of the payloads of all ranks of a large group, in which blocks do not tell them."""
        table = torch.empty((self.size, 1), dtype=torch.int64, device="cpu")
        self._all_gather_on_device(table, torch.tensor([size], dtype=torch.int64, device="cpu"))
        found: list[int] = table.view(-1).tolist()
        return found

    def plan(self, key: Hashable, tensors: Sequence[tuple[torch.dtype, torch.Size]] | None) -> BlockPlan:
        """How calls with ``key`` exchange their tensors, for ``meet``; kept in ``plans``.

        Args:
            key: must be equal on all ranks: operation, arguments, structure, dtypes and shapes.
            tensors: dtypes and shapes of tensors in host memory; None: they are elsewhere.
        """
        if len(self.plans) >= _PLANS:
            self.plans.clear()
        plan = self.plans[key] = self._blocks.plan(fingerprint(key), tensors)
        return plan

    def meet(self, plan: BlockPlan, describe: Callable[[], str]) -> None:
        """Compare the calls of all ranks, and exchange the data in the places of ``plan``.

        Raises:
            CollectiveMismatchError: keys differ, on every rank.
        """
        self._meet(plan.fingerprint, plan.size, describe, None)

    def _meet(
        self,
        call: int,
        size: int,
        describe: Callable[[], str],
        local_error: BaseException | None,
        mark: int = 0,
    ) -> bool:
        """Exchange blocks of the same call; returns whether payloads are of one size as well, and marks equal."""
        if self._compared is not None:
            self._compared(self.ranks, self._position[1] or "", call, describe())
        blocks = self._blocks
        blocks.write(call, size, 0 if local_error is None else _LOCAL_ERROR, mark)
        if self.device.type == "cpu":
            blocks.exchange(self._wait)
        else:
            blocks.exchange_by(self._all_gather_on_device, self._largest_on_device)
        agree = blocks.agree()
        if local_error is not None or not (agree or blocks.same_call()):
            self._raise_mismatch(describe, local_error)
        return agree

    def _share(self, payload: Tensor | None, largest: int, source: int | None) -> Tensor:
        mine = torch.zeros(largest, dtype=torch.uint8, device=self.device)
        if payload is not None:
            mine[: payload.numel()] = payload.to(self.device)
        if source is not None:
            self.wait(dist.broadcast(mine, self.ranks[source], group=self.wire, async_op=True), mine)
            return mine.expand(self.size, largest)
        table = torch.empty((self.size, largest), dtype=torch.uint8, device=self.device)
        self.all_gather_into(table, mine)
        return table

    def _all_gather_on_device(self, table: Tensor, row: Tensor) -> None:
        """All-gather tensors in host memory, through the device if the group needs it."""
        if self.device.type == "cpu":
            self.all_gather_into(table, row)
            return
        on_device = torch.empty(table.shape, dtype=table.dtype, device=self.device)
        self.all_gather_into(on_device, row.to(self.device))
        table.copy_(on_device)
        if self.failure is not None:  # reported by the watchdog; the copied values are invalid
            raise self.failure

    def _largest_on_device(self, numbers: Tensor) -> Tensor:
        """The largest of the numbers of all ranks, one by one."""
        found = numbers.to(self.device)
        self.wait(dist.all_reduce(found, dist.ReduceOp.MAX, group=self.wire, async_op=True), found)
        largest = found.cpu()
        if self.failure is not None:  # reported by the watchdog; the copied values are invalid
            raise self.failure
        return largest

    def all_gather_into(self, table: Tensor, row: Tensor) -> None:
        """Fill ``table`` (ranks times the size of ``row``) with the contiguous ``row`` of every rank."""
        everything, mine = table.view(-1), row.view(-1)
        work = all_gather_single(everything, mine, group=self.wire, async_op=True)
        self.wait(work, mine, everything)

    # --- waiting and failing ---

    def wait(self, work: dist.Work, *tensors: Tensor) -> None:
        """Wait for ``work`` on ``tensors``; on a device, make the current stream wait."""
        if tensors[0].device.type != "cpu":
            work.wait()
            self._pending.append((self._position[0], self._position[1] or "", work))
        else:
            self._held = hold_outside_python(*tensors)
            self._wait(work)

    def _wait(self, work: dist.Work) -> None:
        while True:
            try:
                work.wait(self._patience)
            except RuntimeError as error:
                if work.is_completed():
                    if self._succeeded(work):
                        return
                    raise self._collective_error(error) from error
                if self._fatal_error is not None:
                    if self.watchdog is not None:
                        self.watchdog.wait_for_others(self)
                    raise self._abort(self._fatal_error) from None
            except (
                BaseException
            ):  # Ctrl-C, or an exception from a signal handler: this rank abandons the collective
                self._abort(DistributedOperationException(f"{self._position[1]} was interrupted"))
                raise
            else:
                return

    @staticmethod
    def _succeeded(work: dist.Work) -> bool:
        """Whether a completed work succeeded; it may have completed just after a timeout."""
        try:
            work.wait()
        except RuntimeError:
            return False
        return True

    def wait_message(self, work: dist.Work, tensor: Tensor) -> None:
        """Wait for a message from or to one rank.

        Gloo does not allow a second wait after a timeout: a timeout breaks the group's connections.
        """
        self._in_message = True
        try:
            work.wait()
        except RuntimeError as error:
            raise self._collective_error(error) from error
        finally:
            self._in_message = False
        if tensor.device.type != "cpu":
            self._pending.append((self._position[0], self._position[1] or "", work))

    def _collective_error(self, error: RuntimeError) -> DistributedOperationException:
        """The error for a failed collective."""
        if self._fatal_error is not None:
            return self._abort(self._fatal_error)
        number, operation, thread = self.position()
        what = f"collective #{number}, {operation} at {call_site(_frame(thread))}"
        if self.watchdog is None:
            failure = DistributedOperationException(f"{what}, failed: {error}")
        else:
            proof, listing = self.watchdog.explain(self, GRACE)
            kind = CollectiveMismatchError if proof else DistributedOperationException
            failure = kind(f"{what}, failed: {proof or first_line(error)}\n{listing}")
        return self._abort(failure)

    def _abort(self, failure: DistributedOperationException) -> DistributedOperationException:
        """Abort the group's pending work, which would otherwise keep this process from exiting."""
        if self.failure is None:
            self.failure = failure
            atexit.register(_leave_world)
            self.wire.abort()
            if self.wire is self.group:
                return failure
            # Torch's collectives, in which other ranks may wait for this one. Reaching a rank that is gone would take
            # minutes where gloo has not connected to it yet.
            if self._issued() and self.watchdog is not None and self.watchdog.all_live(self):
                end_collectives(self.group)
            else:
                self.group.abort()
        return failure

    def _raise_mismatch(self, describe: Callable[[], str], local_error: BaseException | None) -> NoReturn:
        site = call_site(_frame(threading.get_ident()))
        words = f"{type(local_error).__name__}: {local_error}" if local_error is not None else describe()
        text = f"{self._position[1]} at {site}{words and ': '}{words}".encode()
        if len(text) > _TEXT:
            text = text[: _TEXT - 4] + " …".encode()
        mine = torch.zeros(_TEXT, dtype=torch.uint8, device="cpu")
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        table = torch.empty((self.size, _TEXT), dtype=torch.uint8, device="cpu")
        self._all_gather_on_device(table, mine)
        if local_error is not None:
            raise local_error
        lines = [
            f"  rank {rank}: {bytes(row.tolist()).rstrip(bytes(1)).decode(errors='replace')}"
            for rank, row in zip(self.ranks, table, strict=True)
        ]
        raise CollectiveMismatchError(
            f"ranks disagree about collective #{self._position[0]}:\n"
            + "\n".join(lines)
            + "\nEvery rank must call the same collectives in the same order, with tensors of equal "
            "structure, dtype and shape (gather with ragged=True takes first dimensions of any size)."
        )


def _with_size(payload: Tensor, largest: int) -> Tensor:
    """A payload behind its size, in a row that has room for the largest."""
    row = torch.zeros(8 + aligned(largest), dtype=torch.uint8, device="cpu")
    row[:8].view(torch.int64)[0] = payload.numel()
    row[8 : 8 + payload.numel()] = payload
    return row


class Channels:
    """The channels of this process, one per group, and their watchdog.

    Args:
        rank: this process's rank in the world.
        size: number of ranks in the world.
        device: device of this process.
        store: a dedicated client of the world's store; None: no watchdog.
        settings: which collectives are checked, and when a stuck one is reported.
        wire: see ``Channel``, for all ranks.
        compared: see ``Channel``.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        device: torch.device,
        store: Store | None,
        settings: CheckSettings,
        wire: dist.ProcessGroup | None = None,
        compared: Compared | None = None,
    ) -> None:
        self._device = device
        self._wire = wire
        self._compared = compared
        self._settings = settings
        self._place = (store, rank, size)
        self._by_name: dict[str, Channel] = {}
        self._latest: Channel | None = None
        self._watchdog = self._make_watchdog()
        self._watched: list[WatchedGroup] = []
        self.of(None)

    def _make_watchdog(self) -> Watchdog | None:
        store, rank, size = self._place
        seconds = self._settings.report_after
        if store is None or seconds == 0:
            return None
        own = () if self._wire is None else (str(self._wire.group_name),)
        return Watchdog(store, rank, size, seconds, reach=self._reach, own_groups=lambda: own)

    def _reach(self) -> Mapping[str, tuple[int, int]]:
        return {name: channel.reach() for name, channel in list(self._by_name.items())}

    def in_progress(self) -> list[str]:
        """The collectives that this process is in, one line for each group, with the call in user code."""
        found = []
        for channel in list(self._by_name.values()):
            number, operation, thread = channel.position()
            if operation is not None:
                site = call_site(_frame(thread)) or "an unknown line"
                found.append(f"{operation} (#{number}) at {site}")
        return found

    def release_completed(self) -> None:
        """See `Channel.release_completed`, for all groups."""
        for channel in list(self._by_name.values()):
            channel.release_completed()

    @property
    def watchdog(self) -> Watchdog | None:
        """The watchdog, which knows where the other ranks are; None if it is off."""
        return self._watchdog

    def watch(self, group: WatchedGroup) -> None:
        """Have the watchdog, now or once there is one, report operations of ``group`` that wait."""
        self._watched.append(group)
        if self._watchdog is not None:
            self._watchdog.add(group)

    def of(self, group: dist.ProcessGroup | None) -> Channel | None:
        """The channel of ``group`` (None: all ranks), or None if the group has one rank.

        Raises:
            StateError: the process group is gone.
            ConfigError: this process is not in ``group``.
        """
        group = dist.group.WORLD if group is None else group
        latest = self._latest
        if latest is not None and latest.group is group:
            return latest
        if not isinstance(group, dist.ProcessGroup):
            if group is None:
                raise StateError("the process group has been destroyed; collectives need a new PartialState")
            raise ConfigError(
                "this process is not a member of the group that was passed; call the collective on members only"
            )
        name = str(group.group_name)
        channel = self._by_name.get(name)
        if channel is None or channel.group is not group:
            if group.size() == 1:
                return None
            channel = Channel(
                group,
                device=self._device,
                settings=self._settings,
                watchdog=self._watchdog,
                wire=self._wire if group is dist.group.WORLD else None,
                compared=self._compared,
            )
            self._by_name[name] = channel
        self._latest = channel
        return channel

    def configure(self, mode: str | None, report_after: float | None) -> None:
        """Change the settings of all existing and future groups."""
        now = self._settings
        self._settings = CheckSettings(
            now.mode if mode is None else mode, now.report_after if report_after is None else report_after
        )
        if self._watchdog is None:
            self._watchdog = self._make_watchdog()
            if self._watchdog is not None:
                for group in self._watched:
                    self._watchdog.add(group)
        for channel in self._by_name.values():
            if channel.watchdog is None and self._watchdog is not None:
                channel.watchdog = self._watchdog
                self._watchdog.add(channel)
            channel.apply(self._settings)

    def close(self, reason: str | None) -> None:
        """Stop the watchdog; announce ``reason`` to the other ranks if this one leaves the world."""
        if self._watchdog is not None:
            self._watchdog.leave(reason)


def _mark(value: bytes) -> int:
    """A digest of 64 bits, signed."""
    return int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "little", signed=True)


def fingerprint(key: Hashable) -> int:
    """A 64-bit digest of ``key``: equal in all processes for equal keys."""
    return _digest(key)


@lru_cache(maxsize=4096)
def _digest(key: Hashable) -> int:
    return int.from_bytes(hashlib.blake2b(_canonical_text(key).encode(), digest_size=8).digest(), "little")


def _canonical_text(key: Any) -> str:
    """A text form that depends on values and type names only, never on addresses."""
    if isinstance(key, TreeSpec):
        return f"{_canonical_text(key.kind)}{_canonical_text(key.outline)}{_canonical_text(key.children)}"
    if isinstance(key, tuple | list):
        return f"({','.join(map(_canonical_text, key))})"
    if isinstance(key, type):
        return f"{key.__module__}.{key.__qualname__}"
    if isinstance(key, int | float) and key == key // 1:
        # Digests are cached by equality, so equal keys (True, 1 and 1.0) need the same text.
        return repr(int(key))
    if key is None or isinstance(key, str | float | bytes | torch.dtype):
        return repr(key)
    return f"{type(key).__module__}.{type(key).__qualname__}"


def _frame(thread: int) -> FrameType | None:
    return sys._current_frames().get(thread)


def _leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
