"""Pickles of tensors that are divided among ranks, which `torch.save` of a state dict would make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor

from accel_ckpt.parts import is_sharded
from accel_train.errors import DividedTensorError

__all__ = ["refuse_pickles"]


def refuse_pickles(tensors: Iterable[Tensor]) -> None:
    """Refuse to pickle divided tensors of these meshes, because a file would hold only this rank's parts.

    `torch.load` would silently return a tensor with the whole shape and one rank's values. Everything that is computed
    from a parameter (its state-dict entry, gradient, optimizer state, a copy) has the same mesh object, so the mesh
    itself refuses. A deep copy keeps the mesh, and so does a clone.

    Args:
        tensors: parameters of a prepared model; whole ones are not affected.
    """
    for mesh in {id(t.device_mesh): t.device_mesh for t in tensors if is_sharded(t)}.values():  # type: ignore[attr-defined]
        _refuse(mesh)


def _refuse(mesh: Any) -> None:
    if "__reduce_ex__" in vars(mesh):
        return
    ranks = mesh.size()

    def refuse(protocol: int) -> NoReturn:
        raise DividedTensorError(
            f"A tensor that is divided among {ranks} ranks (a DTensor) cannot be pickled, as torch.save does: the file "
            "would hold this rank's part as if it were the whole. On all ranks call `state = "
            "accelerator.get_state_dict(model)`, which gathers, and save that on the main process; or call "
            "accelerator.save_model(model, folder), accelerator.save_state(folder) or accelerator.save(object, file) "
            "on all ranks."
        )

    # pickle and copy look these up at the object, not at its class.
    mesh.__reduce_ex__ = refuse
    mesh.__deepcopy__ = lambda memo: mesh
