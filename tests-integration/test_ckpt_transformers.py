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
