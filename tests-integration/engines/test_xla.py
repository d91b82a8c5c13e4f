"""Training with the real torch_xla, on the CPU. Run with `hatch run engines:xla`.

torch_xla needs its own version of torch, so it is in an environment of its own, which `tools/engines/xla.sh` makes
(2.3 GB) in ACCEL_XLA_FOLDER, by default a folder for temporary files. The oracles are plain loops in this process, with
this environment's torch.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from testkit import gcloud
from testkit.worlds import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT = HERE / "xla_training.py"
FOLDER = Path(os.environ.get("ACCEL_XLA_FOLDER", Path(tempfile.gettempdir()) / "accel-xla"))
SOURCES = [str(path) for path in sorted(ROOT.glob("packages/*/src"))] + [str(ROOT / "tools")]
TOLERANCE = {"no": 1e-6, "bf16": 2e-2}

sys.path.insert(0, str(HERE))
import xla_training as here  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def torch_xla() -> None:
    subprocess.run(["bash", str(ROOT / "tools" / "engines" / "xla.sh"), str(FOLDER)], check=True)


def python(
    *arguments: str, devices: int = 1, code: int | None = 0, timeout: float = 280, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run the engine's Python on the packages' sources."""
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")},
        "PYTHONPATH": os.pathsep.join(SOURCES),
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(devices),
        **environ,
    }
    command = [str(FOLDER / "bin" / "python"), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, cwd=ROOT)
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done


