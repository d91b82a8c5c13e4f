"""Checkpoints on several real ranks."""

import os
import pathlib

import pytest
import torch
from torch import nn

from testkit import worlds

pytestmark = pytest.mark.usefixtures("kept_ranks")


def weights(step):
    return {"layer.weight": torch.full((40, 5), float(step)), "layer.bias": torch.arange(3.0)}


def save_step(folder, step, bad_rank=None, **options):
    from accel_ckpt import save_training_state
    from accel_state import PartialState

    rank = PartialState().process_index
    return save_training_state(
        pathlib.Path(folder) / "c",
        models=[weights(step)] if rank == 0 else [],
        shared={"step": step} if rank == 0 else {},
        per_rank={"rng": torch.tensor([rank, step]) if rank != bad_rank else object()},
        **options,
    )


def check(folder, step, ranks):
    from accel_ckpt import open_training_state

    checkpoint = open_training_state(pathlib.Path(folder) / "c")
    checkpoint.verify()
    assert checkpoint.shared["step"] == step
    assert all(torch.equal(checkpoint.models[0][name], tensor) for name, tensor in weights(step).items())
    assert checkpoint.manifest.world_size == ranks
    assert [checkpoint.per_rank(rank)["rng"].tolist() for rank in range(ranks)] == [
        [r, step] for r in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_save_and_save_again(tmp_path, ranks):
    def work(folder):
        for step in range(3):
            save_step(folder, step)
            check(folder, step, ranks)  # complete on every rank as soon as the call returns

    worlds.run(work, ranks, str(tmp_path))
    assert os.listdir(tmp_path) == ["c"]


def test_t8_one_writer_per_path(tmp_path):
    def work(folder):
        from accel_ckpt.disk import Disk

        opened = []

        class Recording(Disk):
            def open_new(self, path):
                opened.append(path.name)
                return super().open_new(path)

        save_step(folder, 1, disk=Recording())
        return opened

    first, second = worlds.run(work, 2, str(tmp_path))
    assert not set(first) & set(second)
    assert sorted([*first, *second]) == sorted(os.listdir(tmp_path / "c"))


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_one_rank_s_failure_fails_the_save_everywhere(tmp_path, bad_rank):
    def work(folder):
        from accel_state import PartialState

        save_step(folder, 1)
        try:
            save_step(folder, 2, bad_rank)
        except Exception as error:
            message = str(error)
        else:
            raise AssertionError("the save did not fail")
        assert "['rng'] is of type builtins.object" in message
        assert (
            PartialState().process_index == bad_rank or f"rank {bad_rank}: UnsupportedValueError" in message
        )
        check(folder, 1, 2)
        save_step(folder, 3)

    worlds.run(work, 2, str(tmp_path))
    check(tmp_path, 3, 2)
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("operation", ["write", "fsync"])
def test_an_io_error_of_one_rank(tmp_path, bad_rank, operation):
    def work(folder):
        from accel_ckpt import CheckpointSaveError
        from accel_ckpt.disk import Disk
        from accel_state import PartialState

        class Broken(Disk):
            def write(self, descriptor, data):
                if operation == "write":
                    raise OSError(5, "Input/output error")
                return super().write(descriptor, data)

            def fsync(self, descriptor):
                if operation == "fsync":
                    raise OSError(5, "Input/output error")
                super().fsync(descriptor)

        save_step(folder, 1)
        broken = PartialState().process_index == bad_rank
        with pytest.raises(CheckpointSaveError, match="Input/output error"):
            save_step(folder, 2, **({"disk": Broken()} if broken else {}))
        check(folder, 1, 2)

    worlds.run(work, 2, str(tmp_path))
    assert os.listdir(tmp_path) == ["c"]


def test_t33_names_are_the_same_under_ddp_and_compile(tmp_path):
    def work(folder):
        from accel_ckpt import (
            canonical_state_dict,
            load_checkpoint_in_model,
            optimizer_state_by_name,
            save_model,
        )
        from accel_state import PartialState

        state = PartialState()
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        model = nn.parallel.DistributedDataParallel(torch.compile(plain))
        assert "module._orig_mod.0.weight" in model.state_dict()
        assert list(canonical_state_dict(model.state_dict(), model)) == list(plain.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names = optimizer_state_by_name(optimizer, [model])["param_groups"][0]["params"]
        assert names == [f"model_0.{name}" for name, _ in plain.named_parameters()]
        if state.is_main_process:
            save_model(model, folder)
        state.wait_for_everyone()
        load_checkpoint_in_model(model, folder, strict=True)
        again = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        load_checkpoint_in_model(again, folder, strict=True)
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), again.parameters(), strict=True))

    worlds.run(work, 2, str(tmp_path))


