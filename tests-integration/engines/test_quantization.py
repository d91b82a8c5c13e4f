"""Models quantised by the real bitsandbytes and torchao. Run with `hatch run engines-quantization:test`.

The oracle is the engine used by hand on a model that is in memory: outputs are equal bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import io
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accel_bigmodel import (
    QUANTIZATION_SUPPORT,
    BnbQuantizationConfig,
    QuantizationError,
    TorchAoQuantizationConfig,
    dispatch_model,
    find_tied_parameters,
    has_4bit_bnb_layers,
    init_empty_weights,
    load_and_quantize_model,
    replace_with_bnb_layers,
)
from accel_ckpt import save_model

bnb = pytest.importorskip("bitsandbytes", reason="hatch run engines-quantization:test installs it")
torchao = pytest.importorskip("torchao", reason="hatch run engines-quantization:test installs it")
transformers = pytest.importorskip("transformers")

CONFIGS = {
    "bitsandbytes int8": BnbQuantizationConfig(load_in_8bit=True),
    "bitsandbytes int8, no outliers": BnbQuantizationConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    "bitsandbytes fp4": BnbQuantizationConfig(load_in_4bit=True),
    "bitsandbytes nf4": BnbQuantizationConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bf16"
    ),
    "bitsandbytes nf4, doubly, in fp32": BnbQuantizationConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype="fp32",
    ),
    "torchao int8": TorchAoQuantizationConfig("int8"),
    "torchao int8 in fp32": TorchAoQuantizationConfig("int8", torch_dtype="fp32"),
    "torchao int4": TorchAoQuantizationConfig("int4", group_size=32),
    "torchao int4 in fp16": TorchAoQuantizationConfig("int4", group_size=64, torch_dtype="fp16"),
    "torchao float8": TorchAoQuantizationConfig("float8"),
}
# Largest difference of the hidden states to those of the model in float32, relative to their largest value. Of
# several seeds, twice what was seen.
CLOSE = {"int8": 0.05, "float8": 0.15, "fp4": 0.6, "nf4": 0.5, "int4": 0.5}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
IDS = torch.tensor([[1, 5, 9, 2], [3, 3, 7, 0]])


def llama(tied=False):
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=60,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


def empty(tied=False):
    with init_empty_weights():
        return llama(tied)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def tied(request):
    return request.param


@pytest.fixture
def saved(tmp_path, tied):
    torch.manual_seed(0)
    model = llama(tied)
    model.save_pretrained(tmp_path / "saved", max_shard_size="200KB")
    return model, tmp_path / "saved"


def by_hand(model, config, device="cpu"):
    """The same with nothing but the engine: every linear layer of the blocks."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():  # not the rotary frequencies, which no checkpoint holds
        parameter.data = parameter.data.to(config.dtype)
    if config.engine == "torchao":
        quantize_by_torchao(model.model.layers, config, device)
        return model.to(device)
    for parent in list(model.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, bnb_layer(child, config))
    return model.to(device)


def bnb_layer(layer, config):
    sizes = {"input_features": layer.in_features, "output_features": layer.out_features}
    if config.load_in_8bit:
        new = bnb.nn.Linear8bitLt(
            **sizes, bias=False, has_fp16_weights=False, threshold=config.llm_int8_threshold
        )
    else:
        new = bnb.nn.Linear4bit(
            **sizes,
            bias=False,
            compute_dtype=config.bnb_4bit_compute_dtype,
            quant_type=config.bnb_4bit_quant_type,
            compress_statistics=config.bnb_4bit_use_double_quant,
        )
        new.support_avx512bf16_for_cpu = config.bnb_4bit_cpu_packing
    new.to(config.dtype)
    new.load_state_dict(layer.state_dict())
    return new.eval()


def quantize_by_torchao(part, config, device):
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int4WeightOnlyConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    part.to(device)
    if config.weights == "int4" and device == "cpu":
        quantize_(part, PrototypeInt4WeightOnlyConfig(group_size=config.group_size))
    elif config.weights == "int4":
        quantize_(part, Int4WeightOnlyConfig(config.group_size, int4_packing_format="tile_packed_to_4d"))
    else:
        quantize_(part, Int8WeightOnlyConfig() if config.weights == "int8" else Float8WeightOnlyConfig())


