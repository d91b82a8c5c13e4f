"""Models whose weights are views of mapped files: before they compute, the files are looked at."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from accel_ckpt.format.memory import MappedFile, mapped_file_of

__all__ = ["watch_mapped_files"]


class _FilesUnchanged:
    """A forward pre-hook that refuses files that were changed in place: reading past their end would end the process.

    Weights that moved to other memory let their file go, which is watched no longer.
    """

    def __init__(self, files: Collection[MappedFile]) -> None:
        self._files = tuple(map(weakref.ref, files))

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # the compiler cannot look at files
            return
        for reference in self._files:
            if (file := reference()) is not None:
                file.check_unchanged()

    def __reduce__(self) -> Any:
        # Weights that were copied or pickled are not views of a file.
        return _FilesUnchanged, ((),)


def watch_mapped_files(model: nn.Module) -> None:
    """Let a model's forward raise `FileChangedError` if a file that its weights view was changed in place."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, _FilesUnchanged):
            del model._forward_pre_hooks[key]
    tensors = (*model.parameters(), *model.buffers())
    files = {id(file): file for tensor in tensors if (file := mapped_file_of(tensor)) is not None}
    if files:
        model.register_forward_pre_hook(_FilesUnchanged(files.values()), prepend=True)
