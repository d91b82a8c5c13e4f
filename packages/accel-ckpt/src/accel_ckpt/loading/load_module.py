"""Loading the saved weights of a training state into a module, divided among ranks or not."""

from __future__ import annotations

import torch
from torch import nn

from accel_ckpt.errors import StateMismatchError
from accel_ckpt.loading.load_state import SavedWeights
from accel_ckpt.modules.names import canonical_state_dict, loads_by_itself, misfits, under_own_names
from accel_ckpt.modules.versions import with_versions
from accel_ckpt.parts import is_sharded, parts_of, reshard
from accel_ckpt.tensor_storage import same_tensor_id, why_not_plain

__all__ = ["check_weights", "load_weights_into"]


def check_weights(module: nn.Module, weights: SavedWeights, strict: bool = True) -> None:
    """Check that :func:`load_weights_into` can load weights: names and shapes, then the files that this rank reads.

    Changes nothing, so that all ranks can agree before any rank changes something.

    Args:
        module: wrapped or not.
        weights: weights of a training state.
        strict: names must be the same, not only shapes.

    Raises:
        StateMismatchError: names or shapes are not those of the module.
        CorruptCheckpointError: a file is not what was written.
    """
    problems = misfits(module, weights.about, strict)
    if problems:
        raise StateMismatchError(
            f"the weights in {weights.directory} do not fit the module {type(module).__name__}: {'; '.join(problems)}. "
            "Nothing was changed. Build the module as it was when the state was saved"
        )
    targets = _targets(module, weights)
    if targets is None:
        weights.verify()
    else:
        weights.check(targets)


def load_weights_into(module: nn.Module, weights: SavedWeights, strict: bool = True) -> None:
    """Load saved weights into a module, in place; of a divided tensor this rank reads only its part.

    A module that overrides how it loads a state dict, or has tensors of special kinds, gets whole tensors.

    Args:
        module: wrapped or not.
        weights: weights of a training state.
        strict: names must be the same, not only shapes.

    Raises:
        StateMismatchError: names or shapes are not those of the module. Nothing was changed.
        CorruptCheckpointError: a file is not what was written. Nothing was changed.
    """
    check_weights(module, weights, strict)
    targets = _targets(module, weights)
    if targets is None:
        state = with_versions({**weights.read(), **weights.extra}, weights.versions)
        module.load_state_dict(under_own_names(module, state), strict=strict)
        return
    weights.fill(targets)
    if weights.extra:
        module.load_state_dict(under_own_names(module, weights.extra), strict=False)


def _targets(module: nn.Module, weights: SavedWeights) -> dict[str, torch.Tensor] | None:
    """The tensors to fill, of tied ones the first; ``None`` if the module must load its state dict by itself."""
    if any(loads_by_itself(child) for child in module.modules()):
        return None
    reshard(module)
    own = canonical_state_dict(module.state_dict(), module)
    tensors = {name: tensor for name, tensor in own.items() if isinstance(tensor, torch.Tensor)}
    if any(why_not_plain(tensor) is not None and not is_sharded(tensor) for tensor in tensors.values()):
        return None
    targets: dict[str, torch.Tensor] = {}
    filled = set()
    for name, tensor in tensors.items():
        if name in weights.tensors:
            held = (weights.tensors[name].name, *(same_tensor_id(part.tensor) for part in parts_of(tensor)))
            if held not in filled:
                targets[name] = tensor
            filled.add(held)
    return targets
