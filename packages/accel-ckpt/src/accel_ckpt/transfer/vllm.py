"""Weights for vLLM, by the NCCL backend of its weight transfer, as documented for vLLM 0.32.

https://docs.vllm.ai/en/v0.32.0/training/weight_transfer/ describes four calls to the inference side
(`init_weight_transfer_engine`, `start_weight_update`, `update_weights`, `finish_weight_update`), with plain data, and
broadcasts from rank 0 of a group that it forms with the inference workers at ranks from 1. With `packed`, rank 0 sends
whole weights one behind the other as bytes, cut where a buffer has become larger than its size.

Only rank 0 holds a buffer of whole weights, one at a time; the other ranks of the training send it their parts.
"""

from __future__ import annotations

import fnmatch
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from accel_ckpt.coordination.ranks import run_together
from accel_ckpt.errors import TransferError
from accel_ckpt.geometry import Box
from accel_ckpt.saving.part_division import Holding
from accel_ckpt.transfer.connection import (
    BUCKET_BYTES,
    LocalTransport,
    Transport,
    carry_out,
    describe_offers,
    described,
    move_together,
    sources_of,
)
from accel_ckpt.transfer.offers import OfferedWeights, WeightInfo
from accel_ckpt.transfer.plan import RankWeights, TransferPlan, plan_transfer

__all__ = ["Broadcaster", "VLLMClient", "VLLMServer", "VLLMWeightTransfer"]


class VLLMClient(Protocol):
    """How rank 0 reaches the inference side; vLLM's own clients for HTTP and Ray have these methods.

    Every call must return after all replicas have done it, and raise if one has failed.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers join the group."""
        ...

    def start_weight_update(self) -> None:
        """Prepare the workers for an update."""
        ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the workers receive weights; returns when they have."""
        ...

    def finish_weight_update(self) -> None:
        """Let the workers use the new weights."""
        ...


class Broadcaster(Protocol):
    """The group of rank 0 and the workers; vLLM's `PyNcclCommunicator` is one."""

    def broadcast(self, tensor: torch.Tensor, src: int) -> object:
        """Send a tensor to all workers."""
        ...


