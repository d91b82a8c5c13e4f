"""Where the values of a stage's parameters belong, and what no stage is built of. Needs no Megatron-core."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel_train import MegatronLMPlugin
from accel_train.errors import OptionError
from accel_train.strategies.megatron.build import build, empty_out, rule_of
from accel_train.strategies.megatron.families import architecture_of
from accel_train.strategies.megatron.layout import FusedHeads, Gated, Heads, Vocabulary, WholeTensor

CPU = torch.device("cpu")
GROUPS = SimpleNamespace(tp_rank=1, tp_size=2, is_first=True, is_last=False)


def llama():
    return SimpleNamespace(
        model_type="llama", num_hidden_layers=6, hidden_size=8, intermediate_size=16, num_attention_heads=4,
        num_key_value_heads=2, head_dim=2, rms_norm_eps=1e-6, hidden_act="silu", max_position_embeddings=64,
        tie_word_embeddings=False, vocab_size=10, eos_token_id=1, rope_theta=500.0,
    )  # fmt: skip


def gpt2():
    return SimpleNamespace(
        model_type="gpt2", num_hidden_layers=6, hidden_size=8, n_inner=None, num_attention_heads=4,
        layer_norm_epsilon=1e-5, activation_function="gelu_new", max_position_embeddings=64, attn_pdrop=0.0,
        resid_pdrop=0.0, embd_pdrop=0.0, tie_word_embeddings=True, vocab_size=10, eos_token_id=1,
    )  # fmt: skip


# A stage with four layers before it: Megatron counts a stage's layers from 0, the model all of them
IN_LLAMA = {
    "embedding.word_embeddings.weight": Vocabulary("model.embed_tokens.weight"),
    "output_layer.weight": Vocabulary("lm_head.weight"),
    "decoder.layers.0.input_layernorm.weight": WholeTensor("model.layers.4.input_layernorm.weight"),
    "decoder.layers.1.self_attention.linear_qkv.weight": Heads(
        (
            "model.layers.5.self_attn.q_proj.weight",
            "model.layers.5.self_attn.k_proj.weight",
            "model.layers.5.self_attn.v_proj.weight",
        )
    ),
    "decoder.layers.0.mlp.linear_fc1.weight": Gated(
        ("model.layers.4.mlp.gate_proj.weight", "model.layers.4.mlp.up_proj.weight")
    ),
    "decoder.layers.11.mlp.linear_fc2.weight": WholeTensor("model.layers.15.mlp.down_proj.weight", dim=1),
    "decoder.final_layernorm.weight": WholeTensor("model.norm.weight"),
}
IN_GPT2 = {
    "embedding.position_embeddings.weight": WholeTensor("transformer.wpe.weight"),
    "decoder.layers.1.self_attention.linear_qkv.weight": FusedHeads(
        "transformer.h.5.attn.c_attn.weight", True
    ),
    "decoder.layers.0.mlp.linear_fc1.bias": WholeTensor("transformer.h.4.mlp.c_fc.bias", dim=0),
    "decoder.final_layernorm.bias": WholeTensor("transformer.ln_f.bias"),
}


@pytest.mark.parametrize(("config", "expected"), [(llama, IN_LLAMA), (gpt2, IN_GPT2)])
def test_layers_are_counted_from_the_first_stage_on(config, expected):
    architecture = architecture_of(config())
    assert {name: rule_of(architecture, name, 4) for name in expected} == expected


@pytest.mark.parametrize(
    "name",
    [
        "mtp.weight",
        "decoder.layers.0.mlp.router.weight",
        "decoder.layers.x.mlp.linear_fc1.weight",
        "input_layernorm.weight",
    ],
)
def test_a_parameter_that_the_model_does_not_have_is_refused(name):
    with pytest.raises(OptionError, match=rf"a parameter '{name}' for which .*other_megatron_args"):
        rule_of(architecture_of(llama()), name, 0)


def named(name):
    model = type(name, (nn.Module,), {})()
    model.config = llama()
    return model


@pytest.mark.parametrize("name", ["LlamaModel", "LlamaForSequenceClassification", "ForCausalLMWrapper"])
def test_a_model_without_a_head_that_predicts_tokens_is_refused(name):
    with pytest.raises(OptionError, match=rf"The model is {name}, .*language-model head"):
        build(MegatronLMPlugin(), named(name), GROUPS, CPU, None)


def test_what_is_no_model_of_transformers_is_refused():
    with pytest.raises(OptionError, match=r"no model of transformers.*custom_model_provider_function"):
        build(MegatronLMPlugin(), nn.Linear(2, 2), GROUPS, CPU, None)


# A model of the script's own, in Megatron's form


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.layer_number = number
        self.fc = nn.Linear(3, 4)
        self.fc.weight.tensor_model_parallel, self.fc.weight.partition_dim = True, 1
        self.fc.bias.tensor_model_parallel, self.fc.bias.partition_dim = False, -1


class Own(nn.Module):
    def __init__(self, numbers=(3, 4), **changed):
        super().__init__()
        self.config = SimpleNamespace(
            **{
                "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 1,
                "sequence_parallel": False, **changed,
            }
        )  # fmt: skip
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([Layer(number) for number in numbers])
        self.head = nn.Linear(4, 1)


def provided(function, compute=None, **options):
    plugin = MegatronLMPlugin(tp_degree=2, pp_degree=2, custom_model_provider_function=function, **options)
    return build(plugin, nn.Linear(1, 1), GROUPS, CPU, compute)


def test_a_model_of_the_scripts_own_is_named_as_a_whole():
    asked, own = [], Own()
    built = provided(lambda **stage: asked.append(stage) or own, torch.bfloat16)
    assert asked == [{"pre_process": True, "post_process": False}]
    assert built.module is own
    assert built.architecture is None
    # Megatron counts from 1: two layers are in stages before.
    assert built.rules == {
        "decoder.layers.0.fc.weight": WholeTensor("decoder.layers.2.fc.weight", dim=1),
        "decoder.layers.0.fc.bias": WholeTensor("decoder.layers.2.fc.bias"),
        "decoder.layers.1.fc.weight": WholeTensor("decoder.layers.3.fc.weight", dim=1),
        "decoder.layers.1.fc.bias": WholeTensor("decoder.layers.3.fc.bias"),
        "head.weight": WholeTensor("head.weight"),
        "head.bias": WholeTensor("head.bias"),
    }
    assert [id(parameter) for _, parameter in built.parameters()] == [id(p) for p in own.parameters()]
    assert {p.dtype for p in own.parameters()} == {own.config.pipeline_dtype} == {torch.bfloat16}
    [[part]] = built.rules["decoder.layers.1.fc.weight"].parts(torch.zeros(4, 3), built.dims).values()
    assert (part.offsets, part.shape) == ((0, 3), (4, 6)), "the second of two ranks"


def test_a_stage_without_layers():
    built = provided(lambda **stage: Own(numbers=()))
    assert list(built.rules) == ["head.weight", "head.bias"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda **stage: SimpleNamespace(config=Own().config),
            "returned SimpleNamespace; it must return a model",
        ),
        (lambda **stage: nn.Linear(2, 2), r"returned Linear; .*TransformerConfig in \.config"),
        (
            lambda **stage: Own(tensor_model_parallel_size=4),
            "has tensor_model_parallel_size=4 in its configuration, but the plugin says 2",
        ),
        (lambda **stage: Own(sequence_parallel=True), "has sequence_parallel=True .* the plugin says False"),
    ],
)
def test_a_provider_whose_model_does_not_fit_is_refused(function, message):
    with pytest.raises(OptionError, match=message):
        provided(function)


def test_an_emptied_model_keeps_its_form():
    model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 2), nn.Linear(2, 5, bias=False))
    model[2].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    model.register_buffer("places", torch.arange(3))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    empty_out(model)
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model[2].weight is model[0].weight
    assert [model[1].weight.requires_grad, model[1].bias.requires_grad] == [True, False]
    assert model.places.tolist() == [0, 1, 2], "buffers are small, and no state has all of them"