def test_save_writes_on_the_main_process_only(tmp_path):
    def work(folder):
        from accel_ckpt import save
        from accel_state import PartialState

        rank = PartialState().process_index
        save({"rank": rank}, pathlib.Path(folder) / "one.pt")
        save({"rank": rank}, pathlib.Path(folder) / f"{rank}.pt")
        PartialState().wait_for_everyone()

    worlds.run(work, 2, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["0.pt", "one.pt"]
    assert torch.load(tmp_path / "one.pt")["rank"] == 0


@pytest.mark.parametrize("meta", [False, True])
def test_weights_broadcast_from_rank_0(tmp_path, meta):
    from accel_ckpt import save_model

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).bfloat16()
    model.register_buffer("scales", torch.ones(3).to(torch.float8_e4m3fn))
    save_model(model, tmp_path / "only here", max_shard_size="30B")

    def work(folder, expected):
        from accel_ckpt import load_checkpoint_in_model
        from accel_state import PartialState

        with torch.device("meta" if meta else "cpu"):
            again = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).bfloat16()
            again.register_buffer("scales", torch.zeros(3, dtype=torch.float8_e4m3fn))
        # Only rank 0 is told where the files are.
        path = folder if PartialState().process_index == 0 else "/nowhere"
        load_checkpoint_in_model(again, path, broadcast_from_rank0=True)
        for name, tensor in expected.items():
            assert torch.equal(again.state_dict()[name].float(), tensor)

    expected = {name: tensor.float() for name, tensor in model.state_dict().items()}
    worlds.run(work, 2, str(tmp_path / "only here"), expected)


def test_a_broadcast_of_what_does_not_fit_fails_everywhere(tmp_path):
    from accel_ckpt import save_model

    save_model(nn.Linear(3, 4), tmp_path)

    def work(folder, name):
        from accel_ckpt import CheckpointError, load_checkpoint_in_model

        with pytest.raises(CheckpointError, match=name):
            load_checkpoint_in_model(nn.Linear(3, 5), folder, broadcast_from_rank0=True)

    worlds.run(work, 2, str(tmp_path), "weight")
    worlds.run(work, 2, str(tmp_path / "nothing"), "nothing")


def optimizer_like(**changes):
    return {f"t{i}": torch.full((200, 200), float(i + changes.get(f"t{i}", 0))) for i in range(6)}


def save_divided(folder, changes=None, **options):
    from accel_ckpt import save_training_state
    from accel_state import PartialState

    rank = PartialState().process_index
    return save_training_state(
        pathlib.Path(folder) / "c",
        models=[weights(1)] if rank == 0 else [],
        shared={
            "optimizer": optimizer_like(**(changes or {}) if rank else {}),
            "custom": torch.ones(200, 200) * rank,
        },
        per_rank={"rng": torch.tensor([rank])},
        replicated=["optimizer"],
        **options,
    )


