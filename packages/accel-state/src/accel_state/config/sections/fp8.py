"""Training in 8-bit floating point (fp8)."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.config.option import Section, option

__all__ = ["Fp8Section"]


@dataclass(frozen=True, repr=False, eq=False)
class Fp8Section(Section):
    """Options of the recipes of torchao (AO) and TransformerEngine (TE), for mixed precision fp8."""

    file_key = "fp8_config"
    prefix = "fp8_"
    env_prefix = "ACCELERATE_FP8_"
    title = "FP8"

    backend: str | None = option(
        help="Library for fp8 computation: TE is TransformerEngine, AO is torchao; MSAMP is refused.",
        key="backend",
        choices=("TE", "AO", "MSAMP"),
        unset=("no",),
        prompt="Which FP8 backend do you want to use?",
    )
    use_autocast_during_eval: bool | None = option(
        help="Use fp8 also in evaluation mode (TE).",
        key="use_autocast_during_eval",
        toggle=True,
        launch_default=False,
        prompt="Do you want to use FP8 autocast during eval mode?",
    )
    margin: int | None = option(
        help="Margin of the scaling factor (TE).",
        key="margin",
        launch_default=0,
        prompt="What margin should be used for gradient scaling?",
    )
    interval: int | None = option(
        help="Steps between updates of the scaling factor (TE).",
        key="interval",
        low=1,
        launch_default=1,
        prompt="After how many steps should the scaling factor be recomputed?",
    )
    fp8_format: str | None = option(
        help="Number format (TE).",
        name="fp8_format",
        env=("ACCELERATE_FP8_FORMAT",),
        choices=("HYBRID", "E4M3", "E5M2"),
        launch_default="HYBRID",
        prompt="Which weight format should be used?",
    )
    amax_history_len: int | None = option(
        help="Length of the amax history (TE).",
        key="amax_history_len",
        keys=("amax_history_length",),
        low=1,
        launch_default=1024,
        prompt="What length of history should be used for the amax scaling factor computation?",
    )
    amax_compute_algo: str | None = option(
        help="How amax is computed from the history (TE).",
        key="amax_compute_algo",
        keys=("amax_compute_algorithm",),
        choices=("max", "most_recent"),
        launch_default="most_recent",
        prompt="Which algorithm should be used for the amax scaling factor computation?",
    )
    override_linear_precision: tuple[bool, bool, bool] | None = option(
        help="Compute linear layers in higher precision: in the forward, for the data gradient, for the weight "
        "gradient (TE).",
        key="override_linear_precision",
        env=(
            "ACCELERATE_FP8_OVERRIDE_FPROP",
            "ACCELERATE_FP8_OVERRIDE_DGRAD",
            "ACCELERATE_FP8_OVERRIDE_WGRAD",
        ),
        launch_default=(False, False, False),
        prompt="Should fprop, dgrad, wgrad be executed in higher precision?",
    )
    opt_level: str | None = option(
        help="Optimization level (MSAMP); not used.",
        key="opt_level",
        keys=("optimization_level",),
        choices=("O1", "O2"),
        launch_default="O2",
    )
    enable_fsdp_float8_all_gather: bool | None = option(
        help="All-gather sharded parameters in fp8 (AO with FSDP2).",
        key="enable_fsdp_float8_all_gather",
        launch_default=True,
        prompt="Do you want to enable FSDP2 float8 all gather? This is recommended for better performance.",
    )
    pad_inner_dim: bool | None = option(
        help="Pad matrices whose inner dimension is not a multiple of 16 (AO).",
        key="pad_inner_dim",
        launch_default=True,
        prompt="Do you want to pad the inner dimension of weight matrices before float8 products?",
    )
    use_mxfp8_block_scaling: bool | None = option(
        help="Use MXFP8 block scaling (TE, Blackwell).",
        key="use_mxfp8_block_scaling",
        toggle=True,
        ours=True,
    )
