"""The runner of the documentation's blocks runs, writes, expects and leaves out blocks as their comments say."""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit import markdown_blocks, worlds


@pytest.fixture
def page(tmp_path):
    def write(text: str) -> Path:
        file = tmp_path / "page.md"
        file.write_text(text.replace("~~~", "```"))
        return file

    return write


def _run(page: Path) -> list[str]:
    folder = page.parent / "run"
    folder.mkdir(exist_ok=True)
    worlds.run(markdown_blocks.run_page, 1, str(page), str(folder))
    return sorted(path.name for path in folder.iterdir() if path.name != ".commands")


def test_parse_finds_language_line_indent_and_marks(page):
    text = 'a\n~~~python title="b.py"\nx = 1\n~~~\n\n'
    text += "    <!-- test: skip=why not -->\n    ~~~bash\n    ls\n    ~~~\n"
    first, second = markdown_blocks.parse(page(text))
    assert (first.language, first.line, first.text, first.file) == ("python", 3, "x = 1\n", "b.py")
    assert (second.language, second.line, second.text) == ("bash", 8, "ls\n")
    assert markdown_blocks.skip_reason(second) == "why not"


@pytest.mark.parametrize("text", ["~~~python\nx = 1\n", "<!-- test: skpi=x -->\n~~~python\n~~~\n"])
def test_parse_refuses_open_fences_and_misspelt_markers(page, text):
    with pytest.raises(ValueError, match=r"not closed|not understood"):
        markdown_blocks.parse(page(text))


def test_blocks_share_a_namespace_and_a_folder(page):
    text = "~~~python\nx = 1\n~~~\n~~~python\nopen('made', 'w').write(str(x))\n~~~\n"
    text += "~~~bash\ncp made copied\n~~~\n"
    assert _run(page(text)) == ["copied", "made"]


def test_a_failing_block_fails_with_its_place(page):
    file = page("~~~text\nnothing\n~~~\n~~~python\n\nassert 1 == 2\n~~~\n")
    with pytest.raises(worlds.RankError, match=r'page\.md", line 6'):
        _run(file)


def test_a_failing_command_fails_with_its_output(page):
    with pytest.raises(worlds.RankError, match=r"page\.md:2: exited with 3(?s:.*)said"):
        _run(page("~~~bash\necho said; exit 3\n~~~\n"))


def test_a_session_prints_what_it_shows(page):
    good = "~~~console\n$ seq 1 5 > made; cat made\n1\n…\n5\n$ echo 'a.b'\na.b\n~~~\n"
    assert _run(page(good)) == ["made"]
    with pytest.raises(worlds.RankError, match=r"page\.md:2: echo 'a\.b' prints other lines:\na\.b"):
        _run(page("~~~console\n$ echo 'a.b'\na-b\n~~~\n"))
    with pytest.raises(worlds.RankError, match="exited with 1, expected 0"):
        _run(page("~~~console\n$ false\n~~~\n"))


def test_expected_errors_and_exits(page):
    good = "<!-- test: raises=LookupError -->\n~~~python\n{}['a']\n~~~\n"
    good += "<!-- test: exits=3 -->\n~~~bash\nexit 3\n~~~\n"
    assert _run(page(good)) == []
    with pytest.raises(worlds.RankError, match="did not raise KeyError"):
        _run(page("<!-- test: raises=KeyError -->\n~~~python\n{}\n~~~\n"))
    with pytest.raises(worlds.RankError, match="exited with 0, expected 1"):
        _run(page("<!-- test: exits=1 -->\n~~~bash\ntrue\n~~~\n"))


def test_titles_and_both_sides_of_a_diff_become_files(page):
    text = '<!-- test: old=old.py -->\n~~~diff title="new.py"\n a\n-b\n+c\n~~~\n'
    file = page(text + '~~~yaml title="c.yaml"\nk: 1\n~~~\n')
    assert _run(file) == ["c.yaml", "new.py", "old.py"]
    assert (file.parent / "run" / "new.py").read_text() == "a\nc\n"
    assert (file.parent / "run" / "old.py").read_text() == "a\nb\n"


def test_a_file_that_is_shown_later(page):
    text = "<!-- test: uses=a.py -->\n~~~console\n$ python a.py\n3\n~~~\n"
    assert _run(page(text + '~~~diff title="a.py"\n-print(2)\n+print(3)\n~~~\n')) == ["a.py"]


def test_skipped_blocks_do_not_run(page):
    assert _run(page("<!-- test: skip=no -->\n~~~bash\ntouch a\n~~~\n")) == []
    assert _run(page("<!-- test: needs=no_such_package -->\n~~~bash\ntouch a\n~~~\n")) == []
    assert _run(page("<!-- test: needs=pytest -->\n~~~bash\ntouch a\n~~~\n")) == ["a"]


def test_a_page_can_be_left_out_as_a_whole(page):
    file = page(
        "# Title\n\n<!-- test: skip-page=sketches -->\n\n~~~bash\ntouch a\n~~~\n~~~bash\ntouch b\n~~~\n"
    )
    assert {markdown_blocks.skip_reason(block) for block in markdown_blocks.parse(file)} == {"sketches"}
    assert _run(file) == []


def test_commands_are_those_under_test(page):
    assert _run(page('~~~bash\npython -c \'import accel_state, sys; open("a", "w")\'\n~~~\n')) == ["a"]


def test_a_snippet_line_stands_for_the_file_in_docs(page):
    block = markdown_blocks.parse(page("~~~python\n--8<--\nexamples/digits.py\n--8<--\n~~~\n"))[0]
    assert block.text == (Path(__file__).parents[2] / "docs" / "examples" / "digits.py").read_text()
