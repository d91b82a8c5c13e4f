"""Losses, their gradients and refusals of a call, against plain PyTorch. Needs no Megatron-core.

What Megatron-core would compute is stood in for: the schedule by a loop over micro-batches, and the functions over the
vocabulary by those of PyTorch, which on one rank do the same.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from accel_train import MegatronLMPlugin
from accel_train.errors import AccumulationError, ArgumentTypeError, DataError
from accel_train.strategies.megatron.build import Built
from accel_train.strategies.megatron.engine import MegatronEngine
from accel_train.strategies.megatron.layout import Dims
from accel_train.strategies.outputs import EngineOutput

VOCABULARY, PADDED = 6, 8
GROUPS = SimpleNamespace(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, cp_size=1, dp_size=1, dp_group=None)


class Own(nn.Module):
    """Takes and returns what Megatron's models do: logits, or with labels the loss of every position."""

    def __init__(self, size=VOCABULARY):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(size, 3)
        self.head = nn.Linear(3, size)

    def forward(self, tokens, positions, attention_mask, labels=None):
        logits = self.head(self.table(tokens))
        if labels is None:
            return logits
        return functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def made(chunk=None, architecture=None, trained=True, groups=GROUPS, **options):
    chunk = chunk or Own()
    built = Built(chunk, "its own", architecture, {}, Dims(0, 1, VOCABULARY, 0, 0, 0))
    plugin = MegatronLMPlugin(custom_model_provider_function=None if architecture else Own, **options)
    return chunk, MegatronEngine(chunk, built, groups, plugin, nn.Linear(1, 1), trained)


def batch():
    """Four sequences, of which the first two have three labels to predict and the others ten."""
    tokens = torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, 2:], labels[1, 3:] = -100, -100
    return {"input_ids": tokens, "labels": labels}


def expected(model, rows, reduction="mean"):
    """As transformers computes it: position n predicts label n + 1."""
    tokens, labels = (value[rows] for value in batch().values())
    logits = model(tokens, None, None)[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture
def schedule(monkeypatch):
    """Megatron's schedule without stages; its calls."""
    calls = []

    def run(*, forward_step_func, data_iterator, model, num_microbatches, forward_only, **sizes):
        calls.append((num_microbatches, forward_only, sizes))
        results = []
        for _ in range(num_microbatches):
            output, loss_of = forward_step_func(data_iterator, model[0])
            loss, found = loss_of(output)
            if not forward_only:
                (loss / num_microbatches).backward()
            results.append(found)
        return results

    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    module = SimpleNamespace(get_forward_backward_func=lambda: run)
    monkeypatch.setitem(sys.modules, "megatron.core.pipeline_parallel", module)
    return calls


def test_one_micro_batch_is_an_ordinary_forward():
    chunk, engine = made()
    begun = []
    engine.before_backward = lambda: begun.append(1) or True
    out = engine(**batch())
    assert list(out) == ["loss"]
    plain = Own()
    loss = expected(plain, slice(None))
    torch.testing.assert_close(out.loss, loss)
    (out.loss * 3).backward()
    (loss * 3).backward()
    torch.testing.assert_close(gradients(chunk), gradients(plain))
    with torch.no_grad():
        engine(**batch())
    engine.eval()(**batch())
    assert len(begun) == 1, "only where gradients may follow"


def test_without_labels_there_are_logits():
    chunk, engine = made()
    out = engine(input_ids=batch()["input_ids"], use_cache=False, return_dict=True, labels=None)
    assert list(out) == ["logits"]
    torch.testing.assert_close(out.logits, chunk(batch()["input_ids"], None, None))


def test_a_schedule_computes_the_mean_over_micro_batches_and_its_gradients(schedule):
    chunk, engine = made(num_micro_batches=2)
    out = engine(**batch())
    assert schedule == [(2, False, {"seq_length": 6, "micro_batch_size": 2})]
    plain = Own()
    loss = (expected(plain, slice(0, 2)) + expected(plain, slice(2, 4))) / 2
    loss.backward()
    torch.testing.assert_close(out.loss, loss)
    torch.testing.assert_close(gradients(chunk), gradients(plain))
    out.loss.backward()
    torch.testing.assert_close(gradients(chunk), gradients(plain), msg="backward accounts, and adds nothing")


def test_a_mean_over_tokens_is_that_of_the_whole_batch(schedule, monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: None)  # of one rank
    chunk, engine = made(num_micro_batches=2, calculate_per_token_loss=True)
    engine.loss_factor = 0.5
    out = engine(**batch())
    plain = Own()
    loss = expected(plain, slice(None))
    (loss * 0.5).backward()
    torch.testing.assert_close(out.loss, loss)
    torch.testing.assert_close(gradients(chunk), gradients(plain))
    differs = (expected(plain, slice(0, 2)) + expected(plain, slice(2, 4))) / 2
    assert not torch.allclose(loss, differs), "else this would tell nothing"


@pytest.mark.parametrize("per_token", [False, True])
def test_a_batch_of_which_no_token_counts_changes_nothing(schedule, monkeypatch, per_token):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: None)  # of one rank
    chunk, engine = made(num_micro_batches=2, calculate_per_token_loss=per_token)
    out = engine(input_ids=batch()["input_ids"], labels=torch.full((4, 6), -100))
    assert out.loss.item() == 0
    assert all(bool((gradient == 0).all()) for gradient in gradients(chunk).values())