def difference(model, plain, device="cpu"):
    with torch.no_grad():
        found = model.model(IDS.to(device)).last_hidden_state.float().cpu()
        expected = plain.float().to("cpu").model(IDS).last_hidden_state
    return ((found - expected).abs().max() / expected.abs().max()).item()


@configs
def test_equal_to_the_engine_by_hand_and_close_to_float32(saved, tied, config):
    plain, folder = saved
    model = load_and_quantize_model(empty(tied), config, folder)
    expected = by_hand(plain, config)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected(IDS).logits)
    assert 0 < difference(model, plain) < CLOSE[config.format.split()[1]]
    tokens = model.generate(IDS, max_new_tokens=6, do_sample=False)
    assert torch.equal(tokens, expected.generate(IDS, max_new_tokens=6, do_sample=False))


@configs
def test_what_a_model_has_in_memory_is_quantised_alike(saved, tied, config):
    plain, folder = saved
    model = load_and_quantize_model(copy.deepcopy(plain), config)
    with torch.no_grad():
        expected = load_and_quantize_model(empty(tied), config, folder)(IDS).logits
        assert torch.equal(model(IDS).logits, expected)


@configs
def test_T32_ties_and_the_output_are_kept(saved, tied, config):
    model = load_and_quantize_model(empty(tied), config, saved[1])
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight.dtype == config.dtype
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert find_tied_parameters(model) == ([["lm_head.weight", "model.embed_tokens.weight"]] if tied else [])
    assert has_4bit_bnb_layers(model) is (config.stored_as == "int4" and config.engine == "bitsandbytes")


@configs
@pytest.mark.parametrize("after_forward", [False, True])
def test_saved_and_loaded_back(saved, tied, config, after_forward, tmp_path):
    model = load_and_quantize_model(empty(tied), config, saved[1])
    with torch.no_grad():
        if after_forward:
            model(IDS)
        save_model(model, tmp_path / "quantised", max_shard_size="100KB")
        expected = model(IDS).logits
        again = load_and_quantize_model(empty(tied), config, tmp_path / "quantised", strict=True)
        assert torch.equal(again(IDS).logits, expected)
        states = model.state_dict(), again.state_dict()
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            assert type(value) is torch.Tensor or isinstance(value, nn.Parameter)
            assert torch.equal(value, states[1][name]), name
        fresh = load_and_quantize_model(empty(tied), config, tmp_path / "quantised")
        assert torch.equal(copy.deepcopy(fresh)(IDS).logits, expected)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied


@pytest.mark.parametrize("name", ["torchao int8", "torchao int4", "torchao float8"])
def test_states_of_torchao_layers_go_into_others(saved, tied, name):
    config = CONFIGS[name]
    model = load_and_quantize_model(empty(tied), config, saved[1])
    other = load_and_quantize_model(llama(tied), config)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        assert torch.equal(other(IDS).logits, model(IDS).logits)
    with pytest.raises(RuntimeError, match=r"Missing key.*q_proj.weight"):
        other.load_state_dict(
            {k: v for k, v in model.state_dict().items() if not k.endswith("q_proj.weight.qdata")}
        )


@pytest.mark.parametrize("config", [CONFIGS[n] for n in CONFIGS if "fp32" not in n], ids=lambda c: c.format)
def test_flags_that_others_read(saved, tied, config):
    model = load_and_quantize_model(empty(tied), config, saved[1], device_map={"": "cpu"})
    assert model.hf_device_map == {"": "cpu"}
    assert model.quantization_method == config.engine
    if config.engine == "bitsandbytes":
        assert (model.is_loaded_in_8bit, model.is_loaded_in_4bit) == (
            config.load_in_8bit,
            config.load_in_4bit,
        )
        with pytest.raises(ValueError, match="cannot cast a bitsandbytes model"):
            model.to(torch.float32)
    else:
        assert not hasattr(model, "is_loaded_in_8bit")


def test_skipped_and_float32_modules(saved, tied):
    config = BnbQuantizationConfig(
        load_in_8bit=True, skip_modules=["lm_head", "q_proj"], keep_in_fp32_modules=["layers.1"]
    )
    model = load_and_quantize_model(empty(tied), config, saved[1])
    first, second = model.model.layers
    assert type(first.self_attn.q_proj) is nn.Linear
    assert first.self_attn.q_proj.weight.dtype == torch.float16
    assert isinstance(first.self_attn.k_proj, bnb.nn.Linear8bitLt)
    assert {p.dtype for p in second.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["bitsandbytes nf4", "bitsandbytes int8", "torchao int8"])
