"""The rounds of a step: pieces of updates go to the rank that computes, and come back orthogonalised."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_ckpt.geometry import Box
from accel_ckpt.parts import parts_of
from accel_train.errors import PrepareError
from accel_train.muon.holders import Holders
from accel_train.muon.newton_schulz import orthogonalize
from accel_train.muon.plan import Matrices, MuonItem, MuonPiece, MuonPlan, matrices_of, plan_of

__all__ = ["Rounds", "Stepped"]


@dataclass
class Stepped:
    """A parameter in one step.

    Attributes:
        group: the options of its group.
        parts: what this rank holds of it.
        gradients: likewise; None: it has none in this step.
        momenta: likewise, with this step's gradient in them; None as the gradients.
    """

    group: Mapping[str, Any]
    parts: Sequence[Tensor]
    gradients: Sequence[Tensor] | None
    momenta: Sequence[Tensor] | None


class Rounds:
    """Steps parameters that the same ranks hold, each matrix computed by one of them.

    The first call plans, which is a collective of the ranks that parts are divided among. All ranks then run the same
    rounds, whichever gradients they have, so none waits for a message that another does not send. While a rank computes
    a round, pieces of the next one are on their way to it, and results of the last one on their way back.

    Args:
        holders: the ranks.
        parameters: whole tensors or `DTensor`s.
        groups: the options of each parameter's group.
        largest: bytes of whole matrices in one round.

    Raises:
        PrepareError: a parameter has no matrices, as those that an engine has joined and flattened.
    """

    def __init__(
        self,
        holders: Holders,
        parameters: Sequence[Tensor],
        groups: Sequence[Mapping[str, Any]],
        largest: int,
    ) -> None:
        self._holders = holders
        self._matrices = [
            _matrices(parameter, group) for parameter, group in zip(parameters, groups, strict=True)
        ]
        own = [[part.box for part in parts_of(parameter.detach())] for parameter in parameters]
        boxes: list[list[list[Box]]] = [own]
        if holders.parts.size > 1:
            found: list[Any] = [None] * holders.parts.size
            dist.all_gather_object(found, own, group=holders.parts.group)
            boxes = found
        self.plan: MuonPlan = plan_of(
            self._matrices,
            [tuple(parameter.shape) for parameter in parameters],
            boxes,
            holders.copies.size,
            [group["ns_steps"] for group in groups],
            largest,
        )

    def run(self, stepped: Sequence[Stepped]) -> None:
        """Step the parameters; a collective of their holders.

        Args:
            stepped: the parameters, in the order in which they were given.
        """
        count = len(self.plan.rounds)
        arriving = self._gather(0, stepped) if count else None
        leaving: _Leaving | None = None
        for number in range(count):
            assert arriving is not None
            wholes = arriving.finish()
            arriving = self._gather(number + 1, stepped) if number + 1 < count else None
            results = {
                place: self._orthogonal(item, whole, stepped[item.parameter])
                for (place, item), whole in zip(self._owned(number), wholes, strict=True)
            }
            following = self._return(number, results)
            if leaving is not None:
                self._apply(leaving, stepped)
            leaving = following
        if leaving is not None:
            self._apply(leaving, stepped)

    def _owned(self, number: int) -> Iterator[tuple[int, MuonItem]]:
        """This rank's items of a round, numbered."""
        return enumerate(self.plan.rounds[number][self._holders.copies.index][self._holders.parts.index])

    def _orthogonal(self, item: MuonItem, whole: Tensor, parameter: Stepped) -> Tensor:
        if parameter.gradients is None and item.home is not None:
            return torch.zeros_like(whole)  # no rank has one, or uses it
        group, matrices = parameter.group, self._matrices[item.parameter]
        given = whole.flatten(1) if matrices.flatten else whole
        found = orthogonalize(given, tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])
        return found.reshape(item.sizes)

    def _gather(self, number: int, stepped: Sequence[Stepped]) -> _Arriving:
        """Bring the pieces of this rank's items of a round together, and send those of others' items."""
        parts, copy = self._holders.parts, self._holders.copies.index
        owners = self.plan.rounds[number][copy]
        owned = owners[parts.index]
        received: list[Tensor] = []
        work = None
        if self.plan.is_exchanged(number, copy):
            sent = [
                [self._update(item, piece, stepped) for item in items for piece in item.pieces[parts.index]]
                if owner != parts.index
                else []
                for owner, items in enumerate(owners)
            ]
            sizes = [
                sum(_elements(item.pieces[rank]) for item in owned) if rank != parts.index else 0
                for rank in range(parts.size)
            ]
            work, received = self._all_to_all(sent, sizes)
        local = {
            place: [self._update(item, piece, stepped) for piece in item.pieces[parts.index]]
            for place, item in enumerate(owned)
        }
        return _Arriving(work, received, owned, local, parts.index)

    def _update(self, item: MuonItem, piece: MuonPiece, stepped: Sequence[Stepped]) -> Tensor:
        """What is orthogonalised, of this rank's piece of an item: in bfloat16, where the holders communicate."""
        parameter = stepped[item.parameter]
        if parameter.gradients is None or parameter.momenta is None:
            return torch.zeros(piece.sizes, dtype=torch.bfloat16, device=self._holders.device)
        momentum = parameter.momenta[piece.part][piece.where]
        if parameter.group["nesterov"]:
            gradient = parameter.gradients[piece.part][piece.where]
            momentum = gradient.lerp(momentum, parameter.group["momentum"])
        return momentum.to(self._holders.device, torch.bfloat16)

    def _all_to_all(self, sent: Sequence[Sequence[Tensor]], sizes: list[int]) -> tuple[Any, list[Tensor]]:
        given = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        flat = _flat([tensor for tensors in sent for tensor in tensors], self._holders.device)
        received = flat.new_empty(sum(sizes))
        group = self._holders.parts.group
        work = dist.all_to_all_single(received, flat, sizes, given, group=group, async_op=True)
        return _Sending(work, flat), list(torch.split(received, sizes))

    def _return(self, number: int, results: Mapping[int, Tensor]) -> _Leaving:
        """Send the pieces of this rank's results back, and receive those of its own parameters."""
        parts, copy = self._holders.parts, self._holders.copies.index
        owners = self.plan.rounds[number][copy]
        local = [
            results[place][piece.within]
            for place, item in enumerate(owners[parts.index])
            for piece in item.pieces[parts.index]
        ]
        work, received = None, [_flat([], self._holders.device)] * parts.size
        if self.plan.is_exchanged(number, copy):
            sent = [
                [
                    results[place][piece.within]
                    for place, item in self._owned(number)
                    for piece in item.pieces[rank]
                ]
                if rank != parts.index
                else []
                for rank in range(parts.size)
            ]
            sizes = [
                sum(_elements(item.pieces[parts.index]) for item in items) if owner != parts.index else 0
                for owner, items in enumerate(owners)
            ]
            work, received = self._all_to_all(sent, sizes)
        leaving = _Leaving(number, work, received, local)
        if work is None:
            self._share(leaving)
        return leaving

    def _share(self, leaving: _Leaving) -> None:
        """Exchange results with the ranks that hold copies of the same parts."""
        parts, copies = self._holders.parts, self._holders.copies
        sizes = [
            [piece.elements for _, piece in self._pieces(leaving.number, copy)] for copy in range(copies.size)
        ]
        own = [
            tensor
            for owner, items in enumerate(self.plan.rounds[leaving.number][copies.index])
            for tensor in (
                leaving.local
                if owner == parts.index
                else torch.split(
                    leaving.received[owner],
                    [piece.elements for item in items for piece in item.pieces[parts.index]],
                )
            )
        ]
        leaving.work = None
        if copies.size == 1:
            leaving.copies = [own]
            return
        longest = max(map(sum, sizes))
        flat = torch.zeros(longest, dtype=torch.bfloat16, device=self._holders.device)
        end = 0
        for tensor in own:
            flat[end : end + tensor.numel()] = tensor.reshape(-1)
            end += tensor.numel()
        together = flat.new_empty((copies.size, longest))
        if longest:
            work = dist.all_gather([*together.unbind()], flat, group=copies.group, async_op=True)
            leaving.work = _Sending(work, flat)
        leaving.copies = [
            torch.split(values[: sum(each)], each) for values, each in zip(together, sizes, strict=True)
        ]

    def _pieces(self, number: int, copy: int) -> list[tuple[MuonItem, MuonPiece]]:
        """What this rank holds of the items of a round that the ranks of a copy compute, in the order of sending."""
        owners = self.plan.rounds[number][copy]
        index = self._holders.parts.index
        return [(item, piece) for items in owners for item in items for piece in item.pieces[index]]

    def _apply(self, leaving: _Leaving, stepped: Sequence[Stepped]) -> None:
        """Step the parts with the results of a round."""
        if leaving.copies is None:
            leaving.wait()
            self._share(leaving)
        leaving.wait()
        assert leaving.copies is not None
        for copy, updates in enumerate(leaving.copies):
            for (item, piece), update in zip(self._pieces(leaving.number, copy), updates, strict=True):
                self._step(item, piece, update, stepped[item.parameter])

    def _step(self, item: MuonItem, piece: MuonPiece, update: Tensor, parameter: Stepped) -> None:
        if parameter.gradients is None:
            return
        group = parameter.group
        rate = float(group["lr"])
        part = parameter.parts[piece.part][piece.where]
        part.mul_(1 - rate * group["weight_decay"])
        part.add_(
            update.reshape(piece.sizes).to(part.device),
            alpha=-rate * _ratio(group, self._matrices[item.parameter]),
        )


