"""Scatter: one rank sends every rank its own part.

Parts are sent point to point, so a rank receives only its own part and a small header. Parts may differ in structure,
shapes and number of rows. The description of a part (structure, dtypes, shapes) is sent only when it changes; a stream
of parts of equal size needs one message per part.
"""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_state.communication.channel import Channel
from accel_state.communication.serialization import aligned, pack
from accel_state.errors import CollectiveMismatchError, ConfigError, NotAvailableError
from accel_state.trees import TreeSpec, flatten, unflatten
from accel_state.world.process import PartialState

__all__ = ["Scatterer", "scatter"]

_HEADER = struct.Struct("<qqq8x")
"""Bytes of description (0: unchanged), bytes of values, 1 if the source failed."""

_TAG = 7919
"""Distinguishes these messages from a script's own point-to-point messages, which mostly use tag 0."""
_STREAMS = 1 << 16
"""Streams after which a tag is used again."""


def scatter(
    parts: Sequence[Any] | None, from_process: int = 0, *, group: dist.ProcessGroup | None = None
) -> Any:
    """Send every rank its own part, once; see ``Scatterer``."""
    return Scatterer(from_process, group=group)(parts)


@dataclass(slots=True)
class _Connection:
    """The state that both ends of a connection keep about the parts sent over it."""

    description: bytes = b""
    size: int = 0
    expected: int = 0
    """Bytes that are sent together with the header of the next part."""

    def advance(self, size: int) -> None:
        """Record the size of a part: after two parts of equal size, the next is expected to have that size too."""
        self.expected = size if size == self.size else 0
        self.size = size


@dataclass(frozen=True, slots=True)
class _Description:
    spec: TreeSpec
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]


class Scatterer:
    """A stream of parts from one rank to all.

    Calls are collective: all ranks of the group make them, in the same order. The object remembers the last
    description sent, so use a separate object per stream.

    Args:
        from_process: the source, a rank of the world.
        group: the participating ranks; None: all.

    Attributes:
        bytes_received: bytes of headers, descriptions and values received so far.
        bytes_sent: the same for bytes sent.

    Raises:
        ConfigError: ``from_process`` is not in the group.
    """

    def __init__(self, from_process: int = 0, *, group: dist.ProcessGroup | None = None) -> None:
        channel = PartialState().channel(group)
        ranks = [PartialState().process_index] if channel is None else channel.ranks
        if from_process not in ranks:
            raise ConfigError(f"from_process is {from_process}; the ranks of this group are {ranks}")
        self._channel = channel
        self._source = from_process
        self._connections = {rank: _Connection() for rank in ranks}
        # A separate tag and name: a rank that leaves a loop before the others, and begins the next, is found in
        # another stream than they, and does not mistake parts of the first stream for those of the second.
        stream = 0 if channel is None else channel.next_stream()
        self._tag = _TAG + stream % _STREAMS
        self._operation = f"scatter (stream {stream})"
        self.bytes_received = 0
        self.bytes_sent = 0

    def __call__(self, parts: Sequence[Any] | None) -> Any:
        """Send ``parts``, or receive one.

        Args:
            parts: on the source, one tree per rank of the group, in rank order; leaves that are not tensors
                must be picklable. Ignored on other ranks.

        Returns:
            this rank's part: on the source the tree that was passed, on other ranks new tensors, on the CPU if the
            group can transfer CPU tensors.

        Raises:
            ConfigError: the number of parts differs from the number of ranks.
            TypeError: a part cannot be sent.
            CollectiveMismatchError: on the other ranks, if the source raised one of these.
        """
        channel = self._channel
        if channel is None:
            if parts is None or len(parts) != 1:
                raise _wrong_count(parts, 1)
            return parts[0]
        with channel.operation(self._operation):
            if channel.ranks[channel.rank] != self._source:
                if channel.rehearsed:
                    raise NotAvailableError(
                        f"rank {channel.ranks[channel.rank]} gets its data from rank {self._source}, which is not "
                        f"there in a rehearsal; rehearse rank {self._source}. Loaders that rank 0 reads for all "
                        "(dispatch_batches=True) are one case: with dispatch_batches=False every rank reads"
                    )
                return self._receive(channel)
            return self._send(channel, parts)

    def _send(self, channel: Channel, parts: Sequence[Any] | None) -> Any:
        try:
            if parts is None or len(parts) != channel.size:
                raise _wrong_count(parts, channel.size)
            described = [
                None if rank == self._source else _describe(part)
                for rank, part in zip(channel.ranks, parts, strict=True)
            ]
        except (ConfigError, TypeError) as error:
            self._refuse(channel, f"{type(error).__name__}: {error}")
            raise
        works: list[tuple[dist.Work, Tensor]] = []
        for rank, found in zip(channel.ranks, described, strict=True):
            if found is not None:
                leaves, description = found
                connection = self._connections[rank]
                new = description if description != connection.description else b""
                connection.description = description
                works += self._post(channel, rank, connection, _message(new, leaves, channel.device))
        for work, message in works:
            channel.wait_message(work, message)
        return parts[channel.rank]

    def _post(
        self, channel: Channel, rank: int, connection: _Connection, message: Tensor
    ) -> list[tuple[dist.Work, Tensor]]:
        first = _HEADER.size + connection.expected
        size = message.numel() - _HEADER.size
        if size < connection.expected:  # the receiver expects more bytes: pad
            padding = message.new_zeros(connection.expected - size)
            message = torch.cat([message, padding])
        connection.advance(size)
        pieces = [message[:first], message[first:]]
        self.bytes_sent += message.numel()
        works: list[tuple[dist.Work, Tensor]] = []
        for piece in pieces:
            if piece.numel():
                work = dist.isend(piece, rank, group=channel.wire, tag=self._tag)
                assert work is not None
                works.append((work, piece))
        return works

    def _refuse(self, channel: Channel, text: str) -> None:
        """Make the receivers raise too."""
        body = text.encode()
        for rank in channel.ranks:
            if rank != self._source:
                message = _with_header(
                    0, len(body), refused=True, room=aligned(len(body)), device=channel.device
                )
                message[_HEADER.size : _HEADER.size + len(body)] = torch.frombuffer(
                    bytearray(body), dtype=torch.uint8
                )
                for work, piece in self._post(channel, rank, self._connections[rank], message):
                    channel.wait_message(work, piece)

    def _receive(self, channel: Channel) -> Any:
        connection = self._connections[channel.ranks[channel.rank]]
        head = torch.empty(_HEADER.size + connection.expected, dtype=torch.uint8, device=channel.device)
        self._fill(channel, head)
        described, size, refused = _HEADER.unpack(bytes(head[: _HEADER.size].tolist()))
        total = aligned(described) + aligned(size)
        if total <= connection.expected:
            body = head[_HEADER.size :]
        else:
            body = torch.empty(total, dtype=torch.uint8, device=channel.device)
            body[: connection.expected] = head[_HEADER.size :]
            self._fill(channel, body[connection.expected :])
        connection.advance(total)
        if refused:
            raise CollectiveMismatchError(
                f"rank {self._source} could not scatter: {bytes(body[:size].tolist()).decode()}"
            )
        if described:
            connection.description = bytes(body[:described].tolist())
        description: _Description = pickle.loads(connection.description)
        return unflatten(description.spec, _views(body[aligned(described) :], description))

    def _fill(self, channel: Channel, buffer: Tensor) -> None:
        work = dist.irecv(buffer, self._source, group=channel.wire, tag=self._tag)
        assert work is not None
        channel.wait_message(work, buffer)
        self.bytes_received += buffer.numel()


