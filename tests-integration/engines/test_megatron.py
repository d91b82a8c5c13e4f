"""megatron-core itself, on the CPU (testkit.cpu_megatron): it computes what plain PyTorch computes in one process.

The oracle is the model of transformers, trained by PyTorch on the batches of all ranks together; divisions are compared
with it by losses, and by all weights under the model's own names.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from testkit import worlds

pytest.importorskip("megatron.core", reason="megatron-core is not installed here; hatch run engines:megatron")
transformers = pytest.importorskip("transformers", reason="transformers is not installed here")

pytestmark = pytest.mark.timeout(180)
VOCABULARY = 129  # odd: ranks of tensor parallelism pad it
CLOSE = 2e-6  # float32, weights of about 1 after steps of size 1e-2


@dataclass
class Case:
    """One training run.

    Attributes:
        kind: a family.
        plugin: fields of MegatronLMPlugin.
        ranks: of the world.
        accumulation: calls per step.
        clip: norm to which the script clips.
        tied: embedding and output layer are one tensor.
        optimizer: class in torch.optim.
        precision: of the accelerator.
        ends: position from which labels are ignored, by sample.
    """

    kind: str = "llama"
    plugin: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    accumulation: int = 1
    clip: float | None = None
    tied: bool = False
    optimizer: str = "SGD"
    precision: str = "no"
    ragged: bool = False
    frozen: bool = False
    samples: int = 32

    @property
    def readers(self) -> int:
        return self.ranks // (self.plugin.get("tp_degree", 1) * self.plugin.get("pp_degree", 1))


class Tokens(Dataset[Any]):
    """Sequences whose first tokens, and with `ragged` some of the last, do not count in the loss."""

    def __init__(self, count: int, ragged: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, VOCABULARY, (count, 12), generator=generator)
        self.labels = self.tokens.clone()
        self.labels[:, :3] = -100
        if ragged:
            for place in range(count):
                self.labels[place, 5 + place % 6 :] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[place], "labels": self.labels[place]}


def make_model(case: Case, layers: int = 2) -> Any:
    torch.manual_seed(0)
    shared: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    if case.kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32,
            n_layer=layers,
            n_head=4,
            n_positions=64,
            attn_pdrop=0,
            resid_pdrop=0,
            embd_pdrop=0,
            **shared,
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
        config = getattr(transformers, f"{names[case.kind]}Config")(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            tie_word_embeddings=case.tied,
            sliding_window=None,
            **shared,
        )
        model = getattr(transformers, f"{names[case.kind]}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms of one and biases of zero would hide a wrong place
                parameter.add_(
                    0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                )
    if case.frozen:
        model.get_input_embeddings().weight.requires_grad_(False)
    return model


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    # Adam divides by the root of a mean of squares: where a gradient is 0 but for rounding, rounding is the step.
    options = {"eps": 1e-3} if case.optimizer.startswith("Adam") else {"momentum": 0.9}
    return getattr(torch.optim, case.optimizer)(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, **options
    )


def prepared(case: Case) -> tuple[Any, Any, Any, Any]:
    import accel_train
    from testkit import cpu_megatron

    cpu_megatron.install()
    model = make_model(case)
    optimizer = make_optimizer(case, model)
    accelerator = accel_train.Accelerator(
        megatron_lm_plugin=accel_train.MegatronLMPlugin(**{"gradient_clipping": 0.0, **case.plugin}),
        gradient_accumulation_steps=case.accumulation,
        mixed_precision=case.precision,
    )
    loader = DataLoader(Tokens(case.samples, case.ragged), batch_size=4)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def train(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    accelerator, model, optimizer, loader = prepared(case)
    losses = steps(case, accelerator, model, optimizer, loader)
    return losses, cloned(accelerator.get_state_dict(model))


def steps(case: Case, accelerator: Any, model: Any, optimizer: Any, batches: Any) -> list[float]:
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if case.clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
    return losses


def cloned(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


def oracle(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Plain PyTorch, one process, the batches of all readers; a loss is the mean of the micro-batches' means."""
    model = make_model(case)
    optimizer = make_optimizer(case, model)
    data, losses = Tokens(case.samples, case.ragged), []
    pieces = case.readers * case.plugin.get("num_micro_batches", 1)
    if case.plugin.get("calculate_per_token_loss"):
        pieces = 1
    size = 4 * case.readers
    for place, start in enumerate(range(0, case.samples, size)):
        rows = torch.arange(start, start + size)
        loss = torch.stack(
            [
                model(input_ids=data.tokens[piece], labels=data.labels[piece]).loss
                for piece in rows.chunk(pieces)
            ]
        ).mean()
        (loss / case.accumulation).backward()
        losses.append(loss.item())
        if (place + 1) % case.accumulation == 0:
            for norm in (case.clip, case.plugin.get("gradient_clipping")):
                if norm:
                    before = nn.utils.clip_grad_norm_(model.parameters(), norm)
                    assert before > norm, "something is clipped"
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict()


