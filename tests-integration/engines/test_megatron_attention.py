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


# Sequences divided among ranks

CP = {"context_parallel_size": 2}
ADAM = {"optimizer": "AdamW"}
CP_CASES = {
    "cp": Case("llama", CP),
    "gpt2": Case("gpt2", CP, accumulation=2, clip=0.3),
    "qwen3": Case("qwen3", CP, accumulation=2),
    "micro-batches": Case("llama", {**CP, "num_micro_batches": 2}, accumulation=2, ragged=True),
    "cp x tp": Case("llama", {**CP, **TP}, 4),
    "cp x tp, sequence parallelism": Case("gpt2", {**CP, **TP, "sequence_parallelism": True}, 4, clip=0.3),
    "cp x pp": Case("llama", {**CP, **PP}, 4, ragged=True),
    "gpt2 cp x pp": Case("gpt2", {**CP, **PP, "recompute_activations": True}, 4, **ADAM),
    "cp x dp": Case("llama", CP, 4, ragged=True, accumulation=2),
    "cp x dp, distributed optimizer": Case(
        "llama", {**CP, "use_distributed_optimizer": True}, 4, clip=0.3, **ADAM
    ),
    "cp, distributed optimizer": Case("gpt2", {**CP, "use_distributed_optimizer": True}, **ADAM),
    "tokens": Case("llama", {**CP, "calculate_per_token_loss": True}, 4, ragged=True),
    "tokens, micro-batches": Case(
        "llama", {**CP, "calculate_per_token_loss": True, "num_micro_batches": 2}, 4, ragged=True
    ),
    "tokens, pp": Case("llama", {**CP, **PP, "calculate_per_token_loss": True}, 4, ragged=True),
    "three": Case("llama", {"context_parallel_size": 3}, 3),
}


@pytest.mark.parametrize("name", CP_CASES)
def test_divided_sequences(name):
    check(CP_CASES[name])


def test_divided_sequences_bfloat16():
    check(Case("llama", CP, precision="bf16", optimizer="AdamW"), close=3e-2)


@pytest.mark.parametrize(
    ("plugin", "ranks"),
    [
        (CP, 2),
        ({**CP, **PP, "calculate_per_token_loss": True}, 4),
        ({**CP, **TP, "sequence_parallelism": True}, 4),
    ],
    ids=["cp", "cp x pp", "cp x tp"],
)
def test_padding_of_divided_sequences(plugin, ranks):
    check_padding(Case("gpt2", plugin, ranks))


@pytest.mark.parametrize(("plugin", "ranks"), [(CP, 2), ({**CP, **PP}, 4)], ids=["cp", "cp x pp"])
def test_every_rank_gets_the_whole_sequence(plugin, ranks):
    """Logits in their order with and without labels, whatever is cut inside."""
    case = Case("llama", {**plugin, "return_logits": True}, ranks)
    model = runs.make_model(case).eval()
    data = Tokens(6, case.ragged)
    mask = torch.ones_like(data.tokens)
    mask[1, 7:] = mask[4, 9:] = 0
    for found in worlds.run(runs.evaluate, ranks, case, timeout=120):
        for (logits, loss, again), rows in zip(found, (slice(0, 4), slice(3, 6)), strict=True):
            with torch.no_grad():
                expected = model(
                    input_ids=data.tokens[rows], attention_mask=mask[rows], labels=data.labels[rows]
                )
            known = mask[rows].bool()  # what padding predicts is nobody's
            for values in (logits, again):
                torch.testing.assert_close(values[known], expected.logits[known], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-5)


def test_own_loss_from_logits_of_all_ranks():
    case = Case("llama", CP)
    model = runs.make_model(case).double()
    optimizer = runs.make_optimizer(case, model)
    data = Tokens(8, False)
    for rows in (slice(0, 4), slice(4, 8)):
        (model(input_ids=data.tokens[rows]).logits ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in worlds.run(runs.logits_and_own_loss, 2, case, timeout=120):
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=CLOSE, atol=CLOSE, check_dtype=False)


def squares(loss_mask: Tensor, losses: Tensor) -> Tensor:
    """Not a sum over positions: wrong if a rank sees a part of them."""
    return ((losses * loss_mask).sum(1) ** 2).mean() / 1000


