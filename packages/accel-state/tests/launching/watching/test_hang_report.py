"""Stacks of ranks: read from faulthandler's output, grouped, and compared."""

import faulthandler
import subprocess
import sys

import pytest

from accel_state.launching.watching.hang_report import (
    LastCollective,
    RankStack,
    as_data,
    differing,
    from_data,
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


def recorded(*numbers, operations=("all_reduce (Float 5)",), group="0 default_pg gloo"):
    """Stacks that are equal but for the last collective of a group."""
    waits = ("in something",)
    return [
        RankStack(
            rank,
            (USER,),
            waits,
            recorded=(LastCollective(group, number, operations[rank % len(operations)]),),
        )
        for rank, number in enumerate(numbers)
    ]


def test_ranks_that_are_behind_in_a_process_group_differ():
    found = recorded(8, 7, 8, 6)
    assert differing(found) == [1, 3]
    told = "ranks 1 and 3 have begun 7 collectives of group 0 default_pg gloo, others 8: all_reduce (Float 5)"
    assert told in render_hang(found).splitlines()


def test_ranks_that_are_in_another_collective_of_the_group_differ():
    found = recorded(8, 8, 8, operations=("all_reduce (Float 5)", "broadcast (Float 5)"))
    assert differing(found) == [1]
    assert (
        "ranks disagree about collective #8 of group 0 default_pg gloo: ranks 0 and 2: all_reduce (Float 5); rank 1: "
        "broadcast (Float 5)" in render_hang(found)
    )
    halves = recorded(8, 8, operations=("all_reduce (Float 5)", "broadcast (Float 5)"))
    assert differing(halves) == [], "neither of two is the odd one"
    assert "ranks disagree about collective #8" in render_hang(halves)


def test_different_groups_are_not_compared():
    first, second = recorded(8)[0], recorded(3, 3, group="1 gloo")[1]
    assert differing([first, second]) == []


def test_a_stack_of_another_machine_is_as_it_was_there(tmp_path):
    source = tmp_path / "train.py"
    source.write_text("import torch\ntorch.barrier()\n")
    stack = RankStack(
        7, ((str(source), 2, "f"),), ("barrier",), "a note", (LastCollective("0 gloo", 3, "barrier"),)
    )
    data = as_data(stack)
    source.unlink()  # only its own machine has the file
    there = from_data(data, "there")
    assert (there.rank, there.frames, there.collectives) == (7, stack.frames, stack.collectives)
    assert (there.note, there.recorded, there.host) == ("a note", stack.recorded, "there")
    assert "    torch.barrier()" in render_hang([there])


def test_what_comes_from_another_machine_is_bounded_and_printable():
    data = as_data(RankStack(7, (USER,), ("x",), "n"))
    odd = {
        **data,
        "note": "\x1b]0;title\x07" + "y" * 10**6,
        "frames": [["f\n", 1, "g"]] * 10**5,
        "text": "a\n" * 10**6,
    }
    found = from_data(odd, "h\x1b")
    assert found.note.startswith("?]0;title?y")
    assert len(found.note) <= 2000
    assert found.host == "h?"
    assert found.frames[0][0] == "f?"
    assert len(found.frames) + found.text.count("\n") < 1000
    for broken in ({}, {**data, "rank": None}, {**data, "frames": [[1]]}, {**data, "recorded": 5}, [], None):
        with pytest.raises(ValueError, match=r"description of a rank|values to unpack|invalid literal"):
            from_data(broken, "h")


def test_the_table_of_machines_has_the_ranks_that_differ_first_and_an_end():
    waiting = (TORCH, 3252, "all_reduce")
    all_of_them = [
        RankStack(rank, (USER, waiting), note="n", host=f"host{rank // 8:03}") for rank in range(2400)
    ]
    all_of_them[2001] = RankStack(2001, (("/home/me/train.py", 3, "load"),), host="host250")
    lines = render_hang(all_of_them).splitlines()
    assert lines[0].split() == ["machine", "rank", "where"]
    assert lines[1].split(maxsplit=2) == ["host250", "2001", "is in no collective, at /home/me/train.py:3"]
    assert lines[2].split(maxsplit=9)[0] == "host000"
    assert "0, 1, 2, 3, 4, 5, 6 and 7  " in lines[2]
    assert lines[2].endswith("  wait in all_reduce at /home/me/train.py:12")
    assert lines[66] == "… 236 more rows"
    assert lines[67].startswith("rank 2001 is in no collective")
    assert lines[-1] == "rank 2001 on host250 differs from the others"
