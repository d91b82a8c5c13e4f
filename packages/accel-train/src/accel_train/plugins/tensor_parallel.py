"""Options of tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from accel_train.errors import OptionError
from accel_train.plugins.base import StrategyPlugin

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["TorchTensorParallelPlugin"]


@dataclass(frozen=True)
class TorchTensorParallelPlugin(StrategyPlugin):
    """Tensor parallelism: train models whose tensors are divided among groups of ranks that read the same samples.

    The script, or transformers by a `tp_plan`, divides the model; this plugin sets the size of the groups in advance.
    Passing one selects the strategy "tp".

    Attributes:
        tp_size: ranks of one group, neighbours by number; None: those of `torch_device_mesh`, else all ranks.
        torch_device_mesh: the mesh with which the script divides the model: of one dimension, or with a dimension "tp".

    Raises:
        OptionError: `tp_size` is not a whole number of at least 1, or differs from the mesh; or the mesh has other
            groups.
    """

    strategy: ClassVar[str] = "tp"
    argument: ClassVar[str] = "torch_tp_plugin"

    tp_size: int | None = None
    torch_device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        size = self.tp_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise OptionError(f"tp_size is {size!r}; expected a whole number of at least 1, or None.")
        mesh = self.torch_device_mesh
        if mesh is None:
            return
        if mesh.ndim > 1 and "tp" not in (mesh.mesh_dim_names or ()):
            raise OptionError(f"torch_device_mesh is {mesh}; expected one dimension, or one called 'tp'.")
        group = (mesh["tp"] if mesh.ndim > 1 else mesh).mesh.tolist()
        if group != list(range(group[0], group[0] + len(group))) or group[0] % len(group):
            raise OptionError(
                f"torch_device_mesh puts the ranks {group} in one group, and groups are neighbours by number: the tp "
                "dimension must be the last of the mesh."
            )
        if size not in (None, len(group)):
            raise OptionError(
                f"tp_size={size} contradicts torch_device_mesh, whose groups have {len(group)} ranks."
            )
        object.__setattr__(self, "tp_size", len(group))
