"""Saves in the background of several real ranks."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

from testkit import worlds


def build(accelerator, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(300, 400), nn.BatchNorm1d(400), nn.Linear(400, 1))
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def step(accelerator, model, optimizer, number):
    x = torch.randn(8, 300, generator=torch.Generator().manual_seed(number * 10 + accelerator.process_index))
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def content(folder):
    return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_saved_while_training_is_saved_as_without(tmp_path, ranks):
    def work(folder):
        from accel_train import Accelerator

        folder = pathlib.Path(folder)
        ends = []
        for kind in ("never", "sync", "async"):
            accelerator = Accelerator()
            model, optimizer = build(accelerator)
            for number in range(6):
                step(accelerator, model, optimizer, number)
                if kind != "never":
                    accelerator.save_state(folder / f"{kind} {number}", asynchronous=kind == "async")
            accelerator._prepared.saver.drain()
            ends.append([t.clone() for t in model.state_dict().values()])
        assert all(torch.equal(a, b) for end in ends[1:] for a, b in zip(ends[0], end, strict=True))
        accelerator.wait_for_everyone()
        for number in range(6):
            assert content(folder / f"sync {number}") == content(folder / f"async {number}"), number
        assert "state-00001.safetensors" in content(folder / "async 0")  # divided among ranks
        keys = accelerator._process.store.num_keys() if accelerator.is_main_process else 0
        for _ in range(10):
            accelerator.save_state(folder / "more", asynchronous=True).result()
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            assert accelerator._process.store.num_keys() < keys + 10  # what ranks told each other is gone
        accelerator.end_training()

    worlds.run(work, ranks, str(tmp_path), timeout=120)


def test_the_training_s_group_is_not_used_in_the_background(tmp_path):
    def work(folder):
        import torch.distributed as dist

        import accel_state.communication.channel
        from accel_train import Accelerator

        accelerator = Accelerator()
        build(accelerator)
        caller = threading.main_thread()
        used = []

        def watched(function):
            def call(*args, **kwargs):
                used.append(threading.current_thread())
                return function(*args, **kwargs)

            return call

        names = [
            n
            for n in dir(dist)
            if n.startswith(("all_", "broadcast", "gather", "scatter", "send", "recv", "barr"))
        ]
        for name in names:
            setattr(dist, name, watched(getattr(dist, name)))
        for name in ("barrier", "exchange", "operation"):
            if hasattr(accel_state.communication.channel.Channel, name):
                function = watched(getattr(accel_state.communication.channel.Channel, name))
                setattr(accel_state.communication.channel.Channel, name, function)
        accelerator.save_state(pathlib.Path(folder) / "c", asynchronous=True).result()
        assert used  # in the call itself
        assert set(used) == {caller}
        # Even with a collective of the training that waits, the save comes to its end.
        handle = accelerator.save_state(pathlib.Path(folder) / "d", asynchronous=True)
        if accelerator.is_main_process:
            handle.result(30)
        accelerator.wait_for_everyone()
        assert handle.result(30)

    worlds.run(work, 2, str(tmp_path))


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("moment", ["begin", "write", "fsync"])
def test_one_rank_s_failure_fails_the_save_everywhere(tmp_path, bad_rank, moment):
    def work(folder):
        from accel_ckpt.disk import LOCAL, Disk
        from accel_ckpt.saving import staging
        from accel_train import Accelerator

        class Broken(Disk):
            def write(self, descriptor, data):
                if moment == "write":
                    raise OSError(5, "Input/output error")
                return super().write(descriptor, data)

            def fsync(self, descriptor):
                if moment == "fsync":
                    raise OSError(5, "Input/output error")
                super().fsync(descriptor)

        def fail(self, *_):
            raise OSError(5, "Input/output error")

        folder = pathlib.Path(folder)
        accelerator = Accelerator()
        model, optimizer = build(accelerator)
        accelerator.save_state(folder / "c")
        before = content(folder / "c")
        accelerator.wait_for_everyone()
        broken = accelerator.process_index == bad_rank
        write = staging.Staging.write
        if broken and moment == "begin":
            staging.Staging.write = fail
        elif broken:
            accelerator._prepared.saver._disk = Broken()
        handle = accelerator.save_state(folder / "c", asynchronous=True)
        step(accelerator, model, optimizer, 1)  # goes on
        # Asking on one rank only does not upset the next save, which is made on all.
        if accelerator.is_main_process:
            with pytest.raises(OSError, match="Input/output error"):
                handle.result()
            with pytest.raises(OSError, match="Input/output error"):
                handle.result()
        try:
            accelerator.save_state(folder / "c")
        except Exception as error:
            message = str(error)
        else:
            raise AssertionError("nobody was told")
        assert "Input/output error" in message
        assert broken or f"rank {bad_rank}: " in message or "on another rank" in message
        assert content(folder / "c") == before
        staging.Staging.write = write
        accelerator._prepared.saver._disk = LOCAL
        assert accelerator.save_state(folder / "c", asynchronous=True).result()
        assert content(folder / "c") != before
        accelerator.end_training()

    worlds.run(work, 2, str(tmp_path))
    assert os.listdir(tmp_path) == ["c"]


def test_all_ranks_refuse_when_one_is_busy(tmp_path):
    def work(folder):
        from accel_ckpt import SaveInProgressError
        from accel_train import Accelerator

        accelerator = Accelerator()
        build(accelerator)
        handle = accelerator.save_state(pathlib.Path(folder) / "c", asynchronous=True)
        handle.result()
        if accelerator.process_index == 1:
            handle.done = lambda: False
        accelerator.wait_for_everyone()
        with pytest.raises(SaveInProgressError, match=r"c is still being saved .*\(ranks \[1\]\)"):
            accelerator.save_state(pathlib.Path(folder) / "d", asynchronous=True, when_busy="refuse")
        accelerator.end_training()

    worlds.run(work, 2, str(tmp_path))


MORTAL = """
import os, pathlib, signal, sys, time
import torch
from accel_ckpt.disk import Disk
from accel_train import Accelerator

