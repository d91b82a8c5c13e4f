"""Cutting a batch that several ranks read to this rank's positions of each sequence."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import tokenize
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accel_state.trees import flatten, recursively_apply
from accel_train.errors import IncompatibleOptionsError
from accel_train.sequence.layout import WHOLE, SequenceLayout

__all__ = ["IGNORED", "ModelFacts", "SequencePart", "cut_batch", "source_nodes", "takes"]

IGNORED = -100
"""Label that losses leave out: the default `ignore_index` of torch's cross entropy."""


@dataclass(frozen=True)
class SequencePart:
    """The part of each sequence that a rank has.

    Attributes:
        index: index of the part, from 0.
        parts: number of parts.
        name: the degrees that divide sequences, for errors.
        length: required length of every sequence; None: any length that can be divided.
        layout: what each rank of context parallelism has; neighbours in sequence parallelism divide that further.
    """

    index: int
    parts: int
    name: str
    length: int | None = None
    layout: SequenceLayout = WHOLE

    @property
    def multiple(self) -> int:
        """Lengths that can be divided are multiples of this."""
        ranks = self.layout.ranks
        return ranks * math.lcm(self.layout.count // ranks, self.parts // ranks)

    @property
    def why(self) -> str:
        """For errors about lengths: how sequences are divided, and what else could be done."""
        told = f"{self.name} cannot divide into {self.parts} equal parts"
        if self.multiple > self.parts:
            told += f" of two pieces; with cp_load_balance=False, multiples of {self.parts} can be divided"
        return told

    def cut(self, tensor: Tensor, dim: int) -> Tensor:
        """Cut a tensor of all positions, whose length is such a multiple, to this part."""
        shares = self.parts // self.layout.ranks
        found = self.layout.cut(tensor, dim, self.index // shares)
        return found.chunk(shares, dim)[self.index % shares].contiguous()


@dataclass(frozen=True)
class ModelFacts:
    """Which arguments a model takes besides its inputs.

    Attributes:
        positions: it takes `position_ids`.
        is_causal: it predicts the next token.
        shifts: it shifts `labels` itself, unless it is given `shift_labels`.
        counts: it divides the sum of its losses by `num_items_in_batch`.
        may_shift: it takes `labels`, and whether it shifts them itself is not known.
        averages: its loss is the average over the labels of the positions that it sees, unless it is given
            `num_items_in_batch`, which some forwards of its kind ignore.
        padding: the token of padding, if positions count the other tokens, from the number of this token + 1.
        longest: in longer sequences, the factors of rotary embeddings depend on the positions that it sees.
    """

    positions: bool = False
    is_causal: bool = False
    shifts: bool = False
    counts: bool = False
    may_shift: bool = False
    averages: bool = False
    padding: int | None = None
    longest: int | None = None

    @classmethod
    def of(cls, model: nn.Module) -> ModelFacts:
        """Inspect a model, without running it."""
        parameters = inspect.signature(model.forward).parameters
        keywords = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        loss = getattr(getattr(model, "loss_function", None), "__name__", "")  # of transformers
        base = getattr(model, "get_base_model", None)  # PEFT's models pass keyword arguments on
        names = takes(model)
        is_causal = loss == "ForCausalLMLoss" or "shift_labels" in names
        known = keywords and loss == "ForCausalLMLoss"
        return cls(
            positions="position_ids" in names
            or (keywords and base is not None and "position_ids" in takes(base())),
            is_causal=is_causal,
            shifts=(known and is_causal) or "shift_labels" in names,
            counts=known or "num_items_in_batch" in names,
            may_shift="labels" in names and not loss and not is_causal,
            averages=loss in ("ForMaskedLMLoss", "ForTokenClassification"),
            padding=_padding(model),
            longest=_longest(model),
        )


def _padding(model: nn.Module) -> int | None:
    """The token of padding of models like RoBERTa, whose embeddings of positions have a row for it."""
    for module in model.modules():
        places = getattr(module, "position_embeddings", None)
        found = getattr(places, "padding_idx", None) if isinstance(places, nn.Module) else None
        if found is not None:
            return int(found)
    return None


def _longest(model: nn.Module) -> int | None:
    """Positions up to which rotary embeddings of transformers have the same factors, whatever positions they see."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(given, Mapping):
        return None
    found = []
    for rope in (
        given,
        *(each for each in given.values() if isinstance(each, Mapping)),
    ):  # or one for each kind of layer
        kind = str(rope.get("rope_type", rope.get("type", "")))
        if kind == "longrope" or "dynamic" in kind:
            before = rope.get("original_max_position_embeddings")
            before = before or getattr(config, "original_max_position_embeddings", None)
            found.append(int(before or config.max_position_embeddings))
    return min(found, default=None)


def takes(model: nn.Module) -> list[str]:
    """Names of the arguments of a forward, in their order."""
    return list(inspect.signature(model.forward).parameters)


def source_nodes(function: Callable[..., Any]) -> list[ast.AST]:
    """The nodes of a function's source code.

    None if there is no such code: it is of the command line, compiled, edited since, or a lambda in a longer line.
    """
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        return list(ast.walk(ast.parse(source)))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return []


def cut_batch(batch: Any, place: SequencePart, facts: ModelFacts) -> Any:
    """Cut every tensor of (samples, positions, …) to the positions of this rank.

    A mapping with `input_ids` or `inputs_embeds` also gets arguments that a model of transformers, or one whose forward
    names them, would otherwise compute from the positions that it sees: `position_ids`; `shift_labels`, because the
    label of a rank's last position is on the next rank; and `num_items_in_batch`, so that the mean of the ranks' losses
    is the loss over all positions that count.

    Args:
        batch: a batch of all positions, on any device.
        place: this rank's part.
        facts: facts about the model that is trained.

    Raises:
        IncompatibleOptionsError: sequences cannot be divided, have another length than was set, or are padded so that
            attention needs a mask.
    """
    length = _length(batch)
    if length is None:
        raise IncompatibleOptionsError(
            f"{place.name} divides sequences, but the batch ({type(batch).__name__}) has no tensor of the shape "
            "(samples, positions, …). Let the collate function return one, or leave out cp_size and sp_size."
        )
    if place.length not in (None, length):
        raise IncompatibleOptionsError(
            f"A batch has sequences of {length} positions, but sp_seq_length is {place.length} with "
            "sp_seq_length_is_variable=False. Pad to that length, or let lengths vary."
        )
    if length % place.multiple:
        raise IncompatibleOptionsError(
            f"A batch has sequences of {length} positions, which {place.why}. Pad them to a multiple of "
            f"{place.multiple}, as `pad_to_multiple_of={place.multiple}` of transformers' collators does."
        )
    if facts.longest is not None and length > facts.longest:
        raise IncompatibleOptionsError(
            f"A batch has sequences of {length} positions. The model's rotary embeddings (rope_type 'longrope' or "
            f"'dynamic') choose their factors by the last position in sequences of more than {facts.longest}, and with "
            f"{place.name} each rank sees another one. Train on at most {facts.longest} positions, or leave out "
            "cp_size and sp_size."
        )
    more: dict[str, Any] = {}
    if isinstance(batch, Mapping) and ("input_ids" in batch or "inputs_embeds" in batch):
        more = _additions(batch, length, facts)
        if "attention_mask" in batch:
            _check_mask(batch["attention_mask"], facts, place)
            batch = {name: value for name, value in batch.items() if name != "attention_mask"}
        batch = {**batch, **more}

    def cut(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != length:
            return tensor
        return place.cut(tensor, 1)

    found = recursively_apply(cut, batch)
    if "num_items_in_batch" in more:
        found["num_items_in_batch"] = found["num_items_in_batch"] / place.parts
    return found


def _additions(batch: Mapping[str, Any], length: int, facts: ModelFacts) -> dict[str, Any]:
    more: dict[str, Any] = {}
    some = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    if facts.positions and batch.get("position_ids") is None:
        more["position_ids"] = _positions(some, length, facts.padding)
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.shape[1:2] != (length,):
        return more
    if facts.shifts:
        if batch.get("shift_labels") is None:
            more["shift_labels"] = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        labels = more.get("shift_labels", batch.get("shift_labels"))
    if facts.counts and batch.get("num_items_in_batch") is None:
        assert isinstance(labels, Tensor)
        more["num_items_in_batch"] = (labels != IGNORED).sum().clamp_(min=1)
    return more


def _positions(some: Tensor, length: int, padding: int | None) -> Tensor:
    """Position ids as the model would compute them from all positions of tokens or their embeddings."""
    if padding is None:
        return torch.arange(length, device=some.device).expand(some.shape[0], length)
    if some.is_floating_point():
        return _positions(some, length, None) + padding + 1
    kept = (some != padding).long()
    return kept.cumsum(1) * kept + padding


def _check_mask(mask: Any, facts: ModelFacts, place: SequencePart) -> None:
    """Attention over divided sequences has no mask: see that none is needed."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise IncompatibleOptionsError(
            f"The batch has an attention_mask of shape {tuple(getattr(mask, 'shape', ()))}; with {place.name} only a "
            "mask of (samples, positions) for padding on the right can be left out. Use a model and data that need no "
            "other mask."
        )
    kept = mask.bool()
    if bool(kept.all()):
        return
    if not facts.is_causal or bool((kept[:, 1:] & ~kept[:, :-1]).any()):
        raise IncompatibleOptionsError(
            f"The batch has an attention_mask with padding {'before' if facts.is_causal else 'among'} the positions "
            f"that count, which {place.name} cannot mask. Pad causal language models on the right, where no position "
            "attends to the padding (tokenizer.padding_side='right'); pack the samples of other models to full length."
        )


def _length(batch: Any) -> int | None:
    """Positions of the sequences of a batch."""
    if isinstance(batch, Mapping):
        for name in ("input_ids", "inputs_embeds"):
            if isinstance(batch.get(name), Tensor):
                return int(batch[name].shape[1])
    return next((int(leaf.shape[1]) for leaf in flatten(batch)[0] if leaf.dim() >= 2), None)