def saved_tensors(folder):
    from safetensors import safe_open

    found = {}
    for path in sorted(pathlib.Path(folder).glob("state*.safetensors")):
        with safe_open(path, "pt") as file:
            found[path.name] = set(file.keys())
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_all_ranks_hold_alike_is_written_once_divided_among_them(tmp_path, ranks):
    worlds.run(save_divided, ranks, str(tmp_path))
    files = saved_tensors(tmp_path / "c")
    assert set(files) == {"state.safetensors", *(f"state-{rank:05d}.safetensors" for rank in range(1, ranks))}
    names = [name for part in files.values() for name in part]
    assert sorted(names) == sorted(["custom", *(f"optimizer.t{i}" for i in range(6))])
    assert max(len(part) for part in files.values()) <= -(-7 // ranks) + 1
    from accel_ckpt import open_training_state

    checkpoint = open_training_state(tmp_path / "c")
    checkpoint.verify()
    shared = checkpoint.shared
    assert all(torch.equal(shared["optimizer"][name], value) for name, value in optimizer_like().items())
    assert torch.equal(shared["custom"], torch.zeros(200, 200))  # not said to be alike: the leading rank's


def test_a_tensor_that_differs_after_all_is_the_leading_rank_s(tmp_path):
    worlds.run(save_divided, 2, str(tmp_path), {"t3": 0.5, "t4": 0.5})
    files = saved_tensors(tmp_path / "c")
    assert {"optimizer.t3", "optimizer.t4"} <= files["state.safetensors"]
    from accel_ckpt import open_training_state

    shared = open_training_state(tmp_path / "c").shared
    assert all(torch.equal(shared["optimizer"][name], value) for name, value in optimizer_like().items())


def test_every_node_saves_all_of_it(tmp_path):
    def work(folder):
        from accel_ckpt.coordination.ranks import WorldCoordinator
        from accel_state import PartialState

        rank = PartialState().process_index
        node = pathlib.Path(folder) / f"node{rank // 2}"
        save_divided(node, each_node=True, coordinator=WorldCoordinator(rank, 4, rank % 2))

    worlds.run(work, 4, str(tmp_path))
    from accel_ckpt import open_training_state

    for node in (0, 1):
        folder = tmp_path / f"node{node}" / "c"
        assert len(saved_tensors(folder)) == 2
        shared = open_training_state(folder).shared
        assert all(torch.equal(shared["optimizer"][name], value) for name, value in optimizer_like().items())


def test_t8_a_new_save_by_fewer_ranks_leaves_no_file_of_the_old(tmp_path):
    worlds.run(save_divided, 3, str(tmp_path))
    worlds.run(save_divided, 1, str(tmp_path))
    assert list(saved_tensors(tmp_path / "c")) == ["state.safetensors"]


@pytest.mark.parametrize("after", [2, 3])
def test_a_checkpointer_over_ranks(tmp_path, after):
    def state_of(rank, fill):
        from torch.nn.parallel import DistributedDataParallel

        model = nn.Linear(300, 200)
        nn.init.constant_(model.weight, fill)
        optimizer = torch.optim.AdamW(model.parameters())
        wrapped = DistributedDataParallel(model)
        wrapped(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        return {"model": wrapped, "optimizer": optimizer}

    def save(folder):
        from accel_ckpt import Checkpointer
        from accel_state import PartialState

        rank = PartialState().process_index
        Checkpointer(folder).save(4, state_of(rank, 1.0), per_rank={"rank": rank})
        return sorted(path.name for path in (pathlib.Path(folder) / "step_4").glob("state*"))

    def load(folder):
        from accel_ckpt import Checkpointer
        from accel_state import PartialState

        rank = PartialState().process_index
        state, own = state_of(rank, 2.0), {"rank": -1}
        assert Checkpointer(folder).load(state, per_rank=own, allow_new_ranks=True) == 4
        expected = state_of(rank, 1.0)
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                state["optimizer"].state_dict()["state"][0].values(),
                expected["optimizer"].state_dict()["state"][0].values(),
                strict=True,
            )
        )
        return own["rank"], state["model"].module.weight.flatten()[0].item()

    files = worlds.run(save, 2, str(tmp_path))
    assert files[0] == ["state-00001.safetensors", "state.json", "state.safetensors"]
    loaded = worlds.run(load, after, str(tmp_path))
    assert [rank for rank, _ in loaded] == [rank if rank < 2 else -1 for rank in range(after)]


def test_save_model_is_complete_on_every_rank_that_calls(tmp_path):
    def work(folder):
        import time

        from accel_ckpt import CheckpointSaveError, default_coordinator, load_checkpoint_in_model, save_model
        from accel_ckpt.disk import Disk
        from accel_state import PartialState

        class Slow(Disk):
            def write(self, descriptor, data):
                time.sleep(0.3)
                return super().write(descriptor, data)

        state, rank = PartialState(), default_coordinator().rank

        def model(value):
            made = torch.nn.Linear(3, 3)
            torch.nn.init.constant_(made.weight, value)
            return made

        def check(value):
            loaded = model(-1.0)
            load_checkpoint_in_model(loaded, folder)
            assert loaded.weight[0, 0] == value

        if rank == 0:  # alone, before and between: numbers of calls differ
            save_model(model(1.0), folder, writer=0, disk=Slow())
        written = save_model(model(2.0), folder, writer=0, disk=Slow())
        check(2.0)
        assert written == ("model.safetensors",)
        state.wait_for_everyone()
        for value in (3.0, 4.0):
            if rank == 0 and value == 4.0:
                save_model(model(9.0), folder, writer=0)
            state.wait_for_everyone()
            save_model(model(value) if rank == 0 else {}, folder, writer=0, disk=Slow())
            check(value)
            state.wait_for_everyone()
        (pathlib.Path(folder).parent / "file").touch()
        state.wait_for_everyone()
        with pytest.raises(CheckpointSaveError, match=r"file is a file"):
            save_model(model(5.0), pathlib.Path(folder).parent / "file", writer=0)
        if rank == 0:
            save_model(model(6.0), folder, writer=0)
        return True

    assert worlds.run(work, 2, str(tmp_path / "m")) == [True, True]


