"""Preemption on one process: signals, boundaries, what is left behind, and resuming."""

import gc
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_state.environment import patch_environment
from accel_state.errors import StateError
from accel_state.host import signal_listener
from accel_train import Accelerator, ArgumentTypeError, OptionError, PreemptionConfig, ProjectConfiguration
from accel_train.loop import preemption as module

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX systems")


@pytest.fixture(autouse=True)
def nothing_stays():
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    handlers = [signal.getsignal(number) for number in numbers]
    with patch_environment():
        yield
    gc.collect()
    assert [signal.getsignal(number) for number in numbers] == handlers
    assert signal_listener._hub is None
    assert not [t for t in threading.enumerate() if t.name in ("accel-signals", "accel-stop")]


def tell(accelerator, number=signal.SIGTERM):
    """Send a signal and wait until its thread has it."""
    os.kill(os.getpid(), number)
    until = time.monotonic() + 10
    while not accelerator.preemption._consensus.pending and time.monotonic() < until:
        time.sleep(0.001)


def finish(accelerator):
    """End as a preempted script does, and let the signals have an effect again."""
    with pytest.raises(SystemExit) as ending:
        accelerator.exit_preempted()
    assert ending.value.code == 75
    for number in accelerator.preemption.signals:
        assert signal.getsignal(number) is signal.SIG_IGN
        signal.signal(number, signal.SIG_DFL)


def prepared(accelerator):
    model = nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.randn(20, 2)), batch_size=2)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


def test_training_stops_at_the_end_of_a_window():
    accelerator = Accelerator(preemption=True, gradient_accumulation_steps=4)
    model, optimizer, loader = prepared(accelerator)
    seen = []
    for index, (x,) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
        if index == 4:
            tell(accelerator)
        seen.append([accelerator.should_stop for _ in range(3)])
    assert seen == [[False] * 3] * 7 + [[True] * 3] * 3
    assert accelerator.preemption.reason == "SIGTERM on rank 0"
    finish(accelerator)


def test_a_step_without_a_signal_asks_nobody(monkeypatch):
    accelerator = Accelerator(preemption=True)
    model, optimizer, _ = prepared(accelerator)
    monkeypatch.setattr(accelerator.preemption._consensus, "should_stop", None)  # would fail if it were asked
    accelerator.backward(model(torch.randn(2, 2)).mean())
    optimizer.step()
    assert accelerator.should_stop is False
    assert accelerator.preemption.boundaries.passed == 1
    accelerator.end_training()


