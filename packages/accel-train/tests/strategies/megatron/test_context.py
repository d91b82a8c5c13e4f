"""Which positions of a sequence a rank has."""

import pytest
import torch
import torch.distributed as dist

from accel_train.strategies.megatron.batches import Batch, supplied
from accel_train.strategies.megatron.context import ContextPart
from testkit import worlds


def parts(count):
    return [ContextPart(None, index, count) for index in range(count)]


def test_each_rank_has_a_piece_from_each_end():
    places = torch.arange(12)
    found = [part.cut(places, 0).tolist() for part in parts(3)]
    assert found == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert [part.cut(torch.arange(8).reshape(2, 4)).tolist() for part in parts(2)] == [
        [[0, 3], [4, 7]],
        [[1, 2], [5, 6]],
    ]


def joined() -> list[torch.Tensor]:
    dist.init_process_group("gloo")
    part = ContextPart.of(dist.group.WORLD)
    found = []
    for shape, dim in (((2, 12), 1), ((2, 12, 3), 1), ((2, 3, 12, 5), 2)):
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape).requires_grad_()
        again = part.whole(part.cut(whole, dim), dim)
        weights = torch.arange(again.numel(), dtype=torch.float64).reshape(shape)
        [gradient] = torch.autograd.grad((again * weights).sum(), whole)
        dist.all_reduce(gradient)
        found += [again.detach() - whole.detach(), gradient - weights * part.parts]
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_together_have_the_whole_in_its_order(ranks):
    """And the mean of their gradients is the gradient."""
    for differences in worlds.run(joined, ranks):
        assert len(differences) == 6
        assert not any(difference.any() for difference in differences)


@pytest.mark.parametrize(
    ("length", "divisions", "multiple"), [(14, 1, 4), (15, 1, 4), (12, 4, 8), (12, 3, None), (16, 4, None)]
)
def test_lengths_that_cannot_be_divided_name_both_numbers(length, divisions, multiple):
    part = parts(2)[1]
    if multiple is None:
        part.check(length, divisions)
        return
    with pytest.raises(
        ValueError,
        match=rf"sequences of {length} tokens, which context_parallel_size=2.*multiples of {multiple}\b",
    ):
        part.check(length, divisions)


def test_batches_are_cut_after_labels_are_shifted():
    tokens = torch.tensor([[5, 6, 2, 7], [8, 9, 1, 1]])
    given = {
        "input_ids": tokens,
        "labels": tokens,
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
    }
    whole = Batch.of(given, 2)
    for part, places in zip(parts(2), ([0, 3], [1, 2]), strict=True):
        found = Batch.of(given, 2, part)
        assert torch.equal(found.tokens, tokens[:, places])
        assert torch.equal(found.labels, whole.labels[:, places])
        assert found.positions.tolist() == [places] * 2
        assert torch.equal(found.loss_mask, whole.loss_mask), "of the whole sequence"
        assert torch.equal(found.attention_mask, whole.attention_mask[:, :, places])


def test_what_the_scripts_function_returns_is_cut():
    tokens = torch.arange(8).reshape(2, 4)
    everyones = torch.zeros(2, 1, 1, 4, dtype=torch.bool)
    lengths = []

    def batch(mask):
        return supplied(
            lambda *_: (tokens, tokens + 1, tokens, mask, tokens), {}, parts(2)[0], lengths.append
        )

    square = torch.rand(2, 1, 4, 4) > 0.5
    assert torch.equal(batch(square).attention_mask, square[:, :, [0, 3]])
    assert torch.equal(batch(everyones).attention_mask, everyones)
    assert batch(None).labels.tolist() == [[1, 4], [5, 8]]
    assert batch(None).loss_mask.shape == (2, 4)
    assert lengths == [4, 4, 4, 4]
