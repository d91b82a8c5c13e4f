"""Sharded modules and optimizers, saved and loaded by real ranks in any number, against torch's own readers."""

import pathlib

import pytest
import torch
from torch import nn

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")


def reference():
    """The model and optimizer of one process after two steps."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(8)).pow(2).mean().backward()
        optimizer.step()
    return model, optimizer


class Net(nn.Module):
    """With a row count that no number of ranks divides, a parameter of one row, a buffer, and tied weights."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.layer = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.tensor(3))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.layer(self.embed(tokens))) * self.scale)


def sharded(model, optimizer, mesh_shape):
    """The same, with parameters and states divided over the ranks by FSDP2; whole on one rank."""
    if _size(mesh_shape) == 1:
        return model, optimizer
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    state = {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}
    fully_shard(model, mesh=mesh)
    divided = torch.optim.AdamW(model.parameters(), lr=0.1)
    for name, parameter in model.named_parameters():
        divided.state[parameter] = {
            key: distribute_tensor(value, mesh, parameter.placements) if value.dim() else value
            for key, value in state[name].items()
        }
    return model, divided


def save(folder, mesh_shape):
    from accel_ckpt import optimizer_state_by_name, save_training_state

    model, optimizer = sharded(*reference(), mesh_shape)
    save_training_state(
        folder,
        models=[model.state_dict()],
        shared={"optimizer_0": optimizer_state_by_name(optimizer, [model])},
        per_rank={},
    )


def fill(folder, mesh_shape):
    """Load into a model that is divided otherwise; compare with the reference on every rank."""
    from accel_ckpt import load_weights_into, open_training_state, optimizer_state_by_name

    model, optimizer = sharded(*reference(), mesh_shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
    checkpoint = open_training_state(folder)
    checkpoint.load_model(0, model.state_dict())
    tree = optimizer_state_by_name(optimizer, [model])
    targets = {f"optimizer_0.state.{name}.exp_avg": s["exp_avg"] for name, s in tree["state"].items()}
    checkpoint.load_shared(targets)
    expected_model, expected_optimizer = reference()
    expected = expected_model.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(whole(value), expected[name]), name
    states = optimizer_state_by_name(expected_optimizer, [expected_model])["state"]
    for name, state in states.items():
        assert torch.equal(whole(tree["state"][name]["exp_avg"]), state["exp_avg"]), name
    restore_optimizers(checkpoint, model, optimizer, states)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    before = list(model.parameters())
    model(torch.arange(8))  # may leave whole weights in place of the parts
    load_weights_into(model, checkpoint.weights(0))
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    for name, value in model.state_dict().items():
        assert torch.equal(whole(value), expected[name]), name


def restore_optimizers(checkpoint, model, live, expected):
    """One that has states keeps them in place, a new one gets states that are divided like its parameters."""
    from accel_ckpt import check_optimizer_state, load_optimizer_state, optimizer_state_by_name

    before = {name: dict(state) for name, state in optimizer_state_by_name(live, [model])["state"].items()}
    new = torch.optim.AdamW(model.parameters(), lr=0.5)
    for optimizer in (live, new):
        for state in optimizer.state.values():
            state["exp_avg_sq"].zero_()
        for lazy in (["optimizer_0"], []):  # or whole, as older readers give it
            tree = checkpoint.lazy_shared(lazy)["optimizer_0"]
            check_optimizer_state(optimizer, tree, [model])
            load_optimizer_state(optimizer, tree, [model])
            found = optimizer_state_by_name(optimizer, [model])
            assert found["param_groups"][0]["lr"] == 0.1
            for name, state in found["state"].items():
                for key, value in state.items():
                    assert torch.equal(whole(value), expected[name][key]), (name, key)
    after = optimizer_state_by_name(live, [model])["state"]
    assert all(after[name][key] is value for name, state in before.items() for key, value in state.items())
    for group in new.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.detach().clone()
    new.step()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.fixture(
    scope="module", params=[(1,), (2,), pytest.param((3,), marks=pytest.mark.full), (2, 2)], ids=str
)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded") / "c"
    mesh_shape = request.param
    worlds.run(save, _size(mesh_shape), str(folder), mesh_shape)
    return folder


def _size(mesh_shape):
    return int(torch.tensor(mesh_shape).prod())


@pytest.mark.parametrize(
    "mesh_shape",
    [(1,), pytest.param((2,), marks=pytest.mark.full), (3,), pytest.param((2, 2), marks=pytest.mark.full)],
    ids=str,
)
def test_any_division_loads_into_any_other(saved, mesh_shape):
    worlds.run(fill, _size(mesh_shape), str(saved), mesh_shape)


def test_it_reads_as_whole_tensors_too(saved):
    from accel_ckpt import open_training_state, optimizer_state_by_name

    checkpoint = open_training_state(saved)
    checkpoint.verify()
    model, optimizer = reference()
    weights = checkpoint.models[0]
    assert set(weights) == set(model.state_dict())
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    saved_state = checkpoint.shared["optimizer_0"]["state"]
    for name, state in optimizer_state_by_name(optimizer, [model])["state"].items():
        assert all(torch.equal(saved_state[name][key], value) for key, value in state.items()), name


def test_t32_tied_weights_and_replicas_are_written_once(saved):
    from safetensors import safe_open

    model, _ = reference()
    held: dict[str, int] = {}
    for path in pathlib.Path(saved).glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                held[name] = held.get(name, 0) + file.get_tensor(name).numel()
    assert held == {name: p.numel() for name, p in [*model.named_parameters(), ("seen", model.seen)]}


def test_torch_s_hugging_face_reader_reads_it(saved):
    import torch.distributed.checkpoint as dcp

    model, _ = reference()
    target = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(saved)), no_dist=True)
    assert all(torch.equal(target[name], parameter) for name, parameter in model.named_parameters())


