"""Which numbers and inputs a timeline is traced with; bytes by hand."""

import pytest
import torch
from torch import nn

from accel_bigmodel import EstimateError
from accel_bigmodel.planning.timelines import text_inputs, timelines_of

pytest.importorskip("transformers", reason="the oldest versions are tested without it; hatch run test has it")
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    T5Model,
    ViTConfig,
    ViTModel,
)


class Seen(nn.Module):
    """A layer that notes in which dtypes it computes."""

    def __init__(self, notes):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.notes = notes

    def forward(self, x):
        out = self.linear(x)
        self.notes.append((self.linear.weight.dtype, self.frozen.weight.dtype, out.dtype))
        return self.frozen(out) if self.frozen.weight.dtype == out.dtype else out


def noted(name, frozen=None):
    notes = []
    timelines_of(_Shared(notes), lambda n: {"x": torch.empty(n, 4)}, frozen=frozen)(name, False)
    assert notes
    (found,) = set(notes)
    return found


class _Shared(nn.Module):
    def __init__(self, notes):
        super().__init__()
        self.inner = Seen(_Notes(notes))

    def forward(self, x):
        return self.inner(x.to(self.inner.linear.weight.dtype))


class _Notes:
    """A list that copies of the model share."""

    def __init__(self, notes):
        self.notes = notes

    def append(self, note):
        self.notes.append(note)

    def __deepcopy__(self, memo):
        return self


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("name", "frozen", "weights", "kept", "computed"),
    [
        ("float32", None, F32, F32, F32),
        ("float32", BF16, F32, BF16, F32),
        ("bfloat16", None, BF16, BF16, BF16),
        ("bfloat16", F32, BF16, BF16, BF16),  # frozen weights are gathered in the dtype that computes
        ("float32 autocast bfloat16", None, F32, F32, BF16),
        ("float32 autocast float16", None, F32, F32, F16),
        ("float16 autocast", None, F16, F16, F16),
    ],
)
def test_the_numbers_of_a_name(name, frozen, weights, kept, computed):
    assert noted(name, frozen) == (weights, kept, computed)


def test_each_timeline_is_traced_once():
    traced = []

    def inputs(samples):
        traced.append(samples)
        return {"input": torch.empty(samples, 3)}

    timelines = timelines_of(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), inputs)
    assert traced == []  # nothing before it is asked for
    first = timelines("float32", False)
    calls = len(traced)
    assert calls > 0
    assert timelines("float32", False) is first
    assert len(traced) == calls
    assert timelines("bfloat16", False) is not first
    assert len(traced) == 2 * calls
    assert timelines("float32", True) is not timelines("float32", False)


@pytest.mark.parametrize(("name", "size"), [("float32", 4), ("bfloat16", 2)])
def test_the_forward_keeps_the_outputs_of_both_layers(name, size):
    model = nn.Sequential(nn.Embedding(10, 64), nn.Linear(64, 64))
    timeline = timelines_of(model, lambda n: {"input": torch.zeros(n, dtype=torch.long, device="meta")})
    forward, backward = timeline(name, False).phases
    assert (forward.backward, forward.per_sample, forward.gradients) == (False, 2 * 64 * size, 0)
    assert (backward.backward, backward.gradients) == (True, 10 * 64 + 64 * 64 + 64)


@pytest.fixture(scope="module")
def tiny():
    bert = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = {**bert, "num_key_value_heads": 2, "vocab_size": 9}
    t5 = {
        "d_model": 8,
        "d_ff": 8,
        "d_kv": 4,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": 9,
        "decoder_start_token_id": 0,
    }
    with torch.device("meta"):
        return {
            "causal": LlamaForCausalLM(LlamaConfig(**llama)),
            "masked": BertForMaskedLM(BertConfig(**bert, vocab_size=9)),
            "headless": BertModel(BertConfig(**bert, vocab_size=9)),
            "seq2seq": T5ForConditionalGeneration(T5Config(**t5)),
            "encoder-decoder": T5Model(T5Config(**t5)),
            "images": ViTModel(ViTConfig(**bert)),
        }


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("causal", ["input_ids", "labels"]),
        ("masked", ["input_ids", "labels"]),
        ("headless", ["input_ids"]),
        ("seq2seq", ["input_ids", "labels"]),
        ("encoder-decoder", ["decoder_input_ids", "input_ids"]),
    ],
)
def test_inputs_of_text_models_run(tiny, kind, names):
    batch = text_inputs(tiny[kind], 7)(3)
    assert sorted(batch) == names
    for ids in batch.values():
        assert (tuple(ids.shape), ids.dtype, ids.device.type) == ((3, 7), torch.long, "meta")
    assert tiny[kind](**batch)[0].is_meta


@pytest.mark.parametrize(
    ("kind", "told"),
    [("images", "ViTModel does not take tokens .*'pixel_values'"), ("plain", "Linear does not .*None")],
)
def test_models_that_take_no_tokens(tiny, kind, told):
    model = nn.Linear(1, 1) if kind == "plain" else tiny[kind]
    with pytest.raises(EstimateError, match=told):
        text_inputs(model, 7)
