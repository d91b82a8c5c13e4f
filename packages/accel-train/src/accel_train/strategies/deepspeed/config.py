"""DeepSpeed's configuration for an engine: "auto" values filled in from the script, contradictions refused."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel_state.log import get_logger
from accel_train.errors import IncompatibleOptionsError, OptionError
from accel_train.plugins import DeepSpeedPlugin
from accel_train.strategies.deepspeed.placeholders import DummyOptim, DummyScheduler

__all__ = ["Script", "check_known", "engine_config"]

_logger = get_logger(__name__)

# The sections that configurations of users have. The engine passes over what it does not know without a word, and each
# of its versions knows more, so only names that look like one of these are reported.
_SECTIONS = (
    "activation_checkpointing",
    "aio",
    "amp",
    "bf16",
    "bfloat16",
    "checkpoint",
    "comms_logger",
    "communication_data_type",
    "compression_training",
    "csv_monitor",
    "data_efficiency",
    "data_types",
    "dataloader_drop_last",
    "disable_allgather",
    "dump_state",
    "elasticity",
    "flops_profiler",
    "fp16",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "gradient_predivide_factor",
    "hybrid_engine",
    "managed_gradient_accumulation",
    "memory_breakdown",
    "optimizer",
    "prescale_gradients",
    "progressive_layer_drop",
    "scheduler",
    "seq_parallel_communication_data_type",
    "sparse_attention",
    "sparse_gradients",
    "steps_per_print",
    "tensor_parallel",
    "tensorboard",
    "torch_autocast",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "wall_clock_breakdown",
    "wandb",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
)


@dataclass(frozen=True)
class Script:
    """Values of the script for options that a configuration sets to "auto".

    Attributes:
        model: the model.
        optimizer: its optimizer; None: the model is only evaluated.
        scheduler: a placeholder for the scheduler of the configuration, if the script has one.
        batch_sizes: batch sizes of the loaders in this `prepare()` call.
        ranks: number of ranks that read different samples.
        precision: name of the precision.
        schedule_steps: scheduler steps per optimizer step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    scheduler: DummyScheduler | None
    batch_sizes: Sequence[int]
    ranks: int
    precision: str
    schedule_steps: int = 1


def engine_config(plugin: DeepSpeedPlugin, script: Script) -> dict[str, Any]:
    """Make a copy of the plugin's configuration without any "auto".

    Accumulation belongs to the `Accelerator`: the engine steps when the script does, so a window may be of any length.

    Raises:
        IncompatibleOptionsError: the configuration contradicts the script; both values are named.
        OptionError: a value is "auto", and the script does not set it.
    """
    own = copy.copy(plugin)
    holder = copy.copy(plugin.hf_ds_config)
    holder.config = copy.deepcopy(plugin.deepspeed_config)
    object.__setattr__(own, "hf_ds_config", holder)
    config: dict[str, Any] = holder.config
    own.set_mixed_precision(script.precision)
    _check_sections(config, script, plugin)
    micro = _micro_batch_size(plugin, script)
    steps = plugin.accumulation_steps or 1
    config["train_micro_batch_size_per_gpu"] = micro
    config["gradient_accumulation_steps"] = steps
    total = config.get("train_batch_size", "auto")
    if total not in ("auto", None, micro * steps * script.ranks):
        raise IncompatibleOptionsError(
            f"train_batch_size is {total} in {holder.origin}, but {micro} samples per micro-batch, {steps} "
            f"micro-batches and {script.ranks} ranks are {micro * steps * script.ranks}. "
            'Set it to "auto", or correct one of them.'
        )
    config.pop(
        "train_batch_size", None
    )  # the engine's own product, which counts ranks of tensor parallelism as well
    own.deepspeed_config_process(must_match=False, **_values(script))
    if config.get("gradient_clipping") in (None, "auto"):
        config["gradient_clipping"] = 0.0  # the engine's own default clips to 1
    config["managed_gradient_accumulation"] = False
    config.setdefault("zero_allow_untested_optimizer", True)
    if config.get("steps_per_print") is None:
        config["steps_per_print"] = 2**62  # never: scripts print their own progress
    _offload_on_cpu(config)
    return config


def _offload_on_cpu(config: dict[str, Any]) -> None:
    """Switch pinned memory off where there is no accelerator: pinning needs one."""
    if torch.accelerator.is_available():
        return
    for part in ("offload_optimizer", "offload_param"):
        section = config.get("zero_optimization", {}).get(part)
        if section and section.get("device", "none") != "none":
            section["pin_memory"] = False


