"""Saves in the background of one process."""

import atexit
import copy
import ctypes
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from accel_ckpt import (
    BackgroundSaver,
    CheckpointSaveError,
    SaveInProgressError,
    UnsupportedValueError,
    open_training_state,
    optimizer_state_by_name,
    save_training_state,
)
from accel_ckpt.disk import Disk


class Gate(Disk):
    """A disk that writes when it is let; what it does then can be told."""

    def __init__(self, then=None):
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.then = then

    def write(self, descriptor, data):
        self.reached.set()
        assert self.opened.wait(20)
        if self.then is not None:
            raise self.then
        return super().write(descriptor, data)


def build(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(6, 4)).sum().backward()
    optimizer.step()


def parts(model, optimizer):
    return {
        "models": [model.state_dict()],
        "shared": {"optimizer_0": optimizer_state_by_name(optimizer, [model]), "step": 3},
        "per_rank": {"rng": torch.get_rng_state()},
    }


def save(saver, path, model, optimizer, **options):
    return saver.save(path, **parts(model, optimizer), **options)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def hooks(optimizer):
    return len(optimizer._optimizer_step_pre_hooks)


def test_it_is_what_a_synchronous_save_writes(tmp_path):
    model, optimizer = build()
    saver = BackgroundSaver()
    for number in range(3):
        step(model, optimizer)
        save_training_state(tmp_path / "sync", **parts(model, optimizer))
        handle = save(saver, tmp_path / "async", model, optimizer)
        step(model, optimizer)
        assert handle.result() == tmp_path / "async" == handle.directory
        assert handle.done()
        assert content(tmp_path / "sync") == content(tmp_path / "async"), number
    open_training_state(tmp_path / "async").verify()


def test_training_that_saves_at_every_step_is_the_training_that_does_not(tmp_path):
    model, optimizer = build()
    plain, plain_optimizer = copy.deepcopy(model), None
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    saver = BackgroundSaver()
    for number in range(10):
        torch.manual_seed(number)
        step(plain, plain_optimizer)
        torch.manual_seed(number)
        step(model, optimizer)
        save(saver, tmp_path / f"c{number}", model, optimizer)
        saved = {name: t.clone() for name, t in plain.state_dict().items()}
        if number == 7:
            seventh = saved
    saver.drain()
    for ours, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    found = open_training_state(tmp_path / "c7").models[0]
    assert all(torch.equal(found[name], tensor) for name, tensor in seventh.items())


def by_data(tensor):
    tensor.data.mul_(0.5)


def by_numpy(tensor):
    array = tensor.detach().numpy()
    array *= 0.5


def by_address(tensor):
    ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)


def by_foreach(tensor):
    torch._foreach_mul_([tensor.detach()], 0.5)


def by_clamping(tensor):
    with torch.no_grad():
        tensor.clamp_(7, 8)


def by_a_thread(tensor):
    thread = threading.Thread(target=lambda: tensor.detach().zero_())
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    "change",
    [by_data, by_numpy, by_address, by_foreach, by_clamping, by_a_thread],
    ids=lambda way: way.__name__,
)
def test_a_save_holds_the_values_of_the_call_however_they_are_changed_after(tmp_path, change):
    """Weights, buffers, moments, and tensors of shared trees and of this rank's."""
    model, optimizer = build()
    step(model, optimizer)
    content = parts(model, optimizer)
    content["shared"]["average"] = {"weight": torch.randn(300, 300)}
    content["per_rank"]["gradient"] = torch.randn(300, 300)
    moments = {name: state["exp_avg"] for name, state in content["shared"]["optimizer_0"]["state"].items()}
    live = {**content["models"][0], **{f"moment {name}": moment for name, moment in moments.items()}}
    live |= {"average": content["shared"]["average"]["weight"], "gradient": content["per_rank"]["gradient"]}
    live = {name: tensor for name, tensor in live.items() if tensor.is_floating_point()}
    expected = {name: tensor.clone() for name, tensor in live.items()}
    gate = Gate()
    handle = BackgroundSaver(gate).save(tmp_path / "c", **content)
    for tensor in live.values():
        change(tensor)
    assert not any(torch.equal(live[name], expected[name]) for name in live if expected[name].any())
    with pytest.raises(TimeoutError, match=r"still being saved after 0\.01 s"):
        handle.result(0.01)
    gate.opened.set()
    handle.result()
    checkpoint = open_training_state(tmp_path / "c")
    checkpoint.verify()
    saved = {**checkpoint.models[0], "average": checkpoint.shared["average"]["weight"]}
    saved |= {f"moment {n}": s["exp_avg"] for n, s in checkpoint.shared["optimizer_0"]["state"].items()}
    saved["gradient"] = checkpoint.per_rank(0)["gradient"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())


