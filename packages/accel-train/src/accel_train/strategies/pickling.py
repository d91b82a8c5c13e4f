"""Pickles of tensors that are divided among ranks, which `torch.save` of a state dict would make."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, NoReturn

from torch import nn

from accel_ckpt.parts import sharded_parameters
from accel_train.errors import DividedTensorError

__all__ = ["refuse_pickles", "refuse_pickles_of_stages"]


def refuse_pickles(model: nn.Module) -> None:
    """Refuse to pickle divided tensors of these meshes, because a file would hold only this rank's parts.

    `torch.load` would silently return a tensor with the whole shape and one rank's values. Everything that is computed
    from a parameter (its state-dict entry, gradient, optimizer state, a copy) has the same mesh object, so the mesh
    itself refuses. A deep copy keeps the mesh, and so does a clone.

    Args:
        model: a prepared model; its whole parameters are not affected.
    """
    for mesh in {id(p.device_mesh): p.device_mesh for p in sharded_parameters(model).values()}.values():
        _refuse(mesh)


def refuse_pickles_of_stages(module: nn.Module, ranks: int) -> None:
    """Refuse to pickle state dicts of a module that has lost the modules of other ranks of a pipeline.

    Its tensors are whole, so only the dict can tell that it is a part. Deep copies of it refuse as well.
    """

    def mark(_: nn.Module, state: Any, *others: Any) -> None:
        _mark(state, type(module).__name__, ranks)

    module.register_state_dict_post_hook(mark)  # type: ignore[no-untyped-call]


def _mark(state: Any, kind: str, ranks: int) -> None:
    def refuse(protocol: int) -> NoReturn:
        raise DividedTensorError(
            f"The state dict of {kind} cannot be pickled, as torch.save does: it holds the stages of one of {ranks} "
            "ranks of a pipeline, and the file would look like that of the whole model. On all ranks call `state = "
            "accelerator.get_state_dict(model)`, which gathers, and save that on the main process; or call "
            "accelerator.save_model(model, folder) or accelerator.save_state(folder) on all ranks."
        )

    def copied(memo: dict[int, Any]) -> Any:
        found = OrderedDict(copy.deepcopy(list(state.items()), memo))
        _mark(found, kind, ranks)
        return found

    state.__reduce_ex__, state.__deepcopy__ = refuse, copied


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