def _micro_batch_size(plugin: DeepSpeedPlugin, script: Script) -> int:
    """Samples of a micro-batch, which the engine only reports."""
    given = plugin.get_value("train_micro_batch_size_per_gpu", "auto")
    sizes = script.batch_sizes
    if given in (None, "auto"):
        if not sizes:
            return 1
        return min(sizes) if plugin.is_train_batch_min else max(sizes)
    if sizes and given not in sizes:
        raise IncompatibleOptionsError(
            f"train_micro_batch_size_per_gpu is {given} in {plugin.hf_ds_config.origin}, but the prepared loaders have "
            f"batches of {', '.join(map(str, sorted(set(sizes))))} samples per rank. "
            'Set it to "auto", or make them equal.'
        )
    return int(given)


def _check_sections(config: Mapping[str, Any], script: Script, plugin: DeepSpeedPlugin) -> None:
    """One optimizer and one scheduler: the script's, or the configuration's with a placeholder in the script."""
    origin = plugin.hf_ds_config.origin
    for section, given, placeholder in (
        ("optimizer", script.optimizer, isinstance(script.optimizer, DummyOptim)),
        ("scheduler", script.scheduler, script.scheduler is not None),
    ):
        kind = "DummyOptim" if section == "optimizer" else "DummyScheduler"
        if section in config and given is not None and not placeholder:
            raise IncompatibleOptionsError(
                f"{origin} has the section {section!r} ({config[section].get('type')}), but the script prepares "
                f"{type(given).__name__}. Prepare {kind}(…) in its place, or remove the section."
            )
        if section in config and _makes_its_own(given):
            raise IncompatibleOptionsError(
                f"DummyScheduler has an lr_scheduler_callable, but {origin} has the section 'scheduler' "
                f"({config[section].get('type')}). Leave one of them out."
            )
        if section not in config and placeholder and not _makes_its_own(given):
            raise IncompatibleOptionsError(
                f"The script prepares {kind}, which stands for the section {section!r} of the DeepSpeed configuration, "
                f"and {origin} has none. Add the section, or prepare a real {section}."
            )


def _makes_its_own(given: object) -> bool:
    return isinstance(given, DummyScheduler) and given.lr_scheduler_callable is not None


def _values(script: Script) -> dict[str, Any]:
    """The values for "auto", by dotted key."""
    values: dict[str, Any] = {"gradient_clipping": 0.0}
    hidden = _hidden_size(script.model)
    if hidden is not None:
        values |= {
            "zero_optimization.reduce_bucket_size": hidden * hidden,
            "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
            "zero_optimization.stage3_param_persistence_threshold": 10 * hidden,
        }
    values["zero_optimization.stage3_gather_16bit_weights_on_model_save"] = False
    optimizer = script.optimizer
    if isinstance(optimizer, DummyOptim):
        values["optimizer.params.lr"] = optimizer.defaults["lr"]
        values["optimizer.params.weight_decay"] = optimizer.defaults["weight_decay"]
        for name in ("betas", "eps"):
            if name in optimizer.kwargs:
                values[f"optimizer.params.{name}"] = optimizer.kwargs[name]
    scheduler = script.scheduler
    if scheduler is not None and optimizer is not None:
        lr = optimizer.defaults.get("lr")
        values |= {
            "scheduler.params.warmup_min_lr": 0,
            "scheduler.params.warmup_max_lr": lr,
            "scheduler.params.warmup_num_steps": max(1, scheduler.warmup_num_steps),  # DeepSpeed refuses 0
        }
        if scheduler.total_num_steps is not None:
            # The engine steps its scheduler once for each step of the optimizer.
            values["scheduler.params.total_num_steps"] = -(
                -scheduler.total_num_steps // script.schedule_steps
            )
    return values


def _hidden_size(model: nn.Module) -> int | None:
    """The width of a model of transformers, from its configuration; the largest where it has several."""
    config = getattr(model, "config", None)
    if config is None:
        return None
    for source in (config, getattr(config, "text_config", None)):
        for name in ("hidden_size", "hidden_sizes", "d_model", "n_embd"):
            size = getattr(source, name, None)
            if size:
                return int(max(size)) if isinstance(size, list | tuple) else int(size)
    return None


def check_known(config: Mapping[str, Any], origin: str) -> None:
    """Refuse options that an engine cannot support if it steps when the script does; warn of misspelt names.

    Raises:
        OptionError: a section cannot be supported.
    """
    for name in config:
        near = difflib.get_close_matches(name, _SECTIONS, n=1, cutoff=0.85)
        if name not in _SECTIONS and near:
            _logger.warning(
                f"{name!r} in {origin} is no section that DeepSpeed is known to have, and it ignores others; did you "
                f"mean {near[0]!r}?"
            )
    for section in ("pipeline", "compile"):
        if isinstance(config.get(section), Mapping) and config[section].get("deepcompile"):
            raise OptionError(
                f"{section}.deepcompile in {origin} cannot be combined with accumulation by the Accelerator. Leave "
                "it out."
            )