def test_t5_keeps_what_cannot_be_quantised(tmp_path, name):
    """It converts what goes into ``wo`` to the dtype of its weight, which with 4 bits would be uint8."""
    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 64}
    config = transformers.T5Config(**sizes, pad_token_id=0, decoder_start_token_id=0)
    plain = transformers.T5ForConditionalGeneration(config).eval()
    save_model(plain, tmp_path)
    with init_empty_weights():
        model = transformers.T5ForConditionalGeneration(config).eval()
    load_and_quantize_model(model, CONFIGS[name], tmp_path)
    wo = model.encoder.block[0].layer[1].DenseReluDense.wo
    assert (type(wo), wo.weight.dtype) == (nn.Linear, torch.float32)
    assert find_tied_parameters(model) == find_tied_parameters(plain)
    with torch.no_grad():
        found, expected = (m(input_ids=IDS, decoder_input_ids=IDS).logits.float() for m in (model, plain))
    assert (found - expected).abs().max() < CLOSE[name.split()[1]] * expected.abs().max()


# Each cell of the table.

ON_THE_CPU = [cell for cell in QUANTIZATION_SUPPORT if cell.device == "cpu"]
OFFLOADED = [cell for cell in QUANTIZATION_SUPPORT if cell.device == "offloaded"]


def config_of(cell):
    return dataclasses.replace(CONFIGS[cell.format], skip_modules=["lm_head"])


@pytest.mark.parametrize("cell", ON_THE_CPU, ids=lambda cell: cell.format)
@pytest.mark.parametrize("tied", [False], indirect=True)
def test_cells_of_the_cpu(saved, tied, cell):
    assert cell.runs, "the table says that it is refused; what refuses it?"
    model = load_and_quantize_model(empty(tied), config_of(cell), saved[1], device_map={"": "cpu"})
    assert difference(model, saved[0]) < CLOSE[cell.format.split()[1]]


@pytest.mark.parametrize("cell", OFFLOADED, ids=lambda cell: cell.format)
@pytest.mark.parametrize("tied", [False], indirect=True)
def test_cells_of_offloaded_weights(saved, tied, cell):
    model = empty(tied)
    with pytest.raises(QuantizationError, match=re.escape(cell.why)):
        load_and_quantize_model(
            model, config_of(cell), saved[1], device_map={"": "cpu", "model.layers.1": "disk"}
        )
    assert model.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


@pytest.mark.gpu
@pytest.mark.parametrize("format", sorted({cell.format for cell in QUANTIZATION_SUPPORT}))
@pytest.mark.parametrize("tied", [False], indirect=True)
def test_cells_of_the_accelerator(saved, tied, format):
    kind = torch.accelerator.current_accelerator().type
    cells = [cell for cell in QUANTIZATION_SUPPORT if (cell.format, cell.device) == (format, kind)]
    config = CONFIGS[format]
    if not cells or not cells[0].runs:
        with pytest.raises(QuantizationError, match=format):
            load_and_quantize_model(empty(tied), config, saved[1])
        return
    model = load_and_quantize_model(empty(tied), config, saved[1])
    assert model.hf_device_map == {"": 0}
    with torch.no_grad():
        expected = by_hand(saved[0], config, kind)(IDS.to(kind)).logits
        assert torch.equal(model(IDS.to(kind)).logits, expected)
    assert difference(model, saved[0], kind) < CLOSE[format.split()[1]]


# What cannot be done.


@pytest.mark.parametrize(
    ("config", "sizes", "reason"),
    [
        (CONFIGS["bitsandbytes nf4"], (5, 7), "has an odd number of weights"),
        (CONFIGS["torchao int4"], (48, 32), "has 48 inputs, not a multiple of the group size 32"),
        (CONFIGS["torchao int4"], (64, 20), "has 20 outputs, not a multiple of the CPU kernel's 16"),
    ],
)
def test_layers_of_sizes_that_do_not_fit(config, sizes, reason):
    config = dataclasses.replace(config, skip_modules=[])
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(*sizes))
    with pytest.raises(QuantizationError, match=rf"1 {reason}.*skip_modules.*\['1'\]"):
        load_and_quantize_model(model, config)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("sizes", [(64, 100), (48, 128), (62, 33), (130, 32), (1, 2)])
