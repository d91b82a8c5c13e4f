"""Several documents in one sequence, which must not attend to each other."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from accel_train.errors import IncompatibleOptionsError
from accel_train.sequence.batches import ModelFacts, takes

__all__ = ["PackedDocuments", "check_documents", "is_of_transformers", "restarts"]

_BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "sequence_ids")
"""Names under which collators return the boundaries of documents."""


def restarts(position_ids: Tensor) -> Tensor:
    """Whether a document begins after each position but the last: the next position does not follow it by one."""
    return position_ids.diff(dim=-1) != 1


def check_documents(batch: Any, facts: ModelFacts, name: str) -> None:
    """Check that a model can keep the documents of a batch apart.

    Args:
        batch: a batch of all positions.
        facts: facts about the model that is trained.
        name: the degrees that divide sequences.

    Raises:
        IncompatibleOptionsError: it could not, because position ids are missing or the model takes none.
    """
    if not isinstance(batch, Mapping):
        return
    positions = batch.get("position_ids")
    if positions is None:
        given = [key for key in _BOUNDARIES if batch.get(key) is not None]
        if given:
            raise IncompatibleOptionsError(
                f"The batch has {given[0]!r}, so its sequences hold several documents, and no position_ids, from which "
                f"{name} reads where a document begins. Let the collate function return position_ids that begin again "
                "with each document, as PackingCollator and DataCollatorWithFlattening of transformers do."
            )
    elif _is_positions(positions) and not facts.positions and bool(restarts(positions).any()):
        raise IncompatibleOptionsError(
            f"The position_ids of the batch begin again inside a sequence, so it holds several documents, and the "
            f"model's forward has no argument position_ids, from which {name} reads where a document begins. Add the "
            "argument, or give each document a sequence of its own."
        )


class PackedDocuments:
    """The documents of the sequences that a model computes.

    Blocks that are checkpointed run again in backward, by themselves. Their documents are found by a tensor that they
    were called with.

    Args:
        model: its own forward, and those of models of transformers in it, take `position_ids`.
        gather: gathers a tensor of this rank's positions to one of all positions.

    Attributes:
        found_several: whether a batch had sequences of several documents.
    """

    def __init__(self, model: nn.Module, gather: Callable[[Tensor], Tensor]) -> None:
        self._gather = gather
        self._documents = WeakTensorKeyDictionary()
        self.found_several = False
        # Where `position_ids` is among the arguments of a forward; None: by name only.
        self._index: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()
        for module in model.modules():
            if module is model or is_of_transformers(module):
                names = takes(module)
                self._index[module] = names.index("position_ids") if "position_ids" in names else None

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._index

    def positions(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Position ids among the arguments of a call; None: there are none of (samples, positions)."""
        found = kwargs.get("position_ids")
        index = self._index[module]
        if found is None and index is not None and index < len(args):
            found = args[index]
        return found if _is_positions(found) else None

    def of(self, position_ids: Tensor) -> Tensor | None:
        """The number of the document of each position of all ranks; None: each sequence is one document. Collective.

        After the first batch with several documents, all batches have them: blocks that run again then find theirs.
        """
        starts = restarts(self._gather(position_ids))
        if not self.found_several and not bool(starts.any()):
            return None
        self.found_several = True
        return nn.functional.pad(starts.cumsum(1), (1, 0))

    def remember(self, called_with: Iterable[Any], documents: Tensor) -> None:
        """Remember the documents for a module that may run again with the same tensors."""
        for value in called_with:
            if isinstance(value, Tensor):
                self._documents[value] = documents

    def recall(self, called_with: Iterable[Any]) -> Tensor | None:
        """The documents with which a module ran before, with one of these tensors; None: it has not."""
        for value in called_with:
            if isinstance(value, Tensor) and value in self._documents:
                found: Tensor = self._documents[value]
                return found
        return None


def is_of_transformers(module: nn.Module) -> bool:
    """Whether a module is a model of transformers, or one inside another."""
    return hasattr(type(module), "base_model_prefix")


def _is_positions(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()
