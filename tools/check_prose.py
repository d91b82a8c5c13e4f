"""Find words in comments, docstrings, messages and documentation that this project does not use.

Each entry of ``WORDS`` is an idiom or a literal translation that readers of technical English stumble over, with
what to write instead; a few words that are wrong in one sense only are found by what follows them. Run from
the repository root: ``python tools/check_prose.py`` prints one line per hit and exits with 1 when there is any.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tokenize
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

SOURCES = ("packages/*/src/**/*.py", "docs/**/*.py", "docs/**/*.md", "packages/*/README.md", "*.md")
# Pattern, in which a space matches any white space, and what to write instead.
WORDS = (
    (r"anew", "again, or from the start"),
    (r"whoever", "name the process, object or person"),
    (r"(?:is|are|was|were) said", "a message or warning says …, or: … is reported"),
    (r"(?:is|are) told(?! apart)", "receives, is given, or: … is described"),
    (r"(?:goes|go|going|went) on (?:with|from|where|after)", "continues with, from or after"),
    (r"one's own", "your own, its own, or the adjective that is meant (local, custom)"),
    # Right only when a second `as` follows in the same clause.
    (r"as many(?! [^.,;:()]*\bas\b)", "the same number of"),
    (r"lies? (?:in|at|on|below|under|beside|behind|there)", "is (in, at, …)"),
    (
        r"st(?:ands?|ood) (?:in(?! for\b)|at|on|below|under|beside|there|above|before|around)",
        "is (in, at, …)",
    ),
    (r"brought about", "caused, done"),
    (r"(?:is|are) no matter", "does not belong to, is not specific to"),
    (r"what (?:becomes?|became) of", "what happens to"),
    (r"(?:takes?|took|taken) (?:it|them) for", "treats it as"),
    (r"lets? go(?: of)?", "releases"),
    (r"nothing is left of", "state what is gone"),
)
_PATTERN = re.compile(
    "|".join(
        rf"(?P<word{number}>\b(?:{pattern.replace(' ', chr(92) + 's+')})\b)"
        for number, (pattern, _) in enumerate(WORDS)
    ),
    re.IGNORECASE,
)
_STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


@dataclass(frozen=True, order=True)
class Hit:
    """One use of a word.

    Attributes:
        path: the file.
        line: the line where the word begins.
        found: the word, as it is written there.
        better: what to write instead.
    """

    path: str
    line: int
    found: str
    better: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.found!r}: {self.better}"


def check(path: str, source: str) -> list[Hit]:
    """Hits in one file: in comments and string literals of Python, in all of a page but its code."""
    text = python_prose(source) if path.endswith(".py") else page_prose(source)
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    return [
        Hit(path, bisect_right(starts, match.start()), " ".join(match[0].split()), _better(match))
        for match in _PATTERN.finditer(text)
    ]


def _better(match: re.Match[str]) -> str:
    return WORDS[int(str(match.lastgroup).removeprefix("word"))][1]


def python_prose(source: str) -> str:
    """The comments and string literals of a module on their own lines; everything else is blank."""
    kept = [""] * (source.count("\n") + 1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            kept[token.start[0] - 1] += f" {token.string.lstrip('# ')}"
        elif token.type in _STRINGS:
            for number, text in enumerate(_plain(token.string).split("\n"), token.start[0] - 1):
                kept[number] += f" {text}"
    return "\n".join(kept)


def _plain(literal: str) -> str:
    """A string literal without prefix, quotes and the expressions of an f-string, on its own lines."""
    if "f" in literal[:2].lower():
        literal = re.sub(r"\{[^{}\n]*\}", "{}", literal)
    text = re.sub(r"""^\w*("{3}|'{3}|"|')""", "", literal)
    return re.sub(r"""("{3}|'{3}|"|')$""", "", text)


def page_prose(source: str) -> str:
    """A page of Markdown with its code blocks and code spans blank."""
    without_blocks = re.sub(
        r"^(\s*)(```+).*?^\1\2[^\S\n]*$",
        lambda match: "\n" * match[0].count("\n"),
        source,
        flags=re.MULTILINE | re.DOTALL,
    )
    return re.sub(r"`[^`\n]+`", "code", without_blocks)


def check_tree(root: Path) -> list[Hit]:
    """Hits in the packages and the documentation of the repository at ``root``."""
    files = {file for pattern in SOURCES for file in root.glob(pattern)}
    hits: list[Hit] = []
    for file in sorted(files):
        hits += check(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8"))
    return hits


def _part(path: str) -> str:
    """The package or top folder that a file belongs to."""
    parts = path.split("/")
    return parts[1] if parts[0] == "packages" else parts[0]


def main(arguments: list[str] | None = None) -> int:
    """Print the hits and their number in each part of the repository; 1 when there is any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", nargs="?", type=Path, default=Path(), help="repository root")
    hits = check_tree(parser.parse_args(arguments).root)
    for hit in hits:
        print(hit)
    for part, count in sorted(Counter(_part(hit.path) for hit in hits).items()):
        print(f"{part}: {count}")
    print(f"prose: {len(hits)} words to replace")
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main())
