"""Uploading and loading by repository, against a local stand-in for the hub (`testkit.hub`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load, load_file

from accel_ckpt import save_model
from testkit import hub as fake
from testkit import worlds

pytest.importorskip("huggingface_hub", reason="the extra accel-ckpt[hub] is not installed")

WEIGHTS = {"0.weight": torch.arange(400.0).reshape(20, 20), "0.bias": torch.ones(20)}

BUILD = """
import torch, warnings
from accel_ckpt import load_checkpoint_in_model, push_to_hub, save_model
def build(): return torch.nn.Sequential(torch.nn.Linear(20, 20))
"""


@pytest.fixture
def hub(tmp_path):
    with fake.serve() as running:
        yield running


@pytest.fixture
def python(hub, tmp_path):
    """Run code in a process that knows the hub; huggingface_hub reads its environment when it is imported."""

    def run(code, **environ):
        settings = hub.environ(tmp_path / "hf") | environ
        return worlds.run(_execute, 1, BUILD + code, str(tmp_path), environ=settings)[0]

    return run


def _execute(code, folder):
    """What the code leaves in `answer`, or the error that ends it."""
    os.chdir(folder)
    names = {}
    try:
        exec(compile(code, "<test>", "exec"), names)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return names.get("answer"), None


def good(outcome):
    answer, error = outcome
    assert error is None
    return answer


def bad(outcome, *parts):
    _, error = outcome
    assert error is not None
    for part in parts:
        assert part in error


def files_of(weights=WEIGHTS, size="1MB", safe=True, folder=None):
    save_model(weights, folder, max_shard_size=size, safe_serialization=safe)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_upload_and_load(hub, python):
    saved = good(
        python(
            """
torch.manual_seed(1)
model = build()
save_model(model, "out", push_to_hub="org/net", private=True, commit_message="first")
again = build()
load_checkpoint_in_model(again, "org/net")
assert torch.equal(again[0].weight, model[0].weight)
answer = model[0].weight.sum().item()
"""
        )
    )
    assert saved == load(hub.files("org/net")["model.safetensors"])["0.weight"].sum().item()
    assert hub.repositories["org/net"].private
    assert hub.repositories["org/net"].messages == ["initial commit", "first"]
    assert len(hub.requests("PUT", "/lfs/")) == 1


def test_an_upload_holds_exactly_the_last_save(hub, python):
    good(
        python(
            """
save_model(build(), "out", max_shard_size=1000, push_to_hub="org/net")
open("out/notes.txt", "w").write("mine")
save_model(build(), "out", safe_serialization=False, push_to_hub="org/net")
"""
        )
    )
    hub.add(
        "org/other",
        {"README.md": b"hello", "model-00001-of-00002.safetensors": b"", "model.safetensors.index.json": b""},
    )
    assert sorted(hub.files("org/net")) == [".gitattributes", "pytorch_model.bin"]
    assert len(hub.repositories["org/net"].messages) == 3
    good(python('push_to_hub("out", "org/other")'))
    assert sorted(hub.files("org/other")) == ["README.md", "pytorch_model.bin"]


def test_a_failed_upload_leaves_the_folder_and_says_how_to_go_on(hub, python, tmp_path):
    hub.failures["/commit/"] = 500
    bad(
        python('save_model(build(), "out", push_to_hub="org/net")'),
        "CheckpointSaveError: uploading to org/net failed", "500", "push_to_hub(folder, repository)",
    )  # fmt: skip
    hub.failures.clear()
    uploaded = len(hub.requests("PUT", "/lfs/"))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"0.weight", "0.bias"}
    address = good(python('answer = push_to_hub("out", "org/net")'))
    assert address.startswith(f"{hub.endpoint}/org/net/commit/")
    assert uploaded == 1


def test_without_the_right_to_write(hub, python):
    code = 'save_model(build(), "out", push_to_hub="org/net", token="hf_wrong")'
    bad(python(code), "uploading to org/net failed", "401", "hf auth login")
    assert "org/net" not in hub.repositories


def test_private_weights_do_not_go_to_a_public_repository(hub, python):
    hub.add("org/net", {"README.md": b"x"})
    code = 'save_model(build(), "out", push_to_hub="org/net", private=True)'
    bad(python(code), "org/net exists and is public, but private=True was given")
    assert sorted(hub.files("org/net")) == ["README.md"]


@pytest.mark.parametrize("name", ["net", "a/b/c", "org/", "../x", "org/na me"])
def test_names_are_checked_before_anything_is_saved(name, hub, python, tmp_path):
    bad(
        python(f'save_model(build(), "out", push_to_hub={name!r})'),
        "does not name a repository",
        "'org/name'",
    )
    assert not (tmp_path / "out").exists()
    assert not hub.log


def test_options_of_uploads_need_one(python):
    bad(
        python('save_model(build(), "out", private=True)'), "private is for uploads", "push_to_hub='org/name'"
    )
    bad(
        python('load_checkpoint_in_model(build(), "out", revision="v1")'),
        "revision and token are for repositories",
    )


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["1MB", "1KB"])
def test_whole_and_sharded_weights_load(hub, python, tmp_path, size, safe):
    hub.add("org/net", {**files_of(size=size, safe=safe, folder=tmp_path / "made"), "big.onnx": b"x" * 10**6})
    good(
        python(
            """