@pytest.mark.parametrize(
    ("plugin", "ranks"), [(CP, 2), ({**CP, "num_micro_batches": 2}, 2), ({**CP, **PP}, 4)],
    ids=["cp", "micro-batches", "cp x pp"],
)  # fmt: skip
def test_a_loss_of_the_script_sees_whole_sequences(plugin, ranks):
    case = Case("llama", {**plugin, "custom_loss_function": squares}, ranks, ragged=True, samples=16)
    model = runs.make_model(case).double()
    optimizer = runs.make_optimizer(case, model)
    data, expected = Tokens(16, True), []
    for rows in torch.arange(16).chunk(4):
        tokens, labels = data.tokens[rows], data.labels[rows]
        logits = model(input_ids=tokens).logits[:, :-1]
        each = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
        ).unflatten(0, (4, -1))
        loss = squares(torch.ones(()), each)
        loss.backward()
        expected.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    for losses, found in worlds.run(runs.train, ranks, case, timeout=120):
        torch.testing.assert_close(losses, expected, rtol=CLOSE, atol=CLOSE)
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-5, atol=1e-5, check_dtype=False)


def by_items(case: Any) -> dict[str, Tensor]:
    runs = importlib.import_module(RUNS)
    accelerator, model, optimizer, loader = runs.prepared(case)
    for batch in loader:
        with accelerator.accumulate(model):
            count = (batch["labels"][:, 1:] != -100).sum()
            accelerator.backward(model(**batch).loss * count, num_items=count)
            optimizer.step()
            optimizer.zero_grad()
    return runs.cloned(accelerator.get_state_dict(model))


def test_weighing_by_items():
    """Every rank counts the items of whole sequences."""
    case = Case("llama", CP, 4, ragged=True, accumulation=2)
    model = runs.make_model(case).double()
    optimizer = runs.make_optimizer(case, model)
    data = Tokens(case.samples, True)
    for rows in torch.arange(case.samples).split(16):
        loss_of(model, data.tokens[rows], data.labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in worlds.run(by_items, 4, case, timeout=120):
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=CLOSE, atol=CLOSE, check_dtype=False)


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt2", {**CP, **TP, "hidden_dropout": 0.2, "attention_dropout": 0.2}, 4, **ADAM),
        Case("gpt2", {**CP, "use_distributed_optimizer": True, "attention_dropout": 0.2}, 4, **ADAM),
    ],
    ids=["cp x tp", "distributed optimizer"],
)
def test_divided_sequences_resume_exactly(case, tmp_path):
    check_resumes(case, tmp_path)


@pytest.mark.parametrize(
    ("saved", "loaded", "ranks"),
    [
        (CP, TP, 2),
        (PP, {**CP, "use_distributed_optimizer": True}, 2),
        ({**CP, "use_distributed_optimizer": True}, {"context_parallel_size": 3}, 3),
    ],
    ids=["from cp", "to cp", "to another cp"],
)
def test_states_do_not_depend_on_context_parallelism(saved, loaded, ranks, tmp_path):
    case = Case("llama", saved, **ADAM)
    [(losses, weights), *_] = worlds.run(runs.save_and_continue, 2, case, tmp_path / "s", timeout=120)
    other = dataclasses.replace(case, plugin=loaded, ranks=ranks)
    for found in (
        *worlds.run(runs.load_and_continue, ranks, other, tmp_path / "s", timeout=120),
        *worlds.run(runs.load_plainly, 1, case, tmp_path / "s", timeout=120),
    ):
        torch.testing.assert_close(found[0], losses, rtol=CLOSE, atol=CLOSE)
        torch.testing.assert_close(found[1], weights, rtol=CLOSE, atol=CLOSE)


def hidden_states_dropped(case: Any, folder: Any = None) -> tuple[list[Tensor], float]:
    """Which elements the embedding drops of sequences of one token, and what the script draws."""
    runs = importlib.import_module(RUNS)
    accelerator, model, _, _ = runs.prepared(case)
    if folder is not None:
        accelerator.load_state(folder)
    model.train()
    found = []
    for module in model.modules():
        if type(module).__name__ == "LanguageModelEmbedding":
            module.register_forward_hook(lambda _module, _given, output: found.append(output == 0))
    model(input_ids=torch.full((2, 16), 3))
    return found, torch.rand(()).item()


def test_context_ranks_drop_differently_and_the_script_draws_alike():
    plugin = {**CP, **TP, "hidden_dropout": 0.5}
    ranks = worlds.run(hidden_states_dropped, 4, Case("gpt2", plugin, 4), timeout=120)
    masks = [mask for [mask], _ in ranks]
    assert 0.3 < masks[0].double().mean() < 0.7
    assert torch.equal(masks[0], masks[1]), "ranks of tensor parallelism hold the same"
    assert torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2]), "those of context parallelism do not"
    assert len({drawn for _, drawn in ranks}) == 1


