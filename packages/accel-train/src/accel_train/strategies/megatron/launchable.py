"""Declaration of Megatron-LM for the launcher, the wizard and the help; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from accel_state.config.strategies import LaunchableStrategy, Options, Package, StrategyQuestion
from accel_state.errors import ConfigError, NotAvailableError
from accel_train.strategies.megatron.section import UNAVAILABLE, MegatronLMSection

__all__ = ["MEGATRON"]


def _more_than_one(option: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda answers: (answers.get(option) or 1) > 1


def _not_on_the_cpu(options: Options) -> None:
    if options.values["use_cpu"]:
        raise ConfigError(
            f"{options.describe('distributed_type')} contradicts {options.describe('use_cpu')}: megatron-core "
            "computes on GPUs alone; leave one of them out"
        )


def _nothing_unavailable(options: Options) -> None:
    for name, reason in UNAVAILABLE.items():
        path = f"megatron_lm.{name}"
        value = options.values[path]
        if value is True or value not in (None, False, 1):
            raise NotAvailableError(
                f"{options.describe(path)} is not available in this version: {reason}; {options.remedy(path)}"
            )


MEGATRON = LaunchableStrategy(
    name="megatron",
    distributed_type="MEGATRON_LM",
    title="Megatron-LM",
    summary="tensor and pipeline parallelism",
    section=MegatronLMSection,
    section_name="megatron_lm",
    plugin="accel_train.strategies.megatron.plugin:MegatronLMPlugin",
    questions=(
        StrategyQuestion(option="tp_degree", required=True),
        StrategyQuestion(option="sequence_parallelism", when=_more_than_one("tp_degree")),
        StrategyQuestion(option="pp_degree", required=True),
        StrategyQuestion(
            option="num_micro_batches", when=_more_than_one("pp_degree"), default=1, required=True
        ),
        StrategyQuestion(option="recompute_activations"),
        StrategyQuestion(option="use_distributed_optimizer"),
        StrategyQuestion(option="gradient_clipping"),
    ),
    checks=(_not_on_the_cpu, _nothing_unavailable),
    packages=(
        Package(module="megatron.core", name="megatron-core", install="pip install 'megatron-core>=0.16'"),
    ),
    devices=frozenset({"cuda", "rocm"}),
    devices_described="GPUs of NVIDIA or AMD, on which megatron-core computes",
    computes_fp8=False,
    no_rehearsal="the rank runs on the CPU, and megatron-core computes on GPUs alone",
)
"""Declared by an entry point of accel-train."""
