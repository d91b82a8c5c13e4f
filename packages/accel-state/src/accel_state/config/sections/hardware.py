"""Options for the number of processes, where they run, and how they find each other."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.config.option import option
from accel_state.config.sections.common import CommonOptions
from accel_state.enums import DistributedType

__all__ = ["PROCESSES_PER", "HardwareOptions"]

PROCESSES_PER = ("gpu", "cpu", "auto")
"""Words of torchrun's ``--nproc_per_node``; ``auto``: accelerators where there are any, else CPUs."""

_BUILT_IN = tuple(
    member.value
    for member in DistributedType
    if member.value in ("NO", "FSDP", "DEEPSPEED", "XLA") or member.value.startswith("MULTI_")
)
"""The values that need no installed strategy."""


@dataclass(frozen=True, repr=False, eq=False)
class HardwareOptions(CommonOptions):
    """Number and placement of the processes."""

    distributed_type: str | None = option(
        help="Kind of distributed run; by default chosen from the hardware.",
        env=("ACCELERATE_DISTRIBUTED_TYPE",),
        choices=_BUILT_IN,
        unlisted=tuple(name for name in _BUILT_IN if name[:6] == "MULTI_" and name[6:] not in ("CPU", "GPU")),
        synonyms={"tpu": "XLA"},
        switches={
            "--multi_gpu": ("MULTI_GPU", None),
            "--tpu": ("XLA", None),
            "--use_deepspeed": ("DEEPSPEED", "ACCELERATE_USE_DEEPSPEED"),
            "--use_fsdp": ("FSDP", "ACCELERATE_USE_FSDP"),
        },
        prompt="How will the processes share the work?",
    )
    use_parallelism_config: bool = option(
        False,
        help="Use the sizes of the parallelism section; implied by a parallelism_config in a file.",
        env=("ACCELERATE_USE_PARALLELISM_CONFIG",),
        toggle=True,
        ours=True,
        prompt="Do you want to combine several kinds of parallelism in a device mesh?",
    )
    num_processes: int | None = option(
        help="Total number of processes over all machines; --nproc_per_node: on each machine.",
        low=1,
        high=1_000_000,
        flags=("--nproc_per_node",),
        prompt="How many processes in total will you use?",
    )
    processes_per: str | None = option(
        help="Start one process per accelerator (gpu), per CPU (cpu), or per accelerator if there are any, else per "
        "CPU (auto); replaces num_processes. --nproc_per_node gpu is the same.",
        env=(),
        choices=PROCESSES_PER,
        in_file=False,
        ours=True,
    )
    cluster: str = option(
        "auto",
        help="Scheduler whose variables describe the machines; auto: any that is found, none: this machine alone.",
        env=("ACCEL_CLUSTER",),
        choices=(
            "auto",
            "none",
            "slurm",
            "torchrun",
            "skypilot",
            "dstack",
            "aws_batch",
            "vertex_ai",
            "sagemaker",
            "volcano",
            "lsf",
            "flux",
            "mpi",
            "containers",
        ),
        group="accel_state.clusters",
        ours=True,
    )
    min_machines: int | None = option(
        help="Smallest number of machines to start and to continue with; up to num_machines may join. Default: "
        "num_machines.",
        low=1,
        ours=True,
    )
    spares: int = option(
        0,
        help="Spare machines, or on one machine spare processes with torch loaded, that replace one that "
        "failed.",
        low=0,
        ours=True,
    )
    connect_timeout: float = option(
        300.0,
        help="Seconds within which all machines must find each other (rendezvous).",
        low=1,
        ours=True,
    )
    machine_rank: int = option(
        0,
        help="Rank of this machine, from 0.",
        low=0,
        flags=("--node_rank",),
        prompt="What is the rank of this machine?",
    )
    main_process_ip: str | None = option(
        help="Address of the machine with rank 0.",
        flags=("--master_addr",),
        prompt="What is the address of the machine with rank 0?",
    )
    main_process_port: int | None = option(
        help="Port of rank 0 on its machine; 0, or unset on one machine: the launcher chooses a free port.",
        low=0,
        high=65535,
        flags=("--master_port",),
        prompt="Which port of that machine will the processes meet at?",
    )
    same_network: bool = option(
        False,
        help="All machines are on one network, so the address of rank 0 is used without a rendezvous.",
        toggle=True,
        prompt="Are all the machines on the same local network?",
    )
    rdzv_backend: str = option(
        "static",
        help="Rendezvous of PyTorch's elastic launcher: static, c10d, etcd or etcd-v2.",
        prompt="What rendezvous backend will you use?",
    )
    rdzv_conf: str | None = option(
        help="Additional settings of the rendezvous: comma-separated key=value pairs.",
        ours=True,
    )
    rdzv_id: str | None = option(
        help="Name of the run at the rendezvous; by default its address and port.",
        ours=True,
    )
    num_cpu_threads_per_process: int | None = option(
        help="CPU threads of each process.",
        low=1,
        env=("OMP_NUM_THREADS",),
        ours=True,
        prompt="How many CPU threads will each process use?",
    )
