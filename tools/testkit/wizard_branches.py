"""Every branch of ``accel config``: what a user is asked and answers, and what the file must have.

The questions are written out by hand, so that they say what a user sees and not what the table says. Where an answer
must be in the file, and as what, follows from the schema.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from accel_cli.wizard.table import QUESTIONS

__all__ = ["BRANCHES", "Branch"]


@dataclass(frozen=True)
class Branch:
    """One way through the questions.

    Attributes:
        name: its name.
        session: the questions that must come, in this order, as words. One that is not answered with Enter has its
            answer behind "=", as JSON or text; parts of several have ";" between them.
        also: entries that the file must have besides the answers, or otherwise than answered, by dotted key.
        devices: accelerators of the machine.
        needs: what this version must be able to run for the branch to exist: option and value.
    """

    name: str
    session: str
    also: Mapping[str, Any] = field(default_factory=dict)
    devices: int = 0
    needs: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def asked(self) -> list[str]:
        """The names of the questions."""
        return [word.partition("=")[0] for word in shlex.split(self.session)]

    @cached_property
    def answers(self) -> dict[str, Any]:
        """Answers by name of the question; every other question is answered with Enter."""
        words = [word.partition("=") for word in shlex.split(self.session)]
        return {name: _value(answer) for name, there, answer in words if there}

    @cached_property
    def file(self) -> dict[str, Any]:
        """Entries that the file must have, by dotted key."""
        options = {row.name: row.bound for row in QUESTIONS}
        del options["use_parallelism_config"]  # in a file, its section says it
        answered = [(option, self.answers[name]) for name in self.answers if (option := options.get(name))]
        return {option.file_path: option.option_type.dump(value) for option, value in answered} | dict(
            self.also
        )


def _value(answer: str) -> Any:
    if ";" in answer:
        return tuple(_value(part) for part in answer.split(";") if part)
    try:
        return json.loads(answer)
    except ValueError:
        return answer


_SHARDING = """
    fsdp.reshard_after_forward fsdp.cpu_offload fsdp.state_dict_type fsdp.cpu_ram_efficient_loading
    fsdp.activation_checkpointing
