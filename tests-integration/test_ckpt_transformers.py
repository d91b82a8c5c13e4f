"""Real transformers models read what we write, and we read what they write."""

import pytest
import torch

from accel_ckpt import find_tied_parameters

transformers = pytest.importorskip("transformers")


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    ).eval()


def bert():
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=40, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
        )
    ).eval()


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=40, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            tie_word_embeddings=True,
        )
    ).eval()  # fmt: skip


MODELS = {"gpt2": gpt2, "bert": bert, "llama": llama}
IDS = torch.tensor([[1, 2, 3, 4]])


def same(model, again):
    """Equal weights, bit for bit, ties included; equal answers but for the rounding of other kernels."""
    mine, theirs = model.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    groups = [find_tied_parameters(each) for each in (model, again)]
    assert groups[0] == groups[1]
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", ["10GB", "2KB"])
def test_t32_from_pretrained_reads_save_model(tmp_path, name, size):
    from accel_ckpt import save_model

    model = MODELS[name]()
    model.config.save_pretrained(tmp_path)
    save_model(model, tmp_path, max_shard_size=size)
    again, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    same(model, again)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", ["10GB", "2KB"])
def test_t32_we_read_save_pretrained(tmp_path, name, size):
    from accel_ckpt import LoadReport, load_checkpoint_in_model

    model = MODELS[name]()
    model.save_pretrained(tmp_path, max_shard_size=size)
    torch.manual_seed(7)
    again = type(model)(model.config).eval()
    assert load_checkpoint_in_model(again, tmp_path, strict=True) == LoadReport()
    same(model, again)


def test_the_model_of_a_training_state_loads_with_from_pretrained(tmp_path):
    from accel_ckpt import save_training_state

    model = gpt2()
    path = save_training_state(
        tmp_path / "c",
        models=[model.state_dict()],
        shared={},
        per_rank={},
        before_write=lambda folder: model.config.save_pretrained(folder),
    )
    same(model, type(model).from_pretrained(path))


def test_save_is_a_save_function(tmp_path):
    from accel_ckpt import save

    model = gpt2()
    model.save_pretrained(tmp_path, is_main_process=True, save_function=save)
    same(model, type(model).from_pretrained(tmp_path))


def masked_bert():
    from transformers import BertConfig

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertConfig(vocab_size=64, **sizes)


def experts_of(kind):
    import transformers

    small = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    if kind == "mixtral":
        return transformers.MixtralConfig(**small, **heads, num_local_experts=12)
    return transformers.Qwen3MoeConfig(**small, **heads, num_experts=12, moe_intermediate_size=8)


@pytest.mark.parametrize("placed", ["in place", "meta", "device map"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_that_transformers_stacks_are_stacked(tmp_path, kind, placed):
    """from_pretrained is the oracle; the file holds a matrix for each expert."""
    from transformers import AutoModelForCausalLM

    from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(experts_of(kind)).save_pretrained(tmp_path / "saved")
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    if placed == "in place":
        model = AutoModelForCausalLM.from_config(experts_of(kind))
        load_checkpoint_in_model(model, tmp_path / "saved", strict=True)
    else:
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(experts_of(kind))
        model.tie_weights()
        inner = {f"model.{name}": "cpu" for name, _ in model.model.named_children()}
        places = {"": "cpu"} if placed == "meta" else {**inner, "model.layers": "disk", "lm_head": "cpu"}
        model = load_checkpoint_and_dispatch(
            model, tmp_path / "saved", device_map=places, offload_folder=tmp_path / "offload"
        )
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, wanted(ids).logits)


def test_old_names_and_heads_are_those_of_the_model(tmp_path):
    from safetensors.torch import save_file
    from transformers import BertForMaskedLM, BertModel

    from accel_ckpt import load_checkpoint_in_model

    torch.manual_seed(0)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = BertModel(masked_bert()).state_dict()
    for new, name in old.items():
        tensors = {key.replace(new, name): value.clone() for key, value in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    masked_bert().save_pretrained(tmp_path)
    wanted = BertForMaskedLM.from_pretrained(tmp_path)
    model = BertForMaskedLM(masked_bert())
    with pytest.warns(UserWarning, match="does not fill the whole model"):
        report = load_checkpoint_in_model(model, tmp_path, strict=False)
    assert all(name.startswith("cls.") for name in report.missing)
    assert all(name.startswith("pooler.") for name in report.unexpected)
    found, expected = model.bert.state_dict(), wanted.bert.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
