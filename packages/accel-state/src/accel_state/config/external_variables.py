"""Variables that Accelerate reads or writes and that are not options, with their owner.

Together with the options this covers every variable of Accelerate, which a test checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from accel_state.clusters.mpi import MPI_VARIABLES
from accel_state.config.launch import LaunchConfig
from accel_state.config.roots import complete_root
from accel_state.config.schema import schema_of, variables_of
from accel_state.config.sections.hardware import DEVICE_LIST_VARIABLES
from accel_state.constants import DEVICE_COUNT, NAMES_TOLD, RANK_PREFIXED, RUN_FOLDER, STORE_SECRET
from accel_state.messages import did_you_mean, nearest

__all__ = ["OTHER_VARIABLES", "misspelt_variables", "unknown_variables"]

_RANKS = "ranks and addresses, read by accel_state.clusters.topology"
_TRACKER = "settings of that tracker"
_AWS = "read by the AWS SDK; a SageMaker launch sets it for itself, never for the job"

OTHER_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "RANK",
                "WORLD_SIZE",
                "LOCAL_RANK",
                "LOCAL_WORLD_SIZE",
                "MASTER_ADDR",
                "MASTER_PORT",
                "NODE_RANK",
                "NPROC",
                *MPI_VARIABLES,
            ),
            _RANKS,
        ),
        **{
            variable: f"visible devices of type {device}; the launcher sets it from gpu_ids"
            for device, variable in DEVICE_LIST_VARIABLES.items()
        },
        **dict.fromkeys(
            (
                "CLEARML_PROJECT",
                "CLEARML_TASK",
                "MLFLOW_EXPERIMENT_NAME",
                "MLFLOW_NESTED_RUN",
                "MLFLOW_RUN_ID",
                "MLFLOW_TAGS",
            ),
            _TRACKER,
        ),
        **dict.fromkeys(
            ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_DEFAULT_REGION"), _AWS
        ),
        "DEEPSPEED_USE_HPU": "DeepSpeed on Gaudi",
        "FORK_LAUNCHED": "the process was forked by a notebook launcher",
        "GLOO_SOCKET_IFNAME": "network interface of Gloo",
        "HF_HOME": "folder of Accelerate's configuration file",
        "XDG_CACHE_HOME": "folder of HF_HOME if that is not set",
        "KMP_AFFINITY": "cores of OpenMP threads; left to the user, because ranks would share cores",
        "KMP_BLOCKTIME": "waiting of OpenMP threads; left to the user",
        "NCCL_IB_DISABLE": "disables InfiniBand in NCCL, for GPUs that do not support it",
        "NCCL_P2P_DISABLE": "disables peer-to-peer transfers in NCCL, for GPUs that do not support them",
        "PJRT_DEVICE": "device of torch_xla",
        "PT_HPU_LAZY_MODE": "lazy mode of Gaudi",
        "PYTHONPATH": "module search path; DeepSpeed's launcher gets the current folder appended",
        "PYTORCH_CNDEV_BASED_MLU_CHECK": "how PyTorch looks for MLUs",
        "PYTORCH_ENABLE_MPS_FALLBACK": "operators that MPS lacks run on the CPU",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "how PyTorch looks for CUDA devices",
        "TPU_NAME": "name of the TPU attached to a notebook",
        "USE_TORCH_XLA": "0: torch_xla is not used even if it is installed",
    }
)
"""Purpose of each variable."""

_PYTHON = "ACCEL_PYTHON"  # accel launch --as_accelerate sets it for the command accelerate
_OURS = ("ACCELERATE_", "ACCEL_", "FSDP_")
"""Prefixes of this library's variables. ``ACCEL_TEST…`` are for tests of programs that use it."""


def unknown_variables(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Variables with a prefix of ours that nothing reads, and the nearest ones that exist.

    What follows the prefix is compared, because the prefix is alike in all.
    """
    suspects = [
        name for name in sorted(environ) if name.startswith(_OURS) and not name.startswith("ACCEL_TEST")
    ]
    if not suspects:
        return {}
    if _known(LaunchConfig).issuperset(suspects):
        return {}
    known = _known(complete_root())  # looking for installed strategies takes ten milliseconds
    return {name: _nearest(name, known) for name in suspects if name not in known}


def misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence about each variable that looks like a misspelt one of this library."""
    return [
        f"environment variable {name} is not read{did_you_mean(name, near)}"
        for name, near in unknown_variables(environ).items()
        if near
    ]


def _known(root: type[LaunchConfig]) -> set[str]:
    own = {DEVICE_COUNT, NAMES_TOLD, RANK_PREFIXED, RUN_FOLDER, STORE_SECRET, _PYTHON}
    return own.union(OTHER_VARIABLES, *map(variables_of, schema_of(root).options))


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    prefix = next(prefix for prefix in _OURS if name.startswith(prefix))
    bare = [other.removeprefix(prefix) for other in known if other.startswith(prefix)]
    asked = name.removeprefix(prefix)
    found = nearest(asked, bare, cutoff=0.75)
    return [prefix + other for other in found if _means_the_same(asked, other)]


def _means_the_same(asked: str, other: str) -> bool:
    """Whether names differ by letters only: USE_FP8 is no misspelt USE_FSDP, and DISABLE_… is not ENABLE_…."""
    import difflib

    pairs = [*zip(asked.split("_"), other.split("_"), strict=False)]
    if asked.count("_") != other.count("_"):
        return True
    return all(difflib.SequenceMatcher(None, *pair).ratio() >= 0.7 for pair in pairs)
