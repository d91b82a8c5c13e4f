"""Documents of packed batches that would attend to each other are refused before anything is prepared."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_train import (
    Accelerator,
    DataLoaderConfiguration,
    PackedDataset,
    PackingCollator,
    PrepareError,
)

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def decoder(use_cache, attention="sdpa"):
    config = transformers.LlamaConfig(**SIZES, intermediate_size=16, num_key_value_heads=2)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.config.use_cache = use_cache
    return model.eval()


def encoder():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, intermediate_size=16)).eval()


class Inside(nn.Module):
    """A model of transformers in one of the script."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, **batch):
        return self.inner(**batch)


def packed(collate=None):
    texts = [torch.arange(1, 4 + n % 5) for n in range(20)]
    data = PackedDataset(texts, [len(text) for text in texts], max_length=16)
    return DataLoader(data, batch_size=2, collate_fn=collate or PackingCollator(16))


def attends_across(model):
    """Whether a document changes what a model computes for the one behind it."""
    ids = torch.arange(3, 15)[None]
    other = ids.clone()
    other[0, :5] = 40
    positions = torch.tensor([[*range(5), *range(7)]])
    with torch.no_grad():
        first, second = (model(input_ids=each, position_ids=positions).logits[0, 5:] for each in (ids, other))
    return not torch.allclose(first, second, rtol=0, atol=1e-7)


CASES = [
    pytest.param(lambda: decoder(True), "use_cache = False", id="a decoder with a cache"),
    pytest.param(lambda: decoder(True, "eager"), "use_cache = False", id="eager"),
    pytest.param(lambda: decoder(False), None, id="a decoder without a cache"),
    pytest.param(encoder, "flash_attention_2", id="an encoder"),
]


@pytest.mark.parametrize(("build", "remedy"), CASES)
def test_what_is_refused_is_what_transformers_computes_across_documents(build, remedy):
    model = build()
    assert attends_across(model) == (remedy is not None)
    if remedy is None:
        Accelerator(cpu=True).prepare(model, packed())
        return
    before = vars(model).copy()
    with pytest.raises(PrepareError, match=f"PackingCollator.*{type(model).__name__}.*{remedy}"):
        Accelerator(cpu=True).prepare(model, packed())
    assert vars(model).keys() == before.keys()


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("loader_first", [False, True])
def test_prepared_one_after_the_other(loader_first, dispatch):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    items = [decoder(True), packed()]
    first, second = items[::-1] if loader_first else items
    accelerator.prepare(first)
    with pytest.raises(PrepareError, match="use_cache = False"):
        accelerator.prepare(second)


def test_a_model_inside_another():
    with pytest.raises(PrepareError, match="LlamaForCausalLM"):
        Accelerator(cpu=True).prepare(Inside(decoder(True)), packed())


def test_the_collator_of_transformers():
    with pytest.raises(PrepareError, match="DataCollatorWithFlattening"):
        Accelerator(cpu=True).prepare(decoder(True), packed(transformers.DataCollatorWithFlattening()))


def test_without_packing_a_cache_does_no_harm():
    loader = DataLoader([torch.arange(3, 15)] * 4, batch_size=2)
    Accelerator(cpu=True).prepare(decoder(True), loader)
