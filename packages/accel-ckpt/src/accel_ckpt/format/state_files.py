"""Names of the files of a training state."""

from __future__ import annotations

import re

__all__ = ["EXTRA", "is_part_file", "is_tensor_file", "model_stem", "part_file", "rank_stem"]

EXTRA = "model_{}.extra"
"""Among the shared trees: what the state dict of a model holds besides tensors."""


def model_stem(index: int, safe_serialization: bool) -> str:
    """The name, without its extension, of a model's file."""
    return ("model" if safe_serialization else "pytorch_model") + (f"_{index}" if index else "")


def rank_stem(rank: int) -> str:
    """The name, without its extension, of the files of one rank's own trees."""
    return f"rank-{rank:05d}"


def part_file(stem: str, rank: int, number: int = 0) -> str:
    """A file of parts of tensors that one rank writes; the second part of a tensor is in file 1, and so on."""
    return f"{stem}-shard-{rank:05d}{f'-{number}' if number else ''}.safetensors"


def is_part_file(name: str, stem: str) -> bool:
    """Whether a file holds parts of tensors of ``stem``."""
    return re.fullmatch(re.escape(stem) + r"-shard-\d{5}(-\d+)?\.safetensors", name) is not None


def is_tensor_file(name: str, stem: str) -> bool:
    """Whether a file holds tensors of the trees that ``<stem>.json`` describes: all of them, or one rank's share."""
    return re.fullmatch(re.escape(stem) + r"(-\d{5})?\.safetensors", name) is not None