@dataclass(frozen=True, slots=True)
class VLLMServer:
    """The four calls to a vLLM server over HTTP, which it offers with `VLLM_SERVER_DEV_MODE=1`.

    Args:
        base_url: such as ``"http://localhost:8000"``.
        timeout: seconds to wait for an answer.

    Raises:
        ValueError: the address is not one of HTTP.
    """

    base_url: str
    timeout: float = 300.0

    def __post_init__(self) -> None:
        """Refuse addresses of files and other protocols, which urllib would open."""
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(
                f"base_url={self.base_url!r} is no address of a server; give one as 'http://host:8000'"
            )

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers join the group."""
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Prepare the workers for an update."""
        self._post("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the workers receive weights; returns when they have."""
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        """Let the workers use the new weights."""
        self._post("finish_weight_update")

    def _post(self, route: str, body: dict[str, Any] | None = None) -> None:
        url = f"{self.base_url.rstrip('/')}/{route}"
        request = urllib.request.Request(
            url,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            said = error.read(500).decode(errors="replace")
            raise TransferError(f"{url} answers {error.code}: {said}") from error
        except OSError as error:
            raise TransferError(
                f"{url} does not answer: {error}. Start the server with VLLM_SERVER_DEV_MODE=1 and "
                '--weight-transfer-config \'{"backend": "nccl"}\''
            ) from error


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Weights that are broadcast at once."""

    names: tuple[str, ...]
    begins: tuple[int, ...]
    nbytes: int


class VLLMWeightTransfer:
    """Sends weights to vLLM engines, from any strategy. All ranks of the training make one, and call `send` together.

    Args:
        offers: the weights of the training.
        client: the calls to the inference side; used on rank 0.
        connect: joins the group of workers as its rank 0 and returns it; called on rank 0 while the workers join.
        master_address: where rank 0 of that group listens, as the workers reach it.
        master_port: a free port there.
        world_size: of that group: 1, and the number of all inference workers.
        transport: how the ranks of the training reach each other; by default a training of one process.
        ignored: names of weights that vLLM's model does not load, or patterns.
        packed: send many weights in one broadcast.
        packed_buffer_bytes: size after which a buffer is sent. It may exceed this by its last weight.
        packed_num_buffers: buffers that the workers use in turn.
        bucket_bytes: the most bytes of a message between ranks of the training.
        device: where rank 0's buffer is: the device of the group of workers.

    Attributes:
        update_info: what `update_weights` is called with: names, dtypes and shapes, in the order of the values.

    Raises:
        StateMismatchError: ranks of the training do not hold the whole model.
        TransferError: the workers did not join, or another rank failed.
    """

    def __init__(
        self,
        offers: OfferedWeights,
        *,
        client: VLLMClient,
        connect: Callable[[], Broadcaster],
        master_address: str,
        master_port: int,
        world_size: int,
        transport: Transport | None = None,
        ignored: Collection[str] = (),
        packed: bool = True,
        packed_buffer_bytes: int = 1 << 30,
        packed_num_buffers: int = 2,
        bucket_bytes: int = BUCKET_BYTES,
        device: torch.device | str = "cpu",
    ) -> None:
        self._offers = offers
        self._client = client
        self._transport = transport or LocalTransport()
        self._packed = packed
        leads = self._transport.rank == 0

        def describe() -> RankWeights:
            wants = dict(_whole(offers, ignored)) if leads else {}
            return RankWeights(describe_offers(offers), offers.aliases, wants, tuple(ignored))

        ranks = described(describe, self._transport, bucket_bytes)
        self._about = {name: offers.about[name] for name in ranks[0].wants}
        self._chunks = list(_chunks(self._about, packed_buffer_bytes if packed else None))
        self._plans: list[TransferPlan] = [
            plan_transfer(ranks, self._transport.rank, bucket_bytes, chunk.names) for chunk in self._chunks
        ]
        self._transport.open(max((plan.bucket_bytes for plan in self._plans), default=0))
        largest = max((chunk.nbytes for chunk in self._chunks), default=0) if leads else 0
        self._buffer = torch.empty(largest, dtype=torch.uint8, device=device)
        order = [name for chunk in self._chunks for name in chunk.names]
        self.update_info: dict[str, Any] = {
            "names": order,
            "dtype_names": [str(self._about[name].dtype).removeprefix("torch.") for name in order],
            "shapes": [list(self._about[name].shape) for name in order],
        }
        self._group: Broadcaster | None = None
        init_info = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": 1,
            "world_size": world_size,
            "packed": packed,
            "packed_buffer_size_bytes": packed_buffer_bytes,
            "packed_num_buffers": packed_num_buffers,
        }

        def join() -> None:
            if leads:
                call = _BackgroundCall(lambda: client.init_weight_transfer_engine(init_info))
                try:
                    self._group = connect()
                except Exception:
                    call.raise_if_failed()  # says why the workers did not join
                    raise
                call.result()

        run_together(join, self._transport, doing="joining the group of vLLM's workers", error=TransferError)

    def send(self) -> None:
        """Bring the weights' current values to the workers. Collective on the ranks of the training.

        Raises:
            StateMismatchError: the model no longer holds what was offered.
            TransferError: the inference side, or another rank, failed. Workers may then hold values of two updates.
        """
        leads = self._transport.rank == 0
        sources: dict[tuple[str, Box], torch.Tensor] = {}
        calls: list[_BackgroundCall] = []

        def begin() -> None:
            if leads:
                self._client.start_weight_update()
                calls.append(_BackgroundCall(lambda: self._client.update_weights(self.update_info)))

        def finish() -> None:
            if leads:
                calls[0].result()
                self._client.finish_weight_update()

        # First what can fail here alone: workers that have begun wait for the broadcasts.
        doing = "an update of vLLM's weights"
        run_together(
            lambda: sources.update(sources_of(self._offers)),
            self._transport,
            doing=doing,
            error=TransferError,
        )
        run_together(begin, self._transport, doing=doing, error=TransferError)
        for chunk, plan in zip(self._chunks, self._plans, strict=True):
            move_together(lambda c=chunk, p=plan: self._move(c, p, sources, calls), self._transport)  # type: ignore[misc]
        run_together(finish, self._transport, doing=doing, error=TransferError)

    def _move(
        self,
        chunk: _Chunk,
        plan: TransferPlan,
        sources: Mapping[tuple[str, Box], torch.Tensor],
        calls: Sequence[_BackgroundCall],
    ) -> None:
        """Collect the weights of a chunk on rank 0, and broadcast them."""
        if self._transport.rank:
            carry_out(plan, self._transport, sources, {})
            return
        targets = {
            (name, _box(self._about[name])): [self._values(name, begin)]
            for name, begin in zip(chunk.names, chunk.begins, strict=True)
        }
        carry_out(plan, self._transport, sources, targets)
        calls[0].raise_if_failed()  # the workers would not take part in the broadcast
        assert self._group is not None, "rank 0 joined the group"
        values = self._buffer[: chunk.nbytes] if self._packed else self._values(chunk.names[0], 0)
        self._group.broadcast(values, src=0)

    def _values(self, name: str, begin: int) -> torch.Tensor:
        """The memory of a weight in the buffer."""
        shape, dtype = self._about[name]
        end = begin + _box(self._about[name]).volume * dtype.itemsize
        return self._buffer[begin:end].view(dtype).view(shape)


def _box(about: WeightInfo) -> Box:
    return Box((0,) * len(about.shape), about.shape)


def _whole(offers: OfferedWeights, ignored: Collection[str]) -> Iterator[tuple[str, Holding]]:
    """All weights that are offered, whole; tied names once."""
    for name, about in offers.about.items():
        if name not in offers.aliases and not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored):
            yield name, Holding(about.shape, str(about.dtype), about.dtype.itemsize, (_box(about),))


def _chunks(about: Mapping[str, WeightInfo], limit: int | None) -> Iterator[_Chunk]:
    """Weights in the order in which they are sent, cut where a buffer exceeds its size; None: one by one.

    Wide elements come first, so that each weight begins at a multiple of its element's size in a buffer without gaps.
    """
    names: list[str] = []
    begins: list[int] = []
    used = 0
    for name in sorted(about, key=lambda name: -about[name].dtype.itemsize):
        names.append(name)
        begins.append(used)
        used += _box(about[name]).volume * about[name].dtype.itemsize
        if limit is None or used > limit:
            yield _Chunk(tuple(names), tuple(begins), used)
            names, begins, used = [], [], 0
    if names:
        yield _Chunk(tuple(names), tuple(begins), used)


@dataclass(slots=True)
class _BackgroundCall:
    """A call in a thread of its own, which nothing waits for if this process fails."""

    function: Callable[[], None]
    _failure: BaseException | None = None
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.function()
        except BaseException as error:
            self._failure = error

    def raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def result(self) -> None:
        self._thread.join()
        self.raise_if_failed()
