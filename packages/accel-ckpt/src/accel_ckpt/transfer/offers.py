"""What the ranks of a training give to a transfer: each value once, by one of the ranks that hold it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from accel_ckpt.coordination.ranks import Coordinator, default_coordinator, run_together
from accel_ckpt.errors import StateMismatchError, UnsupportedValueError
from accel_ckpt.geometry import Box
from accel_ckpt.modules.names import listed
from accel_ckpt.parts import Part, is_divided, is_leaf, parts_of, shape_of
from accel_ckpt.saving.part_division import PartKey, describe_parts, divide_parts, tied_parts
from accel_ckpt.tensor_storage import DTYPE_NAMES, parse_dtype, why_not_plain
from accel_ckpt.transfer.plan import held_from_plain, held_to_plain

__all__ = ["OfferedWeight", "OfferedWeights", "WeightInfo", "check_plain"]

_STEM = "model"


class WeightInfo(NamedTuple):
    """A whole weight: what every rank knows of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """The dtype in which it is sent."""


class OfferedWeight(NamedTuple):
    """A block of a weight that this rank gives."""

    name: str
    dtype: torch.dtype
    """The dtype in which it is sent; the values may have another."""
    box: Box
    """The place of the block in the whole weight."""
    tensor: torch.Tensor
    """The values, in the memory that training uses."""


class OfferedWeights:
    """The weights of a model that ranks hold together, each value offered by one rank.

    Ranks that hold the same values share them out, as they share the writing of a checkpoint. Nothing is gathered and
    nothing is copied: an iteration returns views of this rank's memory, of the values at that time. The constructor is
    collective; iterating is not.

    Args:
        state: returns this rank's part of the model by canonical name, as `state_dict()` or a strategy's
            `exported_state` does: tensors, ``DTensor``s, parts or lists of parts. It is called in every iteration.
            Entries that are no tensors are left out.
        dtype: send floating-point weights in this dtype; by default in their own.
        replicated: names of whole tensors that all ranks hold with equal values. The first rank gives other whole
            tensors, because buffers may differ between ranks; it also writes them in `save_model`.
        coordinator: the ranks that hold the model; by default all ranks of this process's world.

    Attributes:
        about: shape and dtype of every weight by name, tied names included; the same on all ranks.
        aliases: tied names, to the name under which their values are offered.

    Raises:
        UnsupportedValueError: the ranks' parts do not make up the whole model, or a weight is not plain values in
            memory. On all ranks.
        ValueError: `dtype` is no dtype for weights.
    """

    def __init__(
        self,
        state: Callable[[], Mapping[str, Any]],
        *,
        dtype: torch.dtype | str | None = None,
        replicated: Collection[str] = (),
        coordinator: Coordinator | None = None,
    ) -> None:
        ranks = coordinator or default_coordinator()
        self._state = state
        self._leads = ranks.rank == 0
        self._replicated = frozenset(replicated)
        sent_as = None if dtype is None else _sent_as(dtype)

        def describe() -> dict[str, Any]:
            parts = self._parts()
            for name, found in parts.items():
                check_plain(name, found)
            held = describe_parts({_STEM: parts})[_STEM]
            return {
                "held": {name: held_to_plain(own) for name, own in held.items()},
                "tied": tied_parts(parts),
            }

        answers = run_together(describe, ranks, doing="listing the weights that ranks hold")
        held = [
            {name: held_from_plain(own, f"what rank {rank} holds") for name, own in answer["held"].items()}
            for rank, answer in enumerate(answers)
        ]
        shares = divide_parts(
            [
                {"parts": {_STEM: own}, "tied": {_STEM: answer["tied"]}}
                for own, answer in zip(held, answers, strict=True)
            ],
            ranks.rank,
            [0 for _ in answers],
        )
        self._mine = shares.keys_of(ranks.rank)
        self._dtypes: dict[str, torch.dtype] = {}
        self.aliases = dict(shares.aliases.get(_STEM, {}))
        self.about: dict[str, WeightInfo] = {}
        for rank_holds in held:
            for name, found in rank_holds.items():
                if found.dtype and name not in self.about:
                    own = self._dtypes[name] = parse_dtype(found.dtype)
                    self.about[name] = WeightInfo(
                        found.shape, sent_as if sent_as is not None and own.is_floating_point else own
                    )

    def __iter__(self) -> Iterator[OfferedWeight]:
        """The blocks that this rank gives, with the values that they have now.

        Raises:
            StateMismatchError: this rank no longer holds what it offered.
        """
        found = {
            PartKey(_STEM, name, part.box): part.tensor.detach()
            for name, parts in self._parts().items()
            for part in parts
            if part.tensor.dtype == self._dtypes.get(name)
        }
        gone = sorted({key.name for key in self._mine - found.keys()})
        if gone:
            raise StateMismatchError(
                f"the model has changed since its weights were offered: this rank no longer holds its parts "
                f"of {listed(gone)} in the same shape and dtype. Make a new source and transfer on all ranks"
            )
        for key, tensor in found.items():
            if key in self._mine:
                yield OfferedWeight(key.name, self.about[key.name].dtype, key.box, tensor)

    def state(self) -> dict[str, Any]:
        """This rank's part of the model by name, tied names included, in the dtypes in which it is sent."""
        converted: dict[tuple[int, torch.dtype], Any] = {}  # tied names stay tied

        def sent(name: str, leaf: Any) -> Any:
            dtype = self.about[name].dtype
            if isinstance(leaf, torch.Tensor):
                return converted.setdefault((id(leaf), dtype), leaf.detach().to(dtype))
            parts = [Part(part.tensor.to(dtype), part.offsets, part.shape) for part in parts_of(leaf)]
            return parts or Part.nothing(shape_of(leaf), dtype)

        return {name: sent(name, leaf) for name, leaf in self._state().items() if is_leaf(leaf)}

    def _parts(self) -> dict[str, list[Part]]:
        """This rank's parts by name; an empty part of a weight that another rank gives alone."""
        found: dict[str, list[Part]] = {}
        for name, leaf in self._state().items():
            if not is_leaf(leaf):
                continue
            gives = is_divided(leaf) or self._leads or name in self._replicated
            found[name] = (parts_of(leaf) if gives else []) or [Part.nothing(shape_of(leaf))]
        return found


def check_plain(name: str, parts: Collection[Part]) -> None:
    """Refuse values that cannot be sent as bytes.

    Raises:
        UnsupportedValueError: says why.
    """
    for part in parts:
        reason = why_not_plain(part.tensor)
        if reason is None and part.tensor.dtype not in DTYPE_NAMES:
            reason = f"has the dtype {part.tensor.dtype}, which a transfer does not know; convert it first"
        if reason is not None:
            raise UnsupportedValueError(f"the weight {name!r} {reason}")


def _sent_as(dtype: torch.dtype | str) -> torch.dtype:
    found = parse_dtype(dtype)
    if not found.is_floating_point or found not in DTYPE_NAMES:
        raise ValueError(
            f"dtype={dtype!r} is no dtype in which weights are sent; give a floating-point one such as torch.bfloat16"
        )
    return found
