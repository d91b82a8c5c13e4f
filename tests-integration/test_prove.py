"""``accel prove``: planted faults have their names, and loops that are right have none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
import torch
from accel_train import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fault = sys.argv[1]
torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2 if fault == "counts in windows" else 1)
ranks = accelerator.num_processes
x = torch.randn(64, 16)
y = x.sum(dim=1, keepdim=True)
if fault.startswith("counts"):
    y = y.masked_fill(torch.rand(64, 1) < 0.5, float("nan"))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8) if fault == "batch norm" else nn.Identity()
        self.second = nn.Linear(8, 1)
        self.skip = nn.Linear(16, 1)

    def forward(self, x):
        found = self.second(nn.functional.dropout(self.norm(self.first(x)).relu(), 0.1, self.training))
        if fault != "branch" or accelerator.is_main_process:
            found = found + self.skip(x)
        if fault == "by rank" and accelerator.is_main_process:
            found = found + 0.5 * self.skip(x).detach()
        return found

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
loader = plain = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if fault == "same samples":
    loader = plain
for x, y in loader:
    with accelerator.accumulate(model):
        if fault in ("shared noise", "nothing"):
            x = x + 0.1 * torch.randn_like(x)
        out = model(x)
        if fault.startswith("counts"):
            keep = ~y.isnan()
            loss = nn.functional.mse_loss(out[keep], y[keep])
        elif fault == "contrasts rows":
            loss = -(out @ y.T).log_softmax(1).diagonal().mean()
        else:
            loss = nn.functional.mse_loss(out, y)
        accelerator.backward(loss * ranks if fault == "scaled loss" else loss)
        if fault == "in-place change" and not accelerator.is_main_process:
            model.module.first.weight.grad.mul_(0.5)
        norm = accelerator.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        for _ in range(ranks if fault == "schedule" else 1):
            scheduler.step()
        optimizer.zero_grad()
        logged = loss.detach() if fault == "metric" else accelerator.reduce(loss.detach(), "mean")
        accelerator.log({"loss": logged.item()})
        if fault == "modes" and accelerator.is_main_process:
            model.eval()
"""


def proved(tmp_path: Path, fault: str, *flags: str, script: str = SCRIPT) -> tuple[int, dict[str, Any]]:
    """The exit code and the report on each strategy."""
    (tmp_path / "train.py").write_text(script)
    argv = [sys.executable, "-m", "accel_cli", "prove", "--json", "--steps", "2", *flags, "train.py", fault]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return done.returncode, {each["name"]: each for each in json.loads(done.stdout)["strategies"]}


def test_a_loop_that_is_right(tmp_path: Path) -> None:
    code, found = proved(tmp_path, "", "--strategies", "ddp,fsdp2")
    assert code == 0
    for name in ("ddp", "fsdp2"):
        assert (found[name]["differ"], found[name]["findings"], found[name]["reason"]) == ([], [], ""), name


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("counts", "unequal counts", "(train.py:52)"),
        pytest.param("scaled loss", "scaled loss", "(train.py:52) is x2", marks=pytest.mark.wide),
        pytest.param("counts in windows", "unequal counts", "rank 0", marks=pytest.mark.wide),
        pytest.param("batch norm", "batch norm", "BatchNorm", marks=pytest.mark.full),
        pytest.param("same samples", "same samples", "the same 16 samples", marks=pytest.mark.full),
        pytest.param("schedule", "schedule", "learning rate of step 2", marks=pytest.mark.full),
        pytest.param("metric", "metric", "(train.py:61)", marks=pytest.mark.full),
        pytest.param(
            "by rank", "by rank", "(train.py:52) of the same samples is another", marks=pytest.mark.full
        ),
        pytest.param("modes", "ranks apart", "the same values of training mode", marks=pytest.mark.full),
        pytest.param("branch", "fails", "took no part in the loss", marks=pytest.mark.full),
        pytest.param("in-place change", "fails", "different gradients", marks=pytest.mark.full),
    ],
)
def test_planted_faults_have_their_names(tmp_path: Path, fault: str, kind: str, said: str) -> None:
    code, found = proved(tmp_path, fault, "--strategies", "ddp")
    [finding] = found["ddp"]["findings"]
    assert (finding["kind"], finding["fault"], code) == (kind, True, 1)
    assert said in finding["text"]
    assert finding["advice"]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("contrasts rows", marks=pytest.mark.wide),
        pytest.param("shared noise", marks=pytest.mark.full),
    ],
)
def test_what_may_be_by_design_is_a_note(tmp_path: Path, fault: str) -> None:
    code, found = proved(tmp_path, fault, "--strategies", "ddp")
    [finding] = found["ddp"]["findings"]
    assert (finding["kind"], finding["fault"], code) == (fault, False, 0)


@pytest.mark.wide
def test_what_cannot_be_proved_says_why(tmp_path: Path) -> None:
    code, found = proved(tmp_path, "", "--strategies", "tp")
    assert code == 1  # nothing was compared
    assert "no parameter of Net is divided" in found["tp"]["reason"]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("raise ValueError('no data here')", "ValueError: no data here"),
        pytest.param("print('ready')", "ends before the first step of an optimizer", marks=pytest.mark.full),
    ],
)
def test_a_script_that_fails_on_one_process(tmp_path: Path, script: str, said: str) -> None:
    (tmp_path / "train.py").write_text(script)
    argv = [sys.executable, "-m", "accel_cli", "prove", "--steps", "2", "train.py"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 1
    assert said in done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--strategies", "dpp", "train.py"], "--strategies names 'dpp'; pass some of ddp"),
        (["--steps", "0", "train.py"], "--steps 0 is not a number that it takes"),
        (["--ranks", "3", "train.py"], "--ranks is 3; strategies divide a model over 2 or 4 ranks"),
        (["--quick", "--thorough", "train.py"], "--quick and --thorough exclude each other"),
        ([], "there is no script to prove"),
    ],
)
def test_flags_that_are_wrong(tmp_path: Path, flags: list[str], said: str) -> None:
    (tmp_path / "train.py").write_text("")
    argv = [sys.executable, "-m", "accel_cli", "prove", *flags]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert said in " ".join(done.stderr.split())