class _Sending:
    """A collective under way, and what it reads, which must stay until then."""

    def __init__(self, work: Any, *tensors: Tensor) -> None:
        self._work, self._tensors = work, tensors

    def wait(self) -> None:
        self._work.wait()


@dataclass
class _Arriving:
    """The pieces of a rank's items on their way to it."""

    work: Any
    received: Sequence[Tensor]
    owned: Sequence[MuonItem]
    local: Mapping[int, Sequence[Tensor]]
    index: int

    def finish(self) -> list[Tensor]:
        """The items, each as one tensor."""
        if self.work is not None:
            self.work.wait()
        taken = [0] * len(self.received)
        wholes: list[Tensor] = []
        for place, item in enumerate(self.owned):
            own = self.local[place]
            if item.home == self.index:
                wholes.append(own[0])
                continue
            whole = self.received[0].new_empty(item.sizes)
            for rank, pieces in enumerate(item.pieces):
                for number, piece in enumerate(pieces):
                    if rank == self.index:
                        whole[piece.within] = own[number]
                    else:
                        end = taken[rank] + piece.elements
                        whole[piece.within] = self.received[rank][taken[rank] : end].view(piece.sizes)
                        taken[rank] = end
            wholes.append(whole)
        return wholes


@dataclass
class _Leaving:
    """The results of a round on their way to the parameters."""

    number: int
    work: Any
    received: Sequence[Tensor]
    local: Sequence[Tensor]
    copies: list[Sequence[Tensor]] | None = None

    def wait(self) -> None:
        """Until what was sent last has arrived."""
        if self.work is not None:
            self.work.wait()


def _matrices(parameter: Tensor, group: Mapping[str, Any]) -> Matrices:
    found = matrices_of(tuple(parameter.shape), group["flatten"])
    if found is None:
        raise PrepareError(
            f"Muon orthogonalises matrices, and a parameter of its groups has the shape {list(parameter.shape)} now. "
            "An engine that flattens parameters, as DeepSpeed's ZeRO, cannot train with Muon; use ddp, fsdp2 or tp."
        )
    return found


def _ratio(group: Mapping[str, Any], matrices: Matrices) -> float:
    """What the learning rate is multiplied with for a matrix of this shape."""
    out, into = matrices.rows, matrices.columns
    if group["transposed"]:
        out, into = into, out
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(out, into))  # Liu et al., "Muon is Scalable for LLM Training" (2025)
    return math.sqrt(max(1, out / into))


def _elements(pieces: Iterable[MuonPiece]) -> int:
    return sum(piece.elements for piece in pieces)


def _flat(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    if not tensors:
        return torch.empty(0, dtype=torch.bfloat16, device=device)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
