"""Changes of one mapping inside the text of a YAML file; comments, order and line ends stay."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_state.config.files import parse_text
from accel_state.config.fsdp_conversion import Change

__all__ = ["edit_mapping", "rewritten"]

Span = tuple[int, int, str]


def rewritten(
    text: str, path: Path, key: str | None, changes: Sequence[Change], data: Mapping[str, Any]
) -> tuple[str, list[str]]:
    """The text of a configuration file with changes in one mapping, and notes about what it does not keep.

    JSON stays JSON. The whole text is replaced only where that cannot be done in its lines.

    Args:
        text: the text so far.
        path: the file to write: JSON if it ends in ``.json``.
        key: as for ``edit_mapping``.
        changes: as for ``edit_mapping``.
        data: the data with the changes.
    """
    import yaml

    if path.suffix == ".json" or _is_json(text):
        return json.dumps(data, indent=2) + "\n", []
    edited = edit_mapping(text, key, changes)
    if edited is not None and parse_text(edited, path) == data:
        return edited, []
    lost = (
        ["comments of the file are not kept, because it is not written one option a line"]
        if "#" in text
        else []
    )
    return str(yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True)), lost


def _is_json(text: str) -> bool:
    """JSON is YAML too: Accelerate writes it to files that end in .yaml."""
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def edit_mapping(text: str, key: str | None, changes: Iterable[Change]) -> str | None:
    """The text with changed entries in one mapping of a YAML document.

    New entries come last. A missing mapping is added at the end of the document.

    Args:
        text: a YAML document whose outermost value is a mapping.
        key: key of the mapping in the outermost one; None: the outermost one itself.
        changes: one for each of its keys that is not kept, and for the keys to add.

    Returns:
        The text; None if the mapping is not written one entry a line (in braces, or from an anchor elsewhere).
    """
    import yaml

    document: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    line_end = "\r\n" if "\r\n" in text else "\n"
    changes = list(changes)
    table = document
    if key is not None:
        found = next(((name, value) for name, value in document.value if name.value == key), None)
        if found is None:
            return _with_section(text, key, changes, line_end)
        at, table = found
        if table.tag.endswith(":null"):
            return _with_entries(text, at, table, changes, line_end)
        if table.start_mark.index < at.end_mark.index:
            return None  # an alias: other keys may use the mapping of its anchor, too
    if table.flow_style or any(name.tag.endswith(":merge") for name, _ in table.value):
        return None
    spans = []
    nodes = {name.value: (name, value) for name, value in table.value}
    column = table.value[0][0].start_mark.column
    for change in changes:
        if change.what == "add":
            at = _end_of_line(text, _last_scalar(table).end_mark.index)
            before = "" if text[:at].endswith("\n") else line_end
            spans.append((at, at, f"{before}{' ' * column}{change.name}: {_scalar(change.value)}{line_end}"))
            continue
        name, value = nodes[change.key]
        if not table.start_mark.index <= name.start_mark.index <= value.start_mark.index:
            return None
        spans += _spans(text, change, name, value)
    return _spliced(text, spans)


def _with_section(text: str, key: str, changes: Iterable[Change], line_end: str) -> str:
    entries = "".join(f"  {change.name}: {_scalar(change.value)}{line_end}" for change in changes)
    before = "" if text.endswith("\n") else line_end
    return f"{text}{before}{key}:{line_end}{entries}"


def _with_entries(text: str, at: Any, table: Any, changes: Iterable[Change], line_end: str) -> str:
    """The text with entries for a key that has no value, or ``null``."""
    indent = " " * (at.start_mark.column + 2)
    entries = "".join(f"{indent}{change.name}: {_scalar(change.value)}{line_end}" for change in changes)
    end = _end_of_line(text, table.end_mark.index)
    before = "" if text[:end].endswith("\n") else line_end
    return _spliced(text, [(table.start_mark.index, table.end_mark.index, ""), (end, end, before + entries)])


def _last_scalar(node: Any) -> Any:
    """The last scalar of a mapping: where its text ends."""
    while node.id != "scalar" and node.value and not node.flow_style:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return node


def _end_of_line(text: str, at: int) -> int:
    """The place after the line break that follows."""
    if text[at - 1 : at] == "\n":  # a block of text ends after its last line break
        return at
    end = text.find("\n", at)
    return len(text) if end < 0 else end + 1


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
