"""Packed sequences against the samples by themselves."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from accel_train import (
    ArgumentTypeError,
    DataError,
    DataLoaderConfiguration,
    PackedDataset,
    PackingCollator,
    cu_seqlens_of,
)
from accel_train.data import prepare_data_loader
from testkit import worlds

MAX = 32


def texts(count=60):
    rng = np.random.RandomState(4)
    return [torch.from_numpy(rng.randint(1, 90, rng.randint(1, MAX + 1))) for _ in range(count)]


def packed(seed=0, window=None, count=60):
    samples = texts(count)
    return samples, PackedDataset(samples, lambda index: len(samples[index]), MAX, seed=seed, window=window)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("seed", [0, None])
def test_every_sample_is_in_one_pack(window, seed):
    samples, dataset = packed(seed, window)
    indices = [dataset.indices(pack) for pack in range(len(dataset))]
    assert sorted(index for pack in indices for index in pack) == list(range(len(samples)))
    for pack, members in enumerate(indices):
        assert sum(len(samples[index]) for index in members) <= MAX
        for sample, index in zip(dataset[pack], members, strict=True):
            assert sample is samples[index]
    assert dataset.fill == pytest.approx(sum(map(len, samples)) / (len(dataset) * MAX))
    assert dataset.indices(-1) == indices[-1]
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_rows_hold_samples_with_positions_and_boundaries():
    a, b, c = torch.tensor([5, 6, 7]), torch.tensor([8]), torch.tensor([9, 9])
    batch = PackingCollator(6, pad_token_id=1, cu_seqlens=True)([[a, b], [c]])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 1, 1], [9, 9, 1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, -100, -100], [-100, 9, -100, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 0, 1, 2, 3]]
    assert batch["sequence_ids"].tolist() == [[1, 1, 1, 2, 0, 0], [1, 1, 0, 0, 0, 0]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 4, 6, 8, 12]
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["max_seqlen"] == 4
    assert cu_seqlens_of(batch["position_ids"]).tolist() == batch["cu_seqlens"].tolist()


def test_labels_of_samples_are_kept():
    sample = {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}
    assert PackingCollator(4)([[sample]])["labels"].tolist() == [[-100, -100, 3, -100]]


def test_a_llama_computes_of_packs_what_it_computes_of_samples():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).double().eval()
    samples, dataset = packed(count=20)
    batch = PackingCollator(MAX)([dataset[pack] for pack in range(len(dataset))])
    same = batch["sequence_ids"][:, :, None] == batch["sequence_ids"][:, None, :]
    allowed = (same & torch.ones(MAX, MAX, dtype=torch.bool).tril())[:, None]
    logits = model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], attention_mask=allowed
    ).logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    )
    expected = torch.zeros((), dtype=torch.float64)
    items = 0
    for sample in samples:
        if len(sample) > 1:
            alone = model(input_ids=sample[None]).logits[0]
            expected += torch.nn.functional.cross_entropy(alone[:-1], sample[1:], reduction="sum")
            items += len(sample) - 1
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    assert int((batch["labels"] != -100).sum()) == items


def loader_of(ranks, rank, stateful, workers=0):
    _, dataset = packed()
    loader = DataLoader(
        dataset, batch_size=2, shuffle=True, collate_fn=PackingCollator(MAX), num_workers=workers
    )
    return prepare_data_loader(
        loader, num_processes=ranks, process_index=rank, use_stateful_dataloader=stateful
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_t5_an_epoch_of_packs_continues(workers):
    torch.manual_seed(1)
    whole = loader_of(2, 1, False, workers=workers)
    iterator = iter(whole)
    for _ in range(3):
        next(iterator)
    state = whole.state_dict()
    rest = [batch["input_ids"].tolist() for batch in iterator]
    fresh = loader_of(2, 1, True, workers=workers)
    fresh.load_state_dict(state)
    assert [batch["input_ids"].tolist() for batch in fresh] == rest


def dispatched():
    from accel_train import Accelerator

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    torch.manual_seed(1)
    loader = accelerator.prepare(
        DataLoader(packed()[1], batch_size=2, shuffle=True, collate_fn=PackingCollator(MAX))
    )
    return [accelerator.gather_for_metrics(batch["input_ids"]).tolist() for batch in loader]


def test_rank_0_can_read_packs_for_all():
    found = worlds.run(dispatched, 2)
    _, dataset = packed()
    whole = PackingCollator(MAX)([dataset[pack] for pack in range(len(dataset))])["input_ids"].tolist()
    for batches in found:
        assert sorted(row for batch in batches for row in batch) == sorted(whole)


def test_bad_samples_and_lengths_are_refused():
    with pytest.raises(DataError, match=r"Sample 0 has 40 tokens.*max_length=32"):
        PackedDataset([torch.zeros(40)], [40], MAX)
    with pytest.raises(DataError, match="2 lengths for a dataset of 1 samples"):
        PackedDataset([torch.zeros(1)], [1, 1], MAX)
    with pytest.raises(DataError, match="max_length=0"):
        PackedDataset([], [], 0)
    assert len(PackedDataset([], [], 5)) == 0
    with pytest.raises(DataError, match="has more than max_length=4 tokens"):
        PackingCollator(4)([[torch.zeros(3, dtype=torch.int64)] * 2])
    with pytest.raises(ArgumentTypeError, match=r"got torch.float32 of shape \(3,\)"):
        PackingCollator(4)([[torch.zeros(3)]])
    with pytest.raises(DataError, match=r"\(2,\) tokens and labels of shape \(1,\)"):
        PackingCollator(4)([[{"input_ids": [1, 2], "labels": [1]}]])