@pytest.mark.parametrize("nested", [False, True])
def test_four_bits_in_any_size(sizes, nested):
    """bitsandbytes' own choice of layout fails on these in evaluation on some processors."""
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_use_double_quant=nested, skip_modules=[])
    model = nn.Sequential(nn.Linear(*sizes)).eval()
    x = torch.randn(3, sizes[0])
    expected = model(x)
    load_and_quantize_model(model, config)
    with torch.no_grad():
        before = {name: value.clone() for name, value in model.state_dict().items()}
        found = model(x)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert torch.equal(model(x), found)
    assert (found - expected).abs().max() < 0.5 * expected.abs().max() + 0.5


@pytest.mark.skipif(
    not bnb.functional.has_avx512bf16(),
    reason="bitsandbytes lays weights out anew on processors with AVX512-BF16 only",
)
def test_packed_for_the_cpu():
    """The engine's layout on request; what it would save then is wrong, so nothing is."""
    torch.manual_seed(0)
    config = BnbQuantizationConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype="bf16", skip_modules=[], bnb_4bit_cpu_packing=True
    )
    plain = nn.Sequential(nn.Linear(128, 64, bias=False), nn.Linear(64, 20, bias=False)).bfloat16().eval()
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    model = load_and_quantize_model(copy.deepcopy(plain), config)
    assert [layer.support_avx512bf16_for_cpu for layer in model] == [True, False]
    model.state_dict()
    with torch.no_grad():
        assert torch.equal(model[0](x), bnb_layer(plain[0], config).to("cpu")(x))
        model(x)
    with pytest.raises(
        QuantizationError, match="save the model before its first forward, or load it without"
    ):
        model.state_dict()


FOUR = CONFIGS["bitsandbytes nf4"]


@pytest.mark.parametrize(
    ("saved_as", "loaded_as", "message"),
    [
        ("bitsandbytes nf4", "bitsandbytes int8", "absmax is not expected"),
        ("bitsandbytes int8", "bitsandbytes nf4", "SCB is not expected"),
        ("bitsandbytes int8", "torchao int8", "SCB is not expected"),
        ("bitsandbytes fp4", "bitsandbytes nf4", "bitsandbytes__fp4 is not expected"),
        ("bitsandbytes nf4", "bitsandbytes nf4, doubly, in fp32", "absmax is torch.float32"),
        ("torchao int8", "torchao float8", "qdata is torch.int8"),
        ("torchao int4", "bitsandbytes nf4", "qdata is not expected"),
    ],
)
@pytest.mark.parametrize("tied", [True], indirect=True)
def test_quantised_in_another_way(saved, tied, tmp_path, saved_as, loaded_as, message):
    save_model(load_and_quantize_model(empty(tied), CONFIGS[saved_as], saved[1]), tmp_path / "quantised")
    model = empty(tied)
    with pytest.raises(QuantizationError, match=rf"layers\.0\.self_attn.*{message}.*nothing was changed"):
        load_and_quantize_model(model, CONFIGS[loaded_as], tmp_path / "quantised")
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    "text",
    [
        b"not json",
        b'{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [4096, 4096]}',
        b'{"quant_type": "nf4", "blocksize": 1, "dtype": "bfloat16", "shape": [64, 64]}',
        b'{"quant_type": "nf4", "blocksize": 64, "dtype": "load", "shape": [64, 64]}',
        b"[1]",
    ],
)
def test_a_description_that_would_let_the_engine_read_elsewhere(tmp_path, text):
    config = dataclasses.replace(FOUR, skip_modules=[])
    save_model(load_and_quantize_model(nn.Sequential(nn.Linear(64, 64)), config), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["0.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuantizationError, match=r"quant_state\.bitsandbytes__nf4"):
        load_and_quantize_model(nn.Sequential(nn.Linear(64, 64)), config, tmp_path)


def test_layers_put_there_by_hand(saved, tied):
    plain, _ = saved
    expected = load_and_quantize_model(copy.deepcopy(plain), FOUR)
    model = copy.deepcopy(plain)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    assert replace_with_bnb_layers(model, FOUR) is model
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(model.to("cpu")(IDS).logits, expected(IDS).logits)
    other = replace_with_bnb_layers(llama(), FOUR, modules_to_not_convert=["self_attn", "lm_head"])
    assert type(other.model.layers[0].self_attn.q_proj) is nn.Linear


PEAK = """
    import re, sys, torch
    from torch import nn
    from accel_bigmodel import *
    import accel_bigmodel.quantization.loading as loading

    def anonymous():
        return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024

    peak = 0
    original = loading._QuantizingPlacer.put
    def put(self, *args):
        global peak
        original(self, *args)
        peak = max(peak, anonymous())
    loading._QuantizingPlacer.put = put
    config = {config}
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(32)))
        tiny = nn.Sequential(nn.Linear(32, 32))
    loading.quantization_engine(config).quantize(tiny[0], torch.ones(32, 32), torch.device("cpu"))  # the engine's own
    before = anonymous()
    load_and_quantize_model(model, config, sys.argv[1])
    print(peak - before, anonymous() - before)
"""


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ("BnbQuantizationConfig(load_in_8bit=True, skip_modules=[])", 128),
        ("BnbQuantizationConfig(load_in_4bit=True, skip_modules=[], bnb_4bit_compute_dtype='bf16')", 64 + 8),
        ("TorchAoQuantizationConfig('int8', skip_modules=[])", 128),
        ("TorchAoQuantizationConfig('float8', skip_modules=[])", 128),
    ],
)
def test_peak_memory(tmp_path, config, size):
    """Of 512 MB in float32, little more than the quantised weights is ever in memory."""
    save_model(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(32))), tmp_path)
    code = textwrap.dedent(PEAK).replace("{config}", config)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    peak, after = map(int, done.stdout.split()[-2:])
    assert after < size + 16, done.stdout
    # What quantising takes for itself is given back every 32 MB of full weights; it is several times that, and varies.
    assert peak < size + 256, done.stdout


