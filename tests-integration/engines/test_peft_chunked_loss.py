"""Adapters of PEFT in a model with a chunked loss, against the same model with all logits."""

from __future__ import annotations

import pytest
import torch

from testkit.float64 import Float64

peft = pytest.importorskip(
    "peft", reason="hatch run engines:peft installs it, and with it Accelerate, which it needs"
)

VOCABULARY = 37


def build(**options):
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).double()
    return peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **options))


def results(model):
    ids = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    with Float64():
        outputs = model(input_ids=ids, labels=ids)
    outputs.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return outputs.loss.detach(), grads


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
)
def test_loss_and_gradients_are_those_of_the_model(options):
    from accel_train import use_chunked_loss

    model = build(**options)
    wanted = results(model)
    with use_chunked_loss(model, chunk_size=3):
        found = results(model)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert any("lm_head" in name for name in found[1]) == ("lm_head" in str(options))


def test_an_adapter_of_the_head_is_refused():
    from accel_train import use_chunked_loss
    from accel_train.errors import LossError

    model = build(target_modules=["q_proj", "lm_head"])  # its product is added to the logits
    with use_chunked_loss(model), pytest.raises(LossError, match="used for '__add__'"):
        results(model)
