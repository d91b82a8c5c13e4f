"""Renaming and converting weights whose names in files are not those of the model, by the rules of the model's library.

transformers has rules for models whose modules have changed since their checkpoints were written, and applies them in
``from_pretrained``. For models of its classes its function returns these rules; nothing is imported here.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from accel_ckpt.errors import StateMismatchError
from accel_ckpt.loading.weights import Pair, TensorInfo, WeightSource

__all__ = ["RenamedWeights", "renamed_weights"]

_RULES = "get_model_conversion_mapping"
"""The function of transformers 5, which its models' module imports and PEFT calls; returns rules in their order."""
_PATTERNS = "_checkpoint_conversion_mapping"
"""The attribute of models of transformers 4 and of custom code: regular expression → what replaces it."""


class _Pattern(NamedTuple):
    """A rule of `_PATTERNS`; the first that fits is applied."""

    patterns: Mapping[str, str]

    def rename_source_key(self, name: str) -> tuple[str, str | None]:
        for pattern, replacement in self.patterns.items():
            # Written for both directions: a replacement may hold what only a pattern needs.
            plain = re.sub(r"\(.*\)", "", replacement.lstrip("^"))
            new, count = re.subn(pattern, plain, name)
            if count:
                return new, pattern
        return name, None


def _rules_of(model: nn.Module) -> list[Any]:
    """Objects with ``rename_source_key(name) -> (new name, pattern that fits or None)``.

    Those that also change values have ``operations``, ``add_tensor`` and ``convert``.
    """
    for kind in type(model).__mro__:
        find = getattr(sys.modules.get(kind.__module__), _RULES, None)
        if find is not None:
            return list(find(model))
    patterns = getattr(model, _PATTERNS, None)
    return [_Pattern(patterns)] if isinstance(patterns, Mapping) and patterns else []


