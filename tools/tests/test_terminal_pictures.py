"""Pictures of terminals: what a command printed, in its colours."""

import re

import pytest

from terminal_pictures import HEIGHT, IMAGES, PICTURES, Picture, draw, show, with_room_below


def test_a_picture_shows_what_the_command_printed():
    picture = Picture("x", "printf '\\033[31mred\\033[0m plain\\n'; pwd; echo end")
    lines = show(picture)
    assert [line.plain for line in lines] == ["red plain", "/home/you/project", "end"]
    assert "red" in str(lines[0].spans[0].style)
    svg = draw(lines, picture)
    assert "plain" in svg
    assert "url(" not in svg.replace("url(#", "")


def test_keys_are_typed_when_their_text_is_there():
    picture = Picture("x", "read -p 'name? ' name; echo hello $name", keys=[("name?", "you\r")])
    assert show(picture)[-1].plain == "name? hello you"  # the terminal does not echo


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        (Picture("x", "echo bad; exit 3"), "ended with 3, not 0:\nbad"),
        (Picture("x", "echo first; sleep 9", seconds=0.5), "the program does not end:\nfirst"),
        (Picture("x", "echo bye", keys=[("name?", "you\r")]), r"'name\?' is not on the screen:\nbye"),
    ],
)
def test_a_picture_of_something_else_is_not_drawn(picture, message):
    with pytest.raises(RuntimeError, match=message):
        show(picture)


def test_every_picture_of_the_documentation_is_drawn_by_the_script():
    assert {path.stem for path in IMAGES.glob("*.svg")} == {picture.name for picture in PICTURES}


@pytest.mark.parametrize("path", sorted(IMAGES.glob("*.svg")), ids=lambda path: path.stem)
def test_the_last_line_of_a_picture_has_room_for_its_tails(path):
    svg = path.read_text(encoding="utf-8")
    picture, clip, frame = (float(found[2]) for found in HEIGHT.finditer(svg))
    baseline = max(float(y) for y in re.findall(r'y="([\d.]+)" textLength', svg))
    assert baseline + 8 < clip < picture - 50
    assert frame == pytest.approx(clip + 49)
    assert with_room_below(HEIGHT.sub(lambda found: f"{found[1]}{float(found[2]) - 5:.1f}", svg)) == svg
