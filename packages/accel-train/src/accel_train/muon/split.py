"""Which parameters of a model Muon steps, and which AdamW."""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from accel_ckpt.modules.named_model import NamedModel
from accel_train.errors import IncompatibleOptionsError, OptionError

__all__ = ["Chosen", "MuonParameter", "MuonSplit", "split_for_muon"]

Chosen = str | Sequence[str] | Callable[[str, Tensor], bool]
"""Parameters: a pattern of names, as `fnmatch` takes it, or several, or a function of a name and a parameter."""

_HEADS = frozenset(
    {"lm_head", "classifier", "score", "unembed", "embed_out", "output_projection", "qa_outputs"}
)
_HEADS_OF_THE_MODEL = frozenset({"head", "heads", "output", "fc"})  # elsewhere they are hidden layers


@dataclass(frozen=True, eq=False)
class MuonParameter:
    """A trained parameter of a model, and who steps it.

    Attributes:
        name: its first name in the model, without those of wrappers.
        parameter: itself.
        use_muon: Muon steps it; else AdamW.
        reason: why.
        is_vector: it is a norm, a bias, or a matrix of one row or column.
        transposed: its matrices are stored as (in, out).
        flatten: it is a convolution's, whose dimensions but the first are joined.
    """

    name: str
    parameter: Tensor
    use_muon: bool
    reason: str
    is_vector: bool = False
    transposed: bool = False
    flatten: bool = False


@dataclass(frozen=True)
class MuonSplit:
    """The trained parameters of a model, divided between Muon and AdamW; `print` shows a table.

    Attributes:
        parameters: each once, in the order of the model.
    """

    parameters: tuple[MuonParameter, ...]

    @property
    def muon(self) -> list[MuonParameter]:
        """The parameters that Muon steps."""
        return [item for item in self.parameters if item.use_muon]

    @property
    def adamw(self) -> list[MuonParameter]:
        """The parameters that AdamW steps."""
        return [item for item in self.parameters if not item.use_muon]

    def __str__(self) -> str:
        rows: dict[tuple[str, ...], int] = defaultdict(int)
        for item in self.parameters:
            name = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", item.name)
            shape = " x ".join(map(str, item.parameter.shape)) or "scalar"
            rows[("Muon" if item.use_muon else "AdamW", name, shape, item.reason)] += 1
        lines = [(who, str(count), name, shape, reason) for (who, name, shape, reason), count in rows.items()]
        widths = [max(len(line[column]) for line in lines) for column in range(4)] if lines else []
        return "\n".join(
            "  ".join([*(f"{cell:{width}}" for cell, width in zip(line[:4], widths, strict=True)), line[4]])
            for line in lines
        )


def split_for_muon(
    model: nn.Module, *, include: Chosen = (), exclude: Chosen = (), convolutions: bool = False
) -> MuonSplit:
    """Divide the trained parameters of a model between Muon and AdamW.

    Muon gets weights of shape (out, in), and stacked experts of shape (experts, out, in): three-dimensional parameters
    with "expert" in their name or in that of their module's class, as transformers' mixtures of experts have. AdamW
    gets embeddings, the output head, biases, vectors, matrices with a single row or column, and convolutions. A head is
    what `get_output_embeddings()` returns, or has one of the usual names (`lm_head`, `classifier`, `score` …; `head`,
    `fc` and `output` only directly in the model). A weight that is an embedding too is an embedding.

    Args:
        model: before or after `prepare`. Frozen parameters are left out.
        include: parameters for Muon that the rules give to AdamW: patterns of names, as in `"*.projector.weight"`, or
            a function of name and parameter.
        exclude: likewise, parameters for AdamW.
        convolutions: give weights of convolutions to Muon, each as a matrix (out, all others).

    Raises:
        OptionError: a pattern matches no trained parameter, or an included one has no matrices.
        IncompatibleOptionsError: a parameter is included and excluded.
    """
    names: defaultdict[int, list[str]] = defaultdict(list)
    trained: dict[int, nn.Parameter] = {}
    for name, parameter in NamedModel(model).parameters().items():
        if parameter.requires_grad:
            names[id(parameter)].append(name)
            trained[id(parameter)] = parameter
    owners: defaultdict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for label, own in module.named_parameters(recurse=False):
            owners[id(own)].append((module, label))
    head = _head_of(model)
    included = _chosen(include, "include", names, trained)
    excluded = _chosen(exclude, "exclude", names, trained)
    if both := [key for key in trained if key in included & excluded]:
        raise IncompatibleOptionsError(
            f"{names[both[0]][0]!r} is named by include= and by exclude=. Leave it out of one of them."
        )
    found = []
    for key, parameter in trained.items():
        use_muon, reason = _rule(parameter, names[key], owners[key], head, convolutions)
        is_vector = reason == "vector"
        convolution = any(isinstance(module, nn.modules.conv._ConvNd) for module, _ in owners[key])
        if key in excluded:
            use_muon, reason = False, "excluded"
        elif key in included:
            if parameter.dim() < 2 or (parameter.dim() > 3 and not convolution):
                raise OptionError(
                    f"include= names {names[key][0]!r} of shape {list(parameter.shape)}, which has no matrices for "
                    "Muon. Leave it to AdamW."
                )
            use_muon, reason = True, "included"
        found.append(
            MuonParameter(
                names[key][0],
                parameter,
                use_muon,
                reason,
                is_vector,
                transposed=use_muon and any(_is_transposed(module) for module, _ in owners[key]),
                flatten=use_muon and convolution,
            )
        )
    return MuonSplit(tuple(found))


