"""A rank's run of a flattened parameter as boxes. Needs no DeepSpeed."""

import torch

from accel_train.strategies.deepspeed.state import Share


def test_runs_of_all_ranks_make_up_the_parameter():
    whole = torch.arange(35.0).reshape(5, 7)
    seen = torch.full_like(whole, -1)
    for start, count in ((0, 12), (12, 12), (24, 11)):
        padded = torch.nn.functional.pad(whole.reshape(-1)[start : start + count], (0, 3))
        for part in Share(start, count, (5, 7)).parts(padded):
            box = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.tensor.shape, strict=True))
            seen[box] = part.tensor
    torch.testing.assert_close(seen, whole, rtol=0, atol=0)


def test_parts_are_views_of_the_flat_values():
    flat = torch.zeros(12)
    for part in Share(5, 12, (5, 7)).parts(flat):
        part.tensor.fill_(1)
    assert flat.eq(1).all()


def test_nothing_and_single_values():
    [nothing] = Share(0, 0, (5, 7)).parts(torch.empty(0))
    assert nothing.is_empty
    assert nothing.shape == (5, 7)
    [single] = Share(0, 1, ()).parts(torch.tensor([3.0, 0.0]))
    assert single.tensor.item() == 3
