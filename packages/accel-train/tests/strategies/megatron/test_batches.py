"""What becomes of a batch."""

import pytest
import torch

from accel_train.strategies.megatron.batches import Batch, micro_batches, shifted, supplied, weighted_mean

TOKENS = torch.tensor([[5, 6, 2, 7], [8, 9, 1, 1]])


def test_labels_are_those_of_the_next_position():
    labels, mask = shifted(torch.tensor([[5, 6, -100, 7]]))
    assert labels.tolist() == [[6, 0, 7, 0]]
    assert mask.tolist() == [[1, 0, 1, 0]]


def test_masks_and_positions():
    batch = Batch.of({"input_ids": TOKENS, "labels": TOKENS}, eod_token=2)
    assert batch.loss_mask is not None
    assert batch.loss_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]  # nothing is predicted from the token 2
    assert batch.positions.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.attention_mask is None
    given = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}
    assert Batch.of(given, None).attention_mask is None, "nothing is padding"
    given["attention_mask"][1, 3] = 0
    mask = Batch.of(given, None).attention_mask
    assert mask is not None
    assert mask.shape == (2, 1, 4, 4)
    assert mask[0, 0].tolist() == torch.ones(4, 4).triu(1).bool().tolist()
    assert bool(mask[1, 0, :, 3].all())


@pytest.mark.parametrize(("rows", "count", "expected"), [(4, 2, 2), (3, 2, 1), (6, 4, 2), (1, 8, 1)])
def test_micro_batches_are_of_one_size(rows, count, expected):
    given = {"input_ids": torch.arange(rows * 2).reshape(rows, 2), "use": True}
    pieces = micro_batches(given, count)
    assert len(pieces) == expected
    assert torch.equal(torch.cat([piece["input_ids"] for piece in pieces]), given["input_ids"])
    assert all(piece["use"] for piece in pieces)


def test_batches_that_are_none():
    with pytest.raises(ValueError, match=r"different numbers of rows: {'a': 2, 'b': 3}"):
        micro_batches({"a": torch.ones(2), "b": torch.ones(3)}, 1)
    with pytest.raises(TypeError, match="custom_get_batch_function returned int"):
        supplied(lambda iterator, flag: 3, {})


@pytest.mark.parametrize(
    ("mask", "mean"),
    [
        ([1, 0, 1, 0], 3.0),
        ([0.1, 0.0, 0.0, 0.3], 6.5),  # weights whose sum is below 1
        ([0, 0, 0, 0], 0.0),
        ([False, True, False, False], 4.0),
    ],
)
def test_the_mean_of_what_counts(mask, mean):
    losses = torch.tensor([2.0, 4.0, 4.0, 8.0], dtype=torch.bfloat16)
    found = weighted_mean(losses, torch.tensor(mask))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(mean))
