"""Hooks on models of transformers: offloaded by hand, placed, compiled, copied, and free again."""

import copy

import pytest
import torch

from accel_bigmodel import (
    AlignDevicesHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_execution_device_hook,
    get_state_dict_offloaded_model,
    remove_hook_from_submodules,
)

transformers = pytest.importorskip("transformers", reason="the default environment installs it")

SMALL = {"vocab_size": 100, "pad_token_id": 0, "eos_token_id": 99}


def llama():
    config = transformers.LlamaConfig(
        **SMALL, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)


def gpt2():
    config = transformers.GPT2Config(**SMALL, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1)
    return transformers.GPT2LMHeadModel(config)


def t5():
    config = transformers.T5Config(
        **SMALL, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS = [llama, gpt2, t5]
PROMPT = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


@pytest.fixture
def model(request):
    torch.manual_seed(0)
    return request.param().eval()


def tokens(model):
    return model.generate(PROMPT, max_new_tokens=6, do_sample=False)


def ties(model):
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), set()).add(name)
    return sorted(map(sorted, found.values()))


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_offloaded_by_hand(model, tmp_path):
    expected, before = tokens(model), {name: value.clone() for name, value in model.state_dict().items()}
    objects, tied = dict(model.named_parameters()), ties(model)
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True))
    attach_align_device_hook(model, "cpu", offload=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert ties(model) == tied
    assert torch.equal(tokens(model), expected)
    assert torch.equal(tokens(copy.deepcopy(model)), expected)
    state_dict = get_state_dict_offloaded_model(model)
    assert state_dict.keys() == before.keys()
    assert all(torch.equal(state_dict[name], before[name]) for name in before)
    model.save_pretrained(tmp_path, state_dict=state_dict)
    assert torch.equal(tokens(type(model).from_pretrained(tmp_path).eval()), expected)
    remove_hook_from_submodules(model)
    assert all(parameter is objects[name] for name, parameter in model.named_parameters())
    assert ties(model) == tied
    assert torch.equal(tokens(model), expected)


@pytest.mark.parametrize("model", [llama], indirect=True)
def test_placed_and_compiled(model):
    torch.compiler.reset()  # compiled code is counted per function, and all hooked modules share one
    with torch.no_grad():
        expected = model(PROMPT).logits
        attach_execution_device_hook(model, "cpu")
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(PROMPT, use_cache=False).logits, expected)
