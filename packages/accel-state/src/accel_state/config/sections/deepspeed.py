"""DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.config.option import Section, option

__all__ = ["DEEPSPEED_KEYS", "DEEPSPEED_OPTIONS", "DeepSpeedLaunchSection", "DeepSpeedSection"]

DEEPSPEED_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""Fields of the plugin to their places in DeepSpeed's own configuration."""
_STEPS = "gradient_accumulation.num_steps"
DEEPSPEED_OPTIONS = {
    _STEPS if name == "gradient_accumulation_steps" else f"deepspeed.{name}": key
    for name, key in DEEPSPEED_KEYS.items()
}
"""Options by path, to the same places."""

_DEVICES = ("none", "cpu", "nvme")


@dataclass(frozen=True, repr=False, eq=False)
class DeepSpeedSection(Section):
    """Options of the DeepSpeed plugin; fields are named as in the plugin."""

    file_key = "deepspeed_config"
    env_prefix = "ACCELERATE_DEEPSPEED_"
    title = "DeepSpeed"

    hf_ds_config: str | None = option(
        help="DeepSpeed's own configuration: a path, JSON text or base64 text.",
        name="deepspeed_config_file",
        env=("ACCELERATE_DEEPSPEED_CONFIG_FILE",),
        unset=("none",),
        prompt="Where is that file?",
    )
    zero_stage: int | None = option(
        help="ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also parameters.",
        low=0,
        high=3,
        prompt="Which ZeRO stage will shard the training state?",
    )
    offload_optimizer_device: str | None = option(
        help="Device to offload optimizer states to (stages 2 and 3).",
        choices=_DEVICES,
        prompt="Where will optimizer states be offloaded to?",
    )
    offload_param_device: str | None = option(
        help="Device to offload parameters to (stage 3).",
        choices=_DEVICES,
        prompt="Where will parameters be offloaded to?",
    )
    offload_optimizer_nvme_path: str | None = option(
        help="Folder for optimizer states on NVMe.",
        unset=("none",),
        prompt="Which folder on NVMe will hold optimizer states?",
    )
    offload_param_nvme_path: str | None = option(
        help="Folder for parameters on NVMe.",
        unset=("none",),
        prompt="Which folder on NVMe will hold parameters?",
    )
    gradient_clipping: float | None = option(
        help="Maximum gradient norm.",
        env=("ACCELERATE_GRADIENT_CLIPPING",),
        unset=("auto", "none"),
        low=0,
        prompt="At which norm are gradients clipped (none: not at all)?",
    )
    zero3_init_flag: bool | None = option(
        help="Create models inside deepspeed.zero.Init, so that they are sharded at creation (stage 3).",
        env=("ACCELERATE_DEEPSPEED_ZERO3_INIT",),
        prompt="Do you want to enable deepspeed.zero.Init when using ZeRO Stage-3?",
    )
    zero3_save_16bit_model: bool | None = option(
        help="Save gathered 16-bit weights (stage 3).",
        prompt="Do you want to save 16-bit model weights when using ZeRO Stage-3?",
    )
    transformer_moe_cls_names: str | None = option(
        help="Comma-separated classes of mixture-of-experts layers.",
        name="deepspeed_moe_layer_cls_names",
        env=("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",),
        prompt="Which classes are mixture-of-experts layers (comma-separated; none: no such layers)?",
    )


@dataclass(frozen=True, repr=False, eq=False)
class DeepSpeedLaunchSection(DeepSpeedSection):
    """The plugin's options, and those of DeepSpeed's launcher for several machines."""

    deepspeed_hostfile: str | None = option(
        help="DeepSpeed hostfile that lists machines and their slots.",
        env=(),
        prompt="Where is the hostfile that lists machines and their slots?",
    )
    deepspeed_exclusion_filter: str | None = option(
        help="Machines and devices to exclude, as in DeepSpeed's --exclude.",
        env=(),
        prompt="Which machines and devices are excluded, such as worker-0:1 (none: none)?",
    )
    deepspeed_inclusion_filter: str | None = option(
        help="Machines and devices to use, as in DeepSpeed's --include.",
        env=(),
        prompt="Which machines and devices are used, such as worker-0@worker-1:0,2 (none: all)?",
    )
    deepspeed_multinode_launcher: str | None = option(
        help="Launcher for several machines.",
        env=(),
        choices=("pdsh", "standard", "openmpi", "mvapich", "mpich", "impi", "nossh", "slurm"),
        prompt="Which launcher starts DeepSpeed on the machines?",
    )