def test_an_evaluation_runs_the_schedule_forward(schedule):
    chunk, engine = made(num_micro_batches=2, trained=False)
    out = engine(input_ids=batch()["input_ids"])
    torch.testing.assert_close(out.logits, chunk(batch()["input_ids"], None, None))
    engine.loss_factor = 7.0  # is of training
    torch.testing.assert_close(
        engine(**batch()).loss, (expected(chunk, slice(0, 2)) + expected(chunk, slice(2, 4))) / 2
    )
    assert [forward_only for _, forward_only, _ in schedule] == [True, True]
    assert all(gradient is None for gradient in gradients(chunk).values())


def test_the_first_loss_of_a_window_may_be_multiplied(schedule):
    _, engine = made(num_micro_batches=2)
    scaled = []
    engine.scale = scaled.append
    (engine(**batch()).loss * 0.25).backward()
    assert scaled == [0.25], "gradients were computed for the loss itself"
    (engine(**batch()).loss * 0.25).backward()
    assert scaled == [0.25], "the next call computes them for this factor"


def test_a_later_loss_of_a_window_may_not(schedule):
    _, engine = made(num_micro_batches=2)
    scaled, firsts = [], iter([True, False, False])
    engine.scale, engine.before_backward = scaled.append, lambda: next(firsts)
    for _ in range(2):
        engine(**batch()).loss.backward()
    with pytest.raises(AccumulationError, match=r"multiplied by 0\.5 after .*custom_loss_function"):
        (engine(**batch()).loss * 0.5).backward()
    assert scaled == []


def test_the_scripts_own_loss():
    given = []

    def loss(mask, losses):
        given.append((mask, losses))
        return (losses * mask).sum() * 2, "what is reported"

    chunk, engine = made(custom_loss_function=loss)
    torch.testing.assert_close(engine(**batch()).loss, expected(chunk, slice(None), "sum") * 2)
    [(mask, losses)] = given
    assert mask.sum(1).tolist() == [1, 2, 5, 5], "labels after the first of each sequence"
    assert losses.shape == (4, 6)


@pytest.mark.parametrize("returned", [False, True])
def test_padding_of_the_vocabulary_has_no_share(monkeypatch, returned):
    def in_place(logits, labels):
        losses = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        logits.data.zero_()  # as Megatron's does
        return losses

    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    module = SimpleNamespace(
        vocab_parallel_cross_entropy=in_place, gather_from_tensor_model_parallel_region=lambda logits: logits
    )
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel", module)
    chunk = Own(PADDED)
    with torch.no_grad():
        chunk.head.bias[VOCABULARY:] = 50.0  # would win everywhere
    _, engine = made(chunk, SimpleNamespace(eod_token=None), return_logits=returned)

    def plain(*arguments):
        return chunk(*arguments)[..., :VOCABULARY]

    out = engine(**batch())
    torch.testing.assert_close(out.loss, expected(plain, slice(None)))
    if returned:
        torch.testing.assert_close(out.logits, plain(batch()["input_ids"], None, None))
    else:
        assert out.logits is None
    out.loss.backward()
    assert chunk.head.bias.grad[VOCABULARY:].tolist() == [0, 0]
    assert chunk.head.bias.grad[:VOCABULARY].abs().min() > 0


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"pixel_values": torch.ones(4, 1)},
            ArgumentTypeError,
            r"pixel_values=.*they take attention_mask, input",
        ),
        ({"input_ids": None}, ArgumentTypeError, r"without input_ids.*model\(\*\*batch\)"),
        ({"input_ids": torch.ones(4, 5, dtype=torch.long)}, DataError, "of 5 tokens, but seq_length is 6"),
        ({"labels": torch.ones(3, 6, dtype=torch.long)}, DataError, "numbers of rows.*'labels': 3"),
        (
            {"labels": None},
            ArgumentTypeError,
            r"without labels, and with pp_degree=1 and num_micro_batches=2",
        ),
    ],
)
def test_what_a_call_cannot_take_is_refused_before_anything_is_computed(schedule, given, error, message):
    _, engine = made(num_micro_batches=2, seq_length=6)
    begun = []
    engine.before_backward = lambda: begun.append(1) or True
    with pytest.raises(error, match=message):
        engine(**{**batch(), **given})
    assert (begun, schedule) == ([], [])


def test_what_a_script_asks_of_the_engine():
    chunk, engine = made()
    assert engine.config == "its own"
    engine.given.config = "the model's"
    assert engine.config == "the model's"
    assert [id(p) for p in engine.parameters()] == [id(p) for p in chunk.parameters()], (
        "none of the given model"
    )


def test_outputs_are_those_of_transformers():
    loss, logits = torch.ones(()), torch.zeros(2)
    both = EngineOutput(loss, logits)
    assert both.loss is both["loss"] is both[0] is loss
    assert both.logits is both["logits"] is both[-1] is logits
    assert both[:1] == (loss,)
    alone = EngineOutput(None, logits)
    assert (alone.loss, alone[0], list(alone)) == (None, logits, ["logits"])
    with pytest.raises(AttributeError, match="hidden_states"):
        alone.hidden_states  # noqa: B018
