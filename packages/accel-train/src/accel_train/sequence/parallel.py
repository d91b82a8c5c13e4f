"""Context and sequence parallelism of a run: this rank's part of each sequence, and attention to the others."""

from __future__ import annotations

import ast
import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from accel_state.messages import warn
from accel_state.trees import recursively_apply
from accel_train.errors import IncompatibleOptionsError, OptionError, PrepareError
from accel_train.mesh import Mesh
from accel_train.sequence.attention import DividedAttention
from accel_train.sequence.batches import IGNORED, ModelFacts, SequencePart, cut_batch, source_nodes, takes
from accel_train.sequence.documents import PackedDocuments, check_documents, is_of_transformers
from accel_train.sequence.layout import SequenceLayout
from accel_train.sequence.trial import try_turned

__all__ = ["SequenceParallel"]


class SequenceParallel:
    """Cuts batches, and replaces `scaled_dot_product_attention` by divided attention in prepared models.

    Args:
        mesh: a mesh with several ranks in "cp", "sp" or both.
        rotation: how context parallelism exchanges keys and values.
        length: required length of every sequence; None: any.
        balanced: whether each rank of context parallelism has a piece from each end of a sequence.
    """

    def __init__(
        self,
        mesh: Mesh,
        rotation: str = "allgather",
        length: int | None = None,
        balanced: bool = True,
    ) -> None:
        cp, sp = mesh.degrees["cp"], mesh.degrees["sp"]
        groups = {name: part.get_group() for name in ("cp", "sp") if (part := mesh.submesh(name)) is not None}
        index = 0
        for name in ("cp", "sp"):  # parts of neighbouring ranks are neighbours
            part = mesh.submesh(name)
            index = index * mesh.degrees[name] + (0 if part is None else part.get_local_rank())
        named = " and ".join(f"{name}_size {size}" for name, size in (("cp", cp), ("sp", sp)) if size > 1)
        layout = SequenceLayout(cp, balanced and cp > 1)
        self._place = SequencePart(index, cp * sp, named, length, layout)
        self._attention = DividedAttention(groups.get("sp"), groups.get("cp"), rotation, layout)
        self._facts: ModelFacts | None = None
        self._prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._told_of_form = False
        self._cut: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def prepare(self, model: nn.Module) -> nn.Module:
        """Make a model attend to the positions of all ranks; it is changed in place, once.

        Raises:
            IncompatibleOptionsError: the model has attention that cannot be divided.
        """
        if model in self._prepared:
            return model
        _check_attention(model, self._place.name)
        _check_head(model, self._place.name)
        facts = ModelFacts.of(model)
        if self._place.index == 0:
            _warn_of_neighbours(model, self._place.name)
        if self._facts is None:
            self._facts = facts
            if self._facts.may_shift and self._place.index == 0:
                warn(
                    f"The forward of {type(model).__name__} takes labels, which {self._place.name} cuts as all tensors "
                    "of a batch. If it compares each position with the next label (labels[:, 1:]), it compares wrong "
                    "tokens where this rank's positions end. Then let it take shift_labels, of which the loader gives "
                    "the shifted labels of this rank's positions, and num_items_in_batch, by which to divide the sum "
                    "of its losses.",
                )
            if facts.shifts and not facts.counts and self._place.index == 0:
                warn(
                    f"The forward of {type(model).__name__} takes shift_labels and not num_items_in_batch. An average "
                    f"over the labels of a rank, of which {self._place.name} gives some ranks fewer than others, is no "
                    "part of the average over all: let it take num_items_in_batch too, and divide the sum by it.",
                )
        self._prepared.add(model)
        documents = PackedDocuments(model, self._attention.gather)
        watch = _Watch(self._attention, self._place.name, documents)
        for module in model.modules():
            # Not only the outermost: blocks that are checkpointed run again in backward, by themselves.
            if module is model or _may_attend(module):
                module.register_forward_pre_hook(watch.enter, prepend=True, with_kwargs=True)
                module.register_forward_hook(watch.leave, always_call=True)
        watch.root = weakref.ref(model)
        own = not is_of_transformers(model) and not hasattr(model, "get_base_model")
        own = own and not isinstance(model, FSDPModule)  # divided by the script, and gathered after `enter`
        watch.tries = set(_TRIED) if own else set()
        watch.tries_losses = not facts.may_shift
        if facts.averages:
            model.register_forward_hook(self._weigh, with_kwargs=True)
        return model

    def shard_batch(self, batch: Any) -> Any:
        """Cut a batch to this rank's positions."""
        if self._facts is not None:
            check_documents(batch, self._facts, self._place.name)
            self._warn_of_form(batch, self._facts)
        found = cut_batch(batch, self._place, self._facts or ModelFacts())
        recursively_apply(self._remember, found)
        return found

    def _warn_of_form(self, batch: Any, facts: ModelFacts) -> None:
        """Warn once of a batch without the names by which positions and labels are found."""
        known = ("input_ids", "inputs_embeds", "position_ids", "shift_labels")
        if isinstance(batch, Mapping) and any(batch.get(name) is not None for name in known):
            return
        taken = (facts.positions, facts.shifts, facts.counts)
        names = ("position_ids", "shift_labels", "num_items_in_batch")
        missing = list(itertools.compress(names, taken))
        if missing and not self._told_of_form and self._place.index == 0:
            self._told_of_form = True
            warn(
                f"The model takes {', '.join(missing)}, of which {self._place.name} gives this rank's part only with "
                f"a mapping that has 'input_ids' or 'inputs_embeds'; this batch is a {type(batch).__name__} without "
                "them. A model that counts positions or shifts labels itself then computes with the part of its rank "
                "alone. Let the collate function return such a mapping, or compute them there for whole sequences.",
            )

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _weigh(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Weigh an average over this rank's labels, so that the mean of the ranks is the average over all labels."""
        labels, names = kwargs.get("labels"), takes(module)
        if labels is None and "labels" in names and names.index("labels") < len(args):
            labels = args[names.index("labels")]
        if not isinstance(labels, Tensor) or kwargs.get("num_items_in_batch") is not None:
            return output
        counted = (labels != IGNORED).sum()
        share = counted * self._place.parts / self._attention.sum(counted).clamp_(min=1)
        loss = output["loss"] if isinstance(output, Mapping) else output[0]
        # Without labels on this rank the mean loss is NaN; it counts nothing.
        loss = torch.where(counted > 0, loss * share.to(loss.dtype), 0)
        if isinstance(output, Mapping):
            output["loss"] = loss  # type: ignore[index]  # of transformers
            return output
        return loss, *output[1:]

    def _remember(self, tensor: Tensor) -> Tensor:
        self._cut[id(tensor)] = tensor
        return tensor

    @contextmanager
    def cut_buffers(
        self,
        buffers: Sequence[Tensor],
        dimensions: Sequence[int],
        kept: Sequence[Tensor] = (),
    ) -> Iterator[None]:
        """Context in which tensors hold this rank's positions; tensors that a prepared loader has cut do not change.

        Args:
            buffers: changed in place.
            dimensions: the sequence dimension of each buffer.
            kept: buffers that stay cut when the context ends.

        Raises:
            OptionError: the number of dimensions differs from the number of buffers.
            IncompatibleOptionsError: the length of a sequence cannot be divided.
        """
        if len(buffers) != len(dimensions):
            raise OptionError(
                f"maybe_context_parallel got {len(buffers)} buffers and {len(dimensions)} buffer_seq_dims; it takes "
                "the dimension of the positions for each buffer."
            )
        pairs = [
            (buffer, dimension)
            for buffer, dimension in zip(buffers, dimensions, strict=True)
            if self._cut.get(id(buffer)) is not buffer
        ]
        for buffer, dimension in pairs:
            if buffer.shape[dimension] % self._place.multiple:
                raise IncompatibleOptionsError(
                    f"A buffer of shape {tuple(buffer.shape)} has {buffer.shape[dimension]} positions along dimension "
                    f"{dimension}, which {self._place.why}. Pad them to a multiple of {self._place.multiple}."
                )
        whole = [(buffer, buffer.data) for buffer, _ in pairs]
        for buffer, dimension in pairs:
            buffer.data = self._place.cut(buffer.data, dimension)
        try:
            yield
        finally:
            for buffer, data in whole:
                if not any(buffer is one for one in kept):
                    buffer.data = data


class _Mode(TorchFunctionMode):
    """Divided attention wherever `scaled_dot_product_attention` is called."""

    def __init__(self, attention: DividedAttention, calls: list[int]) -> None:
        super().__init__()
        self._attention = attention
        self._calls = calls
        self.documents: Tensor | None = None
        self.documents_known = False
        self.alone: nn.Module | None = None  # runs without the model, and its documents are not known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            if self.alone is not None:
                raise PrepareError(
                    f"{type(self.alone).__name__} runs by itself with tensors that the model has not called it with, "
                    "while sequences hold several documents: which of its positions belong together is not known. "
                    "Checkpoint activations with use_reentrant=False, pass position_ids to each block, and call the "
                    "whole model."
                )
            return self._divided(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @torch._disable_dynamo  # type: ignore[attr-defined]  # compiled, the attention to all positions would be divided once more
    def _divided(self, *args: Any, **kwargs: Any) -> Tensor:
        self._calls[0] += 1
        return self._attention(*args, **{**kwargs, "documents": self.documents})


_TRIED = (1, 16, 256)
"""The forwards before which a model of the script's own is tried: what begins as zeros tells nothing in the first."""


class _Watch(threading.local):
    """Enters the mode with the outermost module that runs in a thread; autograd has threads of its own."""

    def __init__(self, attention: DividedAttention, name: str, documents: PackedDocuments) -> None:
        self.root: weakref.ref[nn.Module] | None = None
        self._attention, self._name, self._documents = attention, name, documents
        self._depth = 0
        self._mode: _Mode | None = None
        self._calls = [0]
        self._seen = False
        self.tries: set[int] = set()
        self.tries_losses = False
        self._forwards = 0
        self._trying = False

    def _try(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forwards += 1
        if self._forwards not in self.tries or _is_compiled(model):
            return
        self._trying = True
        try:
            try_turned(model, args, kwargs, self._name, losses=self.tries_losses)
        finally:
            self._trying = False

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._trying:
            return None
        if not self._depth and self.tries and self.root is not None and module is self.root():
            self._try(module, args, kwargs)
        self._depth += 1
        if self._depth == 1:
            self._calls[0] = 0
            self._mode = _Mode(self._attention, self._calls)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        mode, documents = self._mode, self._documents
        assert mode is not None
        if module in documents:
            positions = documents.positions(module, args, kwargs)
            if positions is not None:
                if not mode.documents_known:
                    mode.documents, mode.documents_known = documents.of(positions), True
                return _without_mask(module, args, kwargs, positions)
        elif documents.found_several and not mode.documents_known:
            mode.documents = documents.recall((*args, *kwargs.values()))
            mode.documents_known = mode.documents is not None
            mode.alone = None if mode.documents_known else module
        if mode.documents is not None:
            documents.remember((*args, *kwargs.values()), mode.documents)
        return None

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if self._trying:
            return
        self._depth -= 1
        if self._depth or self._mode is None:
            return
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._mode = None
        if not self._seen and self._calls[0]:
            self._seen = True
        if not self._seen and self.root is not None and module is self.root():
            raise PrepareError(
                f"{type(module).__name__} computed without a call of torch.nn.functional.scaled_dot_product_attention, "
                f"the one place where {self._name} joins the positions of the ranks; each would train on its own part "
                "alone. Write its attention with that function (transformers: attn_implementation='sdpa')."
            )


def _without_mask(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], positions: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments with which a model of transformers makes no mask of the position ids of this rank."""
    if not is_of_transformers(module) or kwargs.get("attention_mask") is not None:
        return None
    names = takes(module)
    if "attention_mask" not in names or names.index("attention_mask") < len(args):
        return None
    return args, {**kwargs, "attention_mask": torch.ones_like(positions)}


def _is_compiled(model: nn.Module) -> bool:
    return any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())


def _may_attend(module: nn.Module) -> bool:
    """Whether a module may attend if it runs by itself: one of several, or one without parameters, as attention is."""
    if next(module.children(), None) is not None:
        return True
    return not type(module).__module__.startswith("torch.") and next(module.parameters(), None) is None


def _check_attention(model: nn.Module, name: str) -> None:
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            raise IncompatibleOptionsError(
                f"{path or type(model).__name__!r} is a torch.nn.MultiheadAttention, which has fused paths that "
                f"{name} cannot divide. Use a module that calls torch.nn.functional.scaled_dot_product_attention."
            )
        config = getattr(module, "config", None)
        kind = getattr(config, "_attn_implementation", None)
        if kind is not None and kind != "sdpa":
            raise IncompatibleOptionsError(
                f"{type(module).__name__} attends by {kind!r}; {name} divides 'sdpa' alone. Create the model with "
                "attn_implementation='sdpa'."
            )
    narrow = _narrow_layers(model)
    if narrow:
        raise IncompatibleOptionsError(
            f"{type(model).__name__} has attention layers of type {', '.join(narrow)}, which need a mask, and {name} "
            "attends without one. Use a model whose layers attend to all positions, or leave out cp_size and sp_size."
        )


_BY_POSITION = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "ForTokenClassification")
"""Kinds of losses of transformers that are sums over positions."""


def _check_head(model: nn.Module, name: str) -> None:
    """Refuse models of transformers whose loss is no sum over positions: for a class, or where an answer is."""
    inner: Any = getattr(model, "get_base_model", None)  # of PEFT
    base: Any = model if inner is None else inner()
    if not is_of_transformers(base):
        return
    kind, names = getattr(base, "loss_type", None), takes(base)
    why = _counts_from_its_part(base, names)
    if why is not None:
        raise IncompatibleOptionsError(
            f"{type(base).__name__} cannot compute parts of sequences, which {name} gives each rank: {why}. Use a "
            "model whose forward takes position_ids and gives its loss all keyword arguments, such as Llama, or leave "
            "out cp_size and sp_size."
        )
    if kind is None and ("labels" not in names or base.can_generate()) and "mc_labels" not in names:
        return  # no loss of its own, or older names of causal language models
    if kind not in _BY_POSITION:
        raise IncompatibleOptionsError(
            f"The outputs or the loss of {type(base).__name__} (loss_type {kind!r}) cannot be computed from parts of "
            f"sequences, which {name} gives each rank. Use a model for causal or masked language modeling or for token "
            "classification, or leave out cp_size and sp_size."
        )


def _counts_from_its_part(model: Any, names: Sequence[str]) -> str | None:
    """Why a model of transformers takes the part of a rank for a whole sequence; None: it does not."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "it has an encoder and a decoder, and makes the decoder's inputs from the labels that it sees"
    if "position_ids" not in names:
        return "its forward takes no position_ids, so it counts the positions that it sees from 0"
    if "labels" in names and model.can_generate() and _calls_loss_without_keywords(type(model).forward):
        return "its forward gives its loss no shift_labels, so it shifts the labels that it sees"
    return None


def _calls_loss_without_keywords(forward: Any) -> bool:
    """Whether a forward computes its loss without handing on `**kwargs`; False where there is no source code."""
    nodes = source_nodes(forward)
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    losses = [call for call in calls if getattr(call.func, "attr", None) == "loss_function"]
    return bool(nodes) and not any(keyword.arg is None for call in losses for keyword in call.keywords)


def _warn_of_neighbours(model: nn.Module, name: str) -> None:
    """Warn of modules of the script's own that join neighbouring positions without attention."""
    if is_of_transformers(model) or hasattr(model, "get_base_model"):
        return
    found = [
        f"{path!r} ({type(module).__name__})"
        for path, module in model.named_modules()
        if isinstance(module, nn.RNNBase) or (isinstance(module, nn.Conv1d) and module.kernel_size != (1,))
    ]
    if found:
        more = f" and {len(found) - 1} others" if len(found) > 1 else ""
        warn(
            f"{type(model).__name__} has {found[0]}{more}. If it joins positions of the sequence, it sees only those "
            f"of its rank, because {name} joins the ranks in attention alone: then it computes other values than one "
            "process. Leave out such modules, or cp_size and sp_size.",
        )


def _narrow_layers(model: nn.Module) -> list[str]:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    return sorted(set(kinds) - {"full_attention"})
