"""The collectives that ``accel doctor`` runs on each rank: the result of each is checked, and its time is measured."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["COLLECTIVES", "NOT_IN_BACKEND", "check_collective"]

NOT_IN_BACKEND = "the backend has none"
"""The problem of a collective that the backend lacks; it is no failure."""
_CHECKED = 12
_TIMED = 2**18
"""Elements per rank of a timed collective: 1 MiB of float32."""
_REPEATS = 3
_LACKS = ("not support", "unsupported", "not implemented", "no backend")


def _mine(rank: int, count: int, device: torch.device) -> Tensor:
    """Values that differ by rank and place, and whose sums are exact in float32."""
    return (torch.arange(count, device=device) % 7 + 10 * rank).float()


class _Call:
    """One collective of ``count`` elements per rank, with the values that it must give on this rank."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.count, self.device = count, device

    def of(self, rank: int) -> Tensor:
        """The input of a rank."""
        return _mine(rank, self.count, self.device)

    def empty(self) -> Tensor:
        """An empty tensor for a result."""
        return torch.full((self.count,), -1.0, device=self.device)

    def everyone(self) -> list[Tensor]:
        """The inputs of all ranks."""
        return [self.of(rank) for rank in range(self.size)]

    def total(self) -> Tensor:
        """The sum of the inputs of all ranks."""
        first = _mine(0, self.count, self.device)
        return first * self.size + 10 * (self.size * (self.size - 1) // 2)


Found = tuple[Tensor, Tensor] | None
"""The result of a collective, and the expected one; None where this rank receives nothing."""


def _all_reduce(call: _Call) -> Found:
    found = call.of(call.rank)
    dist.all_reduce(found)
    return found, call.total()


def _all_gather(call: _Call) -> Found:
    found = [call.empty() for _ in range(call.size)]
    dist.all_gather(found, call.of(call.rank))
    return torch.cat(found), torch.cat(call.everyone())


def _reduce_scatter(call: _Call) -> Found:
    found = call.empty()
    # torch 2.13 renames it, and warns of the other name.
    run = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    run(found, call.of(call.rank).repeat(call.size))
    return found, call.total()


def _broadcast(call: _Call) -> Found:
    last = call.size - 1
    found = call.of(call.rank)
    dist.broadcast(found, last)
    return found, call.of(last)


def _reduce(call: _Call) -> Found:
    found = call.of(call.rank)
    dist.reduce(found, 0)
    return (found, call.total()) if call.rank == 0 else None


def _gather(call: _Call) -> Found:
    found = [call.empty() for _ in range(call.size)] if call.rank == 0 else None
    dist.gather(call.of(call.rank), found)
    return None if found is None else (torch.cat(found), torch.cat(call.everyone()))


def _scatter(call: _Call) -> Found:
    found = call.empty()
    dist.scatter(found, call.everyone() if call.rank == 0 else None)
    return found, call.of(call.rank)


def _all_to_all(call: _Call) -> Found:
    parts = [call.of(call.rank) + other for other in range(call.size)]
    found = [call.empty() for _ in range(call.size)]
    try:
        dist.all_to_all(found, parts)
    except RuntimeError as error:
        if not _lacks(error):
            raise
        whole = torch.empty(call.count * call.size, device=call.device)  # gloo has this form only
        dist.all_to_all_single(whole, torch.cat(parts))
        found = [whole]
    return torch.cat(found), torch.cat([part + call.rank for part in call.everyone()])


def _barrier(call: _Call) -> Found:
    dist.barrier()
    return None


def _send_recv(call: _Call) -> Found:
    found = call.empty()
    after, before = (call.rank + 1) % call.size, (call.rank - 1) % call.size
    operations = [
        dist.P2POp(dist.isend, call.of(call.rank), after),
        dist.P2POp(dist.irecv, found, before),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return found, call.of(before)


COLLECTIVES: dict[str, Callable[[_Call], Found]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "send/recv": _send_recv,
}
"""The collectives by name, in order."""


def check_collective(name: str, device: torch.device) -> tuple[float, str]:
    """Run a collective.

    Args:
        name: one of ``COLLECTIVES``.
        device: device of the tensors.

    Returns:
        Seconds of one call with 1 MiB of float32 per rank, the fastest of three; and the problem, or empty.

    Raises:
        RuntimeError: it failed, for example because another rank ended.
    """
    run = COLLECTIVES[name]
    try:
        found = run(_Call(_CHECKED, device))
    except (RuntimeError, NotImplementedError) as error:
        if _lacks(error):
            return 0.0, NOT_IN_BACKEND
        raise
    problem = ""
    if found is not None and not torch.equal(found[0], found[1]):
        problem = f"gave {_cut(found[0])}; expected {_cut(found[1])}"
    call = _Call(_TIMED // dist.get_world_size() if "all_to" in name else _TIMED, device)
    best = float("inf")
    for _ in range(_REPEATS):
        dist.barrier()
        began = time.perf_counter()
        run(call)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - began)
    return best, problem


def _lacks(error: BaseException) -> bool:
    return isinstance(error, NotImplementedError) or any(word in str(error).lower() for word in _LACKS)


def _cut(tensor: Tensor) -> str:
    text = ", ".join(f"{value:g}" for value in tensor.flatten().tolist()[:6])
    return f"[{text}, …]" if tensor.numel() > 6 else f"[{text}]"
