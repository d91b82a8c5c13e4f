"""The root of the schema for local (non-SageMaker) runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from accel_state.config.data import to_data
from accel_state.config.sections.accumulation import GradientAccumulationSection
from accel_state.config.sections.deepspeed import DeepSpeedLaunchSection
from accel_state.config.sections.dynamo import DynamoSection
from accel_state.config.sections.fp8 import Fp8Section
from accel_state.config.sections.fsdp import FsdpSection
from accel_state.config.sections.hardware import HardwareOptions
from accel_state.config.sections.mpirun import MpirunSection
from accel_state.config.sections.parallelism import ParallelismSection
from accel_state.config.sections.run import RunOptions
from accel_state.config.sections.runtime import RuntimeSection
from accel_state.config.sections.submission import SubmitSection
from accel_state.config.sections.tpu import TpuSection
from accel_state.config.strategies import LaunchableStrategy, installed_strategies

__all__ = ["LaunchConfig"]


@dataclass(frozen=True, repr=False, eq=False)
class LaunchConfig(RunOptions, HardwareOptions):
    """The complete configuration of a local run.

    ``None`` means "not set". The default of an unset option is decided where it is used: by the launcher, or by the
    plugin that is built from a section.

    The sections of installed strategies are fields of the class that ``complete_root`` makes of this one; a run that
    names one of their options has an instance of it. Here they have their defaults. Each strategy also has a property,
    named after its flag (``use_…``): whether it is selected.

    Attributes:
        strategies: the installed strategies whose options the class has.
    """

    title = "Processes"
    compute_environment: ClassVar[str] = "LOCAL_MACHINE"
    strategies: ClassVar[tuple[LaunchableStrategy, ...]] = ()

    gradient_accumulation: GradientAccumulationSection = field(default_factory=GradientAccumulationSection)
    dynamo: DynamoSection = field(default_factory=DynamoSection)
    fsdp: FsdpSection = field(default_factory=FsdpSection)
    deepspeed: DeepSpeedLaunchSection = field(default_factory=DeepSpeedLaunchSection)
    parallelism: ParallelismSection = field(default_factory=ParallelismSection)
    fp8: Fp8Section = field(default_factory=Fp8Section)
    mpirun: MpirunSection = field(default_factory=MpirunSection)
    submission: SubmitSection = field(default_factory=SubmitSection)
    tpu: TpuSection = field(default_factory=TpuSection)
    runtime: RuntimeSection = field(default_factory=RuntimeSection)

    @property
    def gradient_accumulation_steps(self) -> int | None:
        """Micro-batches per optimizer step; None if not set."""
        return self.gradient_accumulation.num_steps

    @property
    def use_deepspeed(self) -> bool:
        """Whether DeepSpeed is selected."""
        return self.distributed_type == "DEEPSPEED"

    @property
    def use_fsdp(self) -> bool:
        """Whether FSDP is selected."""
        return self.distributed_type == "FSDP"

    @property
    def use_tpu(self) -> bool:
        """Whether TPUs are selected."""
        return self.distributed_type == "XLA"

    @property
    def strategy(self) -> LaunchableStrategy | None:
        """The installed strategy that is selected; None: another one, or none."""
        selected = (each for each in self.strategies if each.distributed_type == self.distributed_type)
        return next(selected, None)

    @property
    def multi_accelerator(self) -> bool:
        """Whether a type with several accelerators and one replica on each is selected (MULTI_GPU, MULTI_XPU, …)."""
        return (self.distributed_type or "").startswith("MULTI_") and self.distributed_type != "MULTI_CPU"

    if not TYPE_CHECKING:  # which would then find every attribute

        def __getattr__(self: LaunchConfig, name: str) -> Any:
            for each in () if name.startswith("_") else installed_strategies():
                if name == each.section_name:
                    return each.section()
                if name == each.flag.lstrip("-"):
                    return self.distributed_type == each.distributed_type
            raise AttributeError(f"{type(self).__name__} has no option {name}", name=name, obj=self)

    def is_active(self, section: str) -> bool:
        """Whether the run uses the section; if so, ranks receive all its set values."""
        match section:
            case "dynamo":
                return self.dynamo.backend not in (None, "NO")
            case "fsdp":
                return self.use_fsdp
            case "deepspeed":
                return self.use_deepspeed
            case "parallelism":
                return self.use_parallelism_config
            case "fp8":
                return self.mixed_precision == "fp8"
            case "submission":
                return self.submission.engine is not None
            case _:
                return self.strategy is not None and self.strategy.section_name == section

    def to_dict(self) -> dict[str, Any]:
        """The configuration as data for a file, without unset options and empty sections."""
        data = {"compute_environment": self.compute_environment, **to_data(self)}
        # A parallelism section implies use_parallelism_config; the key is only written if the two differ.
        data.pop("use_parallelism_config", None)
        if self.use_parallelism_config != (ParallelismSection.file_key in data):
            data["use_parallelism_config"] = self.use_parallelism_config
        return data