@dataclass
class _Conversion:
    """Tensors of the checkpoint that one rule makes tensors of the model of.

    Args:
        rule: makes them.
        target: the name of the model that the rule was found for.
        inputs: name in the checkpoint → the pattern of the rule that it fits, in order.
    """

    rule: Any
    target: str
    inputs: dict[str, str] = field(default_factory=dict)

    def of(self, tensors: Mapping[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
        """The tensors of the model by name."""
        rule = copy.deepcopy(self.rule)  # it collects
        for raw, pattern in self.inputs.items():
            rule.add_tensor(self.target, raw, pattern, lambda value=tensors[raw]: value)
        try:
            found = rule.convert(self.target, model=model, config=getattr(model, "config", None))
        except Exception as error:
            some = f"{', '.join(list(self.inputs)[:3])}{', …' if len(self.inputs) > 3 else ''}"
            steps = ", ".join(getattr(step, "__name__", type(step).__name__) for step in rule.operations)
            raise StateMismatchError(
                f"{self.target} is made of {some} by a rule of {type(model).__name__} ({steps}), which fails: {error}. "
                "Load it with from_pretrained, and give the model to dispatch_model of accel-bigmodel"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def renamed_weights(
    model: nn.Module, source: WeightSource, names: Mapping[str, str], known: Collection[str]
) -> WeightSource:
    """Rename weights to the names of the model, if the checkpoint has other names and the model has rules for them.

    Args:
        model: its class has the rules for names in checkpoints.
        source: the weights.
        names: names in the checkpoint → canonical names.
        known: names of the model.

    Raises:
        StateMismatchError: a rule of the model cannot convert tensors of these shapes.
    """
    if all(name in known for name in names.values()):
        return source
    rules = _rules_of(model)
    prefix = getattr(model, "base_model_prefix", "")
    if not rules and not prefix:
        return source
    renamings = [rule for rule in rules if not hasattr(rule, "operations")]
    converters = [rule for rule in rules if hasattr(rule, "operations")]
    plain: dict[str, str] = {}
    conversions: dict[str, _Conversion] = {}
    for raw in sorted(names, key=_natural):
        name, rule, pattern = _new_name(names[raw], renamings, converters, prefix, known)
        if rule is not None and name in known and raw in source.about:
            conversions.setdefault(name, _Conversion(rule, name)).inputs[raw] = pattern or ""
        elif name in known and name not in plain:
            plain[name] = raw
        else:
            plain[raw] = raw  # reported under the name of the file
    if not conversions and all(name == names[raw] for name, raw in plain.items()):
        return source
    return RenamedWeights(model, source, plain, list(conversions.values()))


def _new_name(
    name: str, renamings: Sequence[Any], converters: Sequence[Any], prefix: Any, known: Collection[str]
) -> tuple[str, Any, str | None]:
    """The name in the model, and the rule that converts the tensor, with its pattern."""
    new, pattern, rule = name, None, None
    for renaming in renamings:
        new, _ = renaming.rename_source_key(new)
    for rule in converters:  # at most one fits
        new, pattern = rule.rename_source_key(new)
        if pattern is not None:
            break
    new = _with_prefix(new, prefix, known)
    if new not in known and (kept := _with_prefix(name, prefix, known)) in known:
        return kept, None, None
    return new, None if pattern is None else rule, pattern


def _with_prefix(name: str, prefix: Any, known: Collection[str]) -> str:
    """With or without the name under which a model with a head holds the one below, whichever is the model's."""
    if not isinstance(prefix, str) or not prefix or name in known:
        return name
    inner, outer = name.removeprefix(f"{prefix}."), f"{prefix}.{name}"
    return inner if inner in known else outer if outer in known else name


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts numbers by value, as of the experts that are stacked."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


class RenamedWeights:
    """Weights of a checkpoint under the names of a model.

    Args:
        model: passed to its rules.
        source: the weights as they are saved.
        plain: name of the model → name in the checkpoint.
        conversions: tensors that are made from others.

    Raises:
        StateMismatchError: a conversion does not take tensors of these shapes.
    """

    def __init__(
        self,
        model: nn.Module,
        source: WeightSource,
        plain: Mapping[str, str],
        conversions: Sequence[_Conversion],
    ) -> None:
        self._model, self._source, self._plain = model, source, plain
        self._made: dict[str, torch.Tensor] = {}  # by conversions, and not asked for yet
        self._by: dict[str, _Conversion] = {}
        self._wanted: set[str] = set()
        self.versions = source.versions
        self.objects = {name: source.objects[raw] for name, raw in plain.items() if raw in source.objects}
        about: dict[str, TensorInfo] = {
            name: source.about[raw] for name, raw in plain.items() if raw in source.about
        }
        for conversion in conversions:
            shapes = {raw: source.about[raw] for raw in conversion.inputs}
            outlines = {
                raw: torch.empty(tuple(info.shape), dtype=info.dtype, device="meta")
                for raw, info in shapes.items()
            }
            outputs = conversion.of(outlines, model)
            about |= outputs
            self._by |= dict.fromkeys(outputs, conversion)
        self.about = about
        self.fingerprint = source.fingerprint

    def is_mapped(self, name: str) -> bool:
        """Whether a tensor is a view of a file; the result of a conversion has its own memory."""
        return name not in self._by and self._source.is_mapped(self._plain[name])

    def begin(self, names: Sequence[str]) -> None:
        """Announce the tensors of the checkpoint of which these are made."""
        self._wanted = set(names)
        raw: dict[str, None] = {}
        for name in names:
            raw |= dict.fromkeys(self._by[name].inputs if name in self._by else [self._plain[name]])
        self._source.begin(list(raw))

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the model; one rule may make several, which are kept until they are asked for."""
        conversion = self._by.get(name)
        if conversion is None:
            return self._source.tensor(self._plain[name])
        if name not in self._made:
            inputs = {raw: self._source.tensor(raw) for raw in conversion.inputs}
            made = conversion.of(inputs, self._model)
            self._made |= {at: value for at, value in made.items() if at in self._wanted or at == name}
        return self._made.pop(name)

    def differing(self, pairs: Sequence[Pair]) -> set[Pair]:
        """Find pairs whose values differ, except results of conversions, which are not compared."""
        raw = {
            (self._plain[one], self._plain[other]): (one, other)
            for one, other in pairs
            if one in self._plain and other in self._plain
        }
        return {raw[pair] for pair in self._source.differing(list(raw))}

    def finish(self) -> None:
        """See ``WeightSource``."""
        self._made.clear()
        self._source.finish()
