"""Tables from names to implementations of one kind: built-in ones, and those of installed packages.

Each is imported when it is asked for. An installed package adds one by an entry point.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar, cast

from accel_state import entry_points
from accel_state.errors import AccelError, ConfigError
from accel_state.messages import nearest, warn

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """Built-in and installed implementations of one kind, by name.

    Args:
        kind: the word for the kind in messages.
        group: entry-point group under which installed packages add theirs.
        builtins: name to `module:attribute`, the same form that an entry point has.
        base: class of which every installed implementation is an instance.
        base_class: class of which every installed implementation is a subclass, where implementations are classes.
        error: class of the errors about names and installed packages.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        builtins: Mapping[str, str],
        *,
        base: type = object,
        base_class: type | None = None,
        error: type[AccelError] = ConfigError,
    ) -> None:
        self._kind = kind
        self._group = group
        self._builtins = dict(builtins)
        self._base = base_class or base
        self._classes = base_class is not None
        self._error = error

    def names(self) -> list[str]:
        """Every known name, sorted; a warning names installed ones that built-in ones hide."""
        for sentence in self.hidden():
            warn(sentence, once=True)
        return sorted({*self._builtins, *self.installed()})

    def installed(self) -> dict[str, str]:
        """Name to `module:attribute` of what installed packages add; imports nothing."""
        found = entry_points.entry_points(self._group)
        return {name: place for name, place in found.items() if name not in self._builtins}

    def hidden(self) -> list[str]:
        """A sentence for each installed one that cannot be reached, because a built-in one has its name."""
        found = entry_points.entry_points(self._group)
        return [
            f"the {self._kind} {name} is built in, and hides {found[name]}, which an installed package adds under the "
            f"same name; its package has to rename its entry point in {self._group}"
            for name in sorted(found.keys() & self._builtins.keys())
        ]

    def get(self, name: str) -> T:
        """Return the implementation called `name`.

        Raises:
            ConfigError: there is none, with the known names and the nearest one; or it is installed and cannot be
                imported. Or the class of errors that the registry was given.
        """
        if name in self._builtins:
            return cast(T, entry_points.load(self._builtins[name]))
        place = self.installed().get(name)
        if place is None:
            near = nearest(name, self.names(), count=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise self._error(f"Unknown {self._kind} {name!r}; known: {', '.join(self.names())}.{hint}")
        return self._load(name, place)

    def usable(self) -> Iterator[tuple[str, T]]:
        """The installed ones with their names, without those that cannot be imported, which a warning names."""
        for name, place in sorted(self.installed().items()):
            try:
                found = self._load(name, place)
            except self._error as error:
                warn(str(error), once=True)
            else:
                yield name, found

    def _load(self, name: str, place: str) -> T:
        try:
            found = entry_points.load(place)
        except Exception as error:  # of the code of another package, which the message names
            raise self._error(
                f"the {self._kind} {name} is installed, but {place}, which its entry point in {self._group} names, "
                f"cannot be imported: {type(error).__name__}: {error}; install its package again, or uninstall it"
            ) from error
        fits = isinstance(found, self._base)
        if self._classes:
            fits = isinstance(found, type) and issubclass(found, self._base)
        if not fits:
            raise self._error(
                f"the entry point {name} in {self._group} names {place}, which is {type(found).__name__}; expected "
                f"{'a subclass of ' if self._classes else ''}{self._base.__name__}"
            )
        return cast(T, found)