@pytest.mark.parametrize("each_node", [False, True])
def test_the_facade_saves_a_model_before_any_rank_goes_on(tmp_path, each_node):
    def work(folder, each_node):
        from accel_ckpt import load_checkpoint_in_model
        from accel_train import Accelerator, ProjectConfiguration

        config = ProjectConfiguration(save_on_each_node=each_node)
        accelerator = Accelerator(project_config=config)
        torch.manual_seed(0)
        model = accelerator.prepare(torch.nn.Linear(300, 300))
        for number in range(3):
            accelerator.save_model(model, f"{folder}/{number}")
            load_checkpoint_in_model(torch.nn.Linear(300, 300), f"{folder}/{number}")
        if accelerator.is_main_process:
            accelerator.save_model(model, f"{folder}/alone")
        accelerator.wait_for_everyone()
        load_checkpoint_in_model(torch.nn.Linear(300, 300), f"{folder}/alone")

    worlds.run(work, 2, str(tmp_path), each_node)


def test_a_save_exchanges_four_times(tmp_path):
    def work(folder):
        from accel_ckpt import default_coordinator
        from accel_ckpt.saving.save_state import StateContent, save_collected

        ranks = default_coordinator()
        exchanges = []
        original = ranks.exchange
        ranks.exchange = lambda value: exchanges.append(value) or original(value)

        class Compared:
            each_node = False

            def collect(self):
                return ranks.rank

            def content(self, collected):
                return StateContent(models=[weights(1)], shared={"ranks": collected}, per_rank={})

        save_collected(folder, Compared(), ranks)
        return len(exchanges)

    assert worlds.run(work, 2, str(tmp_path / "c")) == [4, 4]

    from accel_ckpt import open_training_state

    assert open_training_state(tmp_path / "c").shared["ranks"] == [0, 1]


def test_a_checkpointer_keeps_divided_tensors_divided(tmp_path):
    def work(folder):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard, distribute_tensor

        from accel_ckpt import Checkpointer, Part, StateMismatchError, default_coordinator

        rank = default_coordinator().rank
        mesh = init_device_mesh("cpu", (2,))

        def build(seed, first):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            model(torch.ones(2, 5)).square().mean().backward()
            optimizer.step()
            whole = torch.arange(6.0).view(3, 2) * seed
            low, high = (0, first) if rank == 0 else (first, 3)
            values = {
                "part": Part(whole[low:high].clone(), (low, 0), (3, 2)),
                "dtensor": distribute_tensor(whole.clone(), mesh, [Shard(seed % 2)]),
                "number": seed,
            }
            return model, optimizer, {"model": model, "optimizer": optimizer, "values": values}

        for asynchronous in (False, True):
            model, optimizer, state = build(1, 1)
            checkpointer = Checkpointer(f"{folder}/{asynchronous}")
            checkpointer.save(3, state, asynchronous=asynchronous)
            checkpointer.wait()
            other, other_optimizer, loaded = build(2, 2)
            kept = dict(loaded["values"])
            assert checkpointer.load(loaded) == 3
            assert loaded["values"]["number"] == 1
            assert loaded["values"]["part"] is kept["part"]
            assert loaded["values"]["dtensor"] is kept["dtensor"]
            whole = torch.arange(6.0).view(3, 2)
            part = loaded["values"]["part"]
            assert torch.equal(part.tensor, whole[part.box.slices])
            assert torch.equal(loaded["values"]["dtensor"].full_tensor(), whole)
            for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(ours.to_local(), theirs.to_local())
                for key, value in optimizer.state[ours].items():
                    assert torch.equal(local(value), local(other_optimizer.state[theirs][key]))
            loaded["values"]["part"] = Part.nothing((4, 2))
            with pytest.raises(
                StateMismatchError, match=r"values.part is divided .* of shape \[4, 2\], .* \[3, 2\]"
            ):
                checkpointer.load(loaded)

    worlds.run(work, 2, str(tmp_path))


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