class Dying(Disk):
    def write(self, descriptor, data):
        os.kill(os.getpid(), signal.SIGKILL)

folder = pathlib.Path(sys.argv[1])
accelerator = Accelerator()
model = torch.nn.Linear(3, 3)
accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.save_state(folder / "c")
if accelerator.process_index == int(sys.argv[2]):
    accelerator._prepared.saver._disk = Dying()
handle = accelerator.save_state(folder / "c", asynchronous=True)
began = time.monotonic()
try:
    handle.result(30)
except Exception as error:
    print(f"{type(error).__name__} after {time.monotonic() - began:.0f} s: {error}", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_rank_that_dies_does_not_hang_the_others(tmp_path, victim):
    from accel_ckpt import open_training_state

    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": str(worlds.free_port()), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MORTAL, str(tmp_path), str(victim)],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=90)[0] for process in processes]
    assert processes[victim].returncode == -signal.SIGKILL
    said = outputs[1 - victim]
    assert said.startswith("CheckpointSaveError after ")
    assert float(said.split()[2]) < 20
    dead = f"rank {victim} (process {processes[victim].pid}) has ended"
    assert dead in said or (victim == 0 and "the store of this world is gone" in said)
    open_training_state(tmp_path / "c").verify()


def kill_after(delay, there=None):
    """Kill this process after some seconds, and not before a path exists."""

    def kill():
        time.sleep(delay)
        while there is not None and not there.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def forever(folder, victim, delay, first):
    from accel_train import Accelerator

    accelerator = Accelerator()
    model, optimizer = build(accelerator)
    if accelerator.process_index == victim:
        kill_after(delay, pathlib.Path(folder) / "c" if first else None)
    number = 0
    while True:
        step(accelerator, model, optimizer, number)
        accelerator.step = number
        accelerator.save_state(pathlib.Path(folder) / "c", asynchronous=True)
        number += 1


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:a save that did not finish", "ignore:a save was interrupted")
def test_kill_9_at_any_moment_leaves_a_complete_checkpoint(tmp_path):
    from accel_ckpt import open_training_state

    generator = random.Random(0)
    for moment in range(6):
        with pytest.raises(worlds.RankError):
            worlds.run(forever, 2, str(tmp_path), moment % 2, generator.uniform(0.3, 1.0), moment == 0)
        if (tmp_path / "c").exists():
            checkpoint = open_training_state(tmp_path / "c")
            checkpoint.verify()
            assert (
                checkpoint.shared["optimizer_0"]["state"]["model_0.0.weight"]["step"]
                == checkpoint.shared["step"] + 1
            )
    assert (tmp_path / "c").exists()


def test_tensors_that_are_divided_among_ranks(tmp_path):
    def work(folder):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from accel_ckpt import BackgroundSaver, optimizer_state_by_name, save_training_state
        from accel_state import PartialState

        PartialState()
        folder = pathlib.Path(folder)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 40), nn.Linear(40, 3))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters())
        saver = BackgroundSaver()
        for number in range(3):
            model(torch.randn(4, 7)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            parts = {
                "models": [model.state_dict()],
                "shared": {"optimizer_0": optimizer_state_by_name(optimizer, [model])},
                "per_rank": {},
            }
            save_training_state(folder / f"sync {number}", **parts)
            saver.save(folder / f"async {number}", **parts)
        saver.drain()
        PartialState().wait_for_everyone()
        for number in range(3):
            assert content(folder / f"sync {number}") == content(folder / f"async {number}")
        assert "model-shard-00001.safetensors" in content(folder / "async 0")

    worlds.run(work, 2, str(tmp_path), timeout=120)
