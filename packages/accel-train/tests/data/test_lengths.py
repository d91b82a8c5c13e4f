"""Loaders over data of which ranks hold different amounts."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_train.data.lengths import check_lengths
from accel_train.ranks import Ranks
from testkit import worlds


def lengths(kind):
    from accel_train import Accelerator, DataLoaderConfiguration
    from accel_train.errors import DataError

    options = {"pre_sharded": True} if kind == "own" else {}
    if kind == "sent":
        options = {"dispatch_batches": True}
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    same = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    other = DataLoader(TensorDataset(torch.arange(8 - 2 * accelerator.process_index)), batch_size=2)
    try:
        if kind == "alone":
            accelerator.prepare_data_loader(other)
        accelerator.prepare(same, other)
    except DataError as error:
        return str(error)
    return "prepared"


def test_data_of_different_lengths_is_named_on_all_ranks():
    for text in worlds.run(lengths, 2, "shared"):
        assert text.startswith(
            "The dataset of loader 2 of this prepare() call has 8 samples on rank 0 and 6 on rank 1."
        )
        assert "pre_sharded=True" in text


def test_a_loader_that_is_prepared_alone_is_looked_at_like_others():
    for text in worlds.run(lengths, 2, "alone"):
        assert text.startswith("The dataset of loader 1 ")


@pytest.mark.parametrize("kind", ["own", "sent"])
def test_data_that_is_not_shared_out_may_have_any_length(kind):
    assert worlds.run(lengths, 2, kind) == ["prepared"] * 2


def test_one_rank_has_nobody_to_compare_with():
    check_lengths(Ranks(), [DataLoader(TensorDataset(torch.arange(3)))])
