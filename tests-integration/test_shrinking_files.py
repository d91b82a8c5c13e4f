"""A file that becomes shorter while it is read is an error that names it, and not the end of the interpreter."""

import os
import pickle
import traceback

import pytest
import torch
from torch import nn

import accel_bigmodel
import accel_ckpt
from accel_ckpt.errors import CheckpointError
from accel_train import Accelerator
from testkit import worlds


def net(dtype=torch.float32, device="cpu"):
    return nn.Sequential(*[nn.Linear(300, 300, bias=False, dtype=dtype, device=device) for _ in range(4)])


class Translates(nn.Linear):
    """Loads by itself."""

    def _load_from_state_dict(self, *arguments):
        super()._load_from_state_dict(*arguments)


def prepared(model):
    accelerator = Accelerator(cpu=True)
    return accelerator, *accelerator.prepare(model, torch.optim.Adam(model.parameters()))


def trained(folder, make=net):
    accelerator, model, optimizer = prepared(make())
    accelerator.backward(model(torch.ones(1, 300)).sum())
    optimizer.step()
    accelerator.save_state(folder)


def translating():
    return nn.Sequential(*[Translates(300, 300, bias=False) for _ in range(4)])


def load_state(folder, make=net):
    prepared(make())[0].load_state(folder)


def weights(folder, **options):
    accel_ckpt.save_model(net(), folder, **options)


def load_weights(folder, **options):
    accel_ckpt.load_checkpoint_in_model(net(**options), folder)


CASES = {
    "state": (trained, load_state),
    "state of modules that load by themselves": (
        lambda folder: trained(folder, translating),
        lambda folder: load_state(folder, translating),
    ),
    "checksums": (trained, lambda folder: accel_ckpt.open_training_state(folder).verify()),
    "optimizer": (
        trained,
        lambda folder: accel_ckpt.open_training_state(folder).shared["optimizer_0"],
    ),
    "weights": (weights, load_weights),
    "shards": (lambda folder: weights(folder, max_shard_size="400KB"), load_weights),
    "weights of another dtype": (weights, lambda folder: load_weights(folder, dtype=torch.float64)),
    "one file": (weights, lambda folder: accel_ckpt.load_state_dict(f"{folder}/model.safetensors")),
    "weights to a device": (
        weights,
        lambda folder: accel_ckpt.load_state_dict(f"{folder}/model.safetensors", {"": "cpu"}),
    ),
    "merge": (
        lambda folder: weights(folder, max_shard_size="400KB"),
        lambda folder: accel_ckpt.merge_weights(folder, f"{folder}/merged"),
    ),
}


def shrunk(name, folder, moment):
    """Load, and cut all files down before the read of this number; returns what happened."""
    load, reads = CASES[name][1], 0
    read = os.preadv

    def preadv(*arguments):
        nonlocal reads
        reads += 1
        if reads == moment:
            for entry in os.scandir(folder):
                if entry.is_file():
                    os.truncate(entry.path, min(5000, entry.stat().st_size))
        return read(*arguments)

    os.preadv = preadv
    try:
        load(folder)
    except CheckpointError as error:
        return "named", str(error)
    except Exception:
        return "failed", traceback.format_exc()
    finally:
        os.preadv = read
    return "loaded", reads


@pytest.mark.wide(but=["state", "weights", "shards", "one file", "merge"])
@pytest.mark.skipif(not hasattr(os, "preadv"), reason="files are read otherwise")
@pytest.mark.parametrize("name", CASES)
def test_files_that_shrink(tmp_path, name):
    for moment in (1, 2, 3, 5, 9, 17):
        folder = tmp_path / f"{moment}"
        CASES[name][0](folder)
        [(what, told)] = worlds.run(shrunk, 1, name, str(folder), moment)
        if what == "loaded":
            assert told < moment or "device" in name, told
            break
        assert what == "named", told
        assert str(folder) in told


def touched_later(folder):
    file = f"{folder}/model.safetensors"
    state = accel_ckpt.load_state_dict(file)
    os.truncate(file, 5000)
    return state


def test_what_load_state_dict_returns_needs_no_file(tmp_path):
    model = net()
    accel_ckpt.save_model(model, tmp_path)
    [found] = worlds.run(touched_later, 1, str(tmp_path))
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def computed_later(folder, how):
    model = net(device="meta")
    if how == "dispatched":
        accel_bigmodel.load_checkpoint_and_dispatch(model, folder, {"": "disk"})
    elif how == "to a device map":
        accel_bigmodel.load_checkpoint_in_model(model, folder, {"": "cpu"})
    else:
        accel_ckpt.load_checkpoint_in_model(model, folder)
    uses = [lambda: model(torch.ones(1, 300)), lambda: accel_ckpt.save_model(model, f"{folder}/again")]
    if how == "prepared":
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(model)
        uses.append(lambda: accelerator.save_state(f"{folder}/state"))
    again = pickle.loads(pickle.dumps(model)) if how != "dispatched" else None
    model(torch.ones(1, 300))
    os.truncate(f"{folder}/model.safetensors", 5000)
    if again is not None:
        again(torch.ones(1, 300))  # has memory of its own
    told = []
    for use in uses:
        try:
            use()
        except CheckpointError as error:
            told.append(str(error))
    return told


@pytest.mark.parametrize("how", ["loaded", "to a device map", "dispatched", "prepared"])
def test_a_model_whose_file_shrinks_later(tmp_path, how):
    accel_ckpt.save_model(net(), tmp_path)
    [told] = worlds.run(computed_later, 1, str(tmp_path), how)
    assert len(told) == (3 if how == "prepared" else 2)
    assert all(f"{tmp_path}/model.safetensors" in message for message in told)


def compiled(folder):
    model = net(device="meta")
    accel_ckpt.load_checkpoint_in_model(model, folder)
    inputs = torch.ones(1, 300)
    whole = torch.compile(model, backend="eager", fullgraph=True)
    return torch.equal(whole(inputs), model(inputs))


def test_a_model_over_mapped_files_compiles_as_a_whole(tmp_path):
    accel_ckpt.save_model(net(), tmp_path)
    assert worlds.run(compiled, 1, str(tmp_path)) == [True]


def cut_between_tensors(folder):
    """A file of torch.save is cut after the first tensor was copied."""
    clone = torch.Tensor.clone

    def cut(tensor, *arguments, **options):
        copied = clone(tensor, *arguments, **options)
        os.truncate(f"{folder}/pytorch_model.bin", 5000)
        return copied

    torch.Tensor.clone = cut
    try:
        load_weights(folder)
    except CheckpointError as error:
        return str(error)
    finally:
        torch.Tensor.clone = clone


def test_a_pickled_file_that_shrinks_is_named(tmp_path):
    torch.save(net().state_dict(), tmp_path / "pytorch_model.bin")
    [told] = worlds.run(cut_between_tensors, 1, str(tmp_path))
    assert f"{tmp_path}/pytorch_model.bin" in told