model = build()
load_checkpoint_in_model(model, "org/net")
assert torch.equal(model[0].weight, torch.arange(400.0).reshape(20, 20))
"""
        )
    )
    assert not hub.requests("GET", "big.onnx")


def test_safetensors_are_preferred_and_only_they_are_downloaded(hub, python, tmp_path):
    files = files_of(folder=tmp_path / "a") | {"pytorch_model.bin": b"not these"}
    hub.add("org/net", files)
    good(python('load_checkpoint_in_model(build(), "org/net")'))
    assert not hub.requests("GET", "pytorch_model.bin")


def test_a_revision(hub, python, tmp_path):
    first = hub.add("org/net", files_of(folder=tmp_path / "a"))
    hub.add("org/net", files_of({name: value + 1 for name, value in WEIGHTS.items()}, folder=tmp_path / "b"))
    code = """
model = build()
load_checkpoint_in_model(model, "org/net", revision={!r})
answer = model[0].bias[0].item()
"""
    assert good(python(code.format(first))) == 1
    assert good(python(code.format(None))) == 2
    bad(
        python(code.format("gone")),
        "CheckpointNotFoundError",
        "repository of that name cannot be read",
        "gone",
    )


def test_a_local_folder_comes_first(hub, python, tmp_path):
    files_of(folder=tmp_path / "org" / "net")
    good(python('load_checkpoint_in_model(build(), "org/net")'))
    assert not hub.log


def test_what_cannot_be_found(hub, python):
    code = 'load_checkpoint_in_model(build(), "org/gone")'
    bad(
        python(code), "there is no file or folder org/gone, and the repository of that name", "Check the name"
    )
    hub.add("org/empty", {"README.md": b"x"})
    bad(python('load_checkpoint_in_model(build(), "org/empty")'), "org/empty holds no weights")
    hub.add("org/secret", {"README.md": b"x"}, private=True)
    code = 'load_checkpoint_in_model(build(), "org/secret", token="hf_wrong")'
    bad(python(code), "org/secret", "hf auth login")


LARGE = {"0.weight": torch.zeros(20, 20), "0.bias": torch.ones(20), "padding": torch.arange(6_000_000.0)}
LOAD_LARGE = """
warnings.simplefilter("ignore")
model = build()
load_checkpoint_in_model(model, "org/net")
assert model[0].bias.sum() == 20
"""


def ranges(hub):
    asked = hub.requests("GET", "/resolve/")
    return [
        int(headers["range"].removeprefix("bytes=").rstrip("-")) for headers in asked if "range" in headers
    ]


def test_a_download_that_breaks_is_resumed_by_a_range_request(hub, python, tmp_path):
    files = files_of(LARGE, size="1GB", folder=tmp_path / "made")
    hub.add("org/net", files)
    hub.cuts.append(15_000_000)
    _, broken = python(LOAD_LARGE)
    if broken is not None:  # before its version 1, huggingface_hub leaves it to the next call
        assert "Check the connection and try again" in broken
        good(python(LOAD_LARGE))
    [start] = ranges(hub)
    assert 0 < start <= 15_000_000


@pytest.mark.wide
def test_a_killed_download_is_continued_by_the_next_process(hub, python, tmp_path):
    """Files that were complete are not fetched again; of the file in flight huggingface_hub keeps nothing."""
    weights = {f"layer{i}.weight": torch.full((1000,), float(i)) for i in range(5)}
    files = files_of(weights, size="4KB", folder=tmp_path / "made")
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    hub.add("org/net", files)
    hub.stall = shards[2]
    load_all = BUILD + 'from accel_ckpt import open_weights; answer = sorted(open_weights("org/net").about)'
    process = subprocess.Popen([sys.executable, "-c", load_all], env=hub.environ(tmp_path / "hf"))
    try:
        assert hub.stalled.wait(60)
        assert wait_for(lambda: len(list((tmp_path / "hf").rglob("model[.-]*"))) == len(files) - 1, 30)
    finally:
        process.kill()
        process.wait()
    hub.stall = None
    hub.resume.set()
    asked = len(hub.log)
    assert good(python(load_all)) == sorted(weights)
    gets = [path for method, path, _ in hub.log[asked:] if method == "GET" and "/resolve/" in path]
    fetched = [path.rpartition("/")[2] for path in gets]
    assert fetched == [shards[2]]


def wait_for(condition, seconds):
    import time

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_offline(hub, python, tmp_path):
    files = files_of(size="1KB", folder=tmp_path / "made")
    hub.add("org/net", files)
    code = 'load_checkpoint_in_model(build(), "org/net")'
    bad(
        python(code, HF_HUB_OFFLINE="1"),
        "there is no file or folder org/net",
        "`hf download org/net` while online",
    )
    good(python(code))
    asked = len(hub.log)
    good(python(code, HF_HUB_OFFLINE="1"))
    assert len(hub.log) == asked
    shard = next((tmp_path / "hf").rglob("model-00001-of-*.safetensors"))
    shard.unlink()
    bad(python(code, HF_HUB_OFFLINE="1"), "org/net", "hf download org/net")
    bad(
        python('push_to_hub("made", "org/net")', HF_HUB_OFFLINE="1"),
        "uploading to org/net failed",
        "HF_HUB_OFFLINE",
    )


def test_no_connection(python):
    code = 'load_checkpoint_in_model(build(), "org/net")'
    bad(
        python(code, HF_ENDPOINT="http://127.0.0.1:9"),
        "there is no file or folder org/net",
        "Check the connection",
    )
    code = 'save_model(build(), "out", push_to_hub="org/net")'
    bad(python(code, HF_ENDPOINT="http://127.0.0.1:9"), "uploading to org/net failed", "push_to_hub(folder")


def test_without_huggingface_hub(python, tmp_path):
    hidden = 'import sys; sys.modules["huggingface_hub"] = None\n'
    install = "pip install 'huggingface-hub>=0.34'"
    bad(
        python(hidden + 'save_model(build(), "out", push_to_hub="org/net")'),
        "MissingDependencyError",
        install,
    )
    assert not (tmp_path / "out").exists()
    bad(python(hidden + 'load_checkpoint_in_model(build(), "org/net")'), "MissingDependencyError", install)


def test_the_stand_in_speaks_json(hub):
    """A check of the stand-in itself: what it does not know is an error, not an empty answer."""
    import urllib.error
    import urllib.request

    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{hub.endpoint}/api/unknown")
    hub.add("org/net", {"a.txt": b"0123456789"})
    request = urllib.request.Request(
        f"{hub.endpoint}/org/net/resolve/main/a.txt", headers={"Range": "bytes=4-"}
    )
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 206
        assert answer.headers["Content-Range"] == "bytes 4-9/10"
        assert answer.read() == b"456789"
    with urllib.request.urlopen(f"{hub.endpoint}/api/models/org/net/tree/main") as answer:
        assert [entry["path"] for entry in json.loads(answer.read())] == ["a.txt"]
