"""check_prose finds its words in prose, in the right line, and neither in code nor in good English."""

from __future__ import annotations

import pytest

import check_prose


def _found(source: str, path: str = "a.py") -> list[tuple[int, str]]:
    return [(hit.line, hit.found) for hit in check_prose.check(path, source)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Start anew.", "anew"),
        ("Whoever reads it", "Whoever"),
        ("It is said that it was used.", "is said"),
        ("The hook is told the device.", "is told"),
        ("Training goes on with the next.", "goes on with"),
        ("a sampler of one's own", "one's own"),
        ("all ranks get as many batches.", "as many"),
        ("all get as many. Then as one", "as many"),
        ("The file lies in the folder.", "lies in"),
        ("what stood on a command line", "stood on"),
        ("this is no matter of plugins", "is no matter"),
        ("what becomes of it", "what becomes of"),
        ("the launcher takes it for finished", "takes it for"),
        ("lets go of the lock", "lets go of"),
        ("Nothing is left of it", "Nothing is left of"),
        ("which is brought about later", "brought about"),
    ],
)
def test_each_word_is_found(text, found):
    assert _found(f"# {text}") == [(1, found)]
    assert _found(text, "page.md") == [(1, found)]


def test_every_entry_has_an_example_above():
    (mark,) = [mark for mark in test_each_word_is_found.pytestmark if mark.name == "parametrize"]
    better = {check_prose.check("a.md", text)[0].better for text, _ in mark.args[1]}
    assert better >= {advice for _, advice in check_prose.WORDS}


@pytest.mark.parametrize(
    "text",
    [
        "as many as there are",
        "as many bytes of the file as fit",
        "as many tensors\nof a group as there is room for",
        "X stands for the tensor, Y stands in for it",
        "ranks are told apart by number",
        "it was told to stop",
        "training goes on",
        "manew, renewal, belies",
    ],
)
def test_good_english_is_left_alone(text):
    assert _found(text, "page.md") == []


def test_python_is_read_in_comments_docstrings_and_messages_only():
    source = '''\
"""Title.

Begin
    anew.
"""
anew = whoever(1)  # lies in wait
text = f"it is " f"said {anew}"
other = (
    "it is "
    "said"
)
'''
    assert _found(source) == [(4, "anew"), (6, "lies in"), (7, "is said"), (9, "is said")]


def test_pages_are_read_without_code():
    page = "`anew` is\nsaid\n\n```python\nanew = 1  # anew\n```\n\n    ```bash\n    anew\n    ```\n\nanew\n"
    assert _found(page, "page.md") == [(1, "is said"), (12, "anew")]


def test_main_names_place_and_better_word(tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("fine\nanew\n")
    source = tmp_path / "packages" / "accel-x" / "src" / "accel_x"
    source.mkdir(parents=True)
    (source / "a.py").write_text("# whoever\n")
    assert check_prose.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "docs/a.md:2: 'anew': again, or from the start",
        "packages/accel-x/src/accel_x/a.py:1: 'whoever': name the process, object or person",
        "accel-x: 1",
        "docs: 1",
        "prose: 2 words to replace",
    ]
    (tmp_path / "docs" / "a.md").write_text("fine\n")
    (source / "a.py").write_text("")
    assert check_prose.main([str(tmp_path)]) == 0
