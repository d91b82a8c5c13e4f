"""Preemption in real worlds: ranks stop together, and a restarted run ends with the same bits."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator
from testkit import worlds

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX systems")


# --- worlds of gloo ranks ---


def told_after(seconds, times=1):
    """This rank gets SIGTERM in a while, whatever its main thread does then."""

    def tell():
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.02)

    timer = threading.Timer(seconds, tell)
    timer.start()
    return timer


def train_until_told(told, steps=1, slow=None, times=1, ask_every=1, batches=2000):
    """Train; return after which batch it was time to stop, and whether that was inside a window."""
    accelerator = Accelerator(preemption=True, gradient_accumulation_steps=steps)
    rank = accelerator.process_index
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    data = TensorDataset(torch.randn(2 * batches * accelerator.num_processes, 4))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=2)
    )
    timer = stopped = None
    for index, (x,) in enumerate(loader):
        if rank == slow:
            time.sleep(0.02)
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
        _ = [accelerator.should_stop for _ in range(rank)]  # questions of one rank only change nothing
        if index % ask_every == 0 and accelerator.should_stop:
            stopped = index, accelerator.sync_gradients
            break
        if timer is None and rank in told:  # after a first batch, however slow the machine is
            timer = told_after(told[rank], times)
    # A collective, as the save is: it would not end if ranks had stopped at different batches.
    everywhere = accelerator.gather(torch.tensor([-1 if stopped is None else stopped[0]])).tolist()
    if timer is not None:
        timer.join()
    accelerator.end_training()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return stopped, everywhere, [t.name for t in threading.enumerate() if t.name.startswith("accel-s")]


HOW = {
    "one": {"told": {1: 0.3}},
    "ahead": {"told": {0: 0.3}, "slow": 1},
    "behind": {"told": {1: 0.3}, "slow": 1},
    "all": {"told": dict.fromkeys(range(4), 0.3), "times": 5},
    "window": {"told": {0: 0.3, 1: 0.32}, "slow": 0, "steps": 4},
    "seldom": {"told": {1: 0.3}, "steps": 3, "ask_every": 5},
}
FOUR = [
    pytest.param(4, how, id=f"4-{name}", marks=[] if name in ("all", "window") else pytest.mark.full)
    for name, how in HOW.items()
]


@pytest.mark.wide(but=["2-one", "2-behind", "4-window"])
@pytest.mark.parametrize(
    ("size", "how"), [pytest.param(2, how, id=f"2-{name}") for name, how in HOW.items()] + FOUR
)
def test_all_ranks_stop_after_the_same_batch(size, how):
    results = worlds.run(train_until_told, size, timeout=120, **how)
    stops = {stopped for stopped, _, _ in results}
    assert len(stops) == 1
    stopped, complete = stops.pop()
    assert complete or how.get("ask_every")
    assert stopped > 0
    for _, everywhere, threads in results:
        assert everywhere == [stopped] * size
        assert threads == []


def busy_elsewhere():
    """Rank 0 asks while rank 1 is inside a collective that waits for rank 0, and the other way round."""
    accelerator = Accelerator(preemption=True)
    answers = []
    for first in (0, 1):
        if accelerator.process_index == first:
            time.sleep(0.5)  # the other one is in the collective by now
            if first == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            answers.append(accelerator.should_stop)
        accelerator.wait_for_everyone()
        accelerator.preemption.boundary()
    accelerator.wait_for_everyone()
    answers.append(accelerator.should_stop)
    accelerator.end_training()
    return answers[-1]


def test_a_question_needs_nobody_who_waits():
    assert worlds.run(busy_elsewhere, 2) == [True, True]


def uneven(told_rank):
    """Rank 0 has 3 batches and rank 1 has 9; the signal comes when rank 0 has none left."""
    accelerator = Accelerator(preemption=True)
    rank = accelerator.process_index
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    for epoch in range(3):
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for index in range(3 if rank == 0 else 9):
                optimizer.zero_grad()
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                if epoch == 1 and index == 6:
                    if rank == told_rank:
                        os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(0.1)
                if rank == 0 == told_rank and epoch == 1 and index == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
        seen.append((accelerator.should_stop, accelerator.preemption.boundaries.passed))
    accelerator.end_training()
    return seen


@pytest.mark.parametrize("told", [0, 1])
def test_ranks_with_less_data_agree_after_the_join(told):
    first, second = worlds.run(uneven, 2, told)
    assert first == second
    assert [passed for _, passed in first] == [9, 18, 27]
    assert first[0][0] is False
    assert first[2][0] is True


# --- real launches ---

SCRIPT = """
import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator, DataLoaderConfiguration, ProjectConfiguration, set_seed

