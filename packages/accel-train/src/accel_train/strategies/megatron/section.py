"""Megatron-LM."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.config.option import Section, option

__all__ = ["UNAVAILABLE", "MegatronLMSection"]

UNAVAILABLE = {
    "use_custom_fsdp": "Megatron's own FSDP is not built in; use_distributed_optimizer divides optimizer states and "
    "gradients, and FSDP (--use_fsdp) divides parameters as well",
    "overlap_cpu_optimizer_d2h_h2d": "it belongs to optimizer_cpu_offload, which is not built in; "
    "use_distributed_optimizer divides optimizer states",
    "optimizer_cpu_offload": "Megatron's optimizer on the CPU is not built in; use_distributed_optimizer divides "
    "optimizer states, and DeepSpeed (--use_deepspeed --offload_optimizer_device cpu) keeps them in host memory",
    "use_precision_aware_optimizer": "it needs Transformer Engine's optimizer, and the script's own is stepped here; "
    "use_distributed_optimizer divides optimizer states",
    "expert_model_parallel_size": "mixture-of-experts models are not built in; use tp_degree and pp_degree",
    "expert_tensor_parallel_size": "mixture-of-experts models are not built in; use tp_degree and pp_degree",
}
"""Options that Megatron-LM has and that are refused: why, and what there is instead. False and 1 ask for nothing."""


@dataclass(frozen=True, repr=False, eq=False)
class MegatronLMSection(Section):
    """Options of the Megatron-LM plugin; fields are named as in the plugin."""

    file_key = "megatron_lm_config"
    prefix = "megatron_lm_"
    env_prefix = "MEGATRON_LM_"
    title = "Megatron-LM"

    tp_degree: int | None = option(
        help="Ranks of tensor parallelism.",
        low=1,
        launch_default=1,
        prompt="What is the Tensor Parallelism degree/size?",
    )
    pp_degree: int | None = option(
        help="Ranks of pipeline parallelism.",
        low=1,
        launch_default=1,
        prompt="What is the Pipeline Parallelism degree/size?",
    )
    use_custom_fsdp: bool | None = option(
        help="Use Megatron's own FSDP; not available yet.", launch_default=False
    )
    overlap_cpu_optimizer_d2h_h2d: bool | None = option(
        help="Overlap the transfers of an optimizer on the CPU with computation; not available yet.",
        launch_default=False,
    )
    no_load_optim: bool | None = option(help="Do not load the optimizer state.", launch_default=False)
    eod_mask_loss: bool | None = option(
        help="Exclude end-of-document tokens from the loss.", launch_default=False
    )
    no_save_optim: bool | None = option(help="Do not save the optimizer state.", launch_default=False)
    optimizer_cpu_offload: bool | None = option(
        help="Keep optimizer states on the CPU; not available yet.", launch_default=False
    )
    use_precision_aware_optimizer: bool | None = option(
        help="Keep optimizer states in lower precision where that is safe; not available yet.",
        launch_default=False,
    )
    decoder_last_pipeline_num_layers: int | None = option(
        help="Decoder layers in the last pipeline stage; by default all stages hold the same number.", low=0
    )
    recompute_granularity: str | None = option(help="Activation recomputation: full or selective.")
    recompute_method: str | None = option(help="How layers to recompute are grouped: uniform or block.")
    recompute_num_layers: int | None = option(help="Layers per recomputed group.", low=0)
    attention_backend: bool | None = option(
        help="Compute attention by PyTorch's fused kernels instead of Megatron-core's own code."
    )
    expert_model_parallel_size: int | None = option(
        help="Ranks of expert parallelism; not available yet.", low=1
    )
    context_parallel_size: int | None = option(
        help="Ranks of context parallelism, which divide each sequence.", low=1
    )
    attention_dropout: float | None = option(help="Dropout after attention, from 0 to 1.", low=0, high=1)
    hidden_dropout: float | None = option(help="Dropout of hidden states, from 0 to 1.", low=0, high=1)
    attention_softmax_in_fp32: bool | None = option(help="Compute the softmax of attention in float32.")
    expert_tensor_parallel_size: int | None = option(
        help="Ranks of tensor parallelism inside an expert; not available yet.", low=1
    )
    calculate_per_token_loss: bool | None = option(
        help="Average the loss over tokens instead of micro-batches."
    )
    use_rotary_position_embeddings: bool | None = option(help="Use rotary position embeddings.")
    num_micro_batches: int | None = option(
        help="Micro-batches per step of the pipeline.",
        low=1,
        prompt="What is the number of micro-batches?",
    )
    gradient_clipping: float | None = option(
        help="Maximum gradient norm; 0 disables clipping.",
        low=0,
        launch_default=1.0,
        prompt="What is the gradient clipping value based on global L2 Norm (0 to disable)?",
    )
    sequence_parallelism: bool | None = option(
        help="Split activations along the sequence between the ranks of tensor parallelism.",
        prompt="Do you want to enable Sequence Parallelism?",
    )
    recompute_activations: bool | None = option(
        help="Recompute selected activations in backward.",
        prompt="Do you want to enable selective activation recomputation?",
    )
    use_distributed_optimizer: bool | None = option(
        help="Shard optimizer states and gradients over data-parallel ranks.",
        prompt="Do you want to use distributed optimizer, which shards optimizer state and gradients?",
    )
