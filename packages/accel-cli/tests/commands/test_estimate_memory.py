"""``accel estimate-memory``."""

import json

import pytest
import torch
from safetensors.torch import save_file

from accel_cli.app import main

SETTINGS = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    return str(tmp_path)


def run(capsys, *words):
    assert main(["estimate-memory", *words]) == 0
    return capsys.readouterr().out


def test_the_tables(capsys, folder):
    pytest.importorskip("transformers")
    out = run(capsys, folder, "--seq-length", "32")
    for word in (
        "Largest Layer",
        "Total Size",
        "Training using Adam",
        "N/A",
        "Adafactor",
        "KV cache",
        "10^9",
    ):
        assert word in out


def test_json_and_several_dtypes(capsys, folder):
    pytest.importorskip("transformers")
    words = (folder, "--dtypes", "float32", "int8", "--json", "--batch_size", "3", "--seq_length", "32")
    facts = json.loads(run(capsys, *words))
    count = facts["parameters"]
    assert count == 2 * 64 * 16 + 16 + 2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 32 + 2 * 16)
    assert [row["dtype"] for row in facts["loading"]] == ["float32", "int8"]
    assert facts["loading"][1]["training_with_adam"] is None
    cache = 2 * 3 * 2 * 32 * 4 * 2 * 2  # keys and values, samples, heads, tokens, head size, bytes, layers
    assert facts["inference"][1]["kv_cache"] == cache
    adam = facts["training"][0]
    assert (adam["optimizer"], adam["total"]) == ("AdamW", 16 * count)


def test_files_without_a_configuration(capsys, tmp_path):
    save_file({"a.weight": torch.zeros(10, 10), "b.weight": torch.zeros(5)}, tmp_path / "m.safetensors")
    facts = json.loads(run(capsys, str(tmp_path), "--json"))
    assert facts["loading"][0] == {
        "dtype": "float32", "largest_layer": 400, "total_size": 420, "training_with_adam": 1680,
    }  # fmt: skip
    assert "only names and shapes" in facts["notes"][0]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ["--dtypes", "float23"],
            2,
            "--dtypes is 'float23', which is not a dtype of this table; did you mean float32",
        ),
        (
            ["--dtypes", "float16", "int5"],
            2,
            "--dtypes is 'int5', which is not a dtype of this table; did you mean int8",
        ),
        (["--library_name", "tim"], 2, "--library_name is 'tim', which is not supported; did you mean timm"),
        (["--batch_size", "0"], 2, "--batch_size is '0'"),
    ],
)
def test_wrong_words(capsys, folder, words, code, message):
    assert main(["estimate-memory", folder, *words]) == code
    assert message in capsys.readouterr().err


def test_other_names(capsys):
    assert main(["estimate", "x"]) == 2
    assert "use accel estimate-memory" in capsys.readouterr().err
