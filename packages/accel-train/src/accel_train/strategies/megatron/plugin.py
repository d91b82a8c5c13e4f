"""Options of Megatron-LM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from accel_train.errors import IncompatibleOptionsError, OptionError
from accel_train.plugins.base import SectionPlugin, StrategyPlugin, positional
from accel_train.strategies.megatron.section import UNAVAILABLE, MegatronLMSection

__all__ = ["MegatronLMPlugin"]

_RECOMPUTE = {"recompute_granularity": ("full", "selective"), "recompute_method": ("uniform", "block")}
_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")

# Fields that have no effect here, with the reason and what to use; set to anything but their default they are refused.
_REFUSED: dict[str, str] = {
    "pipeline_model_parallel_split_rank": "encoder-decoder models are not built in. Leave it out",
    "num_layers_per_virtual_pipeline_stage": "the interleaved schedule is not built in. Leave it out; more "
    "num_micro_batches shrink the pipeline's idle time as well",
    "train_samples": "Megatron's own training loop counts samples, and here the loop is the script's. Use train_iters",
    "lr_decay_samples": "Megatron's own training loop counts samples. Use lr_decay_iters",
    "lr_warmup_samples": "Megatron's own training loop counts samples. Use lr_warmup_iters",
    "consumed_samples": "load_state() brings prepared loaders back to where they were. Leave it out",
    "no_wd_decay_cond": "the groups of the script's optimizer say which parameters have weight decay. Give the "
    "optimizer two groups",
    "scale_lr_cond": "the groups of the script's optimizer have learning rates of their own. Give the optimizer two "
    "groups",
    "lr_mult": "the groups of the script's optimizer have learning rates of their own. Give the optimizer two groups",
    "megatron_dataset_flag": "batches come from the script's loaders. Build the dataset with megatron.core.datasets, "
    "put it into a torch DataLoader, and pass that to prepare()",
    "custom_megatron_datasets_provider_function": "batches come from the script's loaders. Build the datasets in the "
    "script, put them into a torch DataLoader, and pass that to prepare()",
    "encoder_seq_length": "encoder-decoder models are not built in. Use seq_length",
    "decoder_seq_length": "encoder-decoder models are not built in. Use seq_length",
    "tensorboard_dir": "Megatron's own training loop writes it. Log what the script computes",
    "set_all_logging_options": "Megatron's own training loop logs. Log what the script computes",
    "custom_train_step_class": "the script's loop is the training step. Use custom_get_batch_function and "
    "custom_loss_function, which the step calls",
    "custom_train_step_kwargs": "the script's loop is the training step. Use custom_get_batch_function and "
    "custom_loss_function, which the step calls",
}


@positional(
    "tp_degree",
    "pp_degree",
    "use_custom_fsdp",
    "overlap_cpu_optimizer_d2h_h2d",
    "no_load_optim",
    "eod_mask_loss",
    "no_save_optim",
    "optimizer_cpu_offload",
    "use_precision_aware_optimizer",
    "decoder_last_pipeline_num_layers",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "attention_backend",
    "expert_model_parallel_size",
    "context_parallel_size",
    "attention_dropout",
    "hidden_dropout",
    "attention_softmax_in_fp32",
    "expert_tensor_parallel_size",
    "calculate_per_token_loss",
    "use_rotary_position_embeddings",
    "num_micro_batches",
    "gradient_clipping",
    "sequence_parallelism",
    "recompute_activations",
    "use_distributed_optimizer",
    "pipeline_model_parallel_split_rank",
    "num_layers_per_virtual_pipeline_stage",
    "is_train_batch_min",
    "train_iters",
    "train_samples",
    "weight_decay_incr_style",
    "start_weight_decay",
    "end_weight_decay",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_fraction",
    "min_lr",
    "consumed_samples",
    "no_wd_decay_cond",
    "scale_lr_cond",
    "lr_mult",
    "megatron_dataset_flag",
    "seq_length",
    "encoder_seq_length",
    "decoder_seq_length",
    "tensorboard_dir",
    "set_all_logging_options",
    "eval_iters",
    "eval_interval",
    "return_logits",
    "custom_train_step_class",
    "custom_train_step_kwargs",
    "custom_model_provider_function",
    "custom_prepare_model_function",
    "custom_megatron_datasets_provider_function",
    "custom_get_batch_function",
    "custom_loss_function",
    "other_megatron_args",
)
@dataclass(frozen=True, repr=False, eq=False)
class MegatronLMPlugin(StrategyPlugin, SectionPlugin, MegatronLMSection):
    """Train with Megatron-core: tensor, pipeline, context and data parallelism, and its distributed optimizer.

    Passing one selects the strategy "megatron"; unset fields come from the launcher's environment. The number of all
    ranks divided by tp_degree, pp_degree and context_parallel_size is the data-parallel degree.

    Attributes:
        tp_degree: tensor parallelism: ranks among which each layer is divided.
        pp_degree: pipeline parallelism: ranks among which the layers are distributed.
        num_micro_batches: pieces into which each batch of a rank is cut; its size must be a multiple of this. With
            pp_degree the stages work on different micro-batches at the same time.
        gradient_clipping: norm to which gradients are clipped in every step; 0: no clipping. The script's
            `clip_grad_norm_` clips as well.
        sequence_parallelism: divide activations along the sequence; with tp_degree above 1.
        recompute_activations: recompute attention in backward; short for recompute_granularity="selective".
        recompute_granularity: "full" recomputes whole layers, "selective" only attention.
        recompute_method: "uniform" or "block"; with "full".
        recompute_num_layers: number of layers of each recomputed unit; with "full".
        use_distributed_optimizer: divide optimizer states and gradients among data-parallel ranks; with Adam.
        decoder_last_pipeline_num_layers: number of layers of the last stage.
        attention_dropout, hidden_dropout: None: the values of the model's configuration.
        attention_softmax_in_fp32: None: Megatron-core's default, yes.
        attention_backend: True: attention by PyTorch's fused kernels. False or None: Megatron-core's own, unless
            context_parallel_size divides sequences.
        context_parallel_size: ranks among which each sequence is divided. Its length must be a multiple of twice this
            number; attention uses PyTorch's kernels.
        use_rotary_position_embeddings: must agree with the model's configuration.
        calculate_per_token_loss: the loss is the mean over the tokens of all micro-batches and ranks; else the mean of
            the means of each micro-batch.
        eod_mask_loss: leave positions whose token ends a document out of the loss.
        no_save_optim, no_load_optim: checkpoints are saved, or loaded, without the optimizer's state.
        is_train_batch_min: has no effect: each batch is cut into micro-batches, whatever its size.
        train_iters, lr_decay_style, lr_decay_iters, lr_warmup_iters, lr_warmup_fraction, min_lr: options of Megatron's
            schedule, which replaces a `MegatronLMDummyScheduler`.
        weight_decay_incr_style, start_weight_decay, end_weight_decay: options of the same schedule.
        seq_length: the length that every batch must have; None: any.
        eval_iters, eval_interval: have no effect: the script's loop evaluates.
        return_logits: calling the model with labels returns the logits as well.
        custom_model_provider_function: called with pre_process and post_process; returns the model of this stage.
        custom_prepare_model_function: called with the list of model chunks before they are wrapped; returns it.
        custom_get_batch_function: called with an iterator and False; returns tokens, labels, loss mask, attention mask
            and position ids.
        custom_loss_function: called with the loss mask and the model's output; returns the loss, or the loss and a
            mapping.
        other_megatron_args: fields of Megatron-core's TransformerConfig, OptimizerConfig and
            DistributedDataParallelConfig.

    Every other field is refused; the error names its replacement.

    Raises:
        OptionError: a value cannot be used.
        IncompatibleOptionsError: fields contradict each other.
        ConfigError: an option is unset, and its environment variable holds a value that cannot be used.
    """

    strategy: ClassVar[str] = "megatron"
    section: ClassVar[str] = "megatron_lm"
    argument: ClassVar[str] = "megatron_lm_plugin"
    when_unset: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "tp_degree": 1,
            "pp_degree": 1,
            "context_parallel_size": 1,
            "num_micro_batches": 1,
            "gradient_clipping": 1.0,
            "use_distributed_optimizer": False,
            "sequence_parallelism": False,
            "recompute_activations": False,
            "use_custom_fsdp": False,
            "overlap_cpu_optimizer_d2h_h2d": False,
            "optimizer_cpu_offload": False,
            "use_precision_aware_optimizer": False,
            "no_load_optim": False,
            "no_save_optim": False,
            "eod_mask_loss": False,
            "calculate_per_token_loss": False,
        }
    )

    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: Any = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    def check(self) -> Mapping[str, Any]:
        """Refuse what is not built in, and fields that contradict each other."""
        self._refuse_absent()
        for name, known in _RECOMPUTE.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise OptionError(f"{name} is {value!r}; known: {', '.join(known)}.")
        if self.sequence_parallelism and self._degree("tp_degree") == 1:
            raise IncompatibleOptionsError(
                "sequence_parallelism divides activations among the ranks of tensor parallelism, and tp_degree is 1. "
                "Set tp_degree to 2 or more, or leave sequence_parallelism out."
            )
        last = self.decoder_last_pipeline_num_layers
        if last is not None and self._degree("pp_degree") == 1:
            raise IncompatibleOptionsError(
                f"decoder_last_pipeline_num_layers={last} is about the last stage of a pipeline, and pp_degree is 1. "
                "Set pp_degree to 2 or more, or leave it out."
            )
        if self.lr_decay_style not in _DECAY_STYLES:
            raise OptionError(
                f"lr_decay_style is {self.lr_decay_style!r}; known: {', '.join(_DECAY_STYLES)}."
            )
        if self.lr_warmup_iters is not None and self.lr_warmup_fraction is not None:
            raise IncompatibleOptionsError(
                "lr_warmup_iters and lr_warmup_fraction both say how long the warm-up is; give one of them."
            )
        self._check_attention()
        return self._recomputation()

    def _check_attention(self) -> None:
        context = self._degree("context_parallel_size")
        if context > 1 and self.attention_backend is False and self.custom_model_provider_function is None:
            raise IncompatibleOptionsError(
                f"context_parallel_size={context} divides sequences in PyTorch's fused attention, and "
                "attention_backend=False asks for Megatron-core's own, which needs whole ones. Leave attention_backend "
                "out, or set it to True."
            )
        if (self.attention_backend or context > 1) and self.attention_softmax_in_fp32 is False:
            cause = "attention_backend" if self.attention_backend else "context_parallel_size"
            raise IncompatibleOptionsError(
                f"attention_softmax_in_fp32=False has no effect on PyTorch's fused attention, which {cause} selects "
                "and which computes the softmax in float32. Leave one of them out."
            )
        if self.seq_length is not None and context > 1 and self.seq_length % (2 * context):
            raise IncompatibleOptionsError(
                f"seq_length={self.seq_length} is not a multiple of {2 * context}, and context_parallel_size={context} "
                "gives each rank two pieces of equal length of every sequence. Change one of them."
            )

    def _degree(self, name: str) -> int:
        return getattr(self, name) or 1

    def _refuse_absent(self) -> None:
        defaults = self.defaults()
        for name, reason in _REFUSED.items():
            value = getattr(self, name)
            if value is not None and value is not False and value != defaults.get(name):
                raise OptionError(f"{name}={value!r} of Megatron-LM is not available: {reason}.")
        for name, reason in UNAVAILABLE.items():
            value = getattr(self, name)
            if value is True or value not in (None, False, 1):
                raise OptionError(f"{name}={value!r} of Megatron-LM is not available: {reason}.")

    def _recomputation(self) -> Mapping[str, Any]:
        granularity = self.recompute_granularity
        if self.recompute_activations:
            if granularity == "full":
                raise IncompatibleOptionsError(
                    "recompute_activations is short for recompute_granularity='selective', and recompute_granularity "
                    "is 'full'. Give one of them."
                )
            granularity = "selective"
        details = {
            name: value
            for name in ("recompute_method", "recompute_num_layers")
            if (value := getattr(self, name)) is not None
        }
        if granularity != "full" and details:
            raise IncompatibleOptionsError(
                f"{' and '.join(f'{name}={value!r}' for name, value in details.items())} need "
                f"recompute_granularity='full', and it is {granularity!r}."
            )
        if granularity == "full" and len(details) < 2:
            missing = {"recompute_method", "recompute_num_layers"} - details.keys()
            raise OptionError(
                f"recompute_granularity='full' needs {' and '.join(sorted(missing))} as well, such as "
                "recompute_method='uniform', recompute_num_layers=1."
            )
        return {"recompute_granularity": granularity}
