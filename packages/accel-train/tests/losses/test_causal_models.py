"""Language models of transformers with a chunked loss, against the same models without."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from accel_train import chunked_cross_entropy, use_chunked_loss
from accel_train.errors import LossError, OptionError, PrepareError
from accel_train.losses.pending_logits import PendingLogits
from testkit.float64 import Float64

transformers = pytest.importorskip("transformers")

VOCABULARY = 37
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True}
MODELS = {
    "Llama": SIZES,
    "Qwen3": {**SIZES, "head_dim": 8},
    "Gemma2": {**SIZES, "head_dim": 8, "final_logit_softcapping": 3.0},
    "Granite": {**SIZES, "logits_scaling": 4.0},
    "Cohere": {**SIZES, "logit_scale": 0.25},
    "Mixtral": {**SIZES, **EXPERTS},
    "Phi": {**SIZES, "num_key_value_heads": 2},  # its head has a bias
}
TIED = ("Gemma2", "Cohere")


def build(kind, dtype=torch.float64):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**MODELS[kind])
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    if kind == "Mixtral":
        model.set_experts_implementation("eager")  # the others compute no float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype)


def exactly(model):
    """A context in which a model whose parameters are in float64 computes in float64 throughout."""
    exact = next(model.parameters()).dtype is torch.float64
    return Float64() if exact else contextlib.nullcontext()


def forward(model, *args, **inputs):
    """What a model returns, computed exactly."""
    with exactly(model):
        return model(*args, **inputs)


def batch(rows=2, length=7):
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def results(model, **inputs):
    """Loss and gradients by name, and the outputs."""
    model.zero_grad()
    outputs = forward(model, **inputs)
    outputs.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return outputs.loss.detach(), grads, outputs


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_and_gradients_are_those_of_the_model(kind, dtype):
    model = build(kind, dtype)
    assert kind not in TIED or model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert kind != "Phi" or model.lm_head.bias is not None
    bound = 1e-12 if dtype is torch.float64 else 2e-5
    shifted = F.pad(batch()["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    cases = {
        "labels": {},
        "items": {"num_items_in_batch": torch.tensor(5)},
        "number": {"num_items_in_batch": 5},
        "shifted": {"shift_labels": shifted},
        "ignored": {"ignore_index": int(batch()["labels"][1, 2])},
    }
    for name, options in cases.items():
        inputs = batch()
        if name == "ignored":
            inputs["labels"][inputs["labels"] < 0] = options["ignore_index"]
        wanted = results(model, **inputs, **options)
        with use_chunked_loss(model, chunk_size=3):
            found = results(model, **inputs, **options)
            assert type(found[2].logits) is PendingLogits
        assert found[0].dtype == wanted[0].dtype
        torch.testing.assert_close(found[0], wanted[0], rtol=bound, atol=bound)
        assert found[1].keys() == wanted[1].keys()
        for key, value in wanted[1].items():
            torch.testing.assert_close(found[1][key], value, rtol=bound, atol=bound, msg=f"{name}: {key}")
        if kind == "Mixtral":
            assert found[2].aux_loss > 0
            torch.testing.assert_close(found[2].aux_loss, wanted[2].aux_loss, rtol=bound, atol=bound)


@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(kind, dtype):
    """As close to float64 as the model itself is."""
    model = build(kind, torch.float32)
    exact = results(build(kind), **batch())

    def under_autocast():
        with torch.autocast("cpu", dtype):
            outputs = forward(model, **batch())
        (2.0**8 * outputs.loss).backward()
        grads = [p.grad.double() / 2**8 for p in model.parameters()]
        model.zero_grad()
        right = exact[1].values()
        return outputs.loss, sum(
            ((a - b).norm() / b.norm()).item() for a, b in zip(grads, right, strict=True)
        )

    wanted, theirs = under_autocast()
    with use_chunked_loss(model, chunk_size=3):
        found, ours = under_autocast()
    assert found.dtype == wanted.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert ours < 1.1 * theirs


def test_logits_of_a_training_forward_are_refused():
    model = build("Gemma2")
    wanted = forward(model, **batch())
    with use_chunked_loss(model):
        logits = forward(model, **batch()).logits
        assert (logits.shape, logits.dtype) == (wanted.logits.shape, torch.float64)
        assert (logits.size(-1), logits.device.type) == (VOCABULARY, "cpu")
        assert repr(logits) == f"PendingLogits(shape=(2, 7, {VOCABULARY}), dtype=torch.float64)"
        for use, name in (
            (lambda: logits.argmax(-1), "'argmax'"),
            (lambda: torch.softmax(logits, -1), "'softmax'"),
            (lambda: wanted.logits - logits, "'sub'"),
            (lambda: -logits, "'__neg__'"),
            (lambda: list(logits), "'__iter__'"),
            (lambda: F.cross_entropy(logits[0], batch()["labels"][0]), "a loss after the model's forward"),
        ):
            with pytest.raises(
                LossError, match=rf"used for {name}.*under torch\.no_grad\(\) or without labels"
            ):
                use()
        with torch.no_grad():
            torch.testing.assert_close(forward(model, **batch()).logits, wanted.logits)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda logits, labels: F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1)),
        lambda logits, labels: nn.CrossEntropyLoss(label_smoothing=0.1)(
            logits.view(-1, VOCABULARY), labels.view(-1)
        ),
        lambda logits, labels: F.cross_entropy(
            logits[..., :-1, :].contiguous().view(-1, logits.size(-1)),
            labels[..., 1:].reshape(-1),
            reduction="sum",
        ),
        lambda logits, labels: F.cross_entropy(
            logits[:, 1:].reshape(-1, VOCABULARY).float(), labels[:, 1:].flatten()
        ),
        lambda logits, labels: F.cross_entropy(logits[labels != -100], labels[labels != -100]),
        lambda logits, labels: F.cross_entropy(2 * torch.tanh(logits / 3)[0], labels[0]),
        lambda logits, labels: F.cross_entropy(logits[-1].to(torch.float32).tanh() * 3, labels[-1]),
    ],
)
def test_losses_that_are_computed_in_chunks(loss_of):
    check_loss_function(loss_of)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


def in_place(logits, labels):
    logits[..., 0] = 0
    return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


@pytest.mark.parametrize(
    ("loss_of", "used_for"),
    [
        (in_place, "'__setitem__'"),
        (
            lambda logits, labels: F.cross_entropy(
                logits.view(-1, VOCABULARY), labels.view(-1), reduction="none"
            ),
            "reduction='none'",
        ),
        (lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels), "'transpose'"),
        (lambda logits, labels: logits[..., 1:], "a part of the vocabulary"),
        (lambda logits, labels: logits[:, :, 1], "a part of the vocabulary"),
        (lambda logits, labels: logits.view(-1), "the shape .*, which cuts the vocabulary"),
        (lambda logits, labels: logits * torch.arange(VOCABULARY), "an operation with another tensor"),
        (
            lambda logits, labels: F.cross_entropy(
                logits.view(-1, VOCABULARY), labels.view(-1), weight=torch.arange(VOCABULARY).double()
            ),
            "a cross entropy that is not one of a token for each row",
        ),
        (lambda logits, labels: torch.stack([logits, logits]).std(), "'stack'"),
        (lambda logits, labels: Square.apply(logits), "'square'"),
    ],
)
def test_losses_that_need_all_logits_are_refused(loss_of, used_for):
    model = build("Llama")
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: loss_of(logits, labels)
    with use_chunked_loss(model), pytest.raises((LossError, OptionError), match=used_for):
        results(model, **batch())


def check_loss_function(loss_of):
    model = build("Llama")
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: loss_of(logits, labels)
    wanted = results(model, **batch())
    with use_chunked_loss(model, chunk_size=3):
        found = results(model, **batch())
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=1e-12)
    for key, value in wanted[1].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-12, atol=1e-12, msg=key)


def test_without_labels_nothing_changes():
    model = build("Llama").eval()
    ids = batch()["input_ids"]
    wanted, said = model(ids).logits, model.generate(ids, max_new_tokens=3, do_sample=False)
    with use_chunked_loss(model):
        found = model(ids).logits
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert model.generate(ids, max_new_tokens=3, do_sample=False).tolist() == said.tolist()
        assert type(model.lm_head(torch.zeros(1, 16).double())) is torch.Tensor


def test_evaluation_computes_all_logits():
    model = build("Llama").eval()
    wanted = forward(model, **batch())
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, use_chunked_loss(model, chunk_size=3):
            found = forward(model, **batch())
            torch.testing.assert_close(
                (found.loss, found.logits), (wanted.loss.detach(), wanted.logits.detach())
            )


def test_labels_by_position_and_no_return_dict():
    model = build("Llama")
    ids, labels = batch().values()
    wanted = forward(model, input_ids=ids, labels=labels).loss
    names = list(inspect.signature(model.forward).parameters)
    with use_chunked_loss(model):
        given = [None] * names.index("labels")
        given[0] = ids
        loss, logits, *_ = forward(model, *given, labels, return_dict=False)
    torch.testing.assert_close(loss, wanted)
    assert type(logits) is PendingLogits


def test_gradient_checkpointing_and_kept_logits():
    model = build("Llama", torch.float32)  # backward computes blocks again, outside of Float64
    model.gradient_checkpointing_enable()
    wanted = results(model, **batch())
    shorter = {"input_ids": batch()["input_ids"], "labels": batch()["labels"][:, 3:], "logits_to_keep": 4}
    kept = results(model, **shorter)
    with use_chunked_loss(model):
        for right, inputs in ((wanted, batch()), (kept, shorter)):
            found = results(model, **inputs)
            torch.testing.assert_close(found[:2], right[:2], rtol=2e-5, atol=2e-5)


def test_copies_and_pickles_have_their_own():
    model = build("Llama")
    use_chunked_loss(model, chunk_size=3)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.lm_head.weight.mul_(3)
        plain = build("Llama")
        plain.load_state_dict(other.state_dict())
        assert type(forward(other, **batch()).logits) is PendingLogits
        found, wanted = results(other, **batch()), results(plain, **batch())
        torch.testing.assert_close(found[:2], wanted[:2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(forward(model, **batch()).loss, forward(build("Llama"), **batch()).loss)


def test_remove_gives_the_model_back():
    model = build("Llama")
    before = set(vars(model.lm_head))
    handle = use_chunked_loss(model)
    with pytest.raises(OptionError, match="already"):
        use_chunked_loss(model)
    handle.remove()
    assert set(vars(model.lm_head)) == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert type(forward(model, **batch()).logits) is torch.Tensor
    handle.remove()


def test_a_failed_forward_leaves_the_head_alone():
    model = build("Llama")
    with use_chunked_loss(model):
        with pytest.raises(OptionError, match="There are 7 labels"):
            model(
                input_ids=batch()["input_ids"],
                labels=batch()["labels"][:1],
                num_items_in_batch=1,
                shift_labels=None,
            )
        assert type(model.lm_head(torch.zeros(1, 16).double())) is torch.Tensor


def test_a_weight_that_is_taken_away_after_the_head_is_refused():
    model = build("Llama")

    def take_away(head, args, result):
        head.weight.data = torch.empty(0, dtype=head.weight.dtype)

    with use_chunked_loss(model):
        model.lm_head.register_forward_hook(take_away)
        with pytest.raises(LossError, match="no longer whole"):
            model(**batch())


def test_parameters_of_deepspeed_zero_3_are_refused():
    model = build("Llama")
    handle = use_chunked_loss(model)
    model.lm_head.weight.ds_id = 0  # as its engine marks parameters that it divides
    with pytest.raises(LossError, match="ZeRO stage 3"):
        model(**batch())
    assert type(model(batch()["input_ids"]).logits) is torch.Tensor
    handle.remove()
    with pytest.raises(LossError, match="ZeRO stage 3"):
        use_chunked_loss(model)


def test_a_weight_on_another_device_is_refused():
    """As after a forward of a model that is offloaded to the host."""
    hidden = torch.empty(7, 16, dtype=torch.float64, device="meta")
    weight = build("Llama").lm_head.weight
    logits = PendingLogits.of(hidden, weight, None, chunk_size=3, in_forward=lambda: True)
    with pytest.raises(LossError, match="no longer whole"):
        F.cross_entropy(logits, torch.zeros(7, dtype=torch.int64, device="meta"))


def test_a_head_with_an_adapter_is_refused():
    """A product of another weight is added to the logits."""
    model = build("Llama")
    adapter = nn.Linear(16, VOCABULARY).double()
    head = model.lm_head
    forward_of_head = head.forward
    head.forward = lambda hidden: forward_of_head(hidden) + adapter(hidden)
    with use_chunked_loss(model), pytest.raises(LossError, match="used for '__add__'"):
        results(model, **batch())


def test_a_model_on_the_meta_device():
    """Estimates of memory run models there."""
    model = build("Gemma2", torch.float32).to("meta")
    inputs = {name: value.to("meta") for name, value in batch().items()}
    with use_chunked_loss(model, chunk_size=3):
        loss, grads, _ = results(model, **inputs)
    assert loss.shape == ()
    assert grads.keys() == dict(model.named_parameters()).keys()


def test_models_and_heads_that_are_refused():
    class Own(nn.Module):
        def forward(self, ids):
            return ids

    with pytest.raises(PrepareError, match="no module with a head"):
        use_chunked_loss(Own())
    with pytest.raises(OptionError, match="chunk_size=0"):
        use_chunked_loss(build("Llama"), chunk_size=0)
    model = build("Llama")
    with use_chunked_loss(model):
        model.resize_token_embeddings(VOCABULARY + 3)
        with pytest.raises(LossError, match="another module"):
            forward(model, **batch())
    model = build("Llama")
    model.lm_head.forward = lambda hidden: hidden @ model.lm_head.weight.T
    with use_chunked_loss(model), pytest.raises(LossError, match=r"F\.linear"):
        forward(model, **batch())


def test_a_padded_vocabulary():
    model = build("Llama")
    model.resize_token_embeddings(pad_to_multiple_of=16)
    assert model.lm_head.out_features == 48
    wanted = results(model, **batch())
    with use_chunked_loss(model, chunk_size=3):
        torch.testing.assert_close(results(model, **batch())[:2], wanted[:2], rtol=1e-12, atol=1e-12)


def test_an_encoder_and_decoder():
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=2,
    )
    model = transformers.T5ForConditionalGeneration(config).double().eval()
    wanted = results(model, **batch())
    with use_chunked_loss(model, chunk_size=3):
        found = results(model, **batch())
        assert type(found[2].logits) is PendingLogits
    torch.testing.assert_close(found[:2], wanted[:2], rtol=1e-12, atol=1e-12)


def test_compiled_blocks():
    from accel_train import TorchDynamoPlugin
    from accel_train.setup.compile import compile_model

    model = build("Llama")
    wanted = results(model, **batch())
    with use_chunked_loss(model, chunk_size=3):
        compiled = compile_model(model, TorchDynamoPlugin(backend="eager", use_regional_compilation=True))
        found = results(compiled, **batch())
        assert type(found[2].logits) is PendingLogits
    torch.testing.assert_close(found[:2], wanted[:2], rtol=1e-12, atol=1e-12)


def test_a_model_that_is_compiled_whole_is_refused():
    model = build("Llama")
    use_chunked_loss(model)
    with pytest.raises(LossError, match="use_regional_compilation"):
        torch.compile(model, backend="eager")(**batch())
    with pytest.raises(OptionError, match="use_regional_compilation"):
        use_chunked_loss(torch.compile(build("Llama"), backend="eager"))


def test_the_function_in_a_model_of_its_own():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(16, VOCABULARY).double()

        def forward(self, hidden, labels):
            return chunked_cross_entropy(hidden, self.head.weight, labels, bias=self.head.bias, chunk_size=3)

    model = Own()
    hidden = torch.randn(2, 7, 16).double()
    torch.testing.assert_close(
        model(hidden, batch()["labels"]),
        F.cross_entropy(model.head(hidden).flatten(0, 1), batch()["labels"].flatten()),
    )