def check(case: Case, close: float = CLOSE) -> None:
    expected, weights = oracle(case)
    for losses, found in worlds.run(train, case.ranks, case, timeout=120):
        torch.testing.assert_close(losses, expected, rtol=close, atol=close)
        assert found.keys() == weights.keys()
        torch.testing.assert_close(found, dict(weights), rtol=close, atol=close, check_dtype=False)


TP = {"tp_degree": 2}
PP = {"pp_degree": 2, "num_micro_batches": 2}
BOTH = {**TP, **PP}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("plugin", [TP, PP], ids=["tp", "pp"])
def test_families(kind, plugin):
    check(Case(kind, plugin))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_tensor_and_pipeline_together(kind):
    check(Case(kind, BOTH, ranks=4))


@pytest.mark.parametrize(
    ("plugin", "ranks"),
    [({}, 1), ({}, 2), (TP, 4), (PP, 4), ({"num_micro_batches": 2}, 2)],
    ids=["one", "dp", "dp x tp", "dp x pp", "dp, micro-batches"],
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_replicas(plugin, ranks, accumulation):
    check(Case("llama", plugin, ranks, accumulation=accumulation, ragged=True))


@pytest.mark.parametrize("plugin", [{}, TP, PP], ids=["dp", "tp", "pp"])
def test_clipping(plugin):
    """By the script over all ranks, and by the plugin in every step."""
    check(Case("llama", plugin, clip=0.3, accumulation=2))
    check(Case("llama", {**plugin, "gradient_clipping": 0.2}))


@pytest.mark.parametrize("plugin", [TP, PP], ids=["tp", "pp"])
def test_tied(plugin):
    check(Case("llama", plugin, tied=True, optimizer="AdamW"))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("plugin", "ranks"), [({}, 2), (TP, 4), (PP, 4)], ids=["dp", "dp x tp", "dp x pp"])
def test_distributed_optimizer(plugin, ranks, accumulation):
    plugin = {**plugin, "use_distributed_optimizer": True}
    check(Case("llama", plugin, ranks, accumulation=accumulation, clip=0.3, optimizer="AdamW"))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_sequence_parallelism(kind):
    check(Case(kind, {**TP, "sequence_parallelism": True}, clip=0.3))


@pytest.mark.parametrize(
    "plugin",
    [
        {"recompute_activations": True},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    ],
    ids=["selective", "uniform", "block"],
)
def test_recomputation(plugin):
    check(Case("gpt2", {**TP, **plugin}))


def test_mean_over_tokens():
    """Of all micro-batches and ranks, which hold different numbers of tokens that count."""
    check(Case("llama", {"calculate_per_token_loss": True, "num_micro_batches": 2}, ragged=True))
    check(Case("llama", {**PP, "calculate_per_token_loss": True}, ranks=4, ragged=True))


