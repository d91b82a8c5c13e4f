"""The device mesh of a run: the degree of each kind of parallelism, and the groups of ranks that follow from it.

Ranks are laid out row by row over ``pp, dp_replicate, dp_shard, cp, sp, tp``: neighbours share a tensor-parallel group.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel_state.world.process import current_state
from accel_train.errors import IncompatibleOptionsError, OptionError
from accel_train.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DIMENSIONS", "Mesh", "batch_ranks"]

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")

# Ranks that differ only in these read the same samples …
_READ_ALIKE = frozenset({"pp", "cp", "sp", "tp"})
# … and in these compute the same loss. A rank of cp or sp has the loss of its part of each sequence.
_SAME_LOSS = frozenset({"pp", "tp"})
# Ranks that differ only in these run the same program on the same samples, so they must draw the same random numbers.
# Stages of a pipeline have layers of their own, which draw as often as they do.
_DRAW_ALIKE = _READ_ALIKE - {"pp"}

# What one replica of a model can be sharded over.
_SHARDED = ("dp_shard", "cp", "sp")
# The names of Accelerate for unions of dimensions.
_UNIONS = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}


class Mesh:
    """The device mesh of a run: its degrees of parallelism, checked once, and the groups of ranks in each dimension.

    Args:
        degrees: ranks of each dimension that has more than one.
        device_type: type of the devices on which collectives run.
        world_size: number of ranks.
        rank: the rank of this process.

    Attributes:
        degrees: ranks of each dimension.
        device_mesh: PyTorch's `DeviceMesh` of the dimensions with more than one rank; None if there is none.
        batch: ranks that read different samples.
        loss: ranks whose losses are averaged, and whose items are summed.
        draws: ranks that may draw different random numbers while they train.
        experts: the same ranks as replicas, ``efsdp`` (ranks that hold the same experts) and ``ep`` (ranks that hold
            all experts together, neighbours by number); None: experts are not divided.

    Raises:
        OptionError: a dimension is unknown, or a degree is below 1.
        IncompatibleOptionsError: the product of the degrees is not the number of ranks.
    """

    def __init__(self, degrees: Mapping[str, int], device_type: str, world_size: int, rank: int) -> None:
        for name, degree in degrees.items():
            if name not in DIMENSIONS:
                raise OptionError(f"Unknown dimension {name!r} of a mesh; known: {', '.join(DIMENSIONS)}.")
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise OptionError(
                    f"The mesh's dimension {name} has {degree!r} ranks; it takes a number from 1."
                )
        self.degrees = {name: degrees.get(name, 1) for name in DIMENSIONS}
        product = math.prod(self.degrees.values())
        if product != world_size:
            named = " x ".join(f"{name} {size}" for name, size in self.degrees.items() if size > 1) or "1"
            raise IncompatibleOptionsError(
                f"The mesh {named} needs {product} ranks, and {world_size} are running. Start {product} processes, or "
                "change a degree."
            )
        self.device_mesh: DeviceMesh | None = None
        used = [name for name, size in self.degrees.items() if size > 1]
        if used:
            shape = tuple(self.degrees[name] for name in used)
            self.device_mesh = _shared_mesh(device_type, shape, tuple(used))
        self.experts: DeviceMesh | None = None
        self._flat: dict[tuple[str, ...], DeviceMesh] = {}
        self.batch = self._ranks(_READ_ALIKE, world_size, rank)
        self.loss = self._ranks(_SAME_LOSS, world_size, rank)
        index_of = _indexes(tuple(self.degrees.values()), DIMENSIONS, _DRAW_ALIKE)
        self.draws = Ranks(max(index_of) + 1, index_of[rank], None, index_of, rank)

    @classmethod
    def of_world(cls, world_size: int, rank: int) -> Mesh:
        """Return the mesh of data parallelism alone: every rank has a replica. Creates no process group."""
        mesh = cls.__new__(cls)
        mesh.degrees = {**dict.fromkeys(DIMENSIONS, 1), "dp_replicate": world_size}
        mesh.device_mesh = mesh.experts = None
        mesh._flat = {}
        mesh.batch = mesh.loss = mesh.draws = Ranks.of_world(world_size, rank)
        return mesh

    def divide_experts(self, size: int) -> None:
        """Make the mesh of experts. Collective.

        Args:
            size: ranks that hold all experts together; it divides the ranks of a replica.
        """
        assert self.device_mesh is not None, "a replica has several ranks"
        replicas = self.degrees["dp_replicate"]
        shape = (replicas, math.prod(self.degrees.values()) // (replicas * size), size)
        self.experts = _shared_mesh(self.device_mesh.device_type, shape, ("dp_replicate", "efsdp", "ep"))

    def submesh(self, *names: str) -> DeviceMesh | None:
        """The submesh of these dimensions in mesh order, without those of one rank; None if none is left."""
        used = tuple(name for name in sorted(names, key=DIMENSIONS.index) if self.degrees[name] > 1)
        return self.device_mesh[used] if used and self.device_mesh is not None else None

    @property
    def replica(self) -> DeviceMesh:
        """The ranks of one replica in one dimension, behind the replicas if there are several. Collective."""
        assert self.device_mesh is not None, "a replica has several ranks"
        replicas = self.degrees["dp_replicate"]
        shape = (replicas, math.prod(self.degrees.values()) // replicas)
        mesh = _shared_mesh(self.device_mesh.device_type, shape, ("dp_replicate", "replica"))
        return mesh if replicas > 1 else mesh["replica"]

    @property
    def alike(self) -> Ranks:
        """The ranks of tensor parallelism, which compute the same hidden states."""
        part = self.submesh("tp")
        return Ranks() if part is None else Ranks(part.size(), part.get_local_rank(), part.get_group())

    @property
    def holders(self) -> DeviceMesh | None:
        """The mesh for `fully_shard`: replicas, if there are several, and the ranks that one replica is sharded over.

        These are all ranks whose losses are averaged: those of one sequence share a replica too.
        """
        sharded = [name for name in _SHARDED if self.degrees[name] > 1]
        replicas = self.submesh("dp_replicate")
        if len(sharded) < 2 or self.device_mesh is None:
            return self.submesh("dp_replicate", *sharded)
        flat = self._flattened(sharded)
        if replicas is None:
            return flat
        concatenate = getattr(type(flat), "_concatenate", None)
        if concatenate is not None:
            joined: DeviceMesh = concatenate([replicas, flat])
            return joined
        return self.device_mesh["dp_replicate", self._flat_name(sharded)]  # torch before 2.10

    def name_unions(self) -> None:
        """Flatten dimensions of PyTorch's mesh under the names that scripts use: ``dp``, ``dp_cp``, ``dp_shard_cp``."""
        for name, members in _UNIONS.items():
            used = [member for member in members if self.degrees[member] > 1]
            if not used or self.device_mesh is None:
                continue
            if self._flat_name(used) == name:
                self._flattened(used)
            else:
                self.device_mesh[tuple(used)]._flatten(name)

    def index(self, name: str) -> int:
        """This rank's index in one dimension."""
        part = self.submesh(name)
        return 0 if part is None else part.get_local_rank()

    def _flattened(self, names: Sequence[str]) -> DeviceMesh:
        key = tuple(names)
        if key not in self._flat:
            assert self.device_mesh is not None
            self._flat[key] = self.device_mesh[key]._flatten(self._flat_name(names))
        return self._flat[key]

    @staticmethod
    def _flat_name(names: Sequence[str]) -> str:
        """The name of a union of several dimensions."""
        known = (name for name, members in _UNIONS.items() if tuple(names) == members)
        return names[0] if len(names) == 1 else next(known, "_".join(names))

    def _ranks(self, alike: Collection[str], world_size: int, rank: int) -> Ranks:
        index_of = _indexes(tuple(self.degrees.values()), DIMENSIONS, alike)
        names = [name for name in DIMENSIONS if name not in alike and self.degrees[name] > 1]
        size = max(index_of) + 1
        group = None
        if names and size < world_size and self.device_mesh is not None:
            part = self._flattened(names) if len(names) > 1 else self.device_mesh[names[0]]
            group = part.get_group()
        return Ranks(size, index_of[rank], group, index_of, rank)


