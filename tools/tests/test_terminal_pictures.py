"""Pictures of terminals: what a command printed, in its colours."""

import pytest

from terminal_pictures import IMAGES, PICTURES, Picture, draw, show


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
