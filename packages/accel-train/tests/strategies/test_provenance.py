import pytest
import torch

from accel_train.strategies.provenance import Provenance


def in_place(a):
    found = torch.zeros(4)
    found[2:] = a[2:]
    return found


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda a: a * 2, True),
        (lambda a: a[1:].view(3, 1), True),
        (in_place, True),
        (lambda a: torch.zeros(4).index_add_(0, torch.arange(4), a), True),
        (lambda a: torch.ones(4)[a.argsort()], True),
        (lambda a: (torch.ones(4), [a + 1]), True),
        (lambda a: torch.zeros_like(a) + a.shape[0], False),
        (lambda a: torch.arange(a.numel(), dtype=a.dtype), False),
        (lambda a: a.new_ones(3), False),
    ],
)
def test_values_are_followed(compute, expected):
    marked = torch.arange(4.0)
    with Provenance() as values:
        values.mark(marked)
        assert values.reaches(compute(marked)) is expected
        assert not values.reaches(compute(torch.arange(4.0)))
