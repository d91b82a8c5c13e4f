"""Finding models: folders, files, repositories, and one message for each way to find none."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

from accel_bigmodel import EstimateError
from accel_cli.models import build_model, find_model
from accel_state.errors import MissingDependencyError
from testkit.hub import serve

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def write(folder, settings):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_a_folder_and_its_configuration_are_the_same_model(tmp_path):
    pytest.importorskip("transformers")
    folder = write(tmp_path / "m", LLAMA)
    found = [find_model(str(path)) for path in (folder, folder / "config.json")]
    models = [build_model(each) for each in found]
    assert {type(model).__name__ for model in models} == {"LlamaForCausalLM"}
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in models[0].parameters())


@pytest.mark.parametrize("with_type", [True, False])
def test_the_file_that_is_named_is_read_and_not_the_one_beside_it(tmp_path, with_type):
    transformers = pytest.importorskip("transformers")
    folder = write(tmp_path / "m", LLAMA)
    other = {**LLAMA, "hidden_size": 2 * LLAMA["hidden_size"], "tie_word_embeddings": False}
    if not with_type:
        del other["model_type"]
    (folder / "other.json").write_text(json.dumps(other))
    found = find_model(str(folder / "other.json"), "transformers")
    if not with_type:
        with pytest.raises(EstimateError, match="model_type"):
            build_model(found)
        return
    right = transformers.LlamaForCausalLM(transformers.LlamaConfig(**other))
    assert sum(p.numel() for p in build_model(found).parameters()) == sum(
        p.numel() for p in right.parameters()
    )


def test_files_alone_give_shapes_from_their_headers(tmp_path):
    tensors = {"a.weight": torch.zeros(3, 4, dtype=torch.bfloat16), "b.weight": torch.zeros(5)}
    save_file(tensors, tmp_path / "model.safetensors")
    for name in (tmp_path, tmp_path / "model.safetensors"):
        found = find_model(str(name))
        assert found.library is None
        assert found.shapes == {"a.weight": (3, 4), "b.weight": (5,)}
        assert sorted(found.dtypes) == ["BF16", "F32"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "none.safetensors", "does not exist"),
        (lambda folder: folder, "neither config.json nor safetensors files; it has nothing"),
        (lambda folder: write(folder, {"hidden_size": 3}), "does not say which library"),
    ],
)
def test_what_is_not_a_model(tmp_path, make, message):
    with pytest.raises(EstimateError, match=message):
        find_model(str(make(tmp_path)))


def test_damaged_files(tmp_path):
    for text in ("{", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(EstimateError, match="cannot be read as JSON"):
            find_model(str(tmp_path))
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff" * 100)
    with pytest.raises(EstimateError, match="cannot be read as safetensors"):
        find_model(str(file))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(EstimateError, match=r"neither a config\.json nor a safetensors file"):
        find_model(str(tmp_path / "m.gguf"))


def test_code_of_a_model_is_not_run(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "configuration_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    settings = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.Own"}}
    found = find_model(str(write(tmp_path, settings)))
    with pytest.raises(EstimateError, match="pass --trust_remote_code if you trust it"):
        build_model(found)
    assert not (tmp_path / "ran").exists()


def test_a_configuration_that_its_library_does_not_know(tmp_path):
    pytest.importorskip("transformers")
    found = find_model(str(write(tmp_path, {"model_type": "nothing-known"})))
    with pytest.raises(EstimateError, match="transformers cannot build"):
        build_model(found)


def test_a_library_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(MissingDependencyError, match="pip install timm"):
        build_model(find_model("resnet50", "timm"))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    import huggingface_hub.constants as constants

    with serve() as running:
        for name, value in running.environ(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        template = running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield running


def test_a_repository_gives_its_configuration_alone(hub):
    pytest.importorskip("transformers")
    hub.add("org/llama", {"config.json": json.dumps(LLAMA).encode(), "model.safetensors": b"0" * 5000})
    found = find_model("org/llama")
    assert found.settings == LLAMA
    assert not any("model.safetensors" in path for _, path, _ in hub.log)
    with pytest.raises(EstimateError, match="no repository of that name that you can see"):
        find_model("org/nothing")


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch, tmp_path):
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", constants.ENDPOINT + "/{repo_id}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    began = time.monotonic()
    with pytest.raises(EstimateError, match="the Hub cannot be reached; check the connection"):
        find_model("org/llama")
    assert time.monotonic() - began < 15, "huggingface_hub tries for 23 seconds"


def test_offline_says_so(hub, monkeypatch, tmp_path):
    import huggingface_hub.constants as constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(EstimateError, match="HF_HUB_OFFLINE is set; unset it, run `hf download org/llama"):
        find_model("org/llama")


@pytest.mark.parametrize(
    "command", [["estimate-memory"], ["plan", "--devices", "2", "--memory", "8GB"]], ids=str
)
def test_the_commands_say_so_in_a_process_of_their_own(tmp_path, command):
    # There nothing else has imported huggingface_hub's modules, which appear only when they are.
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    words = [sys.executable, "-m", "accel_cli", command[0], "org/llama", *command[1:]]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2, "1 is for models that do not fit"
    assert done.stderr.startswith(f"accel {command[0]}: error: there is no file or folder org/llama")
    assert done.stderr.count("\n") == 1