def test_after_loading_a_state_of_whole_sequences_context_ranks_drop_differently(tmp_path):
    plain = Case("gpt2", {"hidden_dropout": 0.5, "attention_dropout": 0.5})
    worlds.run(runs.save_and_continue, 2, plain, tmp_path / "s", timeout=120)
    case = dataclasses.replace(plain, plugin={**plain.plugin, **CP})
    ([first], drawn), ([second], again) = worlds.run(
        hidden_states_dropped, 2, case, tmp_path / "s", timeout=120
    )
    assert not torch.equal(first, second)
    assert drawn == again


def test_after_loading_a_state_of_another_division_ranks_drop_as_theirs_does(tmp_path):
    plain = Case("gpt2", {**CP, "hidden_dropout": 0.5}, 4)
    worlds.run(runs.save_and_continue, 4, plain, tmp_path / "s", timeout=120)
    case = dataclasses.replace(plain, plugin={**plain.plugin, **TP})
    ranks = worlds.run(hidden_states_dropped, 4, case, tmp_path / "s", timeout=120)
    masks = [mask for [mask], _ in ranks]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])


def wrong_length(case: Any, length: int) -> str:
    runs = importlib.import_module(RUNS)
    _, model, _, _ = runs.prepared(case)
    try:
        model(input_ids=torch.ones(2, length, dtype=torch.long))
    except ValueError as error:
        return str(error)
    return ""


def test_lengths_that_ranks_cannot_divide_are_an_error_on_all():
    for message in worlds.run(wrong_length, 2, Case("llama", CP), 10, timeout=120):
        assert message.startswith(
            "A batch has sequences of 10 tokens, which context_parallel_size=2 cannot divide"
        )
        assert "multiples of 4" in message
    case = Case("llama", {**CP, **TP, "sequence_parallelism": True}, 4)
    for message in worlds.run(wrong_length, 4, case, 6, timeout=120):
        assert "sequence_parallelism divides among tp_degree=2" in message


def test_degrees_that_do_not_divide_the_world():
    for message in worlds.run(refusal, 2, Case("llama", {"context_parallel_size": 4}), timeout=120):
        assert "times context_parallel_size=4 does not divide the 2 processes" in message


# A model of the script's own


def waves(tensor: Tensor) -> None:
    """First values that do not depend on which layers a stage has."""
    with torch.no_grad():
        tensor.copy_((torch.arange(tensor.numel()).sin() * 0.1).view_as(tensor))


def provided(case: Any) -> list[tuple[float, Tensor]]:
    import accel_train
    from testkit import cpu_megatron

    runs = importlib.import_module(RUNS)
    cpu_megatron.install()

    def provider(pre_process: bool, post_process: bool) -> Any:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig

        from accel_train.strategies.megatron.attention import FusedAttention

        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            context_parallel_size=case.plugin.get("context_parallel_size", 1),
            pipeline_model_parallel_size=case.plugin.get("pp_degree", 1),
            pipeline_dtype=torch.float32,
            init_method=waves,
            output_layer_init_method=waves,
        )
        spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = FusedAttention
        return GPTModel(config, spec, 129, 64, pre_process=pre_process, post_process=post_process)

    def read(iterator: Any, megatron_dataset: bool) -> tuple[Any, ...]:
        tokens = next(iterator)["input_ids"]
        mask = (tokens % 3 > 0).float()
        return tokens, tokens.roll(-1, 1), mask, None, torch.arange(tokens.shape[1]).expand_as(tokens)

    plugin = accel_train.MegatronLMPlugin(
        custom_model_provider_function=provider,
        custom_get_batch_function=read,
        gradient_clipping=0.0,
        **case.plugin,
    )
    accelerator = accel_train.Accelerator(megatron_lm_plugin=plugin)
    stand_in = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        stand_in,
        torch.optim.SGD(stand_in.parameters(), lr=0.1),
        torch.utils.data.DataLoader(Tokens(16, False), batch_size=4),
    )
    losses = runs.steps(case, accelerator, model, optimizer, loader)
    return losses, runs.cloned(accelerator.get_state_dict(model))


@pytest.mark.parametrize(("plugin", "ranks"), [(CP, 2), ({**CP, **PP}, 4)], ids=["cp", "cp x pp"])
def test_layers_of_the_script(plugin, ranks):
    """As in one process with the same layers."""
    whole = {name: value for name, value in plugin.items() if name == "num_micro_batches"}
    [(expected, weights)] = worlds.run(provided, 1, Case(plugin=whole), timeout=120)
    assert expected[-1] < expected[0]
    for losses, found in worlds.run(provided, ranks, Case(plugin=plugin, ranks=ranks), timeout=120):
        torch.testing.assert_close(losses, expected, rtol=CLOSE, atol=CLOSE)
        torch.testing.assert_close(found, weights, rtol=CLOSE, atol=CLOSE)
