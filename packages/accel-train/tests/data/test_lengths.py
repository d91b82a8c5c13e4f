"""Loaders over data of which ranks hold different amounts."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

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
            "The length of the dataset of loader 2 of this prepare() call is 8 on rank 0 and 6 on rank 1."
        )
        assert "pre_sharded=True" in text


def test_a_loader_that_is_prepared_alone_is_looked_at_like_others():
    for text in worlds.run(lengths, 2, "alone"):
        assert text.startswith("The length of the dataset of loader 1 ")


@pytest.mark.parametrize("kind", ["own", "sent"])
def test_data_that_is_not_shared_out_may_have_any_length(kind):
    assert worlds.run(lengths, 2, kind) == ["prepared"] * 2


def test_one_rank_has_nobody_to_compare_with():
    check_lengths(Ranks(), [DataLoader(TensorDataset(torch.arange(3)))])


class Unmeasured(Dataset):
    """Read by a batch sampler, so that nobody needs its length."""

    def __getitem__(self, index):
        return index

    def __len__(self):
        raise NotImplementedError


def others():
    from accel_train import Accelerator
    from accel_train.errors import DataError

    accelerator = Accelerator()
    rank = accelerator.process_index
    data = list(range(8))
    found = [[b.tolist() for b in accelerator.prepare(DataLoader(Unmeasured(), batch_sampler=[[0], [1, 2]]))]]
    for loader in (
        DataLoader(data, batch_size=2, sampler=list(range(4 + 2 * rank))),
        DataLoader(data, batch_size=2 + rank),
    ):
        try:
            accelerator.prepare(loader)
            found.append("prepared")
        except DataError as error:
            found.append(str(error))
    return found


def test_samplers_and_batches_are_compared_too():
    for rank, (read, sampler, size) in enumerate(worlds.run(others, 2)):
        assert read == [[[0]], [[1, 2]]][rank]
        assert sampler.startswith(
            "The length of the sampler of loader 1 of this prepare() call is 4 on rank 0 and 6 "
        )
        assert size.startswith(
            "The batch size of loader 1 of this prepare() call is 2 on rank 0 and 3 on rank 1."
        )
