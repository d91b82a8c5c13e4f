"""Options of `torch.compile`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from accel_state.config.option import Section
from accel_state.config.sections.dynamo import DynamoSection
from accel_state.enums import DynamoBackend
from accel_train.errors import OptionError
from accel_train.plugins.base import SectionPlugin, positional

__all__ = ["TorchDynamoPlugin"]


@positional("backend", "mode", "fullgraph", "dynamic", "options", "disable", "use_regional_compilation")
@dataclass(frozen=True, repr=False, eq=False)
class TorchDynamoPlugin(SectionPlugin, DynamoSection):
    """Options of `torch.compile` for prepared models; unset ones come from the launcher's environment.

    Attributes:
        backend: the compiler; NO compiles nothing.
        mode: `torch.compile`'s mode.
        fullgraph: whether a graph break is an error.
        dynamic: whether shapes are dynamic; None: torch detects it.
        options: options of the backend.
        disable: make `torch.compile` a no-op, for testing.
        use_regional_compilation: compile the repeated blocks of a model, each kind once, instead of the whole model.

    Raises:
        OptionError: torch has no backend of that name.
        ConfigError: an option is unset, and its environment variable holds a value that cannot be used.
    """

    section: ClassVar[str] = "dynamo"
    when_unset: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"backend": "no", "mode": "default", "fullgraph": False, "use_regional_compilation": False}
    )

    options: Any = None
    disable: bool = False

    @classmethod
    def values_of(cls, section: Section) -> dict[str, Any]:
        """The section's values, except that `dynamic` is true or unset."""
        values = super().values_of(section)
        # Accelerate's launcher writes "False" where nobody asked for dynamic shapes; torch would specialise each shape.
        return values | {"dynamic": values["dynamic"] or None}

    def check(self) -> Mapping[str, Any]:
        """Refuse an unknown backend."""
        try:
            return {"backend": DynamoBackend(str(self.backend))}
        except ValueError:
            names = ", ".join(sorted(str(member.value).lower() for member in DynamoBackend))
            raise OptionError(f"Unknown dynamo backend {str(self.backend)!r}; known: {names}.") from None

    @property
    def enabled(self) -> bool:
        """Whether anything is compiled."""
        return self.backend is not DynamoBackend.NO

    @property
    def compiler(self) -> str:
        """The backend under the lower-case name that `torch.compile` takes."""
        return str(self.backend).lower()

    def to_dict(self) -> dict[str, Any]:
        """All fields, the backend as the lower-case name that `torch.compile` takes."""
        return super().to_dict() | {"backend": self.compiler}

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of `torch.compile`."""
        kwargs = super().to_kwargs()
        kwargs.pop("use_regional_compilation", None)
        return kwargs
