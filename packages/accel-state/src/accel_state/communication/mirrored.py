"""A process group without other processes: collectives behave as if every other rank had sent what this rank sends.

``accel rehearse`` runs one rank of a simulated world on such groups. Shapes, dtypes and the order of collectives are
those of the real rank. Every other rank has the values of this rank: a sum is this rank's value times the number of
ranks, and a mean is this rank's value. So losses and gradients stay finite.

torch has such a group for tests, ``torch.testing._internal.distributed.fake_pg``, which gives other answers (2.13): a
sum over ranks stays this rank's value, so a mean of gradients is a part of them; what comes from one other rank
(``recv``, ``scatter``, ``broadcast_object_list``) is uninitialised memory; and it records no calls, which a report
lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["BACKEND", "EnteredCollective", "MirroredGroup", "Record", "register"]

BACKEND = "mirrored"
"""Name of the backend in torch."""


class EnteredCollective(NamedTuple):
    """One collective that this rank entered.

    Attributes:
        operation: name, as torch has it.
        shapes: shapes and dtypes of the tensors that this rank passes.
        bytes: size of those tensors.
        peer: of a message, the other rank's index in the group; None: it is no message, or comes from any rank.
    """

    operation: str
    shapes: str
    bytes: int
    peer: int | None = None


Record = Callable[[Sequence[int], EnteredCollective], None]
"""Called with the global ranks of the group, and the call."""


class _Done(dist.Work):
    """Work that is complete when it is returned."""

    def __init__(self, results: list[Tensor]) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future()
        self._future.set_result(results)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Always true."""
        return True

    def is_success(self) -> bool:
        """Always true."""
        return True

    def get_future(self) -> Any:
        """A future that is complete."""
        return self._future


_ProcessGroup: Any = dist.ProcessGroup  # typed with all overloads; a group in Python implements one of each


