"""Base classes of plugins: where their values come from, and how they select a strategy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar

from accel_state.config.launched import launched_section
from accel_state.config.option import Section
from accel_state.handlers import KwargsHandler
from accel_train.errors import OptionError

__all__ = ["SectionPlugin", "StrategyPlugin", "positional", "writable"]

T = TypeVar("T")


class SectionPlugin(KwargsHandler):
    """Base of a frozen dataclass that extends a section of the launch configuration.

    The section declares the options that files, flags and environment variables can hold; the plugin adds the others. A
    field of the section that the constructor leaves unset (None) gets the value in the process's environment, decoded
    once, or else the plugin's own default. `from_section` builds the plugin from a decoded configuration.
    """

    section: ClassVar[str]
    """Attribute of `LaunchConfig` that holds the section."""

    when_unset: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Default values of the section's fields, for those that neither the caller nor the environment sets; else None."""

    def __post_init__(self) -> None:
        names = [field.name for field in fields(self._section_type()) if getattr(self, field.name) is None]
        if names:
            launched = self.values_of(launched_section(self._section_type()))
            self._assign({name: launched[name] for name in names})
        self._complete()

    @classmethod
    def from_section(cls, section: Section) -> Self:
        """Build the plugin from a decoded section, without reading the environment.

        Args:
            section: the section that the plugin extends; fields that only the plugin has keep their defaults.

        Raises:
            OptionError: the plugin cannot use a value.
        """
        plugin = cls.__new__(cls)
        plugin._assign(cls._declared() | cls.values_of(section))
        plugin._complete()
        return plugin

    @classmethod
    def values_of(cls, section: Section) -> dict[str, Any]:
        """The values of a decoded section by field name, as the plugin understands them."""
        return {field.name: getattr(section, field.name) for field in fields(cls._section_type())}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The value of each field that neither the caller nor the environment sets."""
        return super().defaults() | dict(cls.when_unset)

    def check(self) -> Mapping[str, Any]:
        """Check the values of a complete plugin; return the fields to replace, with their normalised values."""
        return {}

    _used: ClassVar[bool] = False
    """Whether a model was prepared with the plugin, so that changes would come too late."""

    def rewrite(self, values: Mapping[str, Any]) -> None:
        """Change fields after construction.

        Args:
            values: by field name, as the constructor takes them.

        Raises:
            OptionError: there is no such field, or a model was prepared with the plugin already; nothing is changed.
        """
        known = {field.name for field in fields(self)}  # type: ignore[arg-type]
        for name in values.keys() - known:
            raise OptionError(
                f"{type(self).__name__} has no option {name}. It has: {', '.join(sorted(known))}."
            )
        now = {name: (getattr(self, name), self._given.get(name)) for name in values}
        if self._used and any(value not in now[name] for name, value in values.items()):
            raise OptionError(
                f"{', '.join(values)} of a {type(self).__name__} was set after a model was prepared with it, which "
                "would change nothing. Set it before prepare()."
            )
        before = {name: getattr(self, name) for name in known}
        self._assign({**before, **self._given, **values})
        try:
            self._complete()
        except BaseException:
            self._assign(before)
            raise
        self._given.update(values)

    def mark_used(self) -> None:
        """Record that a model was prepared with the plugin."""
        object.__setattr__(self, "_used", True)

    @functools.cached_property
    def _given(self) -> dict[str, Any]:
        """The values before `check` gave them their normal form, of fields that have one."""
        return {}

    def _complete(self) -> None:
        self._assign({name: value for name, value in self.when_unset.items() if getattr(self, name) is None})
        normal = self.check()
        self._given.update((name, getattr(self, name)) for name in normal)
        self._assign(normal)

    def _assign(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)  # frozen for everybody else

    @classmethod
    def _declared(cls) -> dict[str, Any]:
        return {
            field.name: field.default if field.default_factory is MISSING else field.default_factory()
            for field in fields(cls)  # type: ignore[arg-type]
        }

    @classmethod
    def _section_type(cls) -> type[Section]:
        return next(
            base for base in cls.__mro__ if issubclass(base, Section) and not issubclass(base, SectionPlugin)
        )


def writable(cls: type[T]) -> type[T]:
    """Class decorator for a `SectionPlugin`: its fields can be assigned until a model is prepared with it.

    Clients of Accelerate set fields after constructing a plugin. Each value is checked as the constructor checks it.
    """

    def write(self: Any, name: str, value: Any) -> None:
        self.rewrite({name: value})

    cls.__setattr__ = write  # type: ignore[method-assign]
    return cls


class StrategyPlugin:
    """Base of plugins whose type selects the strategy: passing one to `Accelerator` is enough.

    A plugin, built-in or of another package, is a frozen dataclass with this base and with a section or options of its
    own. The strategy receives the plugin.
    """

    strategy: ClassVar[str]
    """Name of the strategy in the registry."""

    @property
    def launched_precision(self) -> str | None:
        """The precision that the plugin's own configuration sets; None: the script chooses."""
        return None

    @property
    def accumulation_steps(self) -> int | None:
        """Micro-batches per step that the plugin's own configuration sets; None: the script chooses."""
        return None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not isinstance(getattr(cls, "strategy", None), str):
            raise TypeError(
                f"{cls.__name__} is a StrategyPlugin without a strategy. Set the class attribute to the name under "
                'which the strategy is registered: strategy: ClassVar[str] = "…".'
            )


def positional(*names: str) -> Callable[[type[T]], type[T]]:
    """Class decorator for a dataclass: its constructor takes the fields in this order.

    The fields of a section come before those that the plugin adds, and scripts may pass them by position in another
    order.

    Args:
        names: every parameter of the constructor.
    """

    def decorate(cls: type[T]) -> type[T]:
        made = cls.__init__
        signature = inspect.signature(made)
        itself, *parameters = signature.parameters.values()
        by_name = {parameter.name: parameter for parameter in parameters}
        if by_name.keys() != set(names):
            raise TypeError(
                f"positional() of {cls.__name__} must name its fields: {', '.join(by_name)}; got {', '.join(names)}."
            )

        @functools.wraps(made)
        def init(self: T, *args: Any, **kwargs: Any) -> None:
            bound = ordered.bind(self, *args, **kwargs)
            made(**bound.arguments)

        ordered = signature.replace(parameters=[itself, *(by_name[name] for name in names)])
        init.__signature__ = ordered  # type: ignore[attr-defined]
        cls.__init__ = init  # type: ignore[method-assign, assignment]
        return cls

    return decorate
