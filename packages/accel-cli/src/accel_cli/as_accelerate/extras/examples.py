"""Functions of ``accelerate.test_utils.examples``: what an example script adds to the one that it extends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_ENDS = {"training_function": "def main", "main": "if __name__"}
_PLAIN = Path("examples", "nlp_example.py")
_LOADERS = "train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)\n"
_MOCKED = "TESTING_MOCKED_DATALOADERS"


def get_function_contents_by_name(lines: Sequence[str], name: str) -> list[str] | None:
    """The lines of "training_function" or "main" of a script, up to what follows it; None if nothing does.

    Raises:
        ValueError: another name.
    """
    if name not in _ENDS:
        raise ValueError(f"the function is {name!r}; known: {', '.join(_ENDS)}")
    begin = next((i for i, line in enumerate(lines) if f"def {name}" in line), len(lines))
    end = next((i for i in range(begin + 1, len(lines)) if _ENDS[name] in lines[i]), None)
    return None if end is None else list(lines[begin:end])


def clean_lines(lines: Sequence[str]) -> list[str]:
    """Lines that are neither empty nor comments."""
    return [line for line in lines if line != "\n" and not line.lstrip().startswith("#")]


def compare_against_test(
    base_filename: str, feature_filename: str, parser_only: bool, secondary_filename: str | None = None
) -> list[str]:
    """Lines of an example of one feature that the complete example lacks.

    Lines of ``examples/nlp_example.py`` in the current folder belong to every example and are left out.

    Args:
        base_filename: the complete example.
        feature_filename: the example of a feature.
        parser_only: compare ``main``, not ``training_function``.
        secondary_filename: the plain example that the complete one extends, if it is another.
    """
    name = "main" if parser_only else "training_function"

    def function(file: str | Path) -> list[str]:
        lines = Path(file).read_text(encoding="utf-8").splitlines(keepends=True)
        return clean_lines(get_function_contents_by_name(lines, name) or [])

    plain = function(_PLAIN)
    second = None if secondary_filename is None else function(secondary_filename)

    def added(lines: Sequence[str]) -> list[str]:
        return [
            line for line in lines if line not in plain and line.lstrip() != _LOADERS and _MOCKED not in line
        ]

    feature = function(feature_filename)
    mocked = [i + 1 for i, line in enumerate(feature) if _MOCKED in line]  # the line below shortens the test
    here = added([line for i, line in enumerate(feature[:-1]) if i not in mocked])
    there = added(function(base_filename))
    missing = [line for line in here if line not in there]
    if second is None:
        return missing
    own = [
        line for line in _PLAIN.read_text(encoding="utf-8").splitlines(keepends=True) if line not in second
    ]
    return [line for line in missing if line not in own]
