"""Attention in megatron-core's layers by PyTorch's kernels, and sequences divided among ranks, on the CPU.

As in test_megatron.py, whose runs these are; the oracle is the model of transformers in float64, in one process.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from testkit import worlds

pytest.importorskip("megatron.core", reason="megatron-core is not installed here; hatch run engines:megatron")
pytest.importorskip("transformers", reason="transformers is not installed here")
RUNS = "tests-integration.engines.test_megatron"  # a rank imports it by itself
runs = importlib.import_module(RUNS)
Case, Tokens = runs.Case, runs.Tokens

pytestmark = pytest.mark.timeout(180)
CLOSE = 3e-6  # float32 against float64, weights of about 1 after steps of size 1e-2
FUSED = {"attention_backend": True}
TP, PP, BOTH = runs.TP, runs.PP, runs.BOTH


def readers(case: Any) -> int:
    degrees = ("tp_degree", "pp_degree", "context_parallel_size")
    count = case.ranks
    for name in degrees:
        count //= case.plugin.get(name, 1)
    return count


def loss_of(model: Any, tokens: Tensor, labels: Tensor, **more: Any) -> Tensor:
    """In float64 as well, where transformers' own loss is in float32."""
    logits = model(input_ids=tokens, **more).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def oracle(case: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Plain PyTorch in float64, one process, the batches of all readers."""
    model = runs.make_model(case).double()
    optimizer = runs.make_optimizer(case, model)
    data, losses = Tokens(case.samples, case.ragged), []
    size = 4 * readers(case)
    pieces = readers(case) * case.plugin.get("num_micro_batches", 1)
    if case.plugin.get("calculate_per_token_loss"):
        pieces = 1
    for place, start in enumerate(range(0, case.samples, size)):
        rows = torch.arange(start, start + size)
        each = [loss_of(model, data.tokens[piece], data.labels[piece]) for piece in rows.chunk(pieces)]
        loss = torch.stack(each).mean()
        (loss / case.accumulation).backward()
        losses.append(loss.item())
        if (place + 1) % case.accumulation == 0:
            if case.clip:
                assert nn.utils.clip_grad_norm_(model.parameters(), case.clip) > case.clip
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict()


def check(case: Any, close: float = CLOSE) -> None:
    expected, weights = oracle(case)
    for losses, found in worlds.run(runs.train, case.ranks, case, timeout=120):
        torch.testing.assert_close(losses, expected, rtol=close, atol=close)
        assert found.keys() == weights.keys()
        torch.testing.assert_close(found, dict(weights), rtol=close, atol=close, check_dtype=False)


# PyTorch's kernels


@pytest.mark.parametrize(
    ("kind", "plugin", "ranks"),
    [
        ("llama", {}, 1),
        ("llama", TP, 2),
        ("gpt2", TP, 2),
        ("qwen3", PP, 2),
        ("gpt2", BOTH, 4),
        ("llama", {**TP, "sequence_parallelism": True}, 2),
        ("gpt2", {**TP, "recompute_activations": True}, 2),
        (
            "llama",
            {
                **TP,
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
            2,
        ),
    ],
    ids=["one", "tp", "gpt2 tp", "pp", "tp x pp", "sequence parallelism", "selective", "full"],
)
def test_fused(kind, plugin, ranks):
    check(Case(kind, {**plugin, **FUSED}, ranks))


def test_fused_bfloat16():
    check(Case("llama", {**TP, **FUSED}, precision="bf16", optimizer="AdamW"), close=3e-2)


def kinds_of_attention(case: Any) -> set[str]:
    runs = importlib.import_module(RUNS)
    _, model, _, _ = runs.prepared(case)
    return {type(m.core_attention).__name__ for m in model.modules() if hasattr(m, "core_attention")}


@pytest.mark.parametrize(
    ("backend", "expected"),
    [(True, "FusedAttention"), (False, "DotProductAttention"), (None, "DotProductAttention")],
)
def test_which_attention_is_used(backend, expected):
    assert worlds.run(kinds_of_attention, 1, Case(plugin={"attention_backend": backend}), timeout=120) == [
        {expected}
    ]


def padded() -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(0, 129, (4, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)
    mask[1, 7:] = 0
    mask[3, :2] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[3, 2] = -100  # padding predicts it
    return tokens, mask, labels


def padded_gradients(case: Any) -> tuple[Tensor, dict[str, Tensor]]:
    runs = importlib.import_module(RUNS)
    accelerator, model, optimizer, _ = runs.prepared(case)
    tokens, mask, labels = padded()
    loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
    accelerator.backward(loss)
    optimizer.step()
    return loss.detach(), runs.cloned(accelerator.get_state_dict(model))


@pytest.mark.parametrize("plugin", [TP, PP], ids=["tp", "pp"])
def test_padding(plugin):
    """After a text and before one; every reader has the same batch."""
    case = Case("gpt2", {**plugin, **FUSED, "calculate_per_token_loss": True})
    check_padding(case)


def check_padding(case: Any) -> None:
    model = runs.make_model(case).double()
    optimizer = runs.make_optimizer(case, model)
    tokens, mask, labels = padded()
    places = torch.arange(tokens.shape[1]).expand_as(tokens)  # as Megatron counts them
    loss = loss_of(model, tokens, labels, attention_mask=mask, position_ids=places)
    loss.backward()
    optimizer.step()
    for found, state in worlds.run(padded_gradients, case.ranks, case, timeout=120):
        torch.testing.assert_close(found, loss.detach(), rtol=CLOSE, atol=CLOSE, check_dtype=False)
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=CLOSE, atol=CLOSE, check_dtype=False)


def dropped(case: Any) -> list[Tensor]:
    """Attention to one position of value one, twice: 0 where that is dropped, else 1 / (1 - p)."""
    runs = importlib.import_module(RUNS)
    _, model, _, _ = runs.prepared(case)
    model.train()
    [attention, *_] = [m.core_attention for m in model.modules() if hasattr(m, "core_attention")]
    kind = attention.mask_type
    query, key = torch.zeros(1, 64, 2, 8), torch.zeros(1, 64, 1, 8)
    return [attention(query, key, torch.ones_like(key), None, attn_mask_type=kind) for _ in range(2)]


def test_ranks_of_tensor_parallelism_drop_differently():
    case = Case("llama", {**TP, **FUSED, "attention_dropout": 0.5})
    (first, again), (second, _) = worlds.run(dropped, 2, case, timeout=120)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(first, second)
    assert not torch.equal(first, again)


@pytest.mark.parametrize("sequence_parallelism", [False, True])
def test_dropout_resumes_exactly(tmp_path, sequence_parallelism):
    plugin = {**TP, **FUSED, "hidden_dropout": 0.2, "attention_dropout": 0.2}
    case = Case("gpt2", {**plugin, "sequence_parallelism": sequence_parallelism})
    check_resumes(case, tmp_path)


def check_resumes(case: Any, folder: Any) -> None:
    went_on = worlds.run(runs.save_and_continue, case.ranks, case, folder / "s", timeout=120)
    resumed = worlds.run(runs.load_and_continue, case.ranks, case, folder / "s", timeout=120)
    for there, here in zip(went_on, resumed, strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=0)
    plain = dataclasses.replace(case, plugin={**case.plugin, "hidden_dropout": 0.0, "attention_dropout": 0.0})
    [(losses, _), *_] = worlds.run(runs.load_and_continue, case.ranks, plain, folder / "s", timeout=120)
    assert losses != went_on[0][0], "something is dropped"


def refusal(case: Any) -> str:
    runs = importlib.import_module(RUNS)
    try:
        runs.prepared(case)
    except ValueError as error:
        return str(error)
    return ""


def test_what_the_kernels_do_not_compute_is_refused_by_name():
    case = Case(plugin={**FUSED, "other_megatron_args": {"softmax_type": "off-by-one"}})
    [message] = worlds.run(refusal, 1, case, timeout=120)
    assert "has softmax_type='off-by-one'" in message


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_fused_on_a_gpu(monkeypatch, precision):
    """Without anything in the place of CUDA: its kernels, for grouped queries, in one rank."""
    import accel_train

    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    case = Case("llama", FUSED, 1, optimizer="AdamW", precision=precision)
    model = runs.make_model(case)
    plugin = accel_train.MegatronLMPlugin(gradient_clipping=0.0, **case.plugin)
    accelerator = accel_train.Accelerator(megatron_lm_plugin=plugin, mixed_precision=precision)
    loader = torch.utils.data.DataLoader(Tokens(case.samples, False), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, runs.make_optimizer(case, model), loader)
    losses = runs.steps(case, accelerator, model, optimizer, loader)
    expected, weights = oracle(case)
    close = 3e-2 if precision == "bf16" else 1e-3  # TF32 and other orders of summation
    torch.testing.assert_close(losses, expected, rtol=close, atol=close)
    found = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    torch.testing.assert_close(found, dict(weights), rtol=close, atol=close, check_dtype=False)
