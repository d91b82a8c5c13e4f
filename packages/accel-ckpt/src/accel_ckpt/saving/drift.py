"""Detecting replicas that have drifted apart, when a state is saved with only one rank's values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from accel_ckpt.saving.draft import fingerprints
from accel_state.messages import warn

__all__ = ["replica_marks", "warn_of_drift"]

_DIGITS = 8  # per tensor: ranks exchange the marks at every save


def replica_marks(tensors: Sequence[torch.Tensor]) -> str:
    """Marks that differ if the tensors of replicas differ: 8 digits each, of a hash of samples.

    Tensors of other classes than torch's, and tensors without memory, are not compared.
    """
    samples = {index: tensor.detach() for index, tensor in enumerate(tensors) if _is_plain(tensor)}
    dense = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in samples.values()]
    found = dict(zip(samples, fingerprints(dense), strict=True))
    return "".join(xxhash.xxh32_hexdigest(found.get(index, "").encode()) for index in range(len(tensors)))


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != "meta"


def warn_of_drift(what: str, names: Sequence[str], marks: Sequence[str]) -> None:
    """Warn if the tensors of replicas differ.

    Args:
        what: the object that is replicated, for the message.
        names: names of the tensors, in the order of the marks.
        marks: the result of `replica_marks` on each rank.
    """
    others = {rank: found for rank, found in enumerate(marks) if found != marks[0]}
    if not others:
        return
    ranks = ", ".join(map(str, others))
    if any(len(found) != len(marks[0]) for found in others.values()):
        problem = f"ranks {ranks} do not hold the same tensors of it as rank 0"
    else:
        places = [slice(at, at + _DIGITS) for at in range(0, len(marks[0]), _DIGITS)]
        differ = [
            name
            for name, place in zip(names, places, strict=True)
            if any(found[place] != marks[0][place] for found in others.values())
        ]
        problem = f"{differ[0]} (the first of {len(differ)} tensors) has other values on rank {ranks} than on rank 0"
    warn(
        f"the replicas of {what} have drifted apart: {problem}. The checkpoint holds those of rank 0, and a run that "
        "loads it continues with them on all ranks. Replicas stay equal if every rank calls the wrapped model, "
        "whose backward averages gradients, and changes weights alike"
    )