@pytest.mark.parametrize("plugin", [TP, PP], ids=["tp", "pp"])
def test_frozen(plugin):
    check(Case("llama", plugin, frozen=True))


@pytest.mark.parametrize("distributed", [False, True])
def test_bfloat16(distributed):
    """Computed in bfloat16, updated in float32: near the float32 run."""
    plugin = {**TP, "use_distributed_optimizer": distributed}
    case = Case("llama", plugin, ranks=4, precision="bf16", optimizer="AdamW")
    check(case, close=3e-2)


# Checkpoints


def save_and_continue(case: Case, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    accelerator, model, optimizer, loader = prepared(case)
    batches = list(loader)
    steps(case, accelerator, model, optimizer, batches[:2])
    accelerator.save_state(folder)
    losses = steps(case, accelerator, model, optimizer, batches[2:4])
    return losses, cloned(accelerator.get_state_dict(model))


def load_and_continue(case: Case, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    accelerator, model, optimizer, loader = prepared(case)
    batches = list(loader)
    steps(case, accelerator, model, optimizer, batches[5:6])  # something else is there
    accelerator.load_state(folder)
    losses = steps(case, accelerator, model, optimizer, batches[2:4])
    return losses, cloned(accelerator.get_state_dict(model))


def load_plainly(case: Case, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """The same state in one process, without Megatron."""
    import accel_train

    model = make_model(case)
    accelerator = accel_train.Accelerator()
    model, optimizer, loader = accelerator.prepare(
        model, make_optimizer(case, model), DataLoader(Tokens(case.samples, case.ragged), batch_size=4)
    )
    batches = list(loader)
    accelerator.load_state(folder)
    losses = steps(case, accelerator, model, optimizer, batches[2:4])
    return losses, cloned(accelerator.get_state_dict(model))


DIVISIONS = {
    "tp": Case("llama", TP, optimizer="AdamW"),
    "pp": Case("llama", PP, optimizer="AdamW"),
    "both": Case("gpt2", BOTH, ranks=4, optimizer="AdamW"),
    "tied pp": Case("llama", PP, tied=True, optimizer="AdamW"),
    "dp": Case("llama", {**TP, "use_distributed_optimizer": True}, ranks=4, optimizer="AdamW"),
    "gpt2 dp": Case("gpt2", {"use_distributed_optimizer": True}, ranks=2, optimizer="AdamW"),
    "dropout": Case("gpt2", {**TP, "hidden_dropout": 0.2, "attention_dropout": 0.2}),
    "bf16": Case("llama", TP, optimizer="AdamW", precision="bf16"),
    "bf16 dp": Case(
        "gpt2", {**TP, "use_distributed_optimizer": True}, 4, optimizer="AdamW", precision="bf16"
    ),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_resume_is_exact(name, tmp_path):
    case = DIVISIONS[name]
    went_on = worlds.run(save_and_continue, case.ranks, case, tmp_path / "s", timeout=120)
    resumed = worlds.run(load_and_continue, case.ranks, case, tmp_path / "s", timeout=120)
    for there, here in zip(went_on, resumed, strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=0)


KEPT = Path(__file__).parent / "saved_runs" / "megatron"
"""Checkpoints that commit b8c3452 wrote, with torch 2.13 and megatron-core 0.16.1, by `keep`."""


def keep(name: str) -> None:
    """Write a checkpoint, and what its run computed afterwards."""
    case, folder = DIVISIONS[name], KEPT / name
    [(losses, weights), *_] = worlds.run(
        save_and_continue, case.ranks, case, folder / "checkpoint", timeout=120
    )
    safetensors.torch.save_file({"losses": torch.tensor(losses), **weights}, folder / "after.safetensors")


@pytest.mark.parametrize("name", sorted(path.name for path in KEPT.iterdir()))
def test_a_kept_checkpoint_continues(name):
    after = safetensors.torch.load_file(KEPT / name / "after.safetensors")
    case = DIVISIONS[name]
    for losses, weights in worlds.run(
        load_and_continue, case.ranks, case, KEPT / name / "checkpoint", timeout=120
    ):
        torch.testing.assert_close({"losses": torch.tensor(losses), **weights}, after, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("name", ["tp", "pp", "tied pp"])
def test_state_in_another_division(name, tmp_path):
    case = DIVISIONS[name]
    [(losses, weights), *_] = worlds.run(save_and_continue, case.ranks, case, tmp_path / "s", timeout=120)
    other = dataclasses.replace(case, plugin=PP if "tp_degree" in case.plugin else TP)
    for found in (
        *worlds.run(load_and_continue, 2, other, tmp_path / "s", timeout=120),
        *worlds.run(load_plainly, 1, case, tmp_path / "s", timeout=120),
    ):
        torch.testing.assert_close(found[0], losses, rtol=CLOSE, atol=CLOSE)
        torch.testing.assert_close(found[1], weights, rtol=CLOSE, atol=CLOSE)


def load_without_state(case: Case, folder: Path) -> str:
    accelerator, _, _, _ = prepared(case)
    try:
        accelerator.load_state(folder)
    except RuntimeError as error:
        return str(error)
    return ""


def test_states_without_the_optimizers(tmp_path):
    """A state saved without it is refused, unless a new optimizer is asked for."""
    case = Case("llama", {**TP, "no_save_optim": True}, optimizer="AdamW")
    [(_, weights), *_] = worlds.run(save_and_continue, 2, case, tmp_path / "s", timeout=120)
    other = dataclasses.replace(case, plugin=TP)
    for message in worlds.run(load_without_state, 2, other, tmp_path / "s", timeout=120):
        assert "saved without its state (no_save_optim)" in message
    new = dataclasses.replace(case, plugin={**TP, "no_load_optim": True})
    for _, found in worlds.run(load_and_continue, 2, new, tmp_path / "s", timeout=120):
        assert found.keys() == weights.keys()
        moved = {name: (found[name] - weights[name]).abs().max().item() for name in weights}
        assert 0 < max(moved.values()) < 0.05, "the same weights, and other moments"


def export(case: Case, folder: Path) -> dict[str, Tensor]:
    accelerator, model, _, _ = prepared(case)
    accelerator.save_model(model, folder)
    unwrapped = accelerator.unwrap_model(model)
    assert type(unwrapped).__name__ == type(make_model(case)).__name__
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        unwrapped.save_pretrained(folder / "pretrained", state_dict=dict(state))  # which it empties
    accelerator.wait_for_everyone()
    return cloned(state)


@pytest.mark.parametrize(
    "case", [Case("gpt2", BOTH, ranks=4), Case("llama", TP), Case("llama", PP, tied=True)]
)
def test_export(case, tmp_path):
    """A model that was only prepared is saved as it came, bit by bit, in files that transformers loads."""
    given = make_model(case)
    for state in worlds.run(export, case.ranks, case, tmp_path, timeout=120):
        torch.testing.assert_close(state, dict(given.state_dict()), rtol=0, atol=0)
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert saved
    for name, value in saved.items():
        torch.testing.assert_close(value, given.state_dict()[name], rtol=0, atol=0)
    loaded = type(given).from_pretrained(tmp_path / "pretrained")
    torch.testing.assert_close(dict(loaded.state_dict()), dict(given.state_dict()), rtol=0, atol=0)


# What a call returns


def evaluate(case: Case) -> list[tuple[Tensor, Tensor, Tensor]]:
    _accelerator, model, _, _ = prepared(case)
    data = Tokens(6, case.ragged)
    mask = torch.ones_like(data.tokens)
    mask[1, 7:] = mask[4, 9:] = 0
    model.eval()
    found = []
    for rows in (slice(0, 4), slice(3, 6)):  # 3 samples are no multiple of the micro-batches
        with torch.no_grad():
            batch = {"input_ids": data.tokens[rows], "attention_mask": mask[rows]}
            logits = model(**batch).logits
            both = model(**batch, labels=data.labels[rows])
        found.append((logits, both.loss, both["logits"]))
    return found


@pytest.mark.parametrize("plugin", [TP, PP], ids=["tp", "pp"])
def test_evaluation(plugin):
    """With padding, on every rank; the logits are those of the whole vocabulary."""
    case = Case("llama", {**plugin, "return_logits": True})
    model = make_model(case).eval()
    data = Tokens(6, case.ragged)
    mask = torch.ones_like(data.tokens)
    mask[1, 7:] = mask[4, 9:] = 0
    for found in worlds.run(evaluate, 2, case, timeout=120):
        for (logits, loss, again), rows in zip(found, (slice(0, 4), slice(3, 6)), strict=True):
            with torch.no_grad():
                expected = model(
                    input_ids=data.tokens[rows], attention_mask=mask[rows], labels=data.labels[rows]
                )
            known = mask[rows].bool()  # what padding predicts is nobody's
            for values in (logits, again):
                torch.testing.assert_close(values[known], expected.logits[known], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-5)


def logits_and_own_loss(case: Case) -> dict[str, Tensor]:
    accelerator, model, optimizer, loader = prepared(case)
    for batch in list(loader)[:2]:
        logits = model(input_ids=batch["input_ids"]).logits
        accelerator.backward((logits**2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return cloned(accelerator.get_state_dict(model))


def test_own_loss_from_logits():
    """Without stages and micro-batches a call is an ordinary forward."""
    case = Case("llama", TP)
    model = make_model(case)
    optimizer = make_optimizer(case, model)
    data = Tokens(8, False)
    for rows in (slice(0, 4), slice(4, 8)):
        (model(input_ids=data.tokens[rows]).logits ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in worlds.run(logits_and_own_loss, 2, case, timeout=120):
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=CLOSE, atol=CLOSE)


def multiplied(case: Case) -> tuple[dict[str, Tensor], str]:
    accelerator, model, optimizer, loader = prepared(case)
    first, second, *_ = loader
    accelerator.backward(model(**first).loss * 3)
    optimizer.step()
    optimizer.zero_grad()
    state = cloned(accelerator.get_state_dict(model))
    accelerator.backward(model(**first).loss * 3)
    try:
        accelerator.backward(model(**second).loss * 5)
    except RuntimeError as error:
        return state, str(error)
    return state, ""


def test_a_multiplied_loss_of_a_schedule():
    """Exact in the first call of a window; after it an error, because gradients are added up."""
    case = Case("llama", PP)
    model = make_model(case)
    optimizer = make_optimizer(case, model)
    data = Tokens(4, False)
    (model(input_ids=data.tokens, labels=data.labels).loss * 3).backward()
    optimizer.step()
    for state, message in worlds.run(multiplied, 2, case, timeout=120):
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=CLOSE, atol=CLOSE)
        assert "multiplied by" in message


# Schedules of the learning rate


def rates(case: Case, dummy: bool) -> list[float]:
    import accel_train

    accelerator, model, optimizer, loader = prepared(case)
    del accelerator, model, optimizer, loader
    model = make_model(case)
    optimizer = make_optimizer(case, model)
    plugin = accel_train.MegatronLMPlugin(gradient_clipping=0.0, min_lr=1e-3, **case.plugin)
    accelerator = accel_train.Accelerator(megatron_lm_plugin=plugin)
    scheduler: Any = (
        accel_train.MegatronLMDummyScheduler(optimizer, total_num_steps=8, warmup_num_steps=2)
        if dummy
        else torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    )
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(Tokens(24, False), batch_size=4)
    )
    found = []
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found.append(scheduler.get_last_lr()[0])
    return found


def test_schedulers():
    case = Case("llama", {**TP, "use_distributed_optimizer": True}, optimizer="AdamW")
    for found in worlds.run(rates, 2, case, False, timeout=120):
        assert found == pytest.approx([1e-2, 5e-3, 5e-3, 2.5e-3, 2.5e-3, 1.25e-3])
    for found in worlds.run(
        rates, 2, case, True, timeout=120
    ):  # grows to 1e-2, then a line to 1e-3 in 6 steps
        assert found == pytest.approx([5e-3, 1e-2, 8.5e-3, 7e-3, 5.5e-3, 4e-3])


# A model of the script's own


def provided(case: Case, folder: Path) -> list[tuple[list[float], list[float]]]:
    import accel_train
    from testkit import cpu_megatron

    cpu_megatron.install()

    def provider(pre_process: bool, post_process: bool) -> Any:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig

        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=case.plugin.get("tp_degree", 1),
            pipeline_model_parallel_size=case.plugin.get("pp_degree", 1),
            pipeline_dtype=torch.float32,
        )
        return GPTModel(
            config, get_gpt_layer_local_spec(), 130, 64, pre_process=pre_process, post_process=post_process
        )

    def read(iterator: Any, megatron_dataset: bool) -> tuple[Any, ...]:
        batch = next(iterator)
        tokens = batch["input_ids"]
        labels = tokens.roll(-1, 1)
        mask = torch.ones_like(tokens).float()
        return tokens, labels, mask, None, torch.arange(tokens.shape[1]).expand_as(tokens)

    def mean(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Any]]:
        loss = (losses * loss_mask).sum() / loss_mask.sum()
        return loss, {"lm loss": loss}

    plugin = accel_train.MegatronLMPlugin(
        custom_model_provider_function=provider,
        custom_get_batch_function=read,
        custom_loss_function=mean,
        gradient_clipping=0.0,
        **case.plugin,
    )
    accelerator = accel_train.Accelerator(megatron_lm_plugin=plugin)
    stand_in = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        stand_in,
        torch.optim.AdamW(stand_in.parameters(), lr=1e-2),
        DataLoader(Tokens(16, False), batch_size=4),
    )
    batches = list(loader)
    before = steps(case, accelerator, model, optimizer, batches * 3)
    accelerator.save_state(folder)
    went_on = steps(case, accelerator, model, optimizer, batches)
    accelerator.load_state(folder)
    return [before, went_on, steps(case, accelerator, model, optimizer, batches)]


@pytest.mark.parametrize("plugin", [TP, PP], ids=["tp", "pp"])
def test_own_model_provider(plugin, tmp_path):
    """It learns, and a saved state is continued exactly, under Megatron's names."""
    for before, went_on, again in worlds.run(provided, 2, Case("llama", plugin), tmp_path / "s", timeout=120):
        assert before[-1] < before[0] - 0.3
        assert went_on == again


@pytest.mark.gpu
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_on_a_gpu(monkeypatch, precision, distributed):
    """Without anything in the place of CUDA: one rank against plain PyTorch."""
    import accel_train

    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    case = Case(
        "llama", {"use_distributed_optimizer": distributed}, 1, optimizer="AdamW", precision=precision
    )
    model = make_model(case)
    plugin = accel_train.MegatronLMPlugin(gradient_clipping=0.0, **case.plugin)
    accelerator = accel_train.Accelerator(megatron_lm_plugin=plugin, mixed_precision=precision)
    model, optimizer, loader = accelerator.prepare(
        model, make_optimizer(case, model), DataLoader(Tokens(case.samples, False), batch_size=4)
    )
    losses = steps(case, accelerator, model, optimizer, loader)
    expected, weights = oracle(case)
    close = 3e-2 if precision == "bf16" else 1e-3  # TF32 and other orders of summation
    torch.testing.assert_close(losses, expected, rtol=close, atol=close)
    found = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    torch.testing.assert_close(found, dict(weights), rtol=close, atol=close, check_dtype=False)
