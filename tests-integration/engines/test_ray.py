"""Runs on real clusters of Ray with several nodes on this machine. Run with `hatch run engines:ray`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ray = pytest.importorskip("ray", reason="hatch run engines:ray installs it")

from ray.cluster_utils import Cluster  # noqa: E402 - after the check that it is there

from accel_state.launching.submission.ray_machines import RayRun, ray_launcher, run_on_ray  # noqa: E402

HERE = Path(__file__).parent
PATIENCE = 180.0


@contextlib.contextmanager
def started(**head: Any) -> Iterator[Any]:
    """A head without processors and two nodes with one each."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **head})
    made.workers = [made.add_node(num_cpus=1) for _ in range(2)]
    ray.init(address=made.address, log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def cluster() -> Iterator[Any]:
    with started() as made:
        yield made


@pytest.fixture
def server() -> Iterator[str]:
    """The address of the job server of a cluster."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with started(include_dashboard=True, dashboard_port=port):
        yield f"http://127.0.0.1:{port}"


def run_of(*words: str, **changes: Any) -> RayRun:
    given: dict[str, Any] = {
        "per_machine": 1,
        "machines": 2,
        "resources": {"CPU": 1},
        "grace": 30.0,
        "patience": 5.0,
    }
    return RayRun(("accel", "launch", "--cpu", "--resume", *words), **(given | changes))


def training(folder: Path, steps: int = 40, *crash: str) -> tuple[str, ...]:
    return (str(HERE / "submitted.py"), str(folder), str(steps), *crash)


def assert_equal_weights(folder: Path, other: Path, steps: int = 40) -> None:
    """Compare with a run on one process that nothing happens to."""
    subprocess.run([sys.executable, *training(other, steps)], check=True, timeout=PATIENCE)
    torch.testing.assert_close(
        torch.load(folder / "weights.pt"), torch.load(other / "weights.pt"), rtol=1e-12, atol=0
    )


def disturbed(run: RayRun, text: str, act: Callable[[], None]) -> list[str]:
    """The lines of a run during which ``act`` is called as soon as one of them contains ``text``.

    Only a main thread may start nodes of Ray, so the run has a thread of its own.
    """
    lines: list[str] = []
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run_on_ray(run, write=lines.append)), daemon=True)
    thread.start()
    until = time.monotonic() + PATIENCE
    while not any(text in line for line in lines):
        assert time.monotonic() < until, lines
        time.sleep(0.05)
    act()
    thread.join(PATIENCE)
    assert codes == [0], lines
    return lines


def resumed(lines: list[str]) -> str:
    """The last line that tells from which step a run goes on."""
    return [line for line in lines if "from step " in line and "from step 0" not in line][-1]


def test_one_world_on_two_nodes(cluster: Any) -> None:
    lines: list[str] = []
    assert run_on_ray(run_of(str(HERE / "world.py")), write=lines.append) == 0
    told = [line.partition("] ") for line in lines if "torchrun" in line]
    assert sorted(rest for _, _, rest in told) == [f"torchrun {rank} 2 0 2 [0, 1]" for rank in range(2)]
    assert {first for first, _, _ in told} == {"[machine 0", "[machine 1"}


def test_a_crash_costs_one_retry(cluster: Any, tmp_path: Path) -> None:
    lines: list[str] = []
    words = training(tmp_path / "run", 40, "1", "15", "1")
    assert run_on_ray(run_of(*words, retries=1), write=lines.append) == 0
    assert any("2 ranks from step 10" in line for line in lines), lines
    assert_equal_weights(tmp_path / "run", tmp_path / "other")


def test_without_retries_a_crash_is_the_exit_code(cluster: Any, tmp_path: Path) -> None:
    lines: list[str] = []
    assert run_on_ray(run_of(*training(tmp_path / "run", 40, "1", "15", "1")), write=lines.append) == 1
    assert any("a planted crash" in line for line in lines)


@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "with what is left"])
def test_a_dead_node(cluster: Any, tmp_path: Path, replaced: bool) -> None:
    def kill() -> None:
        cluster.remove_node(cluster.workers[1], allow_graceful=False)
        if replaced:
            cluster.add_node(num_cpus=1)

    run = run_of(*training(tmp_path / "run", 60), min_machines=None if replaced else 1, grace=10.0)
    lines = disturbed(run, "step 15", kill)
    assert f"{2 if replaced else 1} ranks from" in resumed(lines)
    assert_equal_weights(tmp_path / "run", tmp_path / "other", 60)


def test_a_node_that_is_taken_away_saves_first(cluster: Any, tmp_path: Path) -> None:
    def drain() -> None:
        node = cluster.workers[1].node_id
        words = ["--address", cluster.address, "--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        words += ["--reason-message", "spot", "--deadline-remaining-seconds", "60"]
        done = subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", "drain-node", *words],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    run = run_of(*training(tmp_path / "run", 60), min_machines=1)
    lines = disturbed(run, "step 15", drain)
    assert any("all ranks stop after optimizer step" in line for line in lines), lines
    assert "1 ranks from" in resumed(lines)
    assert_equal_weights(tmp_path / "run", tmp_path / "other", 60)


def accel(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accel_cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=dict(os.environ))


def submit(server: str, *words: str) -> str:
    world = ("--cpu", "--num_machines", "2", "--num_processes", "2")
    done = accel("launch", "--submit", "ray", "--submit_address", server, *world, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("submitted job ")[1].split(";")[0]


def test_a_submitted_job(server: str, tmp_path: Path) -> None:
    place = ("--engine", "ray", "--address", server)
    number = submit(server, "--resume", *training(tmp_path / "run"))
    assert number.startswith("submitted-")
    followed = accel("jobs", "logs", number, "--follow", *place)
    assert "[machine 0] done after step 40" in followed.stdout, followed.stdout + followed.stderr
    listed = json.loads(accel("jobs", "ls", "--json", *place).stdout)
    assert [(job["id"], job["state"], job["machines"]) for job in listed] == [(number, "done", 2)]
    assert_equal_weights(tmp_path / "run", tmp_path / "other")
    again = accel("jobs", "cancel", number, *place)
    assert again.returncode == 1
    assert "has ended already" in again.stderr
    assert "Job nobody does not exist" in accel("jobs", "logs", "nobody", *place).stderr


def test_a_cancelled_job_saves_first(server: str, tmp_path: Path) -> None:
    place = ("--engine", "ray", "--address", server)
    number = submit(server, *training(tmp_path / "run", 600))
    until = time.monotonic() + PATIENCE
    while "from step 0" not in accel("jobs", "logs", number, *place).stdout:
        assert time.monotonic() < until
    assert accel("jobs", "cancel", number, *place).stdout.strip() == f"cancelled job {number}"
    while json.loads(accel("jobs", "ls", "--json", *place).stdout)[0]["state"] == "running":
        assert time.monotonic() < until
    assert json.loads(accel("jobs", "ls", "--json", *place).stdout)[0]["state"] == "cancelled"


def test_a_function_of_a_notebook(cluster: Any, tmp_path: Path) -> None:
    def train(folder: str, scale: float) -> None:
        from accel_train import Accelerator

        accelerator = Accelerator(cpu=True)
        total = accelerator.reduce(torch.tensor([scale * (accelerator.process_index + 1)]))
        Path(folder, str(accelerator.process_index)).write_text(str(total.item()))

    ray_launcher(train, (str(tmp_path), 10.0), 4, num_machines=2, use_cpu=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        str(rank): "100.0" for rank in range(4)
    }


def test_inside_ray_trains_workers_an_accelerator_finds_its_place(cluster: Any, tmp_path: Path) -> None:
    import ray.train
    from ray.train.torch import TorchTrainer

    def train(config: dict[str, Any]) -> None:
        from accel_train import Accelerator

        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.full((2, 2), accelerator.process_index + 1.0)).sum())
        optimizer.step()
        folder = accelerator.save_state(f"{config['folder']}/state")
        places = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
        checkpoint = ray.train.Checkpoint.from_directory(folder) if accelerator.is_main_process else None
        ray.train.report({"places": places}, checkpoint=checkpoint)

    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=str(tmp_path / "results")),
    )
    result = trainer.fit()
    assert result.metrics["places"] == [0, 1]
    with result.checkpoint.as_directory() as folder:
        names = {path.name for path in Path(folder).iterdir()}
    assert "manifest.json" in names, names
