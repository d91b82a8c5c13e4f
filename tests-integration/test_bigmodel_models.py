"""Real architectures under every placement, against a plain load in memory: bit for bit, and token for token."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from torch.utils._pytree import tree_leaves

from accel_bigmodel import (
    OffloadError,
    cpu_offload,
    disk_offload,
    dispatch_model,
    find_tied_parameters,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    offload_stats,
)
from accel_bigmodel.paging.pager import Pager
from accel_bigmodel.streaming.transfer import HostTransfer
from accel_ckpt import save_model
from testkit.models import ZOO

transformers = pytest.importorskip("transformers")

SHARD = "9KB"
GENERATING = [name for name, each in ZOO.items() if each.prompt is not None]
TIED = [name for name, each in ZOO.items() if each.tied is not None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of sharded checkpoints, by architecture."""
    folders = {}

    def folder(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            ZOO[name].build().save_pretrained(folders[name], max_shard_size=SHARD, **ZOO[name].save_options)
            assert len(shards(folders[name])) > 3
        return folders[name]

    return folder


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def empty(name):
    with init_empty_weights():
        return ZOO[name].build()


def plain(name, folder):
    """A model in memory, filled by safetensors and torch alone."""
    model = ZOO[name].build()
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    weights = {}
    for file in shards(folder):
        weights |= safetensors.torch.load_file(file)
    model.load_state_dict(weights, strict=False)
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    return model


def half(model):
    """A map with the first half in memory and the rest on disk."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    return infer_auto_device_map(model, max_memory={"cpu": int(0.6 * size), "disk": 10 * size})


def resident(model, folder, spare):
    return load_checkpoint_and_dispatch(model, folder, {"": "cpu"})


def on_disk(model, folder, spare):
    return load_checkpoint_and_dispatch(model, folder, {"": "disk"}, offload_folder=spare)


def mixed(model, folder, spare):
    device_map = half(model)
    assert set(device_map.values()) == {"cpu", "disk"}
    return load_checkpoint_and_dispatch(model, folder, device_map, offload_folder=spare)


def streamed(device_map, share):
    """Weights are copied to slots ahead of their use, as on an accelerator, within a share of the weights' bytes."""

    def place(model, folder, spare):
        places = half(model) if device_map is None else device_map
        load_checkpoint_in_model(model, folder, places, offload_folder=spare)
        size = sum(parameter.nbytes for parameter in model.parameters())
        memory = None if share is None else int(share * size)
        model.device_memory = memory or 2 * size  # without a limit, slots of tiny blocks are rounded up
        return dispatch_model(model, places, offload_dir=spare, device_memory=memory, transfer=HostTransfer())

    return place


def paged(model, folder, spare):
    """Mapped files may fill less memory than they have bytes, so pages are read ahead and dropped behind."""
    load_checkpoint_in_model(model, folder, {"": "disk"})
    size = sum(parameter.nbytes for parameter in model.parameters())
    model = dispatch_model(model, {"": "disk"}, host_memory=int(0.75 * size))
    assert isinstance(model._accel_dispatch.mover, Pager)
    return model


def cpu_offloaded(model, folder, spare):
    """From a model that is in memory, by the function that knows no map."""
    load_checkpoint_in_model(model, folder)
    return cpu_offload(model, torch.device("cpu"), transfer=HostTransfer())


def disk_offloaded(model, folder, spare):
    """From weights in memory that no file holds: they are written to the folder once."""
    load_checkpoint_in_model(model, folder)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return disk_offload(model, spare, torch.device("cpu"), transfer=HostTransfer())


PLACEMENTS = {
    "resident": resident,
    "disk": on_disk,
    "mixed": mixed,
    "cpu, streamed": streamed({"": "cpu"}, None),
    "disk, streamed": streamed({"": "disk"}, 0.75),
    "mixed, streamed": streamed(None, 0.75),
    "disk, paged": paged,
    "cpu_offload": cpu_offloaded,
    "disk_offload": disk_offloaded,
}


FEW = {"disk", "mixed, streamed"}


def every_placement(test):
    """Runs a test for all placements, most of them in the long tier."""
    some = [each if each in FEW else pytest.param(each, marks=pytest.mark.full) for each in PLACEMENTS]
    return pytest.mark.parametrize("placement", some)(test)


@pytest.fixture
def place(placement, saved, tmp_path):
    """Loads and places a model without weights in the way of this test."""

    def placed(name):
        return PLACEMENTS[placement](empty(name), saved(name), tmp_path / "offload")

    return placed


def same(mine, theirs):
    mine, theirs = tree_leaves(mine), tree_leaves(theirs)
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        if isinstance(other, torch.Tensor):
            assert torch.equal(one, other)


def answer(model, name):
    with torch.no_grad():
        return dict(model(**ZOO[name].inputs(), **({} if name in ("bert", "vit") else {"use_cache": False})))


def story(model, name):
    return model.generate(**ZOO[name].prompt(), max_new_tokens=8, do_sample=False, no_repeat_ngram_size=1)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ZOO)
