"""How ranks agree while they train: through the world's store, never in a collective of the training."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from accel_ckpt.coordination.ranks import Coordinator
from accel_ckpt.errors import CheckpointError, CheckpointSaveError
from accel_ckpt.format import tagged_json
from accel_ckpt.format.forms import check_form
from accel_ckpt.format.reader import parse_json
from accel_state.errors import UntrustedMessageError
from accel_state.host.process_identity import has_ended, process_identity, ranks_here
from accel_state.world.process import PartialState

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["StoreCoordinator", "in_background"]

_WHO = {"machine": (None, str), "pid": int, "born": (None, str)}
_PATIENCE = 30 * 60.0  # seconds to wait for the slowest rank, as in torch's collectives
_LOOK = 1.0  # seconds between two looks at who is still there
_LAST_WORDS = 10.0  # seconds that rank 0 keeps the store for ranks that have not read how the save ended


def in_background(name: str, ranks: Coordinator, stopped: Callable[[], str | None]) -> Coordinator:
    """The same ranks, which agree in threads of theirs while they train.

    Args:
        name: what they do, the same on all ranks and of no other work.
        ranks: the ranks in their training.
        stopped: returns why this rank gives up; None while it goes on.

    Returns:
        The ranks through the world's store; ``ranks`` if there is one, or the process group has no store.
    """
    store = PartialState().connect(f"accel/{name}") if ranks.world_size > 1 else None
    return ranks if store is None else StoreCoordinator(store, ranks, stopped)


class StoreCoordinator:
    """The ranks of one save, each in a thread of its own.

    Args:
        store: a connection that nothing else uses, for keys of this save alone.
        ranks: the same ranks in their training.
        stopped: returns why this rank gives up; None while it goes on.
    """

    def __init__(
        self, store: Store, ranks: Coordinator, stopped: Callable[[], str | None] = lambda: None
    ) -> None:
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self.local_rank = ranks.local_rank
        self._store = store
        self._stopped = stopped
        self._round = 0
        store.set_timeout(timedelta(seconds=_LAST_WORDS))  # no key is asked for that is not there
        store.set(f"who/{self.rank}", json.dumps(process_identity()))

    def exchange(self, value: Any) -> list[Any]:
        """Give plain data to all ranks; returns what each gave, in rank order. Equal values are not read.

        Every program that reaches the store can write to it. So values are plain data, and reading them runs no code.

        Raises:
            CheckpointSaveError: a rank has ended or given up, does not answer, or the store is gone.
            CorruptCheckpointError: an answer in the store is not plain data.
            UnsupportedValueError: the value is more than plain data.
        """
        with self._next_round():
            text = json.dumps(tagged_json.encode(value))
            mark = hashlib.blake2b(text.encode()).hexdigest()
            if self._store.compare_set(f"{self._round}/mark", "", mark).decode() != mark:
                self._store.add(f"{self._round}/different", 1)
            self._give(text)
            self._wait_for(f"{self._round}/all")
            if self._store.add(f"{self._round}/different", 0) == 0:
                return [value] * self.world_size
            return self._answers()

    def gather(self, value: Any) -> list[Any] | None:
        """Give plain data to rank 0, which returns what each gave, in rank order; the others do not wait.

        The errors are those of :meth:`exchange`.
        """
        with self._next_round():
            self._give(json.dumps(tagged_json.encode(value)))
            if self.rank != 0:
                return None
            self._wait_for(f"{self._round}/all")
            return self._answers()

    @contextlib.contextmanager
    def _next_round(self) -> Iterator[None]:
        self._round += 1
        try:
            yield
        except (CheckpointError, UntrustedMessageError):
            raise
        except RuntimeError as error:
            raise CheckpointSaveError(
                f"the store of this world is gone, and rank 0, which keeps it: {error}"
            ) from error

    def leave(self) -> None:
        """The last call: rank 0, in which the store usually lives, stays until all have read what it said."""
        deadline = time.monotonic() + _LAST_WORDS
        try:
            readers = self._store.add("left", 1)
            while self.rank == 0 and readers < self.world_size and time.monotonic() < deadline:
                time.sleep(0.01)
                readers = self._store.add("left", 0)
            if self.rank == 0 and readers == self.world_size:
                self._clean()
        except RuntimeError:  # the process that kept the store has left before: no rank reads any more
            return

    def _give(self, text: str) -> None:
        self._store.set(f"{self._round}/{self.rank}", text)
        if self._store.add(f"{self._round}/count", 1) == self.world_size:
            self._store.set(f"{self._round}/all", "")

    def _answers(self) -> list[Any]:
        answers = self._store.multi_get([f"{self._round}/{rank}" for rank in range(self.world_size)])
        return [tagged_json.decode(parse_json(answer, "an answer in the store")) for answer in answers]

    def _clean(self) -> None:
        """Remove what this save put into the store."""
        ranks = range(self.world_size)
        keys = ["left", "given up", *(f"who/{rank}" for rank in ranks)]
        for number in range(1, self._round + 1):
            keys += [f"{number}/{what}" for what in ("count", "all", "mark", "different", *ranks)]
        for key in keys:
            self._store.delete_key(key)

    def _wait_for(self, key: str) -> None:
        began = time.monotonic()
        looked = began
        pause = 0.001
        while not self._store.check([key]):
            reason = self._stopped()
            if reason is not None:
                self._store.set("given up", f"rank {self.rank}: {reason}")
                raise CheckpointSaveError(reason)
            now = time.monotonic()
            if now - looked >= _LOOK:
                looked = now
                self._look_around(now - began)
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _look_around(self, waited: float) -> None:
        """Raise if a rank of this machine that is waited for has ended; other machines look at theirs, and tell."""
        if self._store.check(["given up"]):
            raise CheckpointSaveError(f"given up by {self._store.get('given up').decode()}")
        for rank, who in ranks_here(self.rank, self.world_size, self._who):
            if has_ended(who) and not self._store.check([f"{self._round}/{rank}"]):
                reason = f"rank {rank} (process {who['pid']}) has ended"
                self._store.set("given up", f"rank {self.rank}: {reason}")
                raise CheckpointSaveError(reason)
        if waited > _PATIENCE:
            absent = [r for r in range(self.world_size) if not self._store.check([f"{self._round}/{r}"])]
            raise CheckpointSaveError(f"ranks {absent} did not answer within {_PATIENCE:g} s")

    def _who(self, rank: int) -> dict[str, Any] | None:
        """The process of a rank; None if it has not begun."""
        if not self._store.check([f"who/{rank}"]):
            return None
        who = parse_json(self._store.get(f"who/{rank}"), "a process in the store")
        check_form(who, _WHO, "a process in the store")
        return who  # type: ignore[no-any-return]