class MirroredGroup(_ProcessGroup):  # type: ignore[misc]
    """The collectives of one group of ranks, of which only this one exists.

    Args:
        rank: this rank's index in the group.
        size: number of ranks.
        ranks: their global ranks.
        record: called with every collective.
    """

    def __init__(self, rank: int, size: int, ranks: Sequence[int], record: Record) -> None:
        super().__init__(rank, size)
        self._place = rank
        self._count = size
        self._ranks = tuple(ranks)
        self._record = record
        self._name = ""

    def getBackendName(self) -> str:  # noqa: N802 - the name that torch calls
        """Name of the backend."""
        return BACKEND

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Keep the name that torch chose."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """The name that torch chose."""
        return self._name

    def abort(self) -> None:
        """Nothing waits, so there is nothing to abort."""

    def shutdown(self) -> None:
        """Nothing runs, so there is nothing to end."""

    def _enter(self, operation: str, given: Sequence[Tensor], peer: int | None = None) -> None:
        shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in given[:4])
        more = f" and {len(given) - 4} more" if len(given) > 4 else ""
        size = sum(t.numel() * t.element_size() for t in given)
        self._record(self._ranks, EnteredCollective(operation, shapes + more, size, peer))

    # What all ranks get

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce in place, as if all ranks gave the same."""
        self._enter("all_reduce", tensors)
        for tensor in tensors:
            self._reduce(tensor, opts)
        return _Done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """As ``allreduce``."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """As ``allreduce``; only the root's result counts."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Leave the values: the root has the same."""
        self._enter("broadcast", tensors)
        return _Done(tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Return at once."""
        self._enter("barrier", [])
        return _Done([])

    def allgather(self, output: list[list[Tensor]], given: list[Tensor], opts: Any = None) -> dist.Work:
        """Fill every rank's place with this rank's tensor."""
        self._enter("all_gather", given)
        for places, tensor in zip(output, given, strict=True):
            _fill(places, tensor)
        return _Done([place for places in output for place in places])

    def allgather_coalesced(
        self, output: list[list[Tensor]], given: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Fill every rank's list with this rank's tensors."""
        self._enter("all_gather", given)
        for places in output:
            for place, tensor in zip(places, given, strict=True):
                place.detach().copy_(tensor.detach())
        return _Done([place for places in output for place in places])

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        """Repeat this rank's tensor once per rank."""
        self._enter("all_gather", [given])
        _repeat(output, given, self._count)
        return _Done([output])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], given: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """As ``all_gather_single``, for several."""
        self._enter("all_gather", given)
        for output, tensor in zip(outputs, given, strict=True):
            _repeat(output, tensor, self._count)
        return _Done(outputs)

    def reduce_scatter(self, output: list[Tensor], given: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """Reduce this rank's part, as if all ranks gave the same."""
        self._enter("reduce_scatter", [tensor for parts in given for tensor in parts])
        for place, parts in zip(output, given, strict=True):
            place.detach().copy_(parts[self._place].detach())
            self._reduce(place, opts)
        return _Done(output)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        """As ``reduce_scatter``, of one tensor that holds all parts."""
        self._enter("reduce_scatter", [given])
        self._take_part(output, given, opts)
        return _Done([output])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], given: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """As ``reduce_scatter_single``, for several."""
        self._enter("reduce_scatter", given)
        for output, tensor in zip(outputs, given, strict=True):
            self._take_part(output, tensor, opts)
        return _Done(outputs)

    def alltoall(self, output: list[Tensor], given: list[Tensor], opts: Any = None) -> dist.Work:
        """Receive from every rank the data that this rank sends to itself, as far as sizes allow."""
        self._enter("all_to_all", given)
        for place in output:
            _cycle(place, given[self._place])
        return _Done(output)

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: Any = None,
        input_sizes: Any = None,
        opts: Any = None,
    ) -> dist.Work:
        """As ``alltoall``, of one tensor."""
        self._enter("all_to_all", [given])
        _cycle(output, given)
        return _Done([output])

    def gather(self, output: list[list[Tensor]], given: list[Tensor], opts: Any = None) -> dist.Work:
        """On the root fill every rank's place with this rank's tensor."""
        self._enter("gather", given)
        for places, tensor in zip(output, given, strict=False):
            _fill(places, tensor)
        return _Done([place for places in output for place in places])

    def scatter(self, output: list[Tensor], given: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """On the root take this rank's part; elsewhere the values are unknown and made up: see ``_make_up``."""
        self._enter("scatter", output)
        for index, place in enumerate(output):
            if index < len(given):
                place.detach().copy_(given[index][self._place].detach())
            else:
                _make_up(place)
        return _Done(output)

    # Messages

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> dist.Work:
        """Nobody receives it."""
        self._enter("send", tensors, destination)
        return _Done(tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        """Fill the tensors with made-up values, because the real ones are unknown; see ``_make_up``.

        Integers are ones: ranks that multiply their votes, as torch's pipelines do, agree then.
        """
        return self._receive(tensors, source)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        """As ``recv``."""
        return self._receive(tensors, None)

    # The same under the names that torch had before 2.13

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _receive(self, tensors: list[Tensor], source: int | None) -> dist.Work:
        self._enter("recv", tensors, source)
        for tensor in tensors:
            _make_up(tensor, integers=1)
        return _Done(tensors)

    def _take_part(self, output: Tensor, given: Tensor, opts: Any) -> None:
        part = given.detach().reshape(self._count, -1)[self._place]
        output.detach().copy_(part.view(output.shape))
        self._reduce(output, opts)

    def _reduce(self, tensor: Tensor, opts: Any) -> None:
        operation = str(getattr(getattr(opts, "reduceOp", None), "op", "SUM")).rpartition(".")[2]
        values = tensor.detach()
        if operation in ("SUM", "PREMUL_SUM"):
            values.mul_(self._count)
        elif operation == "PRODUCT":
            values.pow_(self._count)
        elif operation == "BXOR" and self._count % 2 == 0:
            values.zero_()


def register(record: Record) -> None:
    """Make ``BACKEND`` known to torch in this process.

    Args:
        record: called with every collective of every group.
    """

    def create(options: Any, _: Any) -> MirroredGroup:
        ranks = options.global_ranks_in_group or range(options.group_size)
        return MirroredGroup(options.group_rank, options.group_size, ranks, record)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


def _fill(places: list[Tensor], tensor: Tensor) -> None:
    for place in places:
        _cycle(place, tensor)


def _make_up(tensor: Tensor, integers: int = 0) -> None:
    """Fill a tensor with small random values, like weights, so that results stay finite; or with equal integers.

    They come from a separate generator, so that the script draws the same random numbers as a real rank.
    """
    values = tensor.detach()
    if values.is_floating_point():
        values.normal_(std=0.02, generator=torch.Generator(values.device).manual_seed(0))
    else:
        values.fill_(integers)


def _repeat(output: Tensor, given: Tensor, times: int) -> None:
    # A copy, because FSDP2 gives a part of the output.
    output.detach().view(times, -1).copy_(given.detach().reshape(1, -1).clone())


def _cycle(output: Tensor, given: Tensor) -> None:
    """Fill ``output`` with the values of ``given``, again from the beginning where it is longer."""
    count, values = output.numel(), given.detach().reshape(-1)
    if not count:
        return
    if not values.numel():
        output.detach().zero_()
        return
    if values.numel() < count:
        values = values.repeat(-(-count // values.numel()))
    output.detach().copy_(values[:count].view(output.shape))
