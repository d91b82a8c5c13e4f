"""Write the pages of all configuration options, ``docs/reference/configuration*.md``, from the schema.

``python tools/gen_config_docs.py`` writes the pages, and ``--check`` fails if an existing one is out of date.
"""

from __future__ import annotations

import functools
import sys
import tomllib
from pathlib import Path
from typing import Any

from generated import ROOT, Generated, write_or_check

FOLDER = ROOT / "docs" / "reference"
for source in ("packages/accel-state/src", "packages/accel-train/src"):
    if str(ROOT / source) not in sys.path:
        sys.path.insert(0, str(ROOT / source))

from accel_state.config import (  # noqa: E402 - the path above comes first
    PUBLISHED,
    BoundOption,
    Carrier,
    SageMakerConfig,
    complete_root,
    schema_of,
)

# The sections of the schema on each page; the first page has those that no other has.
PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "configuration.md": ("Configuration options", ()),
    "configuration-strategies.md": ("Options of strategies", ("fsdp", "deepspeed", "parallelism")),
    "configuration-engines.md": ("Options of FP8 and Megatron-LM", ("fp8", "megatron_lm")),
    "configuration-places.md": (
        "Options of MPI, submissions, TPUs and SageMaker",
        ("mpirun", "submission", "tpu"),
    ),
    "configuration-variables.md": ("Variables", ("runtime",)),
}
ELSEWHERE = {section for _, sections in PAGES.values() for section in sections}
FURTHER = "[Configuration options](configuration.md) says how to read an entry.\n"
INTRODUCTION = """\
# Configuration options

Every option of a run, with its name in Python, in a file, on the command line and in the environment. Those of
[strategies](configuration-strategies.md), of [FP8 and Megatron-LM](configuration-engines.md), of [MPI, submissions,
TPUs and SageMaker](configuration-places.md), and [variables](configuration-variables.md) have pages of their own. They
are generated from the schema by `tools/gen_config_docs.py`; how the four are merged is described in
[Configuration](../guides/configuration.md).

Each entry begins with the name in Python, which is also the key in a file where no other is given. Then come the
meaning, the values and the default, and the flags of `accel launch` and the variable. *Launcher only*: the launcher
uses the option, and the program does not see it. Dashes and underscores in flags are interchangeable. Choices are not
case-sensitive. Where a default is *unset*, the value after the arrow is what `accel launch` fills in when the section
is used.
"""
SAGEMAKER = """
## SageMaker

A file with `compute_environment: AMAZON_SAGEMAKER` describes a job with these options, and those of the
sections torch.compile and FP8.
"""
PUBLISHED_INTRODUCTION = """
## Variables that are published

Other libraries read these variables. When a process group or a plugin is created, those that are not set are set;
no variable is overwritten.
"""
OTHERS = """
## Variables without an option

Variables that Accelerate reads or writes, and what happens with them here.
"""


def render() -> dict[str, str]:
    """The pages by the name of their file."""
    sections = _sections(complete_root())
    pages = {}
    for name, (title, chosen) in PAGES.items():
        parts = [INTRODUCTION if name == "configuration.md" else f"# {title}\n\n{FURTHER}"]
        for section in chosen or [one for one in sections if one not in ELSEWHERE]:
            bounds = sections[section]
            parts += [f"\n## {bounds[0].title}\n", _place(bounds[0]), *_entries(bounds)]
        pages[name] = parts
    pages["configuration-places.md"] += [
        SAGEMAKER,
        *_entries([bound for bound in schema_of(SageMakerConfig).options if not bound.section], "sagemaker-"),
    ]
    pages["configuration-variables.md"] += [
        PUBLISHED_INTRODUCTION,
        *_pairs("variable", "read by", PUBLISHED),
        OTHERS,
        *_pairs("variable", "meaning", tomllib.loads((ROOT / "tools/data/other_variables.toml").read_text())),
    ]
    return {name: "\n".join(parts) + "\n" for name, parts in pages.items()}


def _sections(root: type[Any]) -> dict[str, list[BoundOption]]:
    found: dict[str, list[BoundOption]] = {}
    for bound in schema_of(root).options:
        found.setdefault(bound.section, []).append(bound)
    return found


def _place(bound: BoundOption) -> str:
    if bound.file_key:
        return f"In a file these keys are in the mapping `{bound.file_key}`.\n"
    return (
        "These options have no key in files.\n"
        if not bound.keys
        else "In a file these keys are at the top level.\n"
    )


def _entries(bounds: list[BoundOption], prefix: str = "") -> list[str]:
    return [line for bound in bounds for line in _entry(bound, prefix)]


def _entry(bound: BoundOption, prefix: str) -> list[str]:
    """A definition: a table of names this long would break them."""
    about = bound.about
    variables = [*bound.variables, *(name for _, name in about.switches.values() if name)]
    places = [
        _places("file", [key for key in bound.keys if key != bound.path]) if bound.keys else "not in files",
        _places("flag", [*bound.flags, *about.switches]),
        "launcher only" if Carrier.LAUNCHER in bound.carriers else _places("variable", variables),
    ]
    return [
        f"`{bound.path}`{{ #{prefix}{bound.path} }}",
        f":   {about.help}",
        "",
        f"    {_values(bound)}; default: {_default(bound)}",
        "",
        f"    {' · '.join(place for place in places if place)}",
        "",
    ]


def _places(where: str, names: list[str]) -> str:
    return f"{where} {', '.join(f'`{name}`' for name in names)}" if names else ""


def _values(bound: BoundOption) -> str:
    about = bound.about
    if about.choices:
        words = ", ".join(f"`{choice}`" for choice in about.choices)
        return f"true, false, {words}" if bound.option_type.expected.startswith("true") else words
    limits = [f"≥ {about.low:g}"] if about.low is not None else []
    limits += [f"≤ {about.high:g}"] if about.high is not None else []
    return " ".join([bound.option_type.expected.partition(",")[0], ", ".join(limits)]).strip()


def _default(bound: BoundOption) -> str:
    if bound.default is not None:
        return f"`{_shown(bound, bound.default)}`"
    if bound.about.launch_default is not None:
        return f"*unset* → `{_shown(bound, bound.about.launch_default)}`"
    return "*unset*"


def _shown(bound: BoundOption, value: Any) -> str:
    return bound.option_type.format(value)


def _pairs(left: str, right: str, pairs: Any) -> list[str]:
    return [f"| {left} | {right} |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in pairs.items())]


def main(arguments: list[str] | None = None) -> int:
    """Write or check the pages; the exit status."""
    pages = [
        Generated(FOLDER / name, _is(FOLDER / name, text), functools.partial(str, text))
        for name, text in render().items()
    ]
    return write_or_check(__doc__, "python tools/gen_config_docs.py", pages, arguments)


def _is(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
