"""``accel prove``: windows, data that ends, precisions, resumes; scripts that write, wait, hang or are too large."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
from pathlib import Path

import torch
from accel_train import Accelerator, ProjectConfiguration
from accel_state.seeding import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

what = sys.argv[1]
set_seed(3)
project = ProjectConfiguration(project_dir="run", automatic_checkpoint_naming=what != "no resume")
accelerator = Accelerator(gradient_accumulation_steps=2, project_config=project)
x = torch.randn(64, 16)
y = x.sum(dim=1, keepdim=True)

def block():
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
train = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
test = DataLoader(TensorDataset(x, y), batch_size=8)
model, optimizer, scheduler, train, test = accelerator.prepare(model, optimizer, scheduler, train, test)
begin = 0
if Path("run/checkpoints").exists() and what != "no resume":
    accelerator.load_state()
    begin = len(list(Path("run/checkpoints").iterdir()))
    if what == "lost schedule":
        scheduler.scheduler.last_epoch = 0
        for group in optimizer.param_groups:
            group["lr"] = 0.01
for epoch in range(begin, 4):
    train.set_epoch(epoch)
    for x, y in train:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            if what == "window" and not accelerator.sync_gradients:
                loss = loss * accelerator.num_processes
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    errors = []
    for x, y in test:
        with torch.no_grad():
            wrong = (model(x) - y).abs()
        gather = accelerator.gather if what == "padding" else accelerator.gather_for_metrics
        errors.append(gather(wrong))
    accelerator.log({"error": torch.cat(errors).mean().item()})
    model.train()
    accelerator.save_state("run/last" if what == "no resume" else None)
"""


def proved(
    tmp_path: Path, what: str, *flags: str, script: str = SCRIPT, **variables: str
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """The exit code, the report on each strategy and way, and the facts."""
    (tmp_path / "train.py").write_text(script)
    argv = [sys.executable, "-m", "accel_cli", "prove", "--json", *flags, "train.py", what]
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
        check=False,
        env={**os.environ, **variables},
    )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    report = json.loads(done.stdout)
    return done.returncode, {each["name"]: each for each in report["strategies"]}, report["facts"]


def refused(tmp_path: Path, script: str, *flags: str, **variables: str) -> str:
    """What a proof says that ends with an error."""
    (tmp_path / "train.py").write_text(script)
    argv = [sys.executable, "-m", "accel_cli", "prove", *flags, "train.py", "x"]
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
        check=False,
        env={**os.environ, **variables},
    )
    assert done.returncode == 1
    return done.stderr


@pytest.mark.full
def test_a_loop_that_is_right_in_all_ways(tmp_path: Path) -> None:
    code, found, _ = proved(tmp_path, "", "--thorough")
    assert code == 0, found
    reasons = {name: each["reason"] for name, each in found.items() if each["reason"]}
    assert reasons == {}
    wrong = {name: each["findings"] for name, each in found.items() if each["differ"]}
    assert {name for name in wrong if not name.endswith("short last batch")} == set()
    for name in ("ddp, short last batch", "fsdp2, short last batch"):
        [note] = found[name]["findings"]
        assert (note["kind"], note["fault"]) == ("repeated samples", False)
    ways = {name.partition(", ")[2] for name in found}
    assert {
        "",
        "windows of 1",
        "windows of 3",
        "bf16",
        "fp16",
        "recomputation",
        "four ranks",
        "resumed",
    } <= ways


@pytest.mark.parametrize(
    ("what", "way", "kind"),
    [
        pytest.param("padding", "epochs", "padding", marks=pytest.mark.wide),
        pytest.param("window", "window3", "unequal counts", marks=pytest.mark.full),
        pytest.param("lost schedule", "resume", "schedule", marks=pytest.mark.full),
    ],
)
def test_faults_that_a_way_shows(tmp_path: Path, what: str, way: str, kind: str) -> None:
    code, found, _ = proved(tmp_path, what, "--strategies", "ddp", "--ways", way)
    causes = [cause for each in found.values() for cause in each["findings"]]
    assert code == 1, found
    assert causes[0]["kind"] == kind, causes


@pytest.mark.wide
def test_a_run_that_is_killed_goes_on(tmp_path: Path) -> None:
    code, found, _ = proved(tmp_path, "", "--strategies", "ddp", "--ways", "resume")
    assert code == 0, found
    assert [(name, each["reason"]) for name, each in found.items()] == [
        ("ddp, resumed", ""),
        ("ddp on one process, resumed", ""),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]  # the rest was written elsewhere


@pytest.mark.full
def test_a_script_that_does_not_resume_is_no_fault(tmp_path: Path) -> None:
    code, found, _ = proved(tmp_path, "no resume", "--strategies", "ddp", "--ways", "resume")
    assert code == 1  # nothing was compared
    assert "begins again; see --resume_with" in found["ddp, resumed"]["reason"]


@pytest.mark.full
def test_models_may_be_smaller(tmp_path: Path) -> None:
    code, _, facts = proved(tmp_path, "", "--strategies", "ddp", "--layers", "2", "--steps", "1")
    assert (code, facts["reduced"]) == (0, "models keep 2 blocks of each stack of equal ones")


@pytest.mark.full
def test_a_model_that_does_not_fit_is_proved_smaller(tmp_path: Path) -> None:
    wide = SCRIPT.replace("range(4)", "range(400)").replace(
        "nn.Linear(16, 16), nn.Tanh()", "nn.Linear(16, 300_000), nn.Linear(300_000, 16)"
    )
    code, found, facts = proved(tmp_path, "", "--strategies", "ddp", "--steps", "1", script=wide)
    assert code == 0, found
    assert facts["reduced"].endswith("the machine's memory does not hold the models as they are")


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    other = tmp_path / "other"
    here = tmp_path / "here"
    other.mkdir()
    here.mkdir()
    for path in (other / "best.pt", here / "log.txt"):
        path.write_text("from last week")
    os.utime(other / "best.pt", (1, 1))
    writes = SCRIPT.replace(
        "model = Net()",
        "model = Net()\nopen('log.txt', 'a').write('more')\nassert 'week' in open('log.txt').read()\n"
        f"torch.save(model.state_dict(), {str(other / 'best.pt')!r})",
    )
    said = refused(here, writes, TMPDIR=str(here))
    assert f"OverwriteError: the script overwrites {other / 'best.pt'}; pass --overwrite to allow it" in said
    assert {path.read_text() for path in (other / "best.pt", here / "log.txt")} == {"from last week"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param("name = input('name: ')", "EOFError", marks=pytest.mark.wide),
        pytest.param("import time; time.sleep(60)", "train.py:2 in <module>", marks=pytest.mark.wide),
        pytest.param("x = torch.ones(1).cuda()", "use accelerator.device", marks=pytest.mark.full),
    ],
)
def test_scripts_that_do_not_come_to_their_first_step(tmp_path: Path, line: str, said: str) -> None:
    message = refused(tmp_path, f"import torch\n{line}\n{SCRIPT}", "--limit", "8")
    assert said in message.replace("\n", " ")
    assert "not at its end after 8 s (--limit)" in message.replace("\n", " ") or "sleep" not in line


@pytest.mark.full
def test_data_whose_order_changes_is_not_called_a_fault_of_ranks(tmp_path: Path) -> None:
    clock = SCRIPT.replace("set_seed(3)", "import time; torch.manual_seed(time.time_ns())")
    _, found, _ = proved(tmp_path, "", "--strategies", "ddp", "--steps", "1", script=clock)
    assert [cause["kind"] for cause in found["ddp"]["findings"]] == ["not repeatable"]