def _rule(
    parameter: Tensor,
    names: Sequence[str],
    owners: Sequence[tuple[nn.Module, str]],
    head: set[int],
    convolutions: bool,
) -> tuple[bool, str]:
    """Who steps a parameter by default, and why."""
    shape = parameter.shape
    if len(shape) < 2:
        return False, "vector"
    if any(key.endswith("bias") for _, key in owners):
        return False, "vector"  # stacked experts have one row of biases for each
    if any(isinstance(module, nn.Embedding | nn.EmbeddingBag) or "embed" in key for module, key in owners):
        return False, "embedding"
    if id(parameter) in head or any(_is_head(name) for name in names):
        return False, "output head"
    if any(isinstance(module, nn.modules.conv._ConvNd) for module, _ in owners):
        matrix = shape[0] > 1 and parameter.numel() > shape[0]
        return convolutions and matrix, "convolution"
    if parameter.is_complex():
        return False, "complex numbers"
    if len(shape) == 2:
        return (True, "matrix") if min(shape) > 1 else (False, "vector")
    if len(shape) == 3 and min(shape[1:]) > 1 and _are_experts(names, owners):
        return True, "stacked experts"
    return False, f"{len(shape)} dimensions"


def _are_experts(names: Iterable[str], owners: Iterable[tuple[nn.Module, str]]) -> bool:
    labels = [*names, *(type(module).__name__ for module, _ in owners)]
    return any("expert" in label.lower() for label in labels)


def _is_transposed(module: Any) -> bool:
    """Whether a module of transformers has weights of shape (…, in, out)."""
    kind = type(module)
    known = kind.__name__ == "Conv1D" and hasattr(module, "nf")  # GPT-2's linear layer
    unmarked = kind.__name__ == "Llama4TextExperts"
    return known or unmarked or getattr(module, "is_transposed", False) is True


def _head_of(model: nn.Module) -> set[int]:
    heads: set[int] = set()
    for module in model.modules():
        get = getattr(module, "get_output_embeddings", None)
        if callable(get):
            found = get()
            if isinstance(found, nn.Module):
                heads |= {id(parameter) for parameter in found.parameters()}
            break  # the outermost one that knows
    return heads


def _is_head(name: str) -> bool:
    path = name.split(".")[:-1]
    return bool(_HEADS.intersection(path)) or (bool(path) and path[0] in _HEADS_OF_THE_MODEL)


def _chosen(
    chosen: Chosen, argument: str, names: Mapping[int, Sequence[str]], trained: Mapping[int, Tensor]
) -> set[int]:
    if callable(chosen):
        return {key for key, own in names.items() if chosen(own[0], trained[key])}
    found: set[int] = set()
    for pattern in [chosen] if isinstance(chosen, str) else chosen:
        matching = {key for key, own in names.items() if _matches(own, pattern)}
        if not matching:
            first = next((own[0] for own in names.values()), None)
            raise OptionError(
                f"{argument}={pattern!r} matches no trained parameter; their names are like {first!r}. Write a whole "
                "name, or one with * in it."
            )
        found |= matching
    return found


def _matches(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)