folder, delay, save_each_epoch = sys.argv[1], float(sys.argv[2]), "save" in sys.argv


class Progress:
    steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


accelerator = Accelerator(
    preemption=True,
    gradient_accumulation_steps=2,
    project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True),
    dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
)
set_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
inputs = torch.randn(20 * accelerator.num_processes, 4)
workers = {"num_workers": 2, "persistent_workers": True} if "workers" in sys.argv else {}
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
loader = DataLoader(data, batch_size=2, shuffle=True, **workers)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
progress = Progress()
accelerator.register_for_checkpointing(progress)
resumed = accelerator.resume()
log = open(f"{folder}/log_{accelerator.process_index}", "a", buffering=1)
log.write(f"start {os.getpid()} {resumed}\\n")
for epoch in range(progress.steps // len(loader), 3):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = ((model(x) - y) ** 2).mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        progress.steps += 1
        log.write(f"{epoch} {x.sum().item()} {loss.item()}\\n")
        time.sleep(delay * (1 + accelerator.process_index))
        if accelerator.should_stop:
            accelerator.save_state()
            accelerator.exit_preempted()
    if save_each_epoch:
        accelerator.save_state()
if accelerator.is_main_process:
    torch.save(accelerator.get_state_dict(model), f"{folder}/final.pt")
log.close()
accelerator.end_training()
"""
FLAGS = ["--cpu", "--num_processes"]


class Launches:
    """Launches of one script, each with a folder of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)
        self.marker = uuid.uuid4().hex
        self.environ = {
            **{name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
            "PYTHONPATH": os.pathsep.join(sys.path),
            "ACCEL_TEST_MARKER": self.marker,
        }

    def start(self, name, size, *flags, delay=0.0, words=()):
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "accel_cli", "launch", *FLAGS, str(size), *flags, str(self.script)]
        return subprocess.Popen(
            [*command, str(folder), str(delay), *words],
            env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def run(self, name, size, *flags, **how):
        return finish(self.start(name, size, *flags, **how))

    def log(self, name, rank):
        path = self.folder / name / f"log_{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def steps(self, name, rank):
        return [line for line in self.log(name, rank) if not line.startswith("start")]

    def starts(self, name, rank):
        """Process id and what resume() answered, of each start."""
        lines = [line.split() for line in self.log(name, rank) if line.startswith("start")]
        return [(int(pid), answer == "True") for _, pid, answer in lines]

    def await_step(self, name, number, rank=0):
        until = time.monotonic() + 60
        while len(self.steps(name, rank)) < number:
            assert time.monotonic() < until
            time.sleep(0.01)

    def final(self, name):
        return torch.load(self.folder / name / "final.pt")

    def leftovers(self):
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get("ACCEL_TEST_MARKER") == self.marker and process.status() != "zombie":
                    found.append(process)
        return found


def finish(process):
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return subprocess.CompletedProcess([], process.returncode, out, err)


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    return Launches(tmp_path_factory.mktemp("preemption"))


@pytest.fixture(autouse=True)
def nothing_is_left_running(request):
    yield
    if "launches" in request.fixturenames:
        made = request.getfixturevalue("launches")
        until = time.monotonic() + 3
        while (left := made.leftovers()) and time.monotonic() < until:
            time.sleep(0.05)
        for process in left:
            process.kill()
        assert left == []


def assert_same_run(launches, name, size, *, whole_name=None, repeats=False):
    """The run in parts saw the same samples and losses, and ended with the same weights, as the whole one."""
    if whole_name is None:
        whole_name = f"whole{size}"
        if not launches.log(whole_name, 0):
            done = launches.run(whole_name, size, words=["save"])
            assert done.returncode == 0, done.stderr
    for rank in range(size):
        whole, parts = launches.steps(whole_name, rank), launches.steps(name, rank)
        if repeats:  # what came after the last checkpoint was done again
            assert set(parts) == set(whole)
            assert parts[-len(whole) // 3 :] == whole[-len(whole) // 3 :]
        else:
            assert parts == whole
    whole, parts = launches.final(whole_name), launches.final(name)
    assert whole.keys() == parts.keys()
    for key, value in whole.items():
        assert torch.equal(value, parts[key]), key


@pytest.mark.parametrize(
    ("who", "size"),
    [
        pytest.param("one", 2, marks=pytest.mark.full),
        pytest.param("all", 2, marks=pytest.mark.full),
        pytest.param("one", 4, marks=pytest.mark.full),
        pytest.param("all", 4, marks=pytest.mark.full),
    ],
)
def test_preempted_ranks_are_started_again(launches, who, size):
    name = f"{who}{size}"
    process = launches.start(name, size, "--resume", delay=0.02)
    launches.await_step(name, 7)
    pids = [launches.starts(name, rank)[0][0] for rank in range(size)]
    for pid in pids if who == "all" else pids[-1:]:
        for _ in range(3):
            os.kill(pid, signal.SIGTERM)
    done = finish(process)
    assert done.returncode == 0, done.stderr
    assert "training was preempted (exit code 75); restarting all ranks" in done.stderr
    assert "all ranks stop after optimizer step" in done.stderr
    for rank in range(size):
        assert [resumed for _, resumed in launches.starts(name, rank)] == [False, True]
    assert_same_run(launches, name, size)


SIZES = [2, pytest.param(4, marks=pytest.mark.full)]


@pytest.mark.wide
@pytest.mark.parametrize("size", SIZES)
def test_a_stopped_launcher_ends_with_75_and_goes_on_when_it_is_started_again(launches, size):
    name = f"launcher{size}"
    process = launches.start(name, size, "--resume", "--max_restarts", "5", delay=0.02)
    launches.await_step(name, 8)  # of 10 in the epoch
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    done = finish(process)
    assert done.returncode == 75, done.stderr
    assert "restarting" not in done.stderr
    assert launches.leftovers() == []
    done = launches.run(name, size, "--resume")
    assert done.returncode == 0, done.stderr
    assert [resumed for _, resumed in launches.starts(name, 0)] == [False, True]
    assert_same_run(launches, name, size)


@pytest.mark.full
def test_every_process_of_the_job_is_told_as_slurm_does(launches):
    process = launches.start("slurm", 2, "--resume", delay=0.05, words=["workers"])
    launches.await_step("slurm", 7, rank=1)
    job = launches.leftovers()
    assert len(job) >= 7  # the launcher, ranks and their workers
    for member in job:
        member.send_signal(signal.SIGTERM)
    began = time.monotonic()
    done = finish(process)
    assert done.returncode == 75, done.stderr
    assert "did not exit in time" not in done.stderr
    assert time.monotonic() - began < 25
    done = launches.run("slurm", 2, "--resume", words=["workers"])
    assert done.returncode == 0, done.stderr
    done = launches.run("whole_slurm", 2, words=["workers"])
    assert done.returncode == 0, done.stderr
    assert_same_run(launches, "slurm", 2, whole_name="whole_slurm")


@pytest.mark.full
def test_preemption_is_left_to_the_scheduler_unless_asked(launches):
    process = launches.start("scheduler", 2, delay=0.02)
    launches.await_step("scheduler", 5)
    os.kill(launches.starts("scheduler", 1)[0][0], signal.SIGTERM)
    done = finish(process)
    assert done.returncode == 75, done.stderr
    assert "restarting" not in done.stderr
    done = launches.run("scheduler", 2, "--resume")
    assert done.returncode == 0, done.stderr
    assert_same_run(launches, "scheduler", 2)


@pytest.mark.full
def test_one_process(launches):
    process = launches.start("single", 1, "--resume", delay=0.02)
    launches.await_step("single", 7)
    os.kill(launches.starts("single", 0)[0][0], signal.SIGTERM)
    done = finish(process)
    assert done.returncode == 0, done.stderr
    assert [resumed for _, resumed in launches.starts("single", 0)] == [False, True]
    assert_same_run(launches, "single", 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.full
def test_a_killed_rank_goes_on_from_the_newest_checkpoint_or_anew(launches, saved, size):
    name = f"crash{saved}{size}"
    process = launches.start(
        name, size, "--resume", "--max_restarts", "1", delay=0.02, words=["save"] if saved else []
    )
    launches.await_step(name, 14)
    os.kill(launches.starts(name, size - 1)[0][0], signal.SIGKILL)
    done = finish(process)
    assert done.returncode == 0, done.stderr
    assert "restarting all ranks (1 of 1)" in done.stderr
    for rank in range(size):
        assert [resumed for _, resumed in launches.starts(name, rank)] == [False, saved]
    assert done.stderr.count("yet; training starts from the beginning") == (1 if saved else 2)
    assert_same_run(launches, name, size, repeats=True)


@pytest.mark.full
def test_crashes_count_and_preemptions_do_not(launches):
    process = launches.start("counted", 2, "--resume", "--max_restarts", "1", delay=0.03, words=["save"])
    for number, kind in ((3, signal.SIGTERM), (14, signal.SIGKILL), (16, signal.SIGTERM)):
        launches.await_step("counted", number)
        os.kill(launches.starts("counted", 1)[-1][0], kind)
        until = time.monotonic() + 60
        count = len(launches.starts("counted", 1))
        while len(launches.starts("counted", 1)) == count:
            assert time.monotonic() < until
            time.sleep(0.02)
    launches.await_step("counted", 24)
    os.kill(launches.starts("counted", 1)[-1][0], signal.SIGKILL)
    done = finish(process)
    assert done.returncode == 137, done.stderr
    assert done.stderr.count("preempted (exit code 75); restarting") == 2
    assert done.stderr.count("restarting all ranks (1 of 1)") == 1


@pytest.mark.full
def test_a_crash_ends_the_others_at_once_although_they_listen(launches):
    process = launches.start("ended", 3, delay=0.02)
    launches.await_step("ended", 3)
    began = time.monotonic()
    os.kill(launches.starts("ended", 2)[0][0], signal.SIGKILL)
    done = finish(process)
    assert done.returncode == 137
    assert time.monotonic() - began < 20
    assert "rank 2 failed" in done.stderr


def two_machines(launches, name, *flags, delay=0.0):
    port = str(worlds.free_port())
    where = ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port]
    return [
        launches.start(name, 2, *where, "--machine_rank", str(rank), "--resume", *flags, delay=delay)
        for rank in (0, 1)
    ]


@pytest.mark.full
def test_torchs_agent_restarts_preempted_ranks_of_two_machines(launches):
    both = two_machines(launches, "agents", "--max_restarts", "1", delay=0.03)
    launches.await_step("agents", 7)
    os.kill(launches.starts("agents", 1)[0][0], signal.SIGTERM)
    for process in both:
        done = finish(process)
        assert done.returncode == 0, done.stderr
        assert "counts preemptions as crashes: --max_restarts 1 for both together" in done.stderr
    assert [resumed for _, resumed in launches.starts("agents", 1)] == [False, True]
    assert_same_run(launches, "agents", 2)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_stopped_launchers_of_two_machines_end_with_75(launches, number):
    name = f"machines{int(number)}"
    launches.environ["SLURM_JOB_ID"] = "1"  # so that ranks listen to both
    try:
        both = two_machines(launches, name, delay=0.03)
        launches.await_step(name, 7)
        for process in both:
            process.send_signal(number)
        ends = [finish(process) for process in both]
        assert [done.returncode for done in ends] == [75, 75], [done.stderr for done in ends]
    finally:
        del launches.environ["SLURM_JOB_ID"]
    done = launches.run(name, 2, "--resume")
    assert done.returncode == 0, done.stderr
    assert [resumed for _, resumed in launches.starts(name, 0)] == [False, True]
    assert_same_run(launches, name, 2)
