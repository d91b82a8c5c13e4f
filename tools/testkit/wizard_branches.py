"""Every branch of ``accel config``: what is answered, which questions must come, and what the file must have.

The lists of questions are written out by hand, so that they say what a user sees and not what the table says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BRANCHES", "Branch"]

_END = ("mixed_precision", "extras")
_COMPILE = ("dynamo.mode", "dynamo.fullgraph", "dynamo.dynamic", "dynamo.use_regional_compilation")
_SHARDING = (
    "fsdp.reshard_after_forward",
    "fsdp.cpu_offload",
    "fsdp.state_dict_type",
    "fsdp.cpu_ram_efficient_loading",
    "fsdp.activation_checkpointing",
)
_RENDEZVOUS = ("machine_rank", "main_process_ip", "main_process_port", "same_network")
_TE = tuple(
    f"fp8.{name}"
    for name in (
        "backend",
        "use_autocast_during_eval",
        "margin",
        "interval",
        "fp8_format",
        "amax_history_len",
        "amax_compute_algo",
        "override_linear_precision",
    )
)


@dataclass(frozen=True)
class Branch:
    """One way through the questions.

    Attributes:
        name: its name.
        answers: answers by name of the question; every other question is answered with Enter.
        asked: the questions that must come, in this order.
        file: entries that the file must have, by dotted key.
        devices: accelerators of the machine.
        needs: what this version must be able to run for the branch to exist: option and value.
    """

    name: str
    answers: Mapping[str, Any]
    asked: tuple[str, ...]
    file: Mapping[str, Any]
    devices: int = 0
    needs: tuple[tuple[str, Any], ...] = field(default=())


def _local(*more: str) -> tuple[str, ...]:
    return ("place", "devices", "distributed_type", *more)


_PROCESSES = _local("num_processes")
_FSDP = {"distributed_type": "FSDP", "num_processes": 2}
_DEEPSPEED = {"distributed_type": "DEEPSPEED", "num_processes": 2}
_TPU = ("place", "num_processes", "tpu.main_training_function")
_JOB = tuple(f"sagemaker.{name}" for name in ("profile", "region", "iam_role_name", "ec2_instance_type"))
_DATA = tuple(
    f"sagemaker.{name}" for name in ("image_uri", "sagemaker_inputs_file", "sagemaker_metrics_file")
)

BRANCHES = (
    Branch(
        "one process on the CPU",
        {"mixed_precision": "bf16"},
        _local(*_END),
        {"distributed_type": "NO", "num_processes": 1, "use_cpu": True, "mixed_precision": "bf16"},
    ),
    Branch(
        "replicas on the CPU, with mpirun",
        {
            "distributed_type": "MULTI_CPU",
            "num_processes": 2,
            "extras": (
                "gradient_accumulation.num_steps",
                "num_cpu_threads_per_process",
                "debug",
                "mpirun.hostfile",
            ),
            "gradient_accumulation.num_steps": 4,
            "num_cpu_threads_per_process": 3,
            "mpirun.hostfile": "hosts",
        },
        (
            *_PROCESSES,
            *_END,
            "gradient_accumulation.num_steps",
            "num_cpu_threads_per_process",
            "mpirun.hostfile",
        ),
        {
            "distributed_type": "MULTI_CPU",
            "num_processes": 2,
            "gradient_accumulation_steps": 4,
            "num_cpu_threads_per_process": 3,
            "debug": True,
            "mpirun_config.mpirun_hostfile": "hosts",
        },
    ),
    Branch(
        "replicas on GPUs, compiled",
        {
            "gpu_ids": "0,2",
            "extras": ("dynamo.backend", "enable_cpu_affinity"),
            "dynamo.mode": "max-autotune",
            "dynamo.dynamic": False,
            "dynamo.use_regional_compilation": True,
        },
        (*_local("gpu_ids", "num_processes"), *_END, "dynamo.backend", *_COMPILE),
        {
            "distributed_type": "MULTI_GPU",
            "num_processes": 2,
            "use_cpu": False,
            "gpu_ids": "0,2",
            "enable_cpu_affinity": True,
            "dynamo_config.dynamo_backend": "INDUCTOR",
            "dynamo_config.dynamo_mode": "max-autotune",
            "dynamo_config.dynamo_use_dynamic": False,
            "dynamo_config.dynamo_use_regional_compilation": True,
        },
        devices=3,
    ),
    Branch(
        "several machines",
        {
            "place": "several",
            "num_machines": 3,
            "num_processes": 4,
            "machine_rank": 2,
            "main_process_ip": "10.0.0.1",
            "main_process_port": 29501,
            "same_network": False,
            "rdzv_backend": "c10d",
        },
        ("place", "num_machines", *_PROCESSES[1:], *_RENDEZVOUS, "rdzv_backend", *_END),
        {
            "distributed_type": "MULTI_CPU",
            "num_machines": 3,
            "num_processes": 12,
            "machine_rank": 2,
            "main_process_ip": "10.0.0.1",
            "main_process_port": 29501,
            "rdzv_backend": "c10d",
        },
    ),
    Branch(
        "FSDP by layer class",
        {
            **_FSDP,
            "fsdp.transformer_cls_names_to_wrap": ("Block", "Head"),
            "fsdp.activation_checkpointing": True,
            "fsdp.activation_checkpointing_offload": True,
            "fsdp.reshard_after_forward": False,
        },
        (
            *_PROCESSES,
            "fsdp.auto_wrap_policy",
            "fsdp.transformer_cls_names_to_wrap",
            *_SHARDING,
            "fsdp.activation_checkpointing_offload",
            "use_parallelism_config",
            *_END,
        ),
        {
            "distributed_type": "FSDP",
            "fsdp_config.fsdp_version": 2,
            "fsdp_config.fsdp_transformer_layer_cls_to_wrap": "Block,Head",
            "fsdp_config.fsdp_reshard_after_forward": False,
            "fsdp_config.fsdp_activation_checkpointing": True,
            "fsdp_config.fsdp_activation_checkpointing_offload": True,
            "fsdp_config.fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
    ),
    Branch(
        "FSDP by size",
        {**_FSDP, "fsdp.auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp.min_num_params": 1000},
        (
            *_PROCESSES,
            "fsdp.auto_wrap_policy",
            "fsdp.min_num_params",
            *_SHARDING,
            "use_parallelism_config",
            *_END,
        ),
        {"fsdp_config.fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_config.fsdp_min_num_params": 1000},
    ),
    Branch(
        "FSDP in a mesh",
        {
            **_FSDP,
            "num_processes": 8,
            "fsdp.auto_wrap_policy": "NO_WRAP",
            "use_parallelism_config": True,
            "parallelism.tp_size": 2,
            "parallelism.cp_size": 2,
        },
        (
            *_PROCESSES,
            "fsdp.auto_wrap_policy",
            *_SHARDING,
            "use_parallelism_config",
            "parallelism.pp_size",
            "parallelism.tp_size",
            "parallelism.cp_size",
            "parallelism.cp_comm_strategy",
            "parallelism.cp_load_balance",
            "parallelism.sp_size",
            "parallelism.dp_replicate_size",
            "parallelism.dp_shard_size",
            *_END,
        ),
        {
            "parallelism_config.parallelism_config_tp_size": 2,
            "parallelism_config.parallelism_config_dp_shard_size": 2,
        },
    ),
    Branch(
        "experts divided among ranks",
        {
            **_FSDP,
            "num_processes": 4,
            "fsdp.auto_wrap_policy": "NO_WRAP",
            "use_parallelism_config": True,
            "parallelism.ep_size": 2,
        },
        (
            *_PROCESSES,
            "fsdp.auto_wrap_policy",
            *_SHARDING,
            "use_parallelism_config",
            "parallelism.pp_size",
            "parallelism.tp_size",
            "parallelism.cp_size",
            "parallelism.sp_size",
            "parallelism.dp_replicate_size",
            "parallelism.dp_shard_size",
            "parallelism.ep_size",
            *_END,
        ),
        {"parallelism_config.parallelism_config_ep_size": 2},
    ),
    Branch(
        "stages of a pipeline",
        {
            **_FSDP,
            "num_processes": 4,
            "fsdp.auto_wrap_policy": "NO_WRAP",
            "use_parallelism_config": True,
            "parallelism.pp_size": 2,
            "parallelism.pp_schedule": "1f1b",
        },
        (
            *_PROCESSES,
            "fsdp.auto_wrap_policy",
            *_SHARDING,
            "use_parallelism_config",
            "parallelism.pp_size",
            "parallelism.pp_schedule",
            "parallelism.tp_size",
            "parallelism.dp_replicate_size",
            "parallelism.dp_shard_size",
            *_END,
        ),
        {"parallelism_config.parallelism_config_pp_size": 2},
    ),
    Branch(
        "DeepSpeed with its own file",
        {**_DEEPSPEED, "deepspeed_file": True, "deepspeed.hf_ds_config": "zero.json"},
        (
            *_PROCESSES,
            "deepspeed_file",
            "deepspeed.hf_ds_config",
            "deepspeed.zero3_init_flag",
            "deepspeed.transformer_moe_cls_names",
            *_END,
        ),
        {"distributed_type": "DEEPSPEED", "deepspeed_config.deepspeed_config_file": "zero.json"},
    ),
    Branch(
        "DeepSpeed stage 3 on NVMe",
        {
            **_DEEPSPEED,
            "deepspeed.zero_stage": 3,
            "deepspeed.offload_optimizer_device": "nvme",
            "deepspeed.offload_optimizer_nvme_path": "/nvme/optimizer",
            "deepspeed.offload_param_device": "nvme",
            "deepspeed.offload_param_nvme_path": "/nvme/parameters",
            "deepspeed.gradient_clipping": 1.5,
            "deepspeed.zero3_init_flag": True,
            "deepspeed.transformer_moe_cls_names": "Experts",
        },
        (
            *_PROCESSES,
            "deepspeed_file",
            "deepspeed.zero_stage",
            "deepspeed.offload_optimizer_device",
            "deepspeed.offload_optimizer_nvme_path",
            "deepspeed.offload_param_device",
            "deepspeed.offload_param_nvme_path",
            "deepspeed.gradient_clipping",
            "deepspeed.zero3_init_flag",
            "deepspeed.zero3_save_16bit_model",
            "deepspeed.transformer_moe_cls_names",
            *_END,
        ),
        {
            "deepspeed_config.zero_stage": 3,
            "deepspeed_config.offload_optimizer_nvme_path": "/nvme/optimizer",
            "deepspeed_config.offload_param_device": "nvme",
            "deepspeed_config.gradient_clipping": 1.5,
            "deepspeed_config.zero3_init_flag": True,
            "deepspeed_config.zero3_save_16bit_model": False,
            "deepspeed_config.deepspeed_moe_layer_cls_names": "Experts",
        },
    ),
    Branch(
        "DeepSpeed's launcher on several machines",
        {
            **_DEEPSPEED,
            "place": "several",
            "deepspeed.zero_stage": 1,
            "deepspeed.deepspeed_multinode_launcher": "pdsh",
            "deepspeed.deepspeed_hostfile": "hosts",
            "deepspeed.deepspeed_inclusion_filter": "a@b:0",
            "main_process_ip": "a",
        },
        (
            "place",
            "num_machines",
            *_PROCESSES[1:],
            "deepspeed_file",
            "deepspeed.zero_stage",
            "deepspeed.gradient_clipping",
            "deepspeed.transformer_moe_cls_names",
            "deepspeed.deepspeed_multinode_launcher",
            "deepspeed.deepspeed_hostfile",
            "deepspeed.deepspeed_exclusion_filter",
            "deepspeed.deepspeed_inclusion_filter",
            "main_process_ip",
            "main_process_port",
            *_END,
        ),
        {
            "deepspeed_config.deepspeed_multinode_launcher": "pdsh",
            "deepspeed_config.deepspeed_inclusion_filter": "a@b:0",
            "num_processes": 4,
        },
        needs=(("deepspeed.deepspeed_multinode_launcher", "pdsh"),),
    ),
    Branch(
        "Megatron-LM",
        {
            "distributed_type": "MEGATRON_LM",
            "megatron_lm.tp_degree": 2,
            "megatron_lm.pp_degree": 2,
            "megatron_lm.num_micro_batches": 4,
            "megatron_lm.sequence_parallelism": True,
        },
        (
            *_local("gpu_ids", "num_processes"),
            "megatron_lm.tp_degree",
            "megatron_lm.sequence_parallelism",
            "megatron_lm.pp_degree",
            "megatron_lm.num_micro_batches",
            "megatron_lm.recompute_activations",
            "megatron_lm.use_distributed_optimizer",
            "megatron_lm.gradient_clipping",
            *_END,
        ),
        {
            "distributed_type": "MEGATRON_LM",
            "megatron_lm_config.megatron_lm_tp_degree": 2,
            "megatron_lm_config.megatron_lm_num_micro_batches": 4,
            "megatron_lm_config.megatron_lm_gradient_clipping": 1.0,
        },
        devices=4,
        needs=(("distributed_type", "MEGATRON_LM"),),
    ),
    Branch(
        "a TPU",
        {"place": "tpu", "mixed_precision": "bf16", "tpu.downcast_bf16": True},
        (*_TPU, "mixed_precision", "tpu.downcast_bf16", "extras"),
        {"distributed_type": "XLA", "downcast_bf16": True, "main_training_function": "main"},
    ),
    Branch(
        "a pod of TPU machines",
        {
            "place": "tpu",
            "tpu.tpu_use_cluster": True,
            "tpu.tpu_name": "pod",
            "tpu.tpu_zone": "us-central2-b",
            "tpu.commands": ("pip install x", "ls"),
            "tpu.tpu_env": ("A=1", "B=2"),
        },
        (
            *_TPU,
            "tpu.tpu_use_cluster",
            "tpu.tpu_name",
            "tpu.tpu_zone",
            "tpu.tpu_use_sudo",
            "tpu.command_file",
            "tpu.commands",
            "tpu.tpu_env",
            *_END,
        ),
        {"tpu_name": "pod", "commands": ["pip install x", "ls"], "tpu_env": ["A=1", "B=2"]},
        needs=(("tpu.tpu_use_cluster", True),),
    ),
    Branch(
        "a pod of virtual machines without a name",
        {
            "place": "tpu",
            "tpu.tpu_use_cluster": True,
            "tpu.tpu_vm": ("vm-0", "vm-1"),
            "tpu.command_file": "setup.sh",
        },
        (
            *_TPU,
            "tpu.tpu_use_cluster",
            "tpu.tpu_name",
            "tpu.tpu_vm",
            "tpu.tpu_zone",
            "tpu.tpu_use_sudo",
            "tpu.command_file",
            "tpu.tpu_env",
            *_END,
        ),
        {"tpu_vm": ["vm-0", "vm-1"], "command_file": "setup.sh"},
        needs=(("tpu.tpu_use_cluster", True),),
    ),
    Branch(
        "fp8 with TransformerEngine",
        {
            "mixed_precision": "fp8",
            "fp8.backend": "TE",
            "fp8.margin": 2,
            "fp8.override_linear_precision": (True, False, False),
        },
        (*_local("mixed_precision", *_TE), "extras"),
        {
            "mixed_precision": "fp8",
            "fp8_config.backend": "TE",
            "fp8_config.margin": 2,
            "fp8_config.override_linear_precision": [True, False, False],
        },
        devices=1,
    ),
    Branch(
        "fp8 with torchao",
        {"mixed_precision": "fp8", "fp8.backend": "AO", "fp8.pad_inner_dim": False},
        (
            *_local("mixed_precision", "fp8.backend", "fp8.enable_fsdp_float8_all_gather"),
            "fp8.pad_inner_dim",
            "extras",
        ),
        {"fp8_config.backend": "AO", "fp8_config.pad_inner_dim": False},
        devices=1,
    ),
    Branch(
        "a job on SageMaker",
        {
            "place": "sagemaker",
            "sagemaker.profile": "work",
            "sagemaker.iam_role_name": "trainer",
            "sagemaker.ec2_instance_type": "ml.p3.2xlarge",
            "sagemaker.image_uri": "registry/image:1",
            "sagemaker.sagemaker_inputs_file": "inputs.tsv",
        },
        (
            "place",
            *_JOB,
            "sagemaker.distributed_type",
            *_DATA,
            "sagemaker.mixed_precision",
            "sagemaker.dynamo.backend",
        ),
        {
            "compute_environment": "AMAZON_SAGEMAKER",
            "distributed_type": "NO",
            "profile": "work",
            "region": "us-east-1",
            "iam_role_name": "trainer",
            "ec2_instance_type": "ml.p3.2xlarge",
            "image_uri": "registry/image:1",
            "sagemaker_inputs_file": "inputs.tsv",
            "num_machines": 1,
        },
    ),
    Branch(
        "a compiled job on several machines of SageMaker",
        {
            "place": "sagemaker",
            "sagemaker.iam_role_name": "trainer",
            "sagemaker.ec2_instance_type": "ml.p4d.24xlarge",
            "sagemaker.distributed_type": "DATA_PARALLEL",
            "sagemaker.num_machines": 2,
            "sagemaker.dynamo.backend": "INDUCTOR",
        },
        (
            "place",
            *_JOB,
            "sagemaker.distributed_type",
            "sagemaker.num_machines",
            *_DATA,
            "sagemaker.mixed_precision",
            "sagemaker.dynamo.backend",
            *(f"sagemaker.{name}" for name in _COMPILE),
        ),
        {
            "distributed_type": "DATA_PARALLEL",
            "num_machines": 2,
            "dynamo_config.dynamo_backend": "INDUCTOR",
        },
    ),
    *(
        Branch(
            f"fp8 on SageMaker with {backend}",
            {
                "place": "sagemaker",
                "sagemaker.iam_role_name": "trainer",
                "sagemaker.ec2_instance_type": "ml.p5.48xlarge",
                "sagemaker.mixed_precision": "fp8",
                "sagemaker.fp8.backend": backend,
            },
            (
                "place",
                *_JOB,
                "sagemaker.distributed_type",
                *_DATA,
                "sagemaker.mixed_precision",
                *(f"sagemaker.{name}" for name in names),
                "sagemaker.dynamo.backend",
            ),
            {"mixed_precision": "fp8", "fp8_config.backend": backend},
        )
        for backend, names in (
            ("TE", _TE),
            ("AO", ("fp8.backend", "fp8.enable_fsdp_float8_all_gather", "fp8.pad_inner_dim")),
        )
    ),
)
"""Every branch; together they ask every question."""
