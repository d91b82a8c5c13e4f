"""Prediction of the next groups."""

from accel_bigmodel.streaming.schedule import StreamingSchedule


def run(schedule, order, key="model", *, complete=True, ahead=2):
    """What was expected before each group of a forward."""
    schedule.begin(key)
    expected = []
    for group in order:
        expected.append(schedule.upcoming(ahead))
        schedule.record(group)
    schedule.end(complete)
    return expected


def test_nothing_is_expected_of_the_first_forward():
    assert run(StreamingSchedule(), [0, 1, 2]) == [[], [], []]


def test_the_last_order_is_expected():
    schedule = StreamingSchedule()
    run(schedule, [0, 1, 2])
    assert run(schedule, [0, 1, 2]) == [[0, 1], [1, 2], [2]]


def test_groups_that_come_several_times():
    schedule = StreamingSchedule()
    run(schedule, [0, 0, 1, 0])
    assert run(schedule, [0, 0, 1, 0]) == [[0, 0], [0, 1], [1, 0], [0]]


def test_after_a_jump_the_order_goes_on_from_there():
    schedule = StreamingSchedule()
    run(schedule, [0, 1, 2, 3, 4])
    assert run(schedule, [0, 3, 4]) == [[0, 1], [1, 2], [4]]
    assert run(schedule, [0, 3, 4]) == [[0, 3], [3, 4], [4]]


def test_after_a_jump_back():
    schedule = StreamingSchedule()
    run(schedule, [0, 1, 2, 3])
    assert run(schedule, [2, 0, 1]) == [[0, 1], [3], [1, 2]]


def test_an_unknown_group_changes_nothing():
    schedule = StreamingSchedule()
    run(schedule, [0, 1, 2])
    assert run(schedule, [0, 9, 1, 2]) == [[0, 1], [1, 2], [1, 2], [2]]


def test_an_order_cut_short_is_not_learnt():
    schedule = StreamingSchedule()
    run(schedule, [0, 1, 2])
    run(schedule, [0], complete=False)
    assert run(schedule, [0, 1, 2])[1] == [1, 2]


def test_each_module_that_a_forward_begins_at_has_its_order():
    schedule = StreamingSchedule()
    run(schedule, [0, 1], "encoder")
    run(schedule, [2, 3], "decoder")
    assert run(schedule, [0, 1], "encoder")[0] == [0, 1]
    assert run(schedule, [2, 3], "decoder")[0] == [2, 3]


def test_an_order_that_is_assumed():
    schedule = StreamingSchedule([0, 1, 2])
    assert run(schedule, [0, 2, 1]) == [[0, 1], [1, 2], []]
    assert run(schedule, [0, 2, 1]) == [[0, 2], [2, 1], [1]]


def test_the_same_forward_again():
    schedule = StreamingSchedule([0, 1, 2])
    assert schedule.upcoming(5, again=True) == [0, 1, 2]
    schedule.begin("model")
    schedule.record(0)
    schedule.record(1)
    assert schedule.upcoming(5, again=True) == [2, 0, 1]
    assert schedule.upcoming(2, again=True) == [2, 0]
    schedule.record(2)
    assert schedule.upcoming(2, again=True) == [0, 1]
    assert schedule.upcoming(2) == []


def test_an_assumed_order_that_was_wrong_has_to_prove_itself():
    schedule = StreamingSchedule()
    for _ in range(2):  # an order that an error cut short leaves it assumed
        schedule.assume("model", range(10))
        schedule.begin("model")
        assert schedule.upcoming(2) == [0, 1]
        found = []
        for group in (0, 4, 5, 6, 7, 2):
            schedule.record(group)
            found.append(schedule.upcoming(2))
        assert found == [[1, 2], [], [], [7], [8, 9], []]
        schedule.end(complete=False)
    schedule.begin("model")
    for group in (0, 4, 2):
        schedule.record(group)
    schedule.end(complete=True)
    schedule.begin("model")
    schedule.record(4)
    assert schedule.upcoming(2) == [2]  # one that was seen is believed
