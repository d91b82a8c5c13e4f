import pytest

from accel_state.config.sections.parallelism import PIPELINE_SCHEDULES
from accel_train.strategies.pipeline.schedules import SCHEDULES, StageLayout


def test_the_launcher_knows_the_same_schedules():
    assert tuple(SCHEDULES) == PIPELINE_SCHEDULES


def test_stages_go_round_or_turn():
    assert [StageLayout(2, 4).held(rank) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [StageLayout(2, 4, turns=True).held(rank) for rank in range(2)] == [[0, 3], [1, 2]]
    assert [StageLayout(3, 6, turns=True).owner(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "layout", "takes"),
    [
        ("gpipe", 1, StageLayout(4, 4), True),
        ("1f1b", 3, StageLayout(4, 4), False),
        ("1f1b", 4, StageLayout(4, 4), True),
        ("interleaved_1f1b", 6, StageLayout(4, 8), True),
        ("interleaved_1f1b", 9, StageLayout(4, 8), False),
        ("interleaved_zero_bubble", 9, StageLayout(4, 8), False),
        ("looped_bfs", 3, StageLayout(4, 8), True),
    ],
)
def test_numbers_of_micro_batches_are_those_of_torch(schedule, micro_batches, layout, takes):
    assert SCHEDULES[schedule].takes(micro_batches, layout) is takes