def test_plain_data_is_that_of_the_call(tmp_path):
    counts, array = {"steps": [1, 2]}, np.arange(4)
    gate = Gate()
    handle = BackgroundSaver(gate).save(
        tmp_path / "c", models=[], shared={"counts": counts}, per_rank={"array": array}
    )
    counts["steps"].append(3)
    array[:] = 9
    gate.opened.set()
    handle.result()
    checkpoint = open_training_state(tmp_path / "c")
    assert checkpoint.shared["counts"] == {"steps": [1, 2]}
    assert checkpoint.per_rank(0)["array"].tolist() == [0, 1, 2, 3]


def test_optimizers_need_not_wait_for_a_save(tmp_path):
    model, optimizer = build()
    save(BackgroundSaver(), tmp_path / "c", model, optimizer).result()
    assert hooks(optimizer) == 0


def test_a_second_save_is_refused_or_waits(tmp_path):
    gate = Gate()
    saver = BackgroundSaver(gate)
    model, optimizer = build()
    first = save(saver, tmp_path / "first", model, optimizer)
    with pytest.raises(SaveInProgressError, match="first is still being saved"):
        save(saver, tmp_path / "second", model, optimizer, when_busy="refuse")
    with pytest.raises(ValueError, match="'wait' or 'refuse'"):
        save(saver, tmp_path / "second", model, optimizer, when_busy="queue")
    threading.Timer(0.2, gate.opened.set).start()
    second = save(saver, tmp_path / "second", model, optimizer)
    assert first.done()
    assert second.result() == tmp_path / "second"
    save(saver, tmp_path / "third", model, optimizer, when_busy="refuse").result()
    assert sorted(os.listdir(tmp_path)) == ["first", "second", "third"]


@pytest.mark.parametrize("where", ["result", "save", "make_room", "drain"])
def test_a_failure_is_raised_once_where_it_is_asked_for(tmp_path, where):
    model, optimizer = build()
    save_training_state(tmp_path / "c", **parts(model, optimizer))
    before = content(tmp_path / "c")
    gate = Gate(OSError(28, "No space left on device"))
    gate.opened.set()
    saver = BackgroundSaver(gate)
    handle = save(saver, tmp_path / "c", model, optimizer)
    ask = {
        "result": handle.result,
        "save": lambda: save(saver, tmp_path / "c", model, optimizer),
        "make_room": saver.make_room,
        "drain": saver.drain,
    }[where]
    with pytest.raises(
        CheckpointSaveError, match="No space left on device; what was there before is unchanged"
    ):
        ask()
    assert handle.done()
    assert content(tmp_path / "c") == before
    assert os.listdir(tmp_path) == ["c"]
    saver.make_room()  # nobody is told twice
    saver.drain()
    with pytest.raises(CheckpointSaveError):
        handle.result()  # but whoever asks is answered
    gate.then = None
    assert save(saver, tmp_path / "c", model, optimizer).result()


def test_a_failure_lets_the_optimizer_go(tmp_path):
    model, optimizer = build()
    saver = BackgroundSaver()
    save_training_state(tmp_path / "c", **parts(model, optimizer))
    handle = save(saver, tmp_path / "d", model, optimizer, before_write=os.rmdir)
    with pytest.raises(CheckpointSaveError, match="not visible here"):
        handle.result()
    step(model, optimizer)
    assert os.listdir(tmp_path) == ["c"]