@pytest.mark.wide
def test_signals_that_come_while_the_process_ends_change_nothing():
    script = (
        "import atexit, os, signal\nfrom accel_train import Accelerator\naccelerator = Accelerator(preemption=True)\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGTERM)\naccelerator.exit_preempted()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 75


@pytest.mark.wide
def test_repeated_signals_change_nothing():
    accelerator = Accelerator(preemption=True)
    tell(accelerator)
    accelerator.preemption.boundary()
    for _ in range(5):
        tell(accelerator)
        assert accelerator.should_stop
    assert accelerator.preemption._consensus.decision.stop_after == 1
    finish(accelerator)


def test_loops_without_an_optimizer_mark_their_own_boundaries():
    accelerator = Accelerator(preemption=True)
    tell(accelerator)
    seen = []
    for _ in range(3):
        seen.append(accelerator.should_stop)
        accelerator.preemption.boundary()
    assert seen == [False, True, True]
    finish(accelerator)


def test_a_skipped_step_is_a_boundary_too():
    accelerator = Accelerator(preemption=True, mixed_precision="fp16")
    model, optimizer, _ = prepared(accelerator)
    tell(accelerator)
    accelerator.backward(model(torch.full((2, 2), float("inf"))).mean())
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    assert accelerator.should_stop
    finish(accelerator)


def test_off_by_default():
    before = signal.getsignal(signal.SIGTERM)
    accelerator = Accelerator()
    assert accelerator.preemption is None
    assert accelerator.should_stop is False
    assert signal.getsignal(signal.SIGTERM) is before
    _, optimizer, _ = prepared(accelerator)
    optimizer.step()
    assert accelerator._accumulator.observers == []
    with pytest.raises(SystemExit) as ending:
        accelerator.exit_preempted()  # for reasons of the script's own
    assert ending.value.code == 75


@pytest.mark.wide(but=["preemption=True"])
@pytest.mark.parametrize("body", ["", "preemption=True", "preemption=True); accelerator.end_training("])
def test_sigterm_ends_a_program_that_does_not_listen(body):
    script = (
        f"import os, signal\nfrom accel_train import Accelerator\naccelerator = Accelerator({body})\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nprint('goes on')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    listens = body == "preemption=True"
    assert done.returncode == (0 if listens else -signal.SIGTERM), done.stderr
    assert (done.stdout == "goes on\n") == listens


def test_slurm_brings_sigusr1():
    process = Accelerator()._process
    for variables, expected in (({}, {"SIGTERM"}), ({"SLURM_JOB_ID": "7"}, {"SIGTERM", "SIGUSR1"})):
        with patch_environment(**variables):
            preemption = module.Preemption(process, PreemptionConfig())
        assert {number.name for number in preemption.signals} == expected
        preemption.close()


def test_signals_can_be_chosen():
    accelerator = Accelerator(preemption=PreemptionConfig(signals=("SIGUSR2",)))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    tell(accelerator, signal.SIGUSR2)
    accelerator.preemption.boundary()
    assert accelerator.should_stop
    finish(accelerator)


@pytest.mark.wide(but=["SIGTERM", "signals1"])
@pytest.mark.parametrize("signals", ["SIGTERM", (), ("SIGKILL",), ("SIGSTOP",), ("TERM",), (15,), 15])
def test_signals_that_cannot_be_chosen(signals):
    with pytest.raises(OptionError, match=r"PreemptionConfig\(signals=…\)"):
        PreemptionConfig(signals=signals)


def test_a_wrong_argument_is_named():
    with pytest.raises(ArgumentTypeError, match=r"Accelerator\(preemption=…\) takes True.*got 'yes'"):
        Accelerator(preemption="yes")


def test_a_handler_of_before_is_called_and_put_back():
    calls = []

    def before(number, frame):
        calls.append(number)

    signal.signal(signal.SIGTERM, before)
    accelerator = Accelerator(preemption=True)
    tell(accelerator)
    assert calls == [signal.SIGTERM]
    accelerator.end_training()
    assert signal.getsignal(signal.SIGTERM) is before
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_another_thread_is_told_to_use_the_main_one():
    answers = queue.SimpleQueue()

    def attempt():
        try:
            answers.put(Accelerator(preemption=True))
        except StateError as error:
            answers.put(str(error))

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert "create the listening object in the main thread" in answers.get()


def test_two_accelerators_are_told_and_end_apart():
    first, second = Accelerator(preemption=True), Accelerator(preemption=True)
    os.kill(os.getpid(), signal.SIGTERM)
    tell(first)
    tell(second)
    first.preemption.boundary()
    assert (first.should_stop, second.should_stop) == (True, False)
    first.preemption._heeded = True
    first.preemption.close()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    second.preemption.boundary()
    assert second.should_stop
    finish(second)


@pytest.mark.wide
def test_pickles_and_is_collected():
    accelerator = Accelerator(preemption=True)
    model, optimizer, loader = prepared(accelerator)
    copy = pickle.loads(pickle.dumps(accelerator))
    assert copy.preemption is None
    assert copy.should_stop is False
    references = [weakref.ref(item) for item in (accelerator, model, optimizer, loader, copy)]
    accelerator.free_memory()
    del accelerator, model, optimizer, loader, copy
    gc.collect()
    assert [reference() for reference in references] == [None] * 5


@pytest.mark.wide
def test_data_workers_live_on(tmp_path):
    """Slurm tells every process of a job."""
    others = psutil.Process().children()
    accelerator = Accelerator(preemption=PreemptionConfig(signals=("SIGTERM", "SIGUSR1")))
    data = TensorDataset(torch.arange(16.0).unsqueeze(1))
    loader = accelerator.prepare(
        DataLoader(
            data,
            batch_size=2,
            num_workers=2,
            multiprocessing_context="fork",
            worker_init_fn=lambda worker: (tmp_path / str(worker)).touch(),
        )
    )
    rows = []
    for index, (x,) in enumerate(loader):
        rows += x.flatten().tolist()
        if index == 0:
            until = time.monotonic() + 20
            while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until:
                time.sleep(0.01)
            workers = [child for child in psutil.Process().children() if child not in others]
            for name in ("USR1", "TERM"):  # by another process: workers end if their parent says so
                subprocess.run(["kill", f"-{name}", *(str(worker.pid) for worker in workers)], check=True)
            time.sleep(0.3)
            assert len(workers) == 2
            assert all(worker.is_running() and worker.status() != "zombie" for worker in workers)
    assert rows == list(range(16))
    assert not accelerator.preemption._consensus.pending
    psutil.wait_procs(workers, timeout=10)
    assert not any(worker.is_running() for worker in workers)
    accelerator.end_training()


@pytest.mark.wide(only=["accelerator.end_training*"])
@pytest.mark.parametrize("end", ["accelerator.exit_preempted()", "accelerator.end_training()"])
def test_workers_end_with_a_rank_that_leaves_its_loop(end):
    script = f"""
import sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
from accel_train import Accelerator
accelerator = Accelerator(preemption=True)
data = TensorDataset(torch.zeros(64, 1))
loader = accelerator.prepare(DataLoader(data, num_workers=2, persistent_workers=True, multiprocessing_context="fork"))
for x in loader:
    break
{end}
"""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, timeout=100,
    )  # fmt: skip
    assert done.returncode == (75 if "exit" in end else 0)
    # Torch gives each worker 5 seconds to end by itself.
    assert time.monotonic() - began < 40


def test_a_forked_process_is_no_rank():
    accelerator = Accelerator(preemption=PreemptionConfig(signals=("SIGUSR2",)))
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    process.start()
    os.kill(process.pid, signal.SIGUSR2)
    process.join(timeout=10)
    assert process.exitcode == -signal.SIGUSR2
    time.sleep(0.2)
    assert not accelerator.preemption._consensus.pending
    accelerator.end_training()


@pytest.mark.wide
def test_an_end_that_hides_the_preemption_is_told(caplog):
    accelerator = Accelerator(preemption=True)
    tell(accelerator)
    accelerator.preemption.boundary()
    assert accelerator.should_stop
    with caplog.at_level(logging.WARNING):
        accelerator.end_training()
    assert (
        "received a stop signal (SIGTERM on rank 0) and ends without accelerator.exit_preempted()"
        in caplog.text
    )


def test_an_end_in_time_is_not(caplog):
    accelerator = Accelerator(preemption=True)
    tell(accelerator)
    assert not accelerator.should_stop
    caplog.clear()
    accelerator.end_training()
    assert caplog.text == ""


def test_a_save_in_the_background_is_finished_first(tmp_path):
    accelerator = Accelerator(preemption=True, project_config=project(tmp_path))
    prepared(accelerator)
    handle = accelerator.save_state(asynchronous=True)
    finish(accelerator)
    assert handle.done()
    assert (tmp_path / "checkpoints/checkpoint_0/manifest.json").exists()


# Resuming


def project(folder):
    return ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)


