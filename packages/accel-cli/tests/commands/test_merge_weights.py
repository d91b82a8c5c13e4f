"""``accel merge-weights``: flags and messages; what is merged is tested in accel-ckpt."""

import pytest
import torch
from safetensors.torch import load_file

from accel_ckpt import save_model, save_training_state
from accel_cli.app import main

WEIGHTS = {"a": torch.ones(8), "b": torch.zeros(8)}


@pytest.fixture
def parts(tmp_path):
    save_model(WEIGHTS, tmp_path / "parts", max_shard_size=40)
    return tmp_path / "parts"


def merge(*words):
    return main(["merge-weights", *map(str, words)])


def test_one_file(parts, tmp_path, capsys):
    assert merge(parts, tmp_path / "out") == 0
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"a", "b"}
    assert "model.safetensors (" in capsys.readouterr().out
    assert parts.exists()


def test_what_stays_behind_is_named(parts, tmp_path, capsys):
    for name in ("config.json", "tokenizer.json", "notes.txt"):
        (parts / name).write_text("{}")
    assert merge(parts, tmp_path / "out") == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "only weights are merged; from_pretrained reads these files too, so copy them: config.json, tokenizer.json"
    ]
    (tmp_path / "out" / "config.json").write_text("{}")
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    assert merge(parts, tmp_path / "out") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("flag", ["--unsafe_serialization", "--unsafe-serialization"])
def test_a_pickle(flag, parts, tmp_path):
    assert merge(parts, tmp_path / "out", flag) == 0
    assert torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True).keys() == {"a", "b"}


@pytest.mark.parametrize("size", ["40", "40B"])
def test_shards(size, parts, tmp_path, capsys):
    assert merge(parts, tmp_path / "out", "--max_shard_size", size) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    ]  # fmt: skip
    assert "model-00001-of-00002.safetensors" in capsys.readouterr().out


def test_removing_the_source(parts, tmp_path):
    assert merge(parts, tmp_path / "out", "--remove_checkpoint_dir") == 0
    assert not parts.exists()


def test_a_state_for_accelerate(tmp_path, capsys):
    loader = {"epoch": 1, "batches_yielded": 2}
    save_training_state(tmp_path / "state", models=[WEIGHTS], shared={"loader_0": loader}, per_rank={})
    assert merge(tmp_path / "state", tmp_path / "out", "--accelerate_state") == 0
    out = capsys.readouterr().out
    assert "omitted: the position of loader 0" in out
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert merge(tmp_path / "state", tmp_path / "other", "--accelerate_state", "--max_shard_size", "1GB") == 2
    assert "cannot be combined with the other options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("gone", "out"), 2, "there is no file or folder gone"),
        (("parts", "out", "--max_shard_size", "5 apples"), 2, "--max_shard_size: '5 apples' is not a size"),
        (("parts", "parts"), 2, "OUTPUT_PATH is CHECKPOINT_DIRECTORY, parts: "),
        (("parts", "./out/../parts"), 2, "give another folder for the result"),
        (("parts",), 2, "output_path"),
    ],
)
def test_errors_are_one_message(words, code, message, parts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert merge(*words) == code
    captured = capsys.readouterr()
    assert message.lower() in captured.err.lower()
    assert "Traceback" not in captured.err
