"""Documents of packed batches that attend to each other are named when loader and model are prepared."""

import runpy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_train import (
    Accelerator,
    DataLoaderConfiguration,
    PackedDataset,
    PackingCollator,
)

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def decoder(use_cache, attention="sdpa"):
    config = transformers.LlamaConfig(**SIZES, intermediate_size=16, num_key_value_heads=2)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.config.use_cache = use_cache
    return model.eval()


def encoder(kind="BertForMaskedLM"):
    return getattr(transformers, kind)(transformers.BertConfig(**SIZES, intermediate_size=16)).eval()


def of_kind(name, **sizes):
    config = getattr(transformers, name)(**SIZES, intermediate_size=16, use_cache=False, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def gpt_oss():
    heads = {"head_dim": 8, "num_key_value_heads": 2}
    return of_kind("GptOssConfig", **heads, num_local_experts=2, num_experts_per_tok=1)


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
        first, second = (model(input_ids=each, position_ids=positions)[0][0, 5:] for each in (ids, other))
    return not torch.allclose(first, second, rtol=0, atol=1e-7)


def named(*items, **options):
    """The warnings of packed documents while these are prepared, one after the other."""
    accelerator = Accelerator(cpu=True, **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for item in items:
            accelerator.prepare(*item) if isinstance(item, tuple) else accelerator.prepare(item)
    return [str(each.message) for each in seen if "attend to each other" in str(each.message)]


CASES = [
    pytest.param(lambda: decoder(True), "use_cache = False", id="a decoder with a cache"),
    pytest.param(lambda: decoder(True, "eager"), "use_cache = False", id="eager"),
    pytest.param(lambda: decoder(False), None, id="a decoder without a cache"),
    pytest.param(gpt_oss, "without position_ids", id="a decoder whose mask knows no positions"),
    pytest.param(lambda: of_kind("OPTConfig", word_embed_proj_dim=16), "without position_ids", id="OPT"),
    pytest.param(lambda: of_kind("MixtralConfig", num_key_value_heads=2), None, id="a mixture of experts"),
    pytest.param(
        lambda: of_kind("Gemma3TextConfig", head_dim=8, num_key_value_heads=2), None, id="keys of a mapping"
    ),
    pytest.param(encoder, "flash_attention_2", id="an encoder"),
    pytest.param(lambda: encoder("BertModel"), "flash_attention_2", id="an encoder without a head"),
]


@pytest.mark.parametrize(("build", "remedy"), CASES)
def test_what_is_named_is_what_transformers_computes_across_documents(build, remedy):
    model = build()
    assert attends_across(model) == (remedy is not None)
    found = named((model, packed()))
    assert len(found) == (remedy is not None)
    if remedy is not None:
        assert found[0].startswith("PackingCollator puts several documents into one sequence")
        assert (
            type(model).__name__.removesuffix("ForCausalLM") in found[0]
        )  # the part that makes the mask, or all
        assert remedy in found[0]


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("loader_first", [False, True])
def test_prepared_one_after_the_other(loader_first, dispatch):
    items = [decoder(True), packed()]
    options = DataLoaderConfiguration(dispatch_batches=dispatch)
    assert len(named(*(items[::-1] if loader_first else items), dataloader_config=options)) == 1


def test_a_model_inside_another():
    assert "LlamaForCausalLM" in named((Inside(decoder(True)), packed()))[0]
    both = nn.ModuleList([decoder(False), decoder(True)])
    assert len(named((both, packed()))) == 1


def test_the_collator_of_transformers():
    assert (
        "DataCollatorWithFlattening"
        in named((decoder(True), packed(transformers.DataCollatorWithFlattening())))[0]
    )


def test_what_does_no_harm():
    loader = DataLoader([torch.arange(3, 15)] * 4, batch_size=2)
    assert not named((decoder(True), loader)), "nothing is packed"
    assert not named((decoder(True).requires_grad_(False), packed())), "a teacher, perhaps with other batches"
    checkpointing = decoder(True)
    checkpointing.gradient_checkpointing_enable()
    assert not named((checkpointing, packed())), "it trains without a cache"


@pytest.mark.parametrize(
    "edited", ["", "x = (\n" * 9, "    x = '''\n" * 3 + "else:\n" * 9, "  def f():\n g\n" * 9]
)
def test_a_model_whose_source_was_edited_while_it_runs(edited, tmp_path):
    file = tmp_path / "model.py"
    file.write_text(
        "import transformers\n\n\nclass Own(transformers.LlamaForCausalLM):\n"
        "    def forward(self, input_ids=None, position_ids=None):\n        return super().forward(input_ids)\n"
    )
    own = runpy.run_path(str(file))["Own"]
    file.write_text(edited)
    config = transformers.LlamaConfig(**SIZES, intermediate_size=16, num_key_value_heads=2, use_cache=False)
    assert named((own(config), packed())) == []


def called(batch, *, use_cache=True, evaluated=False, model=None, **options):
    """The warnings of packed documents in the first calls of a model without a known collate function."""
    model = decoder(use_cache) if model is None else model
    if evaluated:
        model.requires_grad_(False)
    prepared = Accelerator(cpu=True).prepare(model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            prepared(**batch, **options)
    return [str(each.message) for each in seen if "attend to each other" in str(each.message)]


def of_documents(*lengths):
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": positions + 3, "position_ids": positions}


def test_the_first_packed_batch_is_named():
    [text] = called(of_documents(5, 7))
    assert text.startswith(
        "A batch whose position_ids begin again puts several documents into one sequence, and LlamaForCausalLM with "
        "attn_implementation='sdpa' lets them attend to each other: it makes no mask for documents while config.use_"
        "cache is True"
    )
    assert attends_across(decoder(True))
    [text] = called(of_documents(5, 7), model=Inside(decoder(True)))
    [text] = called(of_documents(5, 7), model=encoder())
    assert "it is an encoder" in text


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (of_documents(12), {}),
        (of_documents(5, 7), {"use_cache": False}),
        (of_documents(5, 7), {"evaluated": True}),
        ({"input_ids": torch.arange(12)[None]}, {}),
        # Padding on the left, as of generate().
        ({**of_documents(2, 10), "attention_mask": torch.ones(1, 12)}, {}),
    ],
)
def test_other_batches_are_not_named(batch, options):
    assert not called(batch, **options)


def test_a_later_batch_is_named_and_then_none():
    model = Accelerator(cpu=True).prepare(decoder(True))
    model(**of_documents(12))
    with pytest.warns(UserWarning, match="attend to each other"):
        model(**of_documents(5, 7))
    assert not any(module._forward_pre_hooks for module in model.modules())