def _describe(part: Any) -> tuple[list[Tensor], bytes]:
    leaves, spec = flatten(part)
    for leaf in leaves:
        if leaf.layout is not torch.strided or leaf.is_nested:
            raise TypeError(f"only dense tensors can be sent, found one with layout {leaf.layout}")
    description = _Description(spec, tuple((leaf.dtype, tuple(leaf.shape)) for leaf in leaves))
    try:
        return leaves, pickle.dumps(description)
    except Exception as error:  # any exception of a user's __reduce__; every rank raises
        raise TypeError(f"a part cannot be pickled: {type(error).__name__}: {error}") from error


def _message(description: bytes, leaves: list[Tensor], device: torch.device) -> Tensor:
    """Header, description and values as one message."""
    size = sum(aligned(leaf.nbytes) for leaf in leaves)
    ahead = _HEADER.size + aligned(len(description))
    message = pack(leaves, device, ahead)
    head = bytearray(ahead)
    _HEADER.pack_into(head, 0, len(description), size, 0)
    head[_HEADER.size : _HEADER.size + len(description)] = description
    message[:ahead] = torch.frombuffer(head, dtype=torch.uint8)
    return message


def _with_header(described: int, size: int, *, refused: bool, room: int, device: torch.device) -> Tensor:
    head = bytearray(_HEADER.size + room)
    _HEADER.pack_into(head, 0, described, size, int(refused))
    return torch.frombuffer(head, dtype=torch.uint8).to(device)


def _views(body: Tensor, description: _Description) -> list[Tensor]:
    values = []
    offset = 0
    for dtype, shape in description.tensors:
        size = math.prod(shape) * dtype.itemsize
        values.append(body[offset : offset + size].view(dtype).view(shape))
        offset += aligned(size)
    return values


def _wrong_count(parts: Sequence[Any] | None, ranks: int) -> ConfigError:
    count = "none" if parts is None else len(parts)
    return ConfigError(f"the source must pass one part per rank: {ranks} are needed, got {count}")