def run(function: str, folder: Path, /, ranks: int = 1, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a function of `xla_training.py`, by the launcher if on several ranks."""
    code, devices = options.pop("code", 0), 4 if options.get("spmd") else 1
    arguments = [str(SCRIPT), function, str(folder), json.dumps(options)]
    launch = ["-m", "accel_cli", "launch", "--tpu", "--num_processes", str(ranks)] if ranks > 1 else []
    return python(*launch, *arguments, code=code, devices=devices)


def trained(folder: Path, ranks: int = 1, **options: Any) -> list[dict[str, Any]]:
    run("train", folder, ranks=ranks, **options)
    return [torch.load(folder / f"seen_{rank}.pt", weights_only=True) for rank in range(ranks)]


def oracle(ranks: int, options: dict[str, Any]) -> dict[str, list[Any]]:
    """The same updates in plain PyTorch, each from all rows of its window; losses by micro-batch, then rank."""
    data, model = here.Rows(), here.make_model()
    optimizer = here.make_optimizer(model)
    batch, accumulation = options["batch"], options.get("accumulation", 1)
    by_items = options.get("items", False)
    made: dict[str, list[Any]] = {"losses": [], "norms": [], "weights": []}
    for _ in range(2):
        parts = list(torch.arange(len(data)).split(batch))
        rounds = [parts[first : first + ranks] for first in range(0, len(parts), ranks)]
        for first in range(0, len(rounds), accumulation):
            micro = [rows for part in rounds[first : first + accumulation] for rows in part]
            losses = []
            for rows in micro:
                with torch.autocast("cpu", torch.bfloat16, enabled=options.get("precision") == "bf16"):
                    outputs = model(data.x[rows])
                losses.append(here.losses_of(outputs, data.y[rows], data.items[rows], by_items))
            made["losses"] += [loss.item() for loss in losses]
            count = int(sum(data.items[rows].sum() for rows in micro)) if by_items else len(micro)
            optimizer.zero_grad()
            (sum(losses) / count).backward()
            if "norm" in options:
                made["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), options["norm"]).item())
            if "value" in options:
                nn.utils.clip_grad_value_(model.parameters(), options["value"])
            optimizer.step()
            made["weights"].append(here.on_host(model.state_dict()))
    return made


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one process, clipped": (1, {"batch": 5, "norm": 0.3}),
    "windows with a short tail": (1, {"batch": 4, "accumulation": 4, "value": 0.02}),
    "items": (1, {"batch": 4, "accumulation": 4, "items": True, "norm": 0.3}),
    "bf16": (1, {"batch": 4, "precision": "bf16", "norm": 0.3}),
    "spmd": (1, {"batch": 8, "spmd": True, "norm": 0.3}),
    "spmd, uneven batches": (1, {"batch": 5, "spmd": True, "accumulation": 4, "items": True}),
    "spmd, bf16": (1, {"batch": 8, "spmd": True, "precision": "bf16"}),
    "two processes": (2, {"batch": 3, "norm": 0.3}),
    "two processes, short tail, items": (2, {"batch": 3, "accumulation": 3, "items": True, "value": 0.02}),
    "two processes, bf16": (2, {"batch": 3, "precision": "bf16"}),
}


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_plain_torch(tmp_path: Path, name: str) -> None:
    ranks, options = CASES[name]
    seen = trained(tmp_path, ranks, **options)
    expected, bound = oracle(ranks, options), TOLERANCE[options.get("precision", "no")]
    for rank, found in enumerate(seen):
        torch.testing.assert_close(found["losses"], expected["losses"][rank::ranks], rtol=bound, atol=bound)
        torch.testing.assert_close(found["norms"], expected["norms"], rtol=bound, atol=bound)
        assert len(found["weights"]) == len(expected["weights"]) > 0
        for made, plain in zip(found["weights"], expected["weights"], strict=True):
            torch.testing.assert_close(made, plain, rtol=bound, atol=bound)
        assert sorted(itertools.chain(*found["rows"])) == sorted([*range(here.ROWS)] * 2), (
            "each row once in an epoch"
        )
    if options.get("spmd"):
        assert all(spec.startswith("{devices=[4,1]") for spec in seen[0]["specs"]), seen[0]["specs"]
    if "norm" in options:
        assert max(expected["norms"]) > options["norm"], "something is clipped"


@pytest.mark.parametrize("spmd", [False, True])
def test_a_step_is_one_program(tmp_path: Path, spmd: bool) -> None:
    """The first steps are compiled; after that each step runs the program that there is."""
    run("programs", tmp_path, spmd=spmd)
    counted = json.loads((tmp_path / "counted.json").read_text())
    compiled, run_again = zip(*counted, strict=True)
    assert compiled[-1] == compiled[2], counted
    later = itertools.pairwise(run_again[2:])
    assert [after - before for before, after in later] == [1] * 5, counted


def test_processes_and_collectives(tmp_path: Path) -> None:
    run("control", tmp_path, ranks=2)
    for rank in range(2):
        assert "CollectiveMismatchError" in (tmp_path / f"refused_{rank}").read_text(), "on all ranks"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run("save", folder, dropout=0.3)
    return folder


@pytest.mark.parametrize("state", ["state", "asynchronous"])
def test_resuming_is_exact(saved: Path, state: str) -> None:
    """Also for dropout, whose numbers are drawn on the device."""
    run("resume", saved, dropout=0.3, state=state)
    resumed, uninterrupted = (
        torch.load(saved / name, weights_only=True) for name in ("resumed.pt", "second.pt")
    )
    torch.testing.assert_close(resumed, uninterrupted, rtol=0, atol=0)


def test_files_need_no_torch_xla(saved: Path) -> None:
    """This process has none."""
    weights = torch.load(saved / "first.pt", weights_only=True)
    model = load_file(saved / "model" / "model.safetensors")
    assert "second.weight" not in model, "tied to first.weight"
    torch.testing.assert_close(model, {name: weights[name] for name in model}, rtol=0, atol=0)
    content = torch.load(saved / "saved.bin", weights_only=True)
    assert content["step"] == 3
    torch.testing.assert_close(content["weights"], weights, rtol=0, atol=0)


@pytest.mark.parametrize("state", ["state", "asynchronous", "pickled"])
def test_single_loads_what_xla_saved(saved: Path, state: str) -> None:
    from accel_train import Accelerator

    accelerator = Accelerator(cpu=True, strategy="single")
    model = here.make_model(5)
    model, optimizer, _ = accelerator.prepare(
        model,
        here.make_optimizer(model),
        torch.utils.data.DataLoader(here.Rows(), batch_size=4, shuffle=True),
    )
    accelerator.load_state(saved / state)
    weights = torch.load(saved / "first.pt", weights_only=True)
    torch.testing.assert_close(dict(model.state_dict()), weights, rtol=0, atol=0)
    moments = [value["exp_avg"] for value in optimizer.state.values()]
    assert {str(moment.device) for moment in moments} == {"cpu"}
    assert all(moment.abs().sum() > 0 for moment in moments)


def test_xla_loads_what_single_saved(tmp_path: Path) -> None:
    """And trains on as the same loop on the CPU, within float32."""
    from accel_train import Accelerator

    accelerator = Accelerator(cpu=True, strategy="single")
    model = here.make_model()
    model, optimizer, loader = accelerator.prepare(
        model,
        here.make_optimizer(model),
        torch.utils.data.DataLoader(here.Rows(), batch_size=4, shuffle=True),
    )
    here._epoch(accelerator, model, optimizer, loader)
    accelerator.save_state(tmp_path / "state")
    run("resume", tmp_path, state="state")
    here._epoch(accelerator, model, optimizer, loader)
    resumed = torch.load(tmp_path / "resumed.pt", weights_only=True)
    torch.testing.assert_close(resumed, dict(model.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_averaged_weights(tmp_path: Path, ranks: int) -> None:
    """torch_xla lets a copy share memory with the weights, which an update in place frees."""
    run("average", tmp_path, ranks=ranks)
    for rank in range(ranks):
        seen = torch.load(tmp_path / f"averaged_{rank}.pt", weights_only=True)
        expected = seen["weights"][0]
        for weights, found in zip(seen["weights"], seen["averages"], strict=True):
            expected = {name: (expected[name] + value) / 2 for name, value in weights.items()}
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        assert not torch.equal(seen["weights"][0]["head.weight"], seen["weights"][-1]["head.weight"])
        assert len(seen["weights"]) > 2


REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "another strategy": (
        1,
        {"strategy": "single"},
        "'single' does not run on device xla:0.*Leave the strategy out",
    ),
    "another strategy, two processes": (2, {"strategy": "ddp"}, "'ddp' does not run on device xla:0"),
    "fp16": (
        1,
        {"mixed_precision": "fp16"},
        "'xla' cannot compute with mixed_precision='fp16'; it takes bf16, no",
    ),
    "the CPU": (1, {"strategy": "xla", "cpu": True}, "'xla' does not run on device cpu.*set PJRT_DEVICE"),
    "the CPU, launched for TPUs": (
        2,
        {"cpu": True},
        r"launcher asks for XLA devices \(--tpu\) and the script for cpu",
    ),
    "spmd and processes": (2, {"strategy": "spmd"}, "2 processes were started, and in SPMD mode one process"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_combined_is_refused(tmp_path: Path, name: str) -> None:
    ranks, arguments, pattern = REFUSED[name]
    run("refuse", tmp_path, ranks=ranks, arguments=arguments, code=1)
    for rank in range(ranks):
        text = (tmp_path / f"refused_{rank}").read_text()
        assert text.startswith("IncompatibleOptionsError"), text
        assert re.search(pattern, text), text


def test_ranks_of_torch_xla_are_refused(tmp_path: Path) -> None:
    done = run("refuse", tmp_path, arguments={}, threads=True, code=1)
    assert "torch_xla has 4 ranks in 1 processes of its own" in done.stderr


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("tests", ["conformance", "test_saved_runs.py"])
def test_conformance(tests: str) -> None:
    """Every property of a strategy, on one process and on two, and kept checkpoints, in this environment's torch."""
    done = python(
        "-m", "pytest", "--full", f"tests-integration/{tests}", "-k", "xla", "-q", "-p", "no:cacheprovider",
        timeout=1400, ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    print(done.stdout[-300:])
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


# Pods, and what the launcher's flags for TPUs do. `testkit.gcloud` runs ssh's commands here, once for each machine.

DOWNCAST = """
import sys
import torch
import torch_xla
from accel_train import Accelerator

def train(index):
    accelerator = Accelerator()
    single = torch.ones(1, device=accelerator.device) + 0.001
    double = torch.ones(1, device=accelerator.device, dtype=torch.float64) + 0.001
    programs = [torch_xla._XLAC._get_xla_tensors_text([tensor]) for tensor in (single, double)]
    print(*[text.split("ROOT=0")[0].rsplit("xla_shape=")[-1] for text in programs])
    print(single.item(), double.item(), sys.argv[1:], __name__)

if __name__ == "__main__":
    train(0)
"""


def test_a_pod_of_two_machines_is_one_world(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch": 3, "norm": 0.3}
    pod = gcloud.install(tmp_path / "bin", machines=2, python=str(FOLDER / "bin" / "python"))
    words = ["--tpu", "--tpu_cluster", "--tpu_name", "pod", "--tpu_zone", "here", "--env", "PJRT_DEVICE=CPU"]
    (tmp_path / "two words").mkdir()
    script = [str(SCRIPT), "train", str(tmp_path / "two words"), json.dumps(options)]
    port = str(free_port())
    python("-m", "accel_cli", "launch", *words, "--main_process_port", port, *script, PATH=pod["PATH"])
    (called,) = gcloud.recorded(tmp_path / "bin")
    assert called[:7] == ["compute", "tpus", "tpu-vm", "ssh", "pod", "--zone", "here"]
    expected = oracle(2, options)
    for rank in range(2):
        found = torch.load(tmp_path / "two words" / f"seen_{rank}.pt", weights_only=True)
        for made, plain in zip(found["weights"], expected["weights"], strict=True):
            torch.testing.assert_close(made, plain, rtol=1e-6, atol=1e-6)


def test_a_machine_of_a_pod_that_fails_gives_the_code(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit(7)")
    pod = gcloud.install(tmp_path / "bin", machines=1, python=str(FOLDER / "bin" / "python"))
    words = ["-m", "accel_cli", "launch", "--tpu", "--tpu_cluster", "--tpu_name", "pod"]
    assert python(*words, str(tmp_path / "broken.py"), PATH=pod["PATH"], code=None).returncode == 7


def test_downcasting_and_a_function_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "downcast.py"
    script.write_text(DOWNCAST)
    launch = ["-m", "accel_cli", "launch", "--tpu", "--mixed_precision", "bf16"]
    assert python(*launch, str(script), "a").stdout.splitlines() == [
        "f32[1]{0},  f64[1]{0}, ",
        "1.0010000467300415 1.001 ['a'] __main__",
    ]
    flags = ["--downcast_bf16", "--main_training_function", "train"]
    done = python(*launch, *flags, str(script), "a")
    assert done.stdout.splitlines()[-2:] == [  # after torch_xla's warning that the variable is deprecated
        "bf16[1]{0},  f32[1]{0}, ",
        "1.0 1.0010000467300415 ['a'] downcast",
    ]
