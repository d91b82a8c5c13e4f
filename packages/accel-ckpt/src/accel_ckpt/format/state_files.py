"""Names of the files of a training state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

__all__ = [
    "EXTRA",
    "is_part_file",
    "is_state_file",
    "model_stem",
    "part_file",
    "rank_stem",
    "sorted_parts",
    "tensor_files",
]

EXTRA = "model_{}.extra"
"""Among the shared trees: what the state dict of a model holds besides tensors."""


_OWN = re.compile(
    r"(model|pytorch_model)(_\d+)?(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?"
    r"|(model(_\d+)?|state|rank-\d{5})(-\d{5})?(-shard-\d{5}(-\d+)?)?\.(safetensors|json)"
)


_PART = re.compile(r"(.+)-shard-\d{5}(?:-\d+)?\.safetensors")


def is_state_file(name: str) -> bool:
    """Whether a save gives this name to a file by itself, not through a hook."""
    return _OWN.fullmatch(name) is not None


def model_stem(index: int, safe_serialization: bool) -> str:
    """The name, without its extension, of a model's file."""
    return ("model" if safe_serialization else "pytorch_model") + (f"_{index}" if index else "")


def rank_stem(rank: int) -> str:
    """The name, without its extension, of the files of one rank's own trees."""
    return f"rank-{rank:05d}"


def part_file(stem: str, rank: int, number: int = 0) -> str:
    """A file of parts of tensors that one rank writes; the second part of a tensor is in file 1, and so on."""
    return f"{stem}-shard-{rank:05d}{f'-{number}' if number else ''}.safetensors"


def sorted_parts(names: Iterable[str], stems: Sequence[str]) -> list[list[str]]:
    """For each stem the files of parts of tensors among others, in the order of their ranks."""
    found: dict[str, list[str]] = {stem: [] for stem in stems}
    for name in names:
        match = _PART.fullmatch(name)
        if match is not None and match[1] in found:
            found[match[1]].append(name)
    return [sorted(found[stem]) for stem in stems]


def is_part_file(name: str) -> bool:
    """Whether a file holds parts of tensors."""
    return _PART.fullmatch(name) is not None


def tensor_files(names: Iterable[str], stem: str) -> list[str]:
    """The files among others that hold tensors of the trees that ``<stem>.json`` describes.

    All of them, one rank's share of whole tensors, or one rank's parts of divided ones.
    """
    pattern = re.compile(re.escape(stem) + r"((-\d{5})?|-shard-\d{5}(-\d+)?)\.safetensors")
    return [name for name in names if pattern.fullmatch(name)]
