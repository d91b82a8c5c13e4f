"""Models of transformers under the real DeepSpeed: what transformers reads of a configuration, and tensor parallelism.

The oracles are the same models in plain PyTorch, on one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from testkit import worlds

pytest.importorskip("deepspeed", reason="hatch run engines:deepspeed installs it")

PROMPT = torch.tensor([[1, 2, 3]])
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_model(kind: str = "llama") -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config: Any = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, vocab_size=40)
    if kind == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=16, **dropout
        )
    elif kind == "mixtral":
        config = transformers.MixtralConfig(
            **SMALL, num_key_value_heads=1, vocab_size=40, num_local_experts=4, num_experts_per_tok=2
        )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def tokens() -> Tensor:
    return torch.randint(0, 40, (8, 8), generator=torch.Generator().manual_seed(2))


def trained(kind: str, config: dict[str, Any], init: bool) -> Any:
    """Weights before and after four steps; whether the model was built divided."""
    from accel_train import Accelerator, DeepSpeedPlugin

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(config, zero3_init_flag=init))
    model = make_model(kind)
    divided = all(hasattr(parameter, "ds_id") for parameter in model.parameters())
    loader = DataLoader(tokens(), batch_size=4 // accelerator.strategy.batch.size)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
    first = weights_of(model, accelerator)
    for _ in range(2):
        for batch in loader:
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return divided, first, weights_of(model, accelerator)


def weights_of(model: nn.Module, accelerator: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def plainly_trained(kind: str, first: dict[str, Tensor]) -> dict[str, Tensor]:
    """From given weights: transformers draws other numbers for a model that it builds divided."""
    model = make_model(kind)
    model.load_state_dict(first)
    optimizer = optimizer_of(model)
    for _ in range(2):
        for batch in tokens().split(4):
            optimizer.zero_grad()
            model(input_ids=batch, labels=batch).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_models_that_are_built_divided_train_as_whole_ones(kind):
    config = {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    for divided, first, weights in worlds.run(trained, 2, kind, config, True, timeout=200):
        assert divided
        assert all(value.abs().sum() > 0 for name, value in first.items() if "weight" in name)
        expected = plainly_trained(kind, first)
        torch.testing.assert_close(weights, expected, rtol=2e-4, atol=2e-5)


def generated(init: bool) -> tuple[Tensor, list[bool], dict[str, Tensor]]:
    """Ranks that want different numbers of tokens; what transformers knows before, while and after."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    from accel_train import Accelerator, DeepSpeedPlugin

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, zero3_init_flag=init))
    known = [is_deepspeed_zero3_enabled()]
    model = make_model()
    model, _ = accelerator.prepare(model, optimizer_of(model))
    known.append(is_deepspeed_zero3_enabled())
    with accelerator.deepspeed_plugin.zero3_init_context_manager(enable=False):
        known.append(is_deepspeed_zero3_enabled())
    count = 4 if accelerator.is_main_process else 9
    with torch.no_grad():
        found = accelerator.unwrap_model(model).generate(
            PROMPT, max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None
        )
    weights = weights_of(model, accelerator)
    del model
    accelerator.free_memory()
    known.append(is_deepspeed_zero3_enabled())
    return found, known, weights


@pytest.mark.parametrize("init", [False, True])
def test_ranks_generate_until_the_last_one_is_done(init):
    """A rank that stops early would leave the others waiting for its parameters."""
    (first, known, weights), (second, _, _) = worlds.run(generated, 2, init, timeout=200)
    model: Any = make_model()
    model.load_state_dict(weights)
    expected = model.generate(PROMPT, max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(second, expected)
    assert torch.equal(first, expected[:, : PROMPT.shape[1] + 4])
    assert known == [init, True, False, init]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_tensor_parallel_layers_are_saved_whole(tmp_path, precision):
    """Before, and after more training: gathering leaves the engine's own tensors alone."""
    ranks = worlds.run(tensor_parallel, 2, precision, str(tmp_path), timeout=200)
    for first, weights in ranks:
        torch.testing.assert_close(weights, ranks[0][1], rtol=0, atol=0)
        if precision == "no":
            torch.testing.assert_close(first, make_model().state_dict(), rtol=0, atol=0)
            expected = plainly_trained("llama", first)
            torch.testing.assert_close(weights, expected, rtol=2e-4, atol=2e-5)
        else:
            assert {value.dtype for value in weights.values()} == {torch.bfloat16}
            assert {name: value.shape for name, value in weights.items()} == {
                name: value.shape for name, value in make_model().state_dict().items()
            }
    saved = load_file(tmp_path / "model" / "model.safetensors")
    torch.testing.assert_close(saved, {name: ranks[0][1][name] for name in saved}, rtol=0, atol=0)
    assert not (tmp_path / "state").exists()


def tensor_parallel(precision: str, folder: str) -> Any:
    """Weights before and after four steps, of layers that both ranks have a half of."""
    from accel_state.errors import NotAvailableError
    from accel_train import Accelerator, DeepSpeedPlugin

    config = {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}
    accelerator = Accelerator(mixed_precision=precision, deepspeed_plugin=DeepSpeedPlugin(config))
    model = make_model()
    loader = DataLoader(tokens(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
    first = weights_of(model, accelerator)
    for _ in range(2):
        for batch in loader:
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_model(model, f"{folder}/model")
    with pytest.raises(NotAvailableError, match=r"autotp_size=2 .* save_checkpoint\(\)"):
        accelerator.save_state(f"{folder}/state")
    return first, weights_of(model, accelerator)


def selected() -> tuple[list[bool], bool]:
    """What transformers knows after each selection, and whether the last model was built divided."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    from accel_train import Accelerator, DeepSpeedPlugin

    plugins = {
        "whole": DeepSpeedPlugin(zero_stage=2),
        "divided": DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True),
    }
    accelerator = Accelerator(deepspeed_plugins=plugins)
    known = [is_deepspeed_zero3_enabled()]
    for name in ("divided", "whole"):
        accelerator.state.select_deepspeed_plugin(name)
        known.append(is_deepspeed_zero3_enabled())
    return known, any(hasattr(parameter, "ds_id") for parameter in make_model().parameters())


def test_transformers_follows_the_selected_plugin():
    for known, divided in worlds.run(selected, 2, timeout=200):
        assert known == [False, True, False]
        assert not divided
