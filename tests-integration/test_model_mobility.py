"""States of models of transformers move between strategies and numbers of ranks; a next step shows nothing is lost.

The step has the same samples on every rank, so its weights do not depend on who computes it.
"""

from __future__ import annotations

import pytest
import torch

from testkit import worlds

VOCABULARY = 97
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL))


def gpt2():
    """Its output layer is tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4))


def started(make, strategy, seed):
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    options = {"fsdp2": {}, "hsdp": {"dp_replicate_size": 2}, "offload": {"cpu_offload": True}}
    plugin = FullyShardedDataParallelPlugin(**options[strategy]) if strategy in options else None
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(seed)
    model = make()
    # A large epsilon keeps Adam from turning roundings of tiny gradients into whole steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    return accelerator, *accelerator.prepare(model, optimizer)


def step(accelerator, model, optimizer, number):
    ids = (torch.arange(40, device=accelerator.device).view(4, 10) * (number + 1)) % VOCABULARY
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()


def save(make, strategy, folder):
    objects = started(make, strategy, 0)
    for number in range(3):
        step(*objects, number)
    objects[0].save_state(folder)
    step(*objects, 3)
    return {name: value.clone() for name, value in objects[0].get_state_dict(objects[1]).items()}


def load(make, strategy, folder):
    objects = started(make, strategy, 5)
    objects[0].load_state(folder)
    step(*objects, 3)
    return objects[0].get_state_dict(objects[1])


FULL = pytest.mark.full
SAVED = [
    pytest.param(gpt2, "fsdp2", 2, [("single", 1), ("ddp", 2)], id="gpt2-fsdp2"),
    pytest.param(gpt2, "ddp", 2, [("fsdp2", 2)], id="gpt2-ddp", marks=FULL),
    pytest.param(gpt2, "hsdp", 4, [("offload", 2), ("fsdp2", 2)], id="gpt2-hsdp", marks=FULL),
    pytest.param(llama, "fsdp2", 4, [("ddp", 2), ("hsdp", 4), ("single", 1)], id="llama-fsdp2", marks=FULL),
    pytest.param(llama, "single", 1, [("fsdp2", 2), ("hsdp", 4)], id="llama-single", marks=FULL),
    pytest.param(mixtral, "fsdp2", 2, [("single", 1), ("hsdp", 4)], id="mixtral-fsdp2", marks=FULL),
    pytest.param(mixtral, "ddp", 2, [("fsdp2", 4)], id="mixtral-ddp", marks=FULL),
]


@pytest.mark.parametrize(("make", "strategy", "ranks", "others"), SAVED)
def test_states_of_models_of_transformers_are_loaded_by_other_strategies(
    tmp_path, make, strategy, ranks, others
):
    wanted = worlds.run(save, ranks, make, strategy, tmp_path / "state")[0]
    for other, count in others:
        for found in worlds.run(load, count, make, other, tmp_path / "state"):
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=f"{other}: {name}")
