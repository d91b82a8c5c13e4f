"""Lists of an `Accelerator` as clients of Accelerate read and write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableSequence
from typing import Any, TypeVar, overload

__all__ = ["ListView"]

T = TypeVar("T")


class ListView(MutableSequence[T]):
    """Several lists that change together, seen as one of them.

    Args:
        lists: of equal length; an index is one entry in all of them.
        read: what an entry of the first list is seen as.
        write: the entry of each list for a value that is put in.
    """

    def __init__(
        self, *lists: list[Any], read: Callable[[Any], T], write: Callable[[T], tuple[Any, ...]]
    ) -> None:
        self._lists = lists
        self._read = read
        self._write = write

    def __len__(self) -> int:
        return len(self._lists[0])

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> MutableSequence[T]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """One value, or a list of several."""
        found = self._lists[0][index]
        return [self._read(entry) for entry in found] if isinstance(index, slice) else self._read(found)

    @overload
    def __setitem__(self, index: int, value: T) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Iterable[T]) -> None: ...
    def __setitem__(self, index: int | slice, value: Any) -> None:
        """Replace one value, or several."""
        rows = [self._write(item) for item in value] if isinstance(index, slice) else [self._write(value)]
        for number, items in enumerate(self._lists):
            column = [row[number] for row in rows]
            items[index] = column if isinstance(index, slice) else column[0]

    def __delitem__(self, index: int | slice) -> None:
        for items in self._lists:
            del items[index]

    def insert(self, index: int, value: T) -> None:
        """Put a value in front of an index."""
        for items, entry in zip(self._lists, self._write(value), strict=True):
            items.insert(index, entry)

    def __eq__(self, other: object) -> bool:
        return list(self) == other if isinstance(other, list) else self is other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))