def test_nobody_asks_to_resume(tmp_path):
    accelerator = Accelerator(project_config=project(tmp_path))
    prepared(accelerator)
    accelerator.save_state()
    assert accelerator.resume() is False
    with patch_environment(accelerate_resume="false"):
        assert accelerator.resume() is False


def test_resume_loads_the_newest_complete_checkpoint(tmp_path):
    accelerator = Accelerator(project_config=project(tmp_path))
    model, *_ = prepared(accelerator)
    for step in range(11):
        accelerator.step = step
        accelerator.save_state()
    (tmp_path / "checkpoints/checkpoint_11").mkdir()  # complete ones have a manifest
    weights = model.weight.detach().clone()
    other = Accelerator(project_config=project(tmp_path))
    restored, *_ = prepared(other)
    with patch_environment(accelerate_resume="true"):
        assert other.resume() is True
    assert other.step == 10
    assert torch.equal(restored.weight, weights)
    assert other.save_iteration == 12  # past everything that is there


def test_resume_says_that_there_is_nothing_yet(tmp_path, caplog):
    accelerator = Accelerator(project_config=project(tmp_path))
    with patch_environment(accelerate_resume="1"):
        assert accelerator.resume() is False
    assert (
        f"no complete checkpoint in {tmp_path / 'checkpoints'} yet; training starts from the beginning"
        in caplog.text
    )


def test_resume_needs_automatic_names(tmp_path):
    with patch_environment(accelerate_resume="true"):
        with pytest.raises(OptionError, match=r"resume\(\) looks for automatic checkpoints"):
            Accelerator(project_dir=tmp_path).resume()
        with pytest.raises(OptionError, match="needs a folder"):
            Accelerator(project_config=ProjectConfiguration(automatic_checkpoint_naming=True)).resume()