def test_outputs_are_those_of_a_plain_load(name, placement, place, saved, tmp_path):
    expected = answer(plain(name, saved(name)), name)
    model = place(name)
    for _ in range(2):  # the second time in the order that the first has shown
        same(answer(model, name), expected)
    written = list((tmp_path / "offload").glob("**/*.safetensors"))
    assert bool(written) == (placement == "disk_offload")  # else the checkpoint's files are the store
    stats = offload_stats(model)
    if stats is not None and placement != "disk, paged":
        assert stats.bytes_moved > 0
        assert stats.peak_bytes <= getattr(model, "device_memory", stats.peak_bytes)


@every_placement
@pytest.mark.parametrize("name", GENERATING)
def test_generated_tokens_are_those_of_a_plain_load(name, place, saved, monkeypatch):
    # Where Accelerate is installed, transformers would put one of its hooks on an encoder that has none; else it fails.
    monkeypatch.delattr(transformers.generation.utils, "add_hook_to_module", raising=False)
    expected = story(plain(name, saved(name)), name)
    assert len(expected.unique()) > 7
    same(story(place(name), name), expected)


@every_placement
@pytest.mark.parametrize("name", ZOO)
def test_saving_a_placed_model_gives_its_weights(name, place, saved, tmp_path):
    model = place(name)
    before = plain(name, saved(name)).state_dict()
    answer(model, name)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=SHARD, **ZOO[name].save_options)
    save_model(model, tmp_path / "ours", max_shard_size=SHARD)
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        assert len(shards(folder)) > 3
        again = plain(name, folder).state_dict()
        assert again.keys() == before.keys()
        assert all(torch.equal(again[key], before[key]) for key in before)
        reloaded = load_checkpoint_and_dispatch(empty(name), folder, {"": "disk"})
        assert find_tied_parameters(reloaded) == find_tied_parameters(plain(name, folder))


@every_placement
@pytest.mark.parametrize("name", TIED)
def test_tied_parameters_stay_one(name, place):
    model = place(name)
    first, second = ZOO[name].tied
    for _ in range(2):
        assert model.get_parameter(first) is model.get_parameter(second)
        names = {name for name, _ in model.named_parameters()}
        assert len({first, second} & names) == 1
        answer(model, name)
    state = model.state_dict()
    assert state[first].data_ptr() == state[second].data_ptr()


@every_placement
@pytest.mark.parametrize("name", ZOO)
def test_the_map_is_where_transformers_looks_for_it(name, placement, place):
    model = place(name)
    # A map is of who gave one: the functions that know none leave no attribute, as the real ones do.
    assert set(getattr(model, "hf_device_map", {}).values()) <= {"cpu", "disk"}
    assert hasattr(model, "hf_device_map") == ("offload" not in placement)
    assert model.device == torch.device("cpu")
    assert model.dtype == torch.float32
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", ZOO)
def test_weights_converted_while_loading(name, saved, tmp_path):
    expected = plain(name, saved(name)).to(torch.bfloat16)
    model = load_checkpoint_and_dispatch(
        empty(name), saved(name), {"": "disk"}, offload_folder=tmp_path / "offload", dtype="bfloat16"
    )
    mine, theirs = dict(model.named_parameters()), dict(expected.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) and mine[key].dtype == torch.bfloat16 for key in mine)
    if name in (
        "gpt2",
        "bert",
    ):  # the others compute rotations and the like from buffers, or have float inputs
        same(answer(model, name), answer(expected, name))


def test_saving_over_the_files_that_a_model_views(saved, tmp_path):
    """Ours keeps the old file for those who view it; the model goes on to answer the same."""
    folder = tmp_path / "checkpoint"
    save_model(plain("llama", saved("llama")), folder, max_shard_size=SHARD)
    model = load_checkpoint_and_dispatch(empty("llama"), folder, {"": "disk"})
    expected = answer(model, "llama")
    save_model(model, folder, max_shard_size=SHARD)
    same(answer(model, "llama"), expected)
    same(answer(load_checkpoint_and_dispatch(empty("llama"), folder, {"": "disk"}), "llama"), expected)


def test_published_names_are_converted_and_dispatched(saved, tmp_path):
    """A checkpoint whose names transformers converts is read as it is, or comes from `from_pretrained`."""
    ZOO["mixtral"].build().save_pretrained(tmp_path / "published", max_shard_size=SHARD)
    expected = answer(plain("mixtral", saved("mixtral")), "mixtral")
    with pytest.raises(OffloadError, match=r"experts\.gate_up_proj.* on disk.*pass offload_folder"):
        load_checkpoint_and_dispatch(empty("mixtral"), tmp_path / "published", {"": "disk"})
    direct = load_checkpoint_and_dispatch(
        empty("mixtral"), tmp_path / "published", {"": "disk"}, offload_folder=tmp_path / "converted"
    )
    same(answer(direct, "mixtral"), expected)
    model = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "published").eval()
    save_model(model, tmp_path / "renamed")
    again = load_checkpoint_and_dispatch(empty("mixtral"), tmp_path / "renamed", {"": "disk"})
    same(answer(again, "mixtral"), expected)
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path / "offload", transfer=HostTransfer())
    same(answer(model, "mixtral"), expected)
    same(story(model, "mixtral"), story(plain("mixtral", saved("mixtral")), "mixtral"))