"""
_DATA = "sagemaker.image_uri sagemaker.sagemaker_inputs_file sagemaker.sagemaker_metrics_file"

BRANCHES = (
    Branch(
        "one process on the CPU",
        """
        place devices distributed_type mixed_precision=bf16 extras
        """,
        {"distributed_type": "NO", "num_processes": 1, "use_cpu": True},
    ),
    Branch(
        "replicas on the CPU, with mpirun",
        """
        place devices distributed_type=MULTI_CPU num_processes=2 mixed_precision
        extras=gradient_accumulation.num_steps;num_cpu_threads_per_process;debug;mpirun.hostfile
        gradient_accumulation.num_steps=4 num_cpu_threads_per_process=3 mpirun.hostfile=hosts
        """,
        {"debug": True},
    ),
    Branch(
        "replicas on GPUs, compiled",
        """
        place devices distributed_type gpu_ids=0,2 num_processes mixed_precision
        extras=dynamo.backend;enable_cpu_affinity dynamo.backend dynamo.mode=max-autotune
        dynamo.fullgraph dynamo.dynamic=false dynamo.use_regional_compilation=true
        """,
        {
            "distributed_type": "MULTI_GPU",
            "num_processes": 2,
            "use_cpu": False,
            "enable_cpu_affinity": True,
            "dynamo_config.dynamo_backend": "INDUCTOR",
        },
        devices=3,
    ),
    Branch(
        "several machines",
        """
        place=several num_machines=3 devices distributed_type num_processes=4 machine_rank=2
        main_process_ip=10.0.0.1 main_process_port=29501 same_network=false rdzv_backend=c10d mixed_precision extras
        """,
        {"distributed_type": "MULTI_CPU", "num_processes": 12},
    ),
    Branch(
        "a job on Kubernetes",
        """
        place=engine submission.engine=kubernetes num_machines=2 devices=accelerators distributed_type num_processes=8
        submission.image=me/train submission.queue=gpus mixed_precision extras
        """,
        {"distributed_type": "MULTI_GPU", "num_processes": 16},
    ),
    Branch(
        "a job on SkyPilot",
        """
        place=engine submission.engine=skypilot num_machines=1 devices=accelerators distributed_type num_processes=8
        submission.gpus_per_machine=H100:8 mixed_precision extras
        """,
        {"num_processes": 8},
    ),
    Branch(
        "FSDP by layer class",
        """
        place devices distributed_type=FSDP num_processes=2 fsdp.auto_wrap_policy
        fsdp.transformer_cls_names_to_wrap=Block;Head fsdp.reshard_after_forward=false
        fsdp.cpu_offload fsdp.state_dict_type fsdp.cpu_ram_efficient_loading
        fsdp.activation_checkpointing=true fsdp.activation_checkpointing_offload=true
        use_parallelism_config mixed_precision extras
        """,
        {"fsdp_config.fsdp_version": 2, "fsdp_config.fsdp_state_dict_type": "SHARDED_STATE_DICT"},
    ),
    Branch(
        "FSDP by size",
        f"""
        place devices distributed_type=FSDP num_processes=2 fsdp.auto_wrap_policy=SIZE_BASED_WRAP
        fsdp.min_num_params=1000 {_SHARDING} use_parallelism_config mixed_precision extras
        """,
    ),
    Branch(
        "FSDP in a mesh",
        f"""
        place devices distributed_type=FSDP num_processes=8 fsdp.auto_wrap_policy=NO_WRAP
        {_SHARDING} use_parallelism_config=true parallelism.pp_size parallelism.tp_size=2
        parallelism.cp_size=2 parallelism.cp_comm_strategy parallelism.cp_load_balance
        parallelism.sp_size parallelism.dp_replicate_size parallelism.dp_shard_size mixed_precision extras
        """,
        {"parallelism_config.parallelism_config_dp_shard_size": 2},
    ),
    Branch(
        "experts divided among ranks",
        f"""
        place devices distributed_type=FSDP num_processes=4 fsdp.auto_wrap_policy=NO_WRAP
        {_SHARDING} use_parallelism_config=true parallelism.pp_size parallelism.tp_size
        parallelism.cp_size parallelism.sp_size parallelism.dp_replicate_size
        parallelism.dp_shard_size parallelism.ep_size=2 mixed_precision extras
        """,
    ),
    Branch(
        "stages of a pipeline",
        f"""
        place devices distributed_type=FSDP num_processes=4 fsdp.auto_wrap_policy=NO_WRAP
        {_SHARDING} use_parallelism_config=true parallelism.pp_size=2 parallelism.pp_schedule=1f1b
        parallelism.tp_size parallelism.dp_replicate_size parallelism.dp_shard_size mixed_precision extras
        """,
    ),
    Branch(
        "DeepSpeed with its own file",
        """
        place devices distributed_type=DEEPSPEED num_processes=2 deepspeed_file=true
        deepspeed.hf_ds_config=zero.json deepspeed.zero3_init_flag
        deepspeed.transformer_moe_cls_names mixed_precision extras
        """,
    ),
    Branch(
        "DeepSpeed stage 3 on NVMe",
        """
        place devices distributed_type=DEEPSPEED num_processes=2 deepspeed_file
        deepspeed.zero_stage=3 deepspeed.offload_optimizer_device=nvme
        deepspeed.offload_optimizer_nvme_path=/nvme/optimizer deepspeed.offload_param_device=nvme
        deepspeed.offload_param_nvme_path=/nvme/parameters deepspeed.gradient_clipping=1.5
        deepspeed.zero3_init_flag=true deepspeed.zero3_save_16bit_model
        deepspeed.transformer_moe_cls_names=Experts mixed_precision extras
        """,
        {"deepspeed_config.zero3_save_16bit_model": False},
    ),
    Branch(
        "DeepSpeed's launcher on several machines",
        """
        place=several num_machines devices distributed_type=DEEPSPEED num_processes=2 deepspeed_file
        deepspeed.zero_stage=1 deepspeed.gradient_clipping deepspeed.transformer_moe_cls_names
        deepspeed.deepspeed_multinode_launcher=pdsh deepspeed.deepspeed_hostfile=hosts
        deepspeed.deepspeed_exclusion_filter deepspeed.deepspeed_inclusion_filter=a@b:0
        main_process_ip=a main_process_port mixed_precision extras
        """,
        {"num_processes": 4},
        needs=(("deepspeed.deepspeed_multinode_launcher", "pdsh"),),
    ),
    Branch(
        "Megatron-LM",
        """
        place devices distributed_type=MEGATRON_LM gpu_ids num_processes megatron_lm.tp_degree=2
        megatron_lm.sequence_parallelism=true megatron_lm.pp_degree=2
        megatron_lm.num_micro_batches=4 megatron_lm.recompute_activations
        megatron_lm.use_distributed_optimizer megatron_lm.gradient_clipping mixed_precision extras
        """,
        {"megatron_lm_config.megatron_lm_gradient_clipping": 1.0},
        devices=4,
        needs=(("distributed_type", "MEGATRON_LM"),),
    ),
    Branch(
        "a TPU",
        """
        place=tpu num_processes tpu.main_training_function mixed_precision=bf16
        tpu.downcast_bf16=true extras
        """,
        {"distributed_type": "XLA", "main_training_function": "main"},
    ),
    Branch(
        "a pod of TPU machines",
        """
        place=tpu num_processes tpu.main_training_function tpu.tpu_use_cluster=true tpu.tpu_name=pod
        tpu.tpu_zone=us-central2-b tpu.tpu_use_sudo tpu.command_file tpu.commands="pip install x;ls"
        tpu.tpu_env=A=1;B=2 mixed_precision extras
        """,
        needs=(("tpu.tpu_use_cluster", True),),
    ),
    Branch(
        "a pod of virtual machines without a name",
        """
        place=tpu num_processes tpu.main_training_function tpu.tpu_use_cluster=true tpu.tpu_name
        tpu.tpu_vm=vm-0;vm-1 tpu.tpu_zone tpu.tpu_use_sudo tpu.command_file=setup.sh tpu.tpu_env
        mixed_precision extras
        """,
        needs=(("tpu.tpu_use_cluster", True),),
    ),
    Branch(
        "fp8 with TransformerEngine",
        """
        place devices distributed_type mixed_precision=fp8 fp8.backend=TE
        fp8.use_autocast_during_eval fp8.margin=2 fp8.interval fp8.fp8_format fp8.amax_history_len
        fp8.amax_compute_algo fp8.override_linear_precision=true;false;false extras
        """,
        devices=1,
    ),
    Branch(
        "fp8 with torchao",
        """
        place devices distributed_type mixed_precision=fp8 fp8.backend=AO
        fp8.enable_fsdp_float8_all_gather fp8.pad_inner_dim=false extras
        """,
        devices=1,
    ),
    Branch(
        "a job on SageMaker",
        """
        place=sagemaker sagemaker.profile=work sagemaker.region sagemaker.iam_role_name=trainer
        sagemaker.ec2_instance_type=ml.p3.2xlarge sagemaker.distributed_type
        sagemaker.image_uri=registry/image:1 sagemaker.sagemaker_inputs_file=inputs.tsv
        sagemaker.sagemaker_metrics_file sagemaker.mixed_precision sagemaker.dynamo.backend
        """,
        {
            "compute_environment": "AMAZON_SAGEMAKER",
            "distributed_type": "NO",
            "region": "us-east-1",
            "num_machines": 1,
        },
    ),
    Branch(
        "a compiled job on several machines of SageMaker",
        f"""
        place=sagemaker sagemaker.profile sagemaker.region sagemaker.iam_role_name=trainer
        sagemaker.ec2_instance_type=ml.p4d.24xlarge sagemaker.distributed_type=DATA_PARALLEL
        sagemaker.num_machines=2 {_DATA} sagemaker.mixed_precision sagemaker.dynamo.backend=INDUCTOR
        sagemaker.dynamo.mode sagemaker.dynamo.fullgraph sagemaker.dynamo.dynamic
        sagemaker.dynamo.use_regional_compilation
        """,
    ),
    *(
        Branch(
            f"fp8 on SageMaker with {backend}",
            f"""
            place=sagemaker sagemaker.profile sagemaker.region sagemaker.iam_role_name=trainer
            sagemaker.ec2_instance_type=ml.p5.48xlarge sagemaker.distributed_type {_DATA}
            sagemaker.mixed_precision=fp8 sagemaker.fp8.backend={backend} {more} sagemaker.dynamo.backend
            """,
        )
        for backend, more in (
            (
                "TE",
                """
                sagemaker.fp8.use_autocast_during_eval sagemaker.fp8.margin sagemaker.fp8.interval
                sagemaker.fp8.fp8_format sagemaker.fp8.amax_history_len sagemaker.fp8.amax_compute_algo
                sagemaker.fp8.override_linear_precision
                """,
            ),
            ("AO", "sagemaker.fp8.enable_fsdp_float8_all_gather sagemaker.fp8.pad_inner_dim"),
        )
    ),
)
"""Every branch; together they ask every question."""
