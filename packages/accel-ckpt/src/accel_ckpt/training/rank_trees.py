"""Shared trees that differ between ranks: comparing them, saving the differences, and restoring each rank's tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import xxhash

from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.format import tagged_json
from accel_ckpt.format.forms import OTHERS, check_form
from accel_ckpt.format.reader import parse_json
from accel_ckpt.format.tagged_json import Tree
from accel_ckpt.parts import is_divided
from accel_ckpt.saving.draft import encode_trees
from accel_ckpt.tensor_storage import as_bytes

__all__ = ["Marks", "RankTree", "mark_of", "ranks_that_differ"]

Marks: TypeAlias = Mapping[str, Sequence[str]]
"""The marks that ranks exchange: name of a tree → the marks of its ``RankTree``."""

_FORM = {"text": str, "tensors": {OTHERS: torch.Tensor}}


@dataclass(frozen=True, slots=True)
class RankTree:
    """One rank's version of a shared tree.

    Args:
        name: name of the tree.
        text: its JSON.
        tensors: its whole tensors by their names in the JSON; divided tensors belong to all ranks.
        marks: checksums with which ranks compare their trees: one of the text, then one of each tensor.
    """

    name: str
    text: str
    tensors: Mapping[str, torch.Tensor]
    marks: tuple[str, ...]

    @classmethod
    def of(cls, name: str, tree: Tree) -> RankTree:
        """Encode a tree. Reads every tensor: a difference in a single element is one.

        Raises:
            UnsupportedValueError: a value cannot be saved exactly; names its path.
        """
        encoded, leaves = encode_trees({name: tree})
        whole = {
            at: leaf for at, leaf in leaves.items() if isinstance(leaf, torch.Tensor) and not is_divided(leaf)
        }
        marks = [mark_of(at, tensor) for at, tensor in whole.items()]
        return cls(name, encoded.decode(), whole, (xxhash.xxh3_64_hexdigest(encoded), *marks))

    def beside(self, marks: Sequence[str]) -> dict[str, Any] | None:
        """The differences that this rank saves: the text, and the tensors that differ; None if nothing does.

        Args:
            marks: marks of the rank whose tree is saved for all.
        """
        if tuple(marks) == self.marks:
            return None
        known = frozenset(marks)
        named = zip(self.tensors.items(), self.marks[1:], strict=True)
        return {
            "text": self.text,
            "tensors": {at: tensor for (at, tensor), mark in named if mark not in known},
        }

    @staticmethod
    def restored(name: str, shared: Tree, own: Mapping[str, Any], where: str) -> Tree:
        """The tree of the rank that saved `own`.

        Args:
            name: of the tree.
            shared: the tree that was saved for all; None where there is none.
            own: what `beside` returned.
            where: the checkpoint, for messages.

        Raises:
            CorruptCheckpointError: it is not what `beside` returns.
        """
        check_form(own, _FORM, f"{where}: a rank's own {name}")
        _, known = encode_trees({name: shared})
        tensors: Mapping[str, Any] = {**known, **own["tensors"]}

        def find(at: str) -> Any:
            if at not in tensors:
                raise CorruptCheckpointError(
                    f"{where}: a rank's own {name} refers to {at!r}, which is not there"
                )
            return tensors[at]

        content = parse_json(own["text"].encode(), f"{where}: a rank's own {name}")
        if not isinstance(content, dict) or name not in content:
            raise CorruptCheckpointError(f"{where}: a rank's own {name} holds something else")
        return tagged_json.decode(content[name], find)


def ranks_that_differ(marks: Sequence[Marks], first: int) -> dict[str, list[int]]:
    """Name of a tree → the ranks that save their own.

    Args:
        marks: of each rank that saves together, the leading one at the front.
        first: the number of that rank.
    """
    names = {name: None for found in marks for name in found}
    differing = {
        name: [
            first + at
            for at, found in enumerate(marks)
            if name in found and tuple(found[name]) != tuple(marks[0].get(name, ()))
        ]
        for name in names
    }
    return {name: ranks for name, ranks in differing.items() if ranks}


def mark_of(name: str, tensor: torch.Tensor) -> str:
    """Checksum of a named tensor: of its name, dtype, shape and every byte of its values."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    digest = xxhash.xxh3_64(f"{name} {plain.dtype} {tuple(plain.shape)} ".encode())
    digest.update(as_bytes(plain))
    return digest.hexdigest()
