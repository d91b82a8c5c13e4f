"""Stacks of ranks: read from faulthandler's output, grouped, and compared."""

import faulthandler
import subprocess
import sys

from accel_state.launching.watching.hang_report import (
    RankStack,
    differing,
    is_whole,
    parse_stack,
    render_hang,
)

USER = ("/home/me/train.py", 12, "train")
TORCH = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def stacks(*places, **more):
    return [
        RankStack(rank, frames=(USER, place) if place else (), **more) for rank, place in enumerate(places)
    ]


def here(path):
    with path.open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=False)
        file.seek(0)
        return file.read()


def test_the_output_of_faulthandler_is_read(tmp_path):
    text = here(tmp_path / "stack")
    found = parse_stack(text)
    assert found[-1][2] == "here"
    assert found[-2] == (__file__, sys._getframe().f_lineno - 3, sys._getframe().f_code.co_name)
    assert parse_stack(text + text) == found
    assert parse_stack("") == ()


def test_a_report_is_whole_when_the_outermost_frame_has_been_written(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import faulthandler, sys\n"
        "def inner():\n"
        "    faulthandler.dump_traceback(sys.stdout.fileno(), all_threads=False)\n"
        "inner()\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert is_whole(done.stdout)
    for end in range(len(done.stdout)):
        assert not is_whole(done.stdout[:end]), done.stdout[:end]


def test_ranks_outside_the_collective_differ():
    waiting = (TORCH, 3252, "all_reduce")
    found = stacks(waiting, ("/home/me/train.py", 3, "load"), waiting)
    assert found[0].place() == "waits in all_reduce at /home/me/train.py:12"
    assert found[1].place() == "is in no collective, at /home/me/train.py:3"
    assert differing(found) == [1]
    text = render_hang(found)
    assert text.splitlines()[0] == "ranks 0 and 2 wait in all_reduce at /home/me/train.py:12"
    assert text.splitlines()[-1] == "rank 1 differs from the others"


def test_the_smaller_groups_differ():
    assert differing(stacks(USER, USER, TORCH and ("/a.py", 1, "f"), USER)) == [2]
    assert differing(stacks(USER, ("/a.py", 1, "f"))) == [], "neither of two is the odd one"
    assert differing(stacks(USER, USER)) == []


def test_a_rank_without_an_answer_is_told():
    text = render_hang([*stacks(USER, USER), RankStack(2, note="it has not created an Accelerator")])
    assert "rank 2 does not answer (it has not created an Accelerator)" in text
    assert differing([*stacks(USER, USER), RankStack(2)]) == [2]


def test_what_a_rank_tells_of_its_collective_comes_before_what_its_stack_shows():
    told = RankStack(0, (USER, (TORCH, 1, "barrier")), ("all_reduce (#3 of gloo; Float 5)",))
    assert told.place() == "waits in all_reduce (#3 of gloo; Float 5) at /home/me/train.py:12"
    placed = RankStack(0, (USER,), ("gather (#3) at train.py:9",))
    assert placed.place() == "waits in gather (#3) at train.py:9"


def test_frames_of_libraries_are_folded_unless_all_are_wanted():
    frames = (USER, (TORCH, 1, "wrapper"), (TORCH, 2, "all_reduce"))
    assert "… 2 frames of torch" in render_hang([RankStack(0, frames)])
    full = render_hang([RankStack(0, frames)], folded=False)
    assert full.count(TORCH) == 2
    assert "frames of" not in full
