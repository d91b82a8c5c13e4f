"""Changes of one mapping inside the text of a YAML file; comments, order and line ends stay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accel_state.config.fsdp_conversion import Change

__all__ = ["edit_mapping"]

Span = tuple[int, int, str]


def edit_mapping(text: str, key: str, changes: Iterable[Change]) -> str | None:
    """The text with changed entries in the mapping at ``key`` of its outermost mapping.

    Args:
        text: a YAML document whose outermost value is a mapping.
        key: key of the mapping that is changed.
        changes: one for each of its keys, and for the keys to add.

    Returns:
        The text; None if the mapping is not written one entry a line (in braces, or from an anchor elsewhere).
    """
    import yaml

    document: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    found = next(((name, value) for name, value in document.value if name.value == key), None)
    if found is None:
        return None
    at, table = found
    if table.flow_style or any(name.tag.endswith(":merge") for name, _ in table.value):
        return None
    if table.start_mark.index < at.end_mark.index:
        return None  # an alias: other keys may use the mapping of its anchor, too
    spans = []
    nodes = {name.value: (name, value) for name, value in table.value}
    first = table.value[0][0].start_mark
    line_end = "\r\n" if "\r\n" in text else "\n"
    for change in changes:
        if change.what == "add":
            at = first.index - first.column  # the start of the line, so that the first entry may be dropped
            spans.append((at, at, f"{' ' * first.column}{change.name}: {_scalar(change.value)}{line_end}"))
            continue
        name, value = nodes[change.key]
        if not table.start_mark.index <= name.start_mark.index <= value.start_mark.index:
            return None
        spans += _spans(text, change, name, value)
    return _spliced(text, spans)


def _spans(text: str, change: Change, name: Any, value: Any) -> list[Span]:
    if change.what == "keep":
        return []
    if change.what == "drop":
        start = text.rfind("\n", 0, name.start_mark.index) + 1
        end = text.find("\n", max(value.end_mark.index - 1, name.end_mark.index))
        return [(start, len(text) if end < 0 else end + 1, "")]
    spans = (
        [(name.start_mark.index, name.end_mark.index, str(change.name))] if change.what == "rename" else []
    )
    if change.value is not change.before:
        spans.append((value.start_mark.index, value.end_mark.index, _scalar(change.value)))
    return spans


def _scalar(value: Any) -> str:
    import yaml

    # In one line, however long: the next line would need the mapping's indentation.
    return (
        str(yaml.safe_dump(value, default_flow_style=True, width=float("inf")))
        .removesuffix("\n")
        .removesuffix("\n...")
    )


def _spliced(text: str, spans: list[Span]) -> str:
    for start, end, new in sorted(spans, reverse=True):
        text = text[:start] + new + text[end:]
    return text