def test_a_whole_checkpoint_loads_in_parts(tmp_path):
    from accel_ckpt import optimizer_state_by_name, save_training_state

    model, optimizer = reference()
    folder = save_training_state(
        tmp_path / "c",
        models=[model.state_dict()],
        shared={"optimizer_0": optimizer_state_by_name(optimizer, [model])},
        per_rank={},
    )
    worlds.run(fill, 2, str(folder), (2,))


def test_a_missing_part_is_noticed(saved):
    import shutil

    from accel_ckpt import CorruptCheckpointError, open_training_state
    from accel_ckpt.format.saved_tensors import SavedTensors

    parts = sorted(pathlib.Path(saved).glob("model-shard-*.safetensors"))
    if len(parts) < 2:
        pytest.skip("one rank writes one part")
    with pytest.raises(CorruptCheckpointError, match="do not make up"):
        SavedTensors(parts[:-1])
    broken = pathlib.Path(saved).with_name("broken")
    shutil.copytree(saved, broken)
    (broken / parts[-1].name).unlink()
    with pytest.raises(CorruptCheckpointError, match="missing"):
        open_training_state(broken)


@pytest.mark.full
def test_a_rank_needs_memory_for_its_share(tmp_path):
    """Saved by two ranks and loaded by two in another division, one tensor of 256 MB, and an optimizer with as much."""

    def work(folder):
        import gc

        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        from accel_ckpt import (
            load_optimizer_state,
            open_training_state,
            optimizer_state_by_name,
            save_training_state,
        )

        mesh = init_device_mesh("cpu", (2,))

        def build(dim):
            model = nn.Module()
            weight = torch.arange(1 << 26, dtype=torch.float32).view(1 << 13, 1 << 13)
            model.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(dim)]))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            optimizer.state[model.weight]["momentum_buffer"] = model.weight.detach() + 1
            return model, optimizer

        model, optimizer = build(0)
        shared = {"optimizer": optimizer_state_by_name(optimizer, [model])}
        save_training_state(folder, models=[model.state_dict()], shared=shared, per_rank={})
        expected, expected_optimizer = build(1)
        model, optimizer = build(1)
        optimizer.state.clear()
        with torch.no_grad():
            model.weight.zero_()
        gc.collect()
        checkpoint = open_training_state(folder)
        before, peak = peak_memory()
        checkpoint.weights(0).fill(model.state_dict())
        load_optimizer_state(optimizer, checkpoint.lazy_shared(["optimizer"])["optimizer"], [model])
        grown = peak() - before
        assert torch.equal(model.weight.to_local(), expected.weight.to_local())
        state = expected_optimizer.state[expected.weight]["momentum_buffer"]
        assert torch.equal(optimizer.state[model.weight]["momentum_buffer"].to_local(), state.to_local())
        return grown

    share, tensor = 1 << 27, 1 << 28  # the share is that of the momentum; the weights are filled in place
    for grown in worlds.run(work, 2, str(tmp_path / "c"), timeout=180):
        assert share / 2 < grown < share + tensor


def peak_memory():
    """Bytes in memory now, file mappings included; and what tells their peak since."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM starts again from here

    def field(name):
        with open("/proc/self/status") as file:
            return 1024 * int(next(line.split()[1] for line in file if line.startswith(name)))

    return field("VmRSS"), lambda: field("VmHWM")


def test_nodes_without_a_shared_file_system_cannot_save_parts(tmp_path):
    def work(folder):
        from accel_ckpt import UnsupportedValueError, save_training_state

        model, _ = sharded(*reference(), (2,))
        with pytest.raises((UnsupportedValueError, OSError), match="all nodes share"):
            save_training_state(folder, models=[model.state_dict()], shared={}, per_rank={}, each_node=True)

    worlds.run(work, 2, str(tmp_path / "c"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("broadcast", [False, True])
def test_whole_weights_go_to_the_ranks_parts(tmp_path, broadcast):
    from accel_ckpt import save_model

    model, _ = reference()
    save_model(model, tmp_path)

    def work(folder, broadcast, expected):
        from torch.distributed.fsdp import fully_shard

        from accel_ckpt import StateMismatchError, load_checkpoint_in_model
        from accel_state import PartialState

        rank = PartialState(cpu=True).process_index
        model = fully_shard(Net(), reshard_after_forward=False)
        parameter = model.layer.weight
        for options in ({"dtype": "bfloat16"}, {"device_map": {"": "meta"}}):
            with pytest.raises(StateMismatchError, match="divided among ranks"):
                load_checkpoint_in_model(model, folder, **options)
        model(torch.arange(8))  # leaves whole weights in place of the parts
        path = "/nowhere" if broadcast and rank else folder
        load_checkpoint_in_model(model, path, broadcast_from_rank0=broadcast)
        assert model.layer.weight is parameter
        assert model.head.weight is model.embed.weight
        for name, tensor in model.state_dict().items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            assert torch.equal(whole, expected[name]), name

    worlds.run(work, 2, str(tmp_path), broadcast, model.state_dict())
