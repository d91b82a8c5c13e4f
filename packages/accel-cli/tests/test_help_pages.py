"""The layout of help pages."""

import os
import sys

import pytest

from accel_cli.help_pages import help_page
from testkit.terminals import Terminal


def test_a_page_has_usage_description_and_aligned_tables():
    text = help_page(
        "accel x",
        "[flags]",
        "One paragraph.\n\n  kept line  as it is\n  and this",
        [("options", [("--short", "A word."), ("--a-very-long-name-of-a-flag VALUE", "Another " * 20)])],
        epilog="The end.",
        width=80,
    )
    assert text.startswith(
        "Usage: accel x [flags]\n\n  One paragraph.\n\n    kept line  as it is\n    and this\n\noptions:\n"
    )
    assert f"  --short{' ' * 23}A word.\n" in text
    assert text.endswith("\n\n  The end.\n")
    assert max(map(len, text.splitlines())) <= 80


def test_no_line_of_a_narrow_terminal_ends_inside_a_word():
    words = {
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS,",
        "dynamo_config.dynamo_use_regional_compilation",
    }
    text = help_page(
        "accel launch",
        "[flags] script.py [the script's own arguments]",
        "One paragraph that is longer than the terminal is wide.",
        [("options", [("--short", " ".join([*words] * 3)), ("--help TOPIC", "A word.")])],
        width=60,
    )
    assert max(map(len, text.splitlines())) <= 60
    assert words <= set(text.split())
    assert "  --help TOPIC\n        A word.\n" in text


@pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX systems")
def test_a_pipe_that_ends_in_the_terminal_has_its_width(tmp_path):
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    show = f"{sys.executable} -m accel_cli launch --help"
    words = ["sh", "-c", f"{show} | cat > page; {show} < /dev/null 2> /dev/null > file"]
    with Terminal(words, environ, str(tmp_path), columns=72) as terminal:
        assert terminal.code(60) == 0
    longest = [max(map(len, (tmp_path / name).read_text().splitlines())) for name in ("page", "file")]
    assert 60 < longest[0] <= 72
    assert 90 < longest[1] <= 100
