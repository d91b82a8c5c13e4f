"""What the reports of ranks say: differences between their collectives, failures, and notes."""

from accel_cli.rehearsal.findings import find, first_difference, lost_message
from accel_cli.rehearsal.run import Rehearsed

WORLD, PAIR = [0, 1, 2], [1, 2]


def rank(number, calls, *, error=None, groups=(WORLD, PAIR), **more):
    entered = [
        [group, call, call.partition("#")[0], f"train.py:{line}"] for line, (group, call) in enumerate(calls)
    ]
    found = {
        "ended": "steps", "error": error, "sections": {}, "notes": [], "groups": list(groups), "entered": entered,
        "messages": [],
    }  # fmt: skip
    return Rehearsed(number, found | more, "")


def failed(message="no", trace="Traceback"):
    return {"type": "ValueError", "message": message, "traceback": trace}


def test_equal_calls_are_no_difference():
    calls = [(0, "gather#1"), (0, "reduce#2")]
    assert first_difference(rank(0, calls), rank(1, calls)) is None
    assert find([rank(0, calls), rank(1, calls)], 3) == []


def test_the_first_difference_is_named_with_both_lines():
    text = first_difference(rank(0, [(0, "a#1"), (0, "b#2")]), rank(1, [(0, "a#1"), (0, "c#2")]))
    assert text == (
        "ranks 0 and 1 would wait for each other in collective 2 of the group of ranks 0, 1, 2: rank 0 enters b at "
        "train.py:1, rank 1 enters c at train.py:1"
    )


def test_equal_words_with_another_fingerprint_differ():
    assert first_difference(rank(0, [(0, "a#1")]), rank(1, [(0, "a#2")])) is not None


def test_only_groups_of_both_ranks_count():
    assert first_difference(rank(0, [(1, "a#1")]), rank(1, [(1, "b#1")])) is None
    assert first_difference(rank(1, [(1, "a#1")]), rank(2, [(1, "b#1")])) is not None


def test_a_group_in_which_only_one_rank_enters_anything():
    here, there = rank(1, [(0, "a#1")], groups=[PAIR]), rank(2, [], groups=[])
    assert "rank 2 has entered all" in first_difference(here, there)
    assert "rank 2 has entered all" in first_difference(there, here)


def test_a_rank_that_enters_less_is_waited_for_unless_one_has_failed():
    more, less = [(0, "a#1"), (0, "b#2")], [(0, "a#1")]
    assert "rank 1 has entered all of its collectives" in first_difference(rank(0, more), rank(1, less))
    assert first_difference(rank(0, more), rank(1, less, error=failed())) is None


def test_failures_come_first_and_equal_findings_once():
    ranks = [rank(0, [], notes=["wrote nothing"]), rank(1, [], error=failed("a\nb"), notes=["wrote nothing"])]
    assert [(item.kind, item.text) for item in find(ranks, 3)] == [
        ("error", "rank 1 of 3 would fail here: ValueError: a"),
        ("note", "wrote nothing"),
    ]


def test_the_first_line_of_a_message_is_shown_once_and_frames_of_libraries_are_folded():
    frames = ['  File "train.py", line 4, in <module>', "    save(a)"]
    inside = [f'  File "/x/accel_train/m{number}.py", line 1, in f' for number in range(3)]
    error = {
        "type": "OptionError",
        "message": "a\nb",
        "traceback": "\n".join(["Traceback:", *frames, *inside, "accel_train.errors.OptionError: a", "b"]),
    }
    [finding] = find([rank(1, [], error=error)], 3)
    assert finding.text.endswith("OptionError: a")
    folded = "  … 2 frames of accel_train"
    assert finding.traceback.splitlines() == ["Traceback:", *frames, folded, inside[2], "b"]


def test_a_script_without_an_accelerator():
    [finding] = find([rank(0, [], sections=None)], 64)
    assert finding.kind == "error"
    assert "64 independent processes" in finding.text


def sent(peer, shown, line=1):
    return [peer, True, shown, f"train.py:{line}"]


def received(peer, shown, line=1):
    return [peer, False, shown, f"train.py:{line}"]


def test_messages_that_arrive_as_they_are_sent():
    one = rank(0, [], messages=[sent(1, "a"), received(1, "c"), sent(2, "x"), sent(1, "b")])
    other = rank(1, [], messages=[received(0, "a"), received(0, "b"), sent(0, "c")])
    assert find([one, other], 3) == []


def test_a_message_that_is_received_in_another_form_is_named_with_both_lines():
    one = rank(0, [], messages=[sent(1, "a"), sent(1, "float32[2]", 7)])
    other = rank(1, [], messages=[received(0, "a"), received(0, "float32[4]", 9)])
    text = (
        "message 2 from rank 0 to rank 1 would not arrive: rank 0 sends float32[2] at train.py:7, and rank 1 expects "
        "float32[4] at train.py:9"
    )
    assert lost_message(one, other) == text
    assert [item.text for item in find([one, other], 3)] == [text]


def test_a_message_that_nobody_sends_or_receives_unless_a_rank_has_failed():
    one, other = rank(0, [], messages=[sent(1, "a")]), rank(1, [], messages=[])
    assert "and rank 1 receives no more" in lost_message(one, other)
    assert "rank 0 sends no more, and rank 1 expects a" in lost_message(
        rank(0, [], messages=[]), rank(1, [], messages=[received(0, "a")])
    )
    assert lost_message(one, rank(1, [], messages=[], error=failed())) is None
