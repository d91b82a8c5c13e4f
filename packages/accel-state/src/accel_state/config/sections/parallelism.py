"""Sizes of the device mesh dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel_state.config.option import Section, option

__all__ = ["PIPELINE_SCHEDULES", "ParallelismSection"]

PIPELINE_SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv_zero_bubble",
)
"""Schedules of pipelines, by the names of PyTorch's classes in lower case."""


@dataclass(frozen=True, repr=False, eq=False)
class ParallelismSection(Section):
    """The device mesh: number of ranks per kind of parallelism."""

    file_key = "parallelism_config"
    prefix = "parallelism_config_"
    env_prefix = "PARALLELISM_CONFIG_"
    title = "Parallelism"

    pp_size: int | None = option(
        help="Ranks of pipeline parallelism: stages of the model, which pass activations on.",
        low=1,
        launch_default=1,
        prompt="What is the pipeline parallelism size?",
    )
    pp_schedule: str | None = option(
        help="Order in which the stages of a pipeline compute micro-batches; by default 1f1b where the model computes "
        "the loss, and gpipe where the script does.",
        choices=PIPELINE_SCHEDULES,
        prompt="In which order do the stages of the pipeline compute micro-batches?",
    )
    pp_num_micro_batches: int | None = option(
        help="Micro-batches that a pipeline cuts each batch into; by default two for each stage.", low=1
    )
    pp_stages_per_rank: int | None = option(
        help="Stages that each rank of a pipeline holds; by default 1, or 2 for schedules that interleave stages.",
        low=1,
    )
    dp_replicate_size: int | None = option(
        help="Ranks that hold replicas of the parameters.",
        low=1,
        launch_default=1,
        prompt="What is the data parallelism replicate size?",
    )
    dp_shard_size: int | None = option(
        help="Ranks that parameters are sharded across.",
        low=1,
        launch_default=1,
        prompt="What is the FSDP size?",
    )
    tp_size: int | None = option(
        help="Ranks of tensor parallelism.",
        low=1,
        launch_default=1,
        prompt="What is the tensor parallelism size?",
    )
    ep_size: int | None = option(
        help="Ranks that the experts of mixture-of-experts layers are divided among; a part of the ranks of FSDP.",
        low=1,
        launch_default=1,
        prompt="What is the expert parallelism size?",
    )
    cp_size: int | None = option(
        help="Ranks of context parallelism.",
        low=1,
        launch_default=1,
        prompt="What is the context parallelism size?",
    )
    cp_backend: str | None = option(
        help="Implementation of context parallelism.", choices=("torch",), launch_default="torch"
    )
    cp_comm_strategy: str | None = option(
        help="How keys and values are exchanged in context parallelism.",
        choices=("allgather", "alltoall"),
        launch_default="allgather",
        prompt="What is the context parallelism communication strategy?",
    )
    cp_load_balance: bool | None = option(
        help="Give each rank of context parallelism a piece from each end of a sequence, so that all compute the same "
        "share of causal attention.",
        launch_default=True,
        prompt="Shall all ranks of context parallelism compute the same share of causal attention?",
    )
    sp_size: int | None = option(
        help="Ranks of sequence parallelism.",
        low=1,
        launch_default=1,
        prompt="What is the sequence parallelism size?",
    )
    sp_backend: str | None = option(
        help="Implementation of sequence parallelism.", choices=("deepspeed",), launch_default="deepspeed"
    )
    sp_seq_length: int | None = option(help="Sequence length, if it is fixed.", unset=("none",), low=1)
    sp_seq_length_is_variable: bool | None = option(
        help="Sequences differ in length from batch to batch.", launch_default=True
    )
    sp_attn_implementation: str | None = option(
        help="Attention implementation that sequence parallelism replaces, by its name in transformers.",
        unset=("none",),
        launch_default="sdpa",
    )

    def launch_defaults(self) -> dict[str, Any]:
        """As declared; details of a dimension only if it has several ranks."""
        found = super().launch_defaults()
        if (self.cp_size or 1) == 1:
            found.pop("cp_comm_strategy", None)
            found.pop("cp_load_balance", None)
        if (self.sp_size or 1) == 1:
            found.pop("sp_seq_length_is_variable", None)
            found.pop("sp_attn_implementation", None)
        return found
