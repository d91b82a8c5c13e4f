"""A mesh of eight ranks: which ranks are in which group, and which samples each rank reads."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from testkit import worlds

SIZES = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}


def record() -> dict[str, Any]:
    """The mesh as nested lists, the groups of every dimension, and the samples of one batch of every rank."""
    ranks = worlds.run(placed, 8, timeout=120)
    return {
        "sizes": SIZES,
        "mesh": ranks[0]["mesh"],
        "groups": {name: sorted({tuple(rank["groups"][name]) for rank in ranks}) for name in SIZES},
        "samples": [rank["samples"] for rank in ranks],
    }


def placed() -> dict[str, Any]:
    """What this rank finds."""
    import torch.distributed as dist

    from accel_train import Accelerator, ParallelismConfig

    degrees = {f"{name}_size": size for name, size in SIZES.items()}
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**degrees))
    mesh = accelerator.torch_device_mesh
    assert tuple(mesh.mesh_dim_names) == tuple(SIZES)
    loader = accelerator.prepare(DataLoader(list(range(8)), batch_size=2))
    return {
        "mesh": mesh.mesh.tolist(),
        "groups": {name: dist.get_process_group_ranks(mesh[name].get_group()) for name in SIZES},
        "samples": next(iter(loader)).tolist(),
    }
