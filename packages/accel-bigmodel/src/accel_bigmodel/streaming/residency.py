"""Which groups stay on the device permanently, within a budget that leaves enough room to stream the others."""

from __future__ import annotations

from collections.abc import Sequence, Set

from accel_bigmodel.errors import DeviceMapError

__all__ = ["choose_resident", "window_bytes"]

# Groups whose bytes together are at most this fraction of the largest group's are not worth copying.
_SMALL_PART = 16


def choose_resident(
    names: Sequence[str], sizes: Sequence[int], around: Set[int], budget: int | None, prefetch: int
) -> set[int]:
    """Numbers of the groups that stay on the device.

    These are the groups that are in use while others stream, those that are needed early, the smallest ones, and as
    many more as the budget allows beside the slots, evenly spread: while they compute, the next groups are copied.

    Args:
        names: of the groups, in the expected order of use.
        sizes: bytes of each on the device.
        around: numbers of groups that are in use while others are, or are needed before their forward.
        budget: bytes on the device for all; ``None``: only the groups that must stay do.
        prefetch: how many groups are moved ahead.

    Raises:
        DeviceMapError: the budget does not hold the largest group beside those in use around it.
    """
    everything = set(range(len(sizes)))
    if budget is not None and sum(sizes) <= budget:
        return everything
    inner = sorted(everything - around)
    _check(names, sizes, around, inner, budget)
    resident = set(around)
    if not inner:
        return resident
    small = _small(sizes, inner)
    if budget is None:
        return resident | small

    def fits(stay: Set[int]) -> bool:
        moving = [sizes[number] for number in sorted(everything - stay)]
        return sum(sizes[number] for number in stay) + window_bytes(moving, prefetch) <= budget

    if fits(resident | small):
        resident |= small
    rest = [number for number in inner if number not in resident]
    few, many = 0, len(rest)  # `few` groups fit (or none); more than `many` do not
    while few < many:
        count = (few + many + 1) // 2
        if fits(resident | _spread(rest, count)):
            few = count
        else:
            many = count - 1
    return resident | _spread(rest, few)


def window_bytes(sizes: Sequence[int], prefetch: int) -> int:
    """The most bytes that a group and the groups prefetched with it take."""
    return max((sum(sizes[at : at + 1 + prefetch]) for at in range(len(sizes))), default=0)


def _check(
    names: Sequence[str], sizes: Sequence[int], around: Set[int], inner: list[int], budget: int | None
) -> None:
    fixed = sum(sizes[number] for number in around)
    largest = max(inner, key=lambda number: sizes[number], default=None)
    need = fixed + (0 if largest is None else sizes[largest])
    if budget is None or need <= budget:
        return
    parts = [f"{names[number]!r} ({sizes[number]:,} bytes)" for number in sorted(around)]
    if largest is not None:
        parts.append(f"{names[largest]!r} ({sizes[largest]:,} bytes)")
    raise DeviceMapError(
        f"a budget of {budget:,} bytes on the device is too small: {' and '.join(parts)} must be on the device at the "
        f"same time, which takes {need:,} bytes; give at least that, or split the module further"
    )


def _small(sizes: Sequence[int], inner: list[int]) -> set[int]:
    limit = max(sizes[number] for number in inner) // _SMALL_PART
    found: set[int] = set()
    for number in sorted(inner, key=lambda number: sizes[number]):
        limit -= sizes[number]
        if limit < 0:
            break
        found.add(number)
    return found


def _spread(numbers: list[int], count: int) -> set[int]:
    return {numbers[at * len(numbers) // count] for at in range(count)} if count else set()