@configs
@pytest.mark.parametrize("tied", [False], indirect=True)
def test_what_is_not_quantised_may_wait_on_disk(saved, tied, config, tmp_path):
    with torch.no_grad():
        model = load_and_quantize_model(empty(tied), config, saved[1])
        expected = model(IDS).logits
        split = load_and_quantize_model(
            empty(tied),
            config,
            saved[1],
            device_map={"": "cpu", "lm_head": "disk"},
            offload_folder=tmp_path / "off",
        )
        assert split.hf_device_map == {"": "cpu", "lm_head": "disk"}
        assert torch.equal(split(IDS).logits, expected)
        assert torch.equal(dispatch_model(model, {"": "cpu"})(IDS).logits, expected)


# What configurations Accelerate takes.

CASES = [
    {"load_in_8bit": True},
    {"load_in_4bit": True},
    {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bf16"},
    {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32, "torch_dtype": "fp16"},
    {"load_in_8bit": True, "torch_dtype": torch.bfloat16},
    {"load_in_8bit": True, "llm_int8_threshold": 0},
    {},
    {"load_in_8bit": True, "load_in_4bit": True},
    {"load_in_8bit": 1},
    {"load_in_4bit": "yes"},
    {"load_in_8bit": True, "llm_int8_threshold": "6"},
    {"load_in_4bit": True, "bnb_4bit_quant_type": "nf3"},
    {"load_in_4bit": True, "bnb_4bit_quant_type": 4},
    {"load_in_4bit": True, "bnb_4bit_use_double_quant": 1},
    {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp64"},
    {"load_in_4bit": True, "bnb_4bit_compute_dtype": 16},
    {"load_in_8bit": True, "torch_dtype": "half precision"},
    {"load_in_8bit": True, "torch_dtype": 1.5},
    {"load_in_8bit": True, "skip_modules": "lm_head"},
    {"load_in_8bit": True, "keep_in_fp32_modules": "wo"},
]


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="Accelerate is the oracle; not installed"
)
@pytest.mark.parametrize("options", CASES)
def test_accepts_and_resolves_what_accelerate_does(options):
    from accelerate.utils import BnbQuantizationConfig as Theirs

    try:
        theirs = Theirs(**options)
    except ValueError:
        with pytest.raises(QuantizationError):
            BnbQuantizationConfig(**options)
        return
    ours = BnbQuantizationConfig(**options)
    for field in dataclasses.fields(theirs):
        assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