def _shared_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """PyTorch's mesh of this form, which is made once in a world, because the groups of a mesh are never freed."""
    from torch.distributed.device_mesh import init_device_mesh

    state = current_state()
    known = {} if state is None else state.meshes
    form = (device_type, shape, names)
    if form not in known:
        known[form] = init_device_mesh(device_type, shape, mesh_dim_names=names)
    mesh: DeviceMesh = known[form]
    return mesh


def batch_ranks(device_mesh: Any, world_size: int, rank: int) -> Ranks:
    """The ranks that read different samples on a mesh made elsewhere; without a mesh, all ranks.

    Args:
        device_mesh: a `torch.distributed.device_mesh.DeviceMesh` over the whole world, or None.
        world_size: number of ranks.
        rank: the rank of this process.

    Raises:
        OptionError: the mesh has no dimension names, or does not hold every rank exactly once.
    """
    if device_mesh is None:
        return Ranks.of_world(world_size, rank)
    names = device_mesh.mesh_dim_names
    members = device_mesh.mesh.flatten().tolist()
    if names is None or sorted(members) != list(range(world_size)):
        raise OptionError(
            f"The device mesh with the dimensions {names} has the ranks {sorted(members)}; it must name its "
            f"dimensions and hold each of the {world_size} ranks once."
        )
    places = _indexes(tuple(device_mesh.mesh.shape), names, _READ_ALIKE)
    index_of = [0] * world_size
    for member, place in zip(members, places, strict=True):
        index_of[member] = place
    return Ranks(max(index_of) + 1, index_of[rank], None, tuple(index_of), rank)


def _indexes(shape: tuple[int, ...], names: Collection[str], alike: Collection[str]) -> tuple[int, ...]:
    """For each place of a mesh, row by row: its index among those that differ in other dimensions than `alike`."""
    indexes = [0]
    for name, size in zip(names, shape, strict=True):
        if name in alike:
            indexes = [index for index in indexes for _ in range(size)]
        else:
            indexes = [index * size + step for index in indexes for step in range(size)]
    return tuple(indexes)