def test_hooks_run_and_errors_are_raised_before_anything_goes_on_in_the_background(tmp_path):
    model, optimizer = build()
    saver = BackgroundSaver()
    threads = []

    def hook(folder):
        threads.append(threading.current_thread())
        (folder / "extra").write_text("x")

    save(saver, tmp_path / "c", model, optimizer, before_write=hook).result()
    assert threads == [threading.main_thread()]
    assert (tmp_path / "c" / "extra").read_text() == "x"
    for wrong in ({"x": object()}, {"x": torch.ones(1, device="meta")}):
        with pytest.raises(UnsupportedValueError):
            saver.save(tmp_path / "d", models=[], shared={"wrong": wrong}, per_rank={})
    assert hooks(optimizer) == 0
    assert os.listdir(tmp_path) == ["c"]


def test_what_comes_after_is_done_in_the_background_when_the_checkpoint_is_complete(tmp_path):
    model, optimizer = build()
    saver = BackgroundSaver()
    seen = []
    after = lambda: seen.append((threading.current_thread().name, (tmp_path / "c").exists()))  # noqa: E731
    save(saver, tmp_path / "c", model, optimizer, after=after).result()
    assert seen == [("accel-save", True)]


def test_an_interrupted_wait_ends_the_save_and_leaves_nothing(tmp_path, monkeypatch):
    model, optimizer = build()
    gate = Gate()
    saver = BackgroundSaver(gate)
    handle = save(saver, tmp_path / "c", model, optimizer)
    assert gate.reached.wait(20)
    real = handle._finished.wait

    def interrupted(timeout=None):
        monkeypatch.setattr(handle._finished, "wait", real)
        gate.opened.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(handle._finished, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saver.drain()
    with pytest.raises(CheckpointSaveError, match="was interrupted"):
        handle.result()
    assert os.listdir(tmp_path) == []


def test_a_saver_can_be_copied_and_pickled_while_it_saves(tmp_path):
    gate = Gate()
    saver = BackgroundSaver(gate)
    model, optimizer = build()
    saver_of_others = pickle.loads(pickle.dumps(BackgroundSaver()))
    assert save(saver_of_others, tmp_path / "d", model, optimizer).result()
    handle = save(saver, tmp_path / "c", model, optimizer)
    state = saver.__getstate__()
    assert set(state) == {"_disk"}
    gate.opened.set()
    handle.result()


def test_a_forked_child_has_nothing_to_wait_for(tmp_path):
    gate = Gate()
    saver = BackgroundSaver(gate)
    model, optimizer = build()
    handle = save(saver, tmp_path / "c", model, optimizer)
    assert gate.reached.wait(20)
    child = os.fork()
    if child == 0:
        try:
            saver.make_room("refuse")
            saver.drain()
            handle._at_exit()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    gate.opened.set()
    handle.result()


def test_nothing_is_kept_alive(tmp_path):
    model, optimizer = build()
    saver = BackgroundSaver()
    handle = save(saver, tmp_path / "c", model, optimizer)
    handle.result()
    weak = [weakref.ref(item) for item in (saver, model, optimizer, handle)]
    saver.drain()
    atexit.unregister(handle._at_exit)
    del saver, model, optimizer, handle
    gc.collect()
    assert [ref() for ref in weak] == [None] * 4


def test_new_tensors_may_be_freed_at_once(tmp_path):
    """The copies hold what they read."""
    saver = BackgroundSaver()
    for number in range(5):
        weight = nn.Parameter(torch.full((1000, 1000), float(number)))
        optimizer = torch.optim.SGD([weight])
        handle = saver.save(tmp_path / "c", models=[{"w": weight}], shared={}, per_rank={})
        del weight, optimizer
        handle.result()
        assert (open_training_state(tmp_path / "c").models[0]["w"] == number).all()


PROGRAM = """
import atexit, os, sys, time
import torch
from torch import nn
from accel_ckpt import BackgroundSaver
from accel_ckpt.disk import Disk

atexit.register(print, "others")

class Slow(Disk):
    def write(self, descriptor, data):
        print("writing", flush=True)
        time.sleep(float(sys.argv[2]))
        {fault}
        return super().write(descriptor, data)

weight = nn.Parameter(torch.ones(1000))
saver = BackgroundSaver(Slow())
handle = saver.save(
    sys.argv[1] + "/c", models=[{{"w": weight}}], shared={{"step": 2}}, per_rank={{}},
)
{end}
"""
FAULT = "raise OSError(5, 'Input/output error')"


def program(folder, delay=0.2, fault="", end=""):
    text = textwrap.dedent(PROGRAM).format(fault=fault, end=end)
    return subprocess.Popen(
        [sys.executable, "-c", text, str(folder), str(delay)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.wide(but=["end"])
@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("sys.exit(3)", 3), ("raise ValueError('mine')", 1)],
    ids=["end", "exit", "error"],
)
def test_the_end_of_the_program_waits_for_the_save(tmp_path, end, status):
    process = program(tmp_path, end=end)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert open_training_state(tmp_path / "c").shared["step"] == 2
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.wide(but=["*-True"])
@pytest.mark.parametrize(("end", "mine"), [("", False), ("raise ValueError('mine')", True)])
def test_a_failure_that_nobody_asked_for_is_told_at_exit(tmp_path, end, mine):
    process = program(tmp_path, 0, FAULT, end)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert (
        f"accel: saving {tmp_path}/c in the background failed, and the program ended before the error was raised"
        in errors
    )
    assert "Input/output error" in errors
    assert ("ValueError: mine" in errors) == mine
    assert output.endswith("others\n")  # what others do at exit is done
    assert os.listdir(tmp_path) == []


@pytest.mark.wide
def test_a_failure_that_was_told_is_not_told_again(tmp_path):
    end = textwrap.dedent("""
        try:
            handle.result()
        except OSError:
            print("told")
    """)
    process = program(tmp_path, 0, FAULT, end)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert output.endswith("told\nothers\n")


@pytest.mark.wide
def test_ctrl_c_while_the_program_waits_at_its_end(tmp_path):
    process = program(tmp_path, 0.5, end="print('end', file=sys.stderr, flush=True)")
    assert process.stdout.readline() == "writing\n"
    assert process.stderr.readline() == "end\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert os.listdir(tmp_path) == []


@pytest.mark.wide
def test_kill_9_leaves_the_checkpoint_before(tmp_path):
    save_training_state(tmp_path / "c", models=[], shared={"step": 1}, per_rank={})
    process = program(tmp_path, 5)
    assert process.stdout.readline() == "writing\n"
    process.kill()
    process.communicate()
    assert open_training_state(tmp_path / "c").shared["step"] == 1
    with pytest.warns(UserWarning, match="a save that did not finish"):
        BackgroundSaver().save(tmp_path / "c", models=[], shared={"step": 3}, per_rank={}).result()
    assert os.listdir(tmp_path) == ["c"]
    assert open_training_state(tmp_path / "c").shared["step"] == 3


def test_one_rank_waits_without_asking_how_the_save_ended(tmp_path):
    gate = Gate(OSError(28, "No space left on device"))
    saver = BackgroundSaver(gate)
    saver.make_room_alone()  # nothing to wait for
    model, optimizer = build()
    handle = save(saver, tmp_path / "c", model, optimizer)
    with pytest.raises(SaveInProgressError, match="rank 0"):
        saver.make_room_alone("refuse")
    with pytest.raises(ValueError, match="'wait' or 'refuse'"):
        saver.make_room_alone("queue")
    threading.Timer(0.2, gate.opened.set).start()
    saver.make_room_alone()
    assert handle.done()
    saver.make_room_alone("refuse")
    with pytest.raises(CheckpointSaveError, match="No space left"):
        saver.make_room()
