"""Which samples of an epoch belong to which rank's batch, against cutting a list by hand."""

import itertools

import pytest

from accel_train.data.sampling.layout import BatchLayout, clip_rows


def cut(total, batch, ranks, start, drop_last, even):
    """The oracle: per rank, its batches as lists of positions in the order, and how many leading rows are real."""
    left, made = list(range(start, total)), [[] for _ in range(ranks)]
    again = itertools.cycle(range(min(total, batch * ranks)))
    while left:
        piece, left = left[: batch * ranks], left[batch * ranks :]
        real = len(piece)
        if real < batch * ranks:
            if drop_last:
                break
            if even:
                piece += list(itertools.islice(again, batch * ranks - real))
        for rank in range(ranks):
            rows = piece[rank * batch : (rank + 1) * batch]
            if rows:
                made[rank].append((rows, max(min(real - rank * batch, batch), 0)))
    return made


def read(layout):
    """The batches that a layout describes."""
    batches = []
    for number in range(layout.batches):
        low = layout.start + number * layout.stride
        if number < layout.full:
            rows = [low + layout.rank * layout.batch + row for row in range(layout.batch)]
        else:
            offsets = range(*layout.tail_span())
            rows = [low + at if at < layout.tail else layout.padding(at) for at in offsets]
        assert layout.rows(number) == len(rows)
        valid = layout.valid_rows(number)
        batches.append((rows, len(rows) if valid is None else valid[layout.rank]))
    return batches


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_batches_are_those_of_a_list_cut_by_hand(ranks, drop_last, even):
    for total, batch in itertools.product(range(12), (1, 2, 3)):
        for start in range(total + 1):
            expected = cut(total, batch, ranks, start, drop_last, even)
            for rank in range(ranks):
                layout = BatchLayout(total, batch, ranks, rank, start=start, drop_last=drop_last, even=even)
                assert read(layout) == expected[rank], layout


@pytest.mark.parametrize(
    ("batches", "position"), [(0, 2), (1, 6), (2, 10), (3, 11), (4, 11)], ids=lambda value: str(value)
)
def test_the_position_after_batches_ends_at_the_last_sample(batches, position):
    assert BatchLayout(11, 2, 2, 0, start=2).consumed(batches) == position


def test_a_position_beyond_the_end_stays():
    layout = BatchLayout(4, 2, 2, 0, start=7)
    assert (layout.batches, layout.consumed(3)) == (0, 7)


@pytest.mark.parametrize(("real", "rows"), [(0, (0, 0, 0)), (3, (2, 1, 0)), (6, (2, 2, 2)), (9, (2, 2, 2))])
def test_rows_go_to_the_first_ranks(real, rows):
    assert clip_rows(real, 2, 3) == rows
