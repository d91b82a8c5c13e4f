"""Run the code blocks of a Markdown page, in order, in one folder and one namespace.

What happens to a block is told by its language, and by an HTML comment on the line before the fence:

- ``python``: executed. A block with ``title="train.py"`` is written to that file instead.
- ``diff``: its new side is executed as Python, or written to the file in ``title=``.
- ``bash``: run by bash in the page's folder, where ``accel`` and ``python`` are those under test.
- ``console``: a session. Lines that begin with ``$ `` are run as above, and those below must be what they print; a line
  ``…`` stands for any lines.
- other languages are text, unless they have a title: then they are written to that file.

A path between two lines ``--8<--`` stands for a file under ``docs/``, as in the built site. (Its other form, a line
``--8<-- "path"``, is valid Python, which a formatter takes apart.)

``<!-- test: skip=reason -->`` leaves a block out, and the reason is printed; ``skip-page=`` on a line of its
own leaves out the whole page. ``<!-- test: file=name -->`` writes the block like a title, without showing it.
``<!-- test: old=name -->`` writes the old side of a diff. ``<!-- test: raises=Error -->`` expects Python to
raise that exception, ``<!-- test: exits=2 -->`` a command to exit with that status. ``<!-- test:
needs=package -->`` leaves a block out when that package is missing, and ``<!-- test: uses=train.py -->`` writes a
file that the page shows further down.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
import types
from dataclasses import dataclass, field
from pathlib import Path

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`\n]*)$")
_MARKER = re.compile(r"<!-- test: (?P<key>skip|file|old|raises|exits|needs|uses)=(?P<value>.+?) -->")
_PAGE_MARKER = re.compile(r"^<!-- test: skip-page=(.+) -->$", re.MULTILINE)
_TITLE = re.compile(r'title="([^"]+)"')
_SNIPPET = re.compile(r"^--8<--\n(\S+)\n--8<--\n", re.MULTILINE)
_DOCS = Path(__file__).parents[2] / "docs"
_PYTHON = {"python", "py", "diff"}
_SHELL = {"bash", "sh"}
_SESSION = "console"
_PROMPT = "$ "


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, what it holds and what its marker asks for."""

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """``page:line`` of the first line inside the fence."""
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether it is code, as opposed to text or data."""
        return self.language in {*_PYTHON, *_SHELL, _SESSION}

    @property
    def file(self) -> str | None:
        """The file that the block is written to, if it is."""
        return self.marks.get("file")


def parse(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order.

    Raises:
        ValueError: a fence is not closed, or a marker is misspelt.
    """
    blocks: list[Block] = []
    content = page.read_text(encoding="utf-8")
    whole = _PAGE_MARKER.search(content)
    lines = content.splitlines()
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        indent = opening["indent"]
        end = next((at for at in range(number + 1, len(lines)) if lines[at] == f"{indent}```"), None)
        if end is None:
            raise ValueError(f"{page}:{number + 1}: the fence is not closed")
        marks = _marks(page, number, lines[number - 1] if number else "")
        if whole is not None:
            marks["skip"] = whole[1]
        title = _TITLE.search(opening["info"])
        if title is not None:
            marks.setdefault("file", title[1])
        language = opening["info"].split()[0] if opening["info"].strip() else ""
        text = textwrap.dedent("\n".join(lines[number + 1 : end])) + "\n"
        text = _SNIPPET.sub(lambda match: (_DOCS / match[1]).read_text(encoding="utf-8"), text)
        blocks.append(Block(page, number + 2, language, text, marks))
        number = end + 1
    return blocks


def _marks(page: Path, number: int, before: str) -> dict[str, str]:
    marks = {match["key"]: match["value"] for match in _MARKER.finditer(before)}
    if "<!-- test:" in before and not marks and not _PAGE_MARKER.match(before):
        raise ValueError(f"{page}:{number}: marker not understood: {before.strip()}")
    return marks


def skip_reason(block: Block) -> str | None:
    """Why a block is not run here, or None when it is."""
    if "skip" in block.marks:
        return block.marks["skip"]
    package = block.marks.get("needs")
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return None


def side(diff: str, *, new: bool) -> str:
    """The new or the old text of a diff; it has no headers, only lines after ``+``, ``-`` or a space."""
    dropped = "-" if new else "+"
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith(dropped))


def run_page(page: str, folder: str) -> None:
    """Run every block of ``page`` in ``folder``, in this process.

    Raises:
        AssertionError: a block did not end as it should; names the place and shows the output of a command.
    """
    os.chdir(folder)
    os.environ.update(commands(Path(folder)))
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    found = parse(Path(page))
    for block in found:
        if skip_reason(block) is not None:
            continue
        if "uses" in block.marks:
            used = next(one for one in found if one.file == block.marks["uses"])
            _write(Path(folder) / block.marks["uses"], _content(used))
        _run(block, Path(folder), module)


def _content(block: Block) -> str:
    return side(block.text, new=True) if block.language == "diff" else block.text


def _run(block: Block, folder: Path, module: types.ModuleType) -> None:
    text = _content(block)
    if "old" in block.marks:
        _write(folder / block.marks["old"], side(block.text, new=False))
    if block.file is not None:
        _write(folder / block.file, text)
    elif block.language in _PYTHON:
        _execute(block, text, module)
    elif block.language in _SHELL:
        _shell(block, text, folder)
    elif block.language == _SESSION:
        _session(block, text, folder)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def _execute(block: Block, text: str, module: types.ModuleType) -> None:
    expected = block.marks.get("raises")
    # Leading blank lines make a traceback point into the page.
    code = compile("\n" * (block.line - 1) + text, str(block.page), "exec")
    try:
        exec(code, vars(module))
    except Exception as error:
        if expected not in {kind.__name__ for kind in type(error).__mro__}:
            raise
    else:
        assert expected is None, f"{block.place}: did not raise {expected}"


def _session(block: Block, text: str, folder: Path) -> None:
    for part in f"\n{text}".split(f"\n{_PROMPT}")[1:]:
        command, _, shown = part.partition("\n")
        printed = _shell(block, command, folder)
        pattern = "".join(
            r"(?:.*\n)*" if line == "…" else f"{re.escape(line)}\n" for line in shown.strip("\n").splitlines()
        )
        assert re.fullmatch(pattern, printed), f"{block.place}: {command} prints other lines:\n{printed}"


def _shell(block: Block, text: str, folder: Path) -> str:
    expected = int(block.marks.get("exits", "0"))
    command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    shown = f"{block.place}: exited with {done.returncode}, expected {expected}\n{text}\n{done.stdout}"
    assert done.returncode == expected, shown
    return done.stdout


def commands(folder: Path) -> dict[str, str]:
    """Variables under which ``accel`` and ``python`` are those of this interpreter, whether installed or not.

    Args:
        folder: gets a subfolder with the two commands.
    """
    place = folder / ".commands"
    place.mkdir(exist_ok=True)
    for name, arguments in (
        ("python", ""),
        (
            "accel",
            "-c 'import sys; from accel_cli.app import main; sys.argv[0] = \"accel\"; sys.exit(main())'",
        ),
    ):
        script = place / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        script.chmod(0o755)
    return {
        "PATH": f"{place}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
