"""Tracebacks of ranks: what is folded, and what is said of the others."""

import json
import subprocess
import sys
import traceback

import pytest

from accel_state.launching.watching.tracebacks import (
    fold_frames,
    last_line,
    last_place,
    summarize,
    waited_for_another,
)


def of(script, *words):
    return subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True).stderr


def test_frames_of_libraries_become_one_line_and_the_raising_one_stays(tmp_path):
    user = tmp_path / "train.py"
    user.write_text("import json\ndef load():\n    return json.loads('{')\nload()\n")
    text = of("import runpy, sys; runpy.run_path(sys.argv[1])", str(user))
    folded = fold_frames(text)
    assert text.count("  File ") > folded.count("  File ")
    assert "  … 3 frames of Python" in folded, folded
    assert "in load\n" in folded
    assert folded.rstrip().endswith(text.rstrip().splitlines()[-1])
    assert folded.count("decoder.py") == 1, "the frame that raised"


def test_a_traceback_without_frames_of_the_user_is_not_changed():
    try:
        json.loads("{")
    except ValueError as error:
        text = "".join(traceback.format_exception(error.with_traceback(error.__traceback__.tb_next)))
    assert fold_frames(text) == text


def test_other_texts_are_not_changed():
    assert fold_frames("killed\n  by somebody") == "killed\n  by somebody"
    assert fold_frames("") == ""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            'Traceback (most recent call last):\n  File "x", line 1\n    f()\nValueError: a\nb',
            "ValueError: a",
        ),
        ("Segmentation fault\n  in a library\nAborted", "Aborted"),
        (
            "Traceback (most recent call last):\nRuntimeError: closed by peer. GLHF! x",
            "RuntimeError: closed by peer",
        ),
        ("", ""),
    ],
)
def test_the_last_line(text, line):
    assert last_line(text) == line


def test_a_rank_that_waited_is_known_by_the_first_line_of_its_error():
    script = (
        "from accel_state.errors import CollectiveMismatchError\n"
        "try:\n    1 / 0\n"
        "except ZeroDivisionError:\n    raise CollectiveMismatchError('rank 1 is gone\\n  0: here\\nCall it.')"
    )
    line = last_line(of(script))
    assert line == "accel_state.errors.CollectiveMismatchError: rank 1 is gone"
    assert summarize([("rank 0", line)]) == ["rank 0 waited for it, and ended because it was gone"]


def test_ends_of_other_ranks_take_a_line_for_each_way():
    gloo = "RuntimeError: [../gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:1"
    assert waited_for_another(gloo)
    assert not waited_for_another("ValueError: a label is out of range")
    ends = [
        *((f"rank {n}", gloo) for n in range(20)),
        ("rank 30", "ValueError: x"),
        ("rank 31", "ValueError: x"),
    ]
    assert summarize(ends) == [
        "ranks 30 and 31 failed too: ValueError: x",
        "ranks 0, 1, 2, 3, 4, 5, 6 and 13 more waited for it, and ended because it was gone",
    ]
    assert summarize(ends[20:], "ValueError: x") == ["ranks 30 and 31 raised the same error"]
    assert summarize([]) == []
    assert summarize([("rank 1", "ValueError: 12345")], longest=12) == ["rank 1 failed too: ValueError:…"]


def test_the_last_place_is_that_of_the_user(tmp_path):
    user = tmp_path / "train.py"
    user.write_text("import json\ndef load():\n    return json.loads('{')\nload()\n")
    text = of("import runpy, sys; runpy.run_path(sys.argv[1])", str(user))
    assert last_place(text) == f"{user}, line 3"
    assert last_place("KeyboardInterrupt") == ""
    frames = f'  File "{user}", line 3, in load\n    return 1\n  File "<string>", line 0, in __init__\n'
    generated = f"Traceback (most recent call last):\n{frames}KeyboardInterrupt"
    assert last_place(generated) == f"{user}, line 3"
