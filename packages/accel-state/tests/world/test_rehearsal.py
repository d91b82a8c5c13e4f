"""What is remembered of a rank that is rehearsed: calls are given by hand."""

import inspect

import pytest

from accel_state.communication.mirrored import EnteredCollective
from accel_state.world.rehearsal import Entered, Rehearsal, RehearsedMessage


def here():
    return inspect.currentframe().f_back.f_lineno


def test_notes_are_told_once_in_order():
    rehearsal = Rehearsal(3)
    for text in ("b", "a", "b"):
        rehearsal.note(text)
    assert (rehearsal.steps, rehearsal.notes) == (3, ["b", "a"])


@pytest.mark.parametrize(
    ("operation", "shapes", "call"),
    [
        ("all_reduce", "float32[6]", "all_reduce(float32[6])"),
        ("all_gather", "float32[2, 3], int64[1]", "all_gather(float32[2, 3], int64[1])"),
        ("all_to_all", "float32[6]", "all_to_all"),  # pairs may exchange other sizes
        ("all_gather", "uint8[40]", "all_gather"),  # so may pickled objects
    ],
)
def test_a_collective_is_compared_by_what_ranks_do_alike(operation, shapes, call):
    rehearsal = Rehearsal(1)
    rehearsal.record([0, 2], EnteredCollective(operation, shapes, 24))
    line = here() - 1
    (entered,) = rehearsal.entered
    assert entered == Entered((0, 2), call, f"{operation}({shapes})", entered.site)
    assert entered.site.endswith(f"test_rehearsal.py:{line}")


def test_bytes_are_added_by_kind():
    rehearsal = Rehearsal(1)
    for operation, count in (("all_reduce", 4), ("send", 10), ("all_reduce", 6), ("recv", 3)):
        rehearsal.record((0, 1), EnteredCollective(operation, "float32[1]", count))
    assert rehearsal.bytes_given == {"all_reduce": 10, "send": 10, "recv": 3}
    # Ranks of a pair do different things, so that these are not compared.
    assert [entered.call for entered in rehearsal.entered] == ["all_reduce(float32[1])"] * 2


def test_messages_of_an_operation_of_this_project_are_counted_and_not_compared():
    rehearsal = Rehearsal(1)
    torch_s = {
        "__name__": "torch.distributed.x",
        "rehearsal": rehearsal,
        "EnteredCollective": EnteredCollective,
    }
    exec("def f(): rehearsal.record((0, 1), EnteredCollective('all_gather', 'float32[3]', 12))", torch_s)
    exec("f()", {"__name__": "accel_state.communication.channel", "f": torch_s["f"]})
    assert rehearsal.entered == []
    assert rehearsal.bytes_given == {"all_gather": 12}


def test_frames_of_torch_are_passed_over():
    rehearsal = Rehearsal(1)
    torch_s = {
        "__name__": "torch.distributed.x",
        "rehearsal": rehearsal,
        "EnteredCollective": EnteredCollective,
    }
    exec("def f(): rehearsal.record((0, 1), EnteredCollective('all_reduce', 'float32[3]', 12))", torch_s)
    torch_s["f"]()
    assert rehearsal.entered[0].site.endswith(f"test_rehearsal.py:{here() - 1}")


def test_operations_of_this_project_are_compared_by_their_fingerprint():
    rehearsal = Rehearsal(1)
    rehearsal.compared((0, 1, 2), "gather", 255, "float32[3]")
    (entered,) = rehearsal.entered
    assert (entered.ranks, entered.call, entered.shown) == ((0, 1, 2), "gather#ff", "gather(float32[3])")


def test_sections_describe_what_is_there_when_the_report_is_made():
    rehearsal = Rehearsal(1)
    losses = []
    rehearsal.sections["losses"] = lambda: list(losses)
    losses.append(0.5)
    assert rehearsal.report() == {"losses": [0.5]}


def test_messages_are_between_ranks_of_the_world():
    rehearsal = Rehearsal(1)
    rehearsal.record((4, 6), EnteredCollective("send", "float32[2]", 8, 1))
    rehearsal.record((4, 6), EnteredCollective("recv", "float32[3]", 12, 0))
    rehearsal.record((4, 6), EnteredCollective("recv", "float32[3]", 12))  # from any rank
    sites = [message.site for message in rehearsal.messages]
    assert rehearsal.messages == [
        RehearsedMessage(6, True, "float32[2]", sites[0]),
        RehearsedMessage(4, False, "float32[3]", sites[1]),
    ]
    assert rehearsal.entered == []


def test_what_is_done_aside_is_not_recorded():
    rehearsal = Rehearsal(1)
    with rehearsal.aside():
        rehearsal.record((0, 1), EnteredCollective("all_reduce", "float32[1]", 4))
        rehearsal.record((0, 1), EnteredCollective("send", "float32[1]", 4, 1))
        rehearsal.compared((0, 1), "gather", 255, "float32[3]")
    assert (rehearsal.entered, rehearsal.messages, rehearsal.bytes_given) == ([], [], {})
    rehearsal.record((0, 1), EnteredCollective("all_reduce", "float32[1]", 4))
    assert len(rehearsal.entered) == 1
