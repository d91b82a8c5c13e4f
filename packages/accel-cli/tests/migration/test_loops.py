"""Plain training loops with an Accelerator: a hundred generated scripts print the same numbers before and after."""

import contextlib
import io
import os
import runpy
import subprocess
import sys

import libcst
import pytest
import torch

from accel_cli.migration.files import migrate_source
from accel_cli.migration.loops import rewrite_loops
from testkit.plain_scripts import scripts

SCRIPTS = scripts(100)


@pytest.fixture
def on_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(text, folder, name):
    """What a script prints, and the files that it saves."""
    path = folder / f"{name}.py"
    path.write_text(text)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    saved = {file.name: torch.load(file) for file in sorted(folder.glob("*.pt"))}
    for file in folder.glob("*.pt"):
        file.unlink()
    return printed.getvalue(), saved


@pytest.mark.parametrize(
    "number",
    [
        number if number % 4 == 0 else pytest.param(number, marks=pytest.mark.full)
        for number in range(len(SCRIPTS))
    ],
)
def test_a_script_prints_the_same_before_and_after(number, on_the_cpu):
    script = SCRIPTS[number]
    migration = migrate_source(script.text)
    assert migration.refusals == (), script.choices
    assert "accelerator.backward(" in migration.after
    assert "accelerator.prepare(" in migration.after
    assert ".cuda(" not in migration.after
    plain, files = run(script.text, on_the_cpu, "plain")
    moved, same = run(migration.after, on_the_cpu, "moved")
    assert plain == moved, f"{script.choices}\n{migration.after}"
    assert plain.count("epoch") == 2
    torch.testing.assert_close(files, same, rtol=0, atol=0)


def test_a_script_is_migrated_once():
    after = migrate_source(SCRIPTS[0].text).after
    assert migrate_source(after).after == after


@pytest.mark.parametrize("number", [0, 7])
@pytest.mark.full
def test_two_processes_run_the_result(number, on_the_cpu):
    (on_the_cpu / "moved.py").write_text(migrate_source(SCRIPTS[number].text).after)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HOME": str(on_the_cpu)}
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_processes", "2", "moved.py"],
        env=environ, capture_output=True, text=True, timeout=120, cwd=on_the_cpu,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch") == 2, "each epoch is printed once"


def changed(text):
    module, refusals, notes = rewrite_loops(libcst.parse_module(text))
    return module.code, [remark.line for remark in refusals], [remark.text for remark in notes]


DDP = """\
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=8, sampler=sampler, shuffle=False)
model = torch.nn.Linear(8, 1).cuda()
model = DDP(model, device_ids=[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = ((model(xb.cuda()) - yb.cuda()) ** 2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "m.pt")
dist.destroy_process_group()
"""


def test_ddp_samplers_and_scalers_go():
    code, refusals, _ = changed(DDP)
    assert refusals == []
    for gone in (
        "DistributedSampler",
        "DDP",
        "GradScaler",
        "init_process_group",
        "set_epoch",
        "cuda()",
        "unscale_",
    ):
        assert gone not in code
    assert 'accelerator = Accelerator(mixed_precision="fp16")\n' in code
    assert "loader = DataLoader(dataset, batch_size=8, shuffle=True)\n" in code
    assert (
        "        accelerator.backward(loss)\n        accelerator.clip_grad_norm_(model.parameters(), 1.0)\n"
        in code
    )
    assert "        optimizer.step()\n" in code
    assert (
        "if accelerator.process_index == 0:\n    accelerator.save(accelerator.unwrap_model(model).state_dict()"
        in code
    )
    compile(code, "x", "exec")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("loss.backward()\n", 1),  # no optimizer
        (
            "opt = SGD(model.parameters())\nfor x in data:\n    loss.backward()\n    opt.step()\n",
            1,
        ),  # no model made
        (
            "class T:\n    def fit(self):\n        self.opt = SGD(self.net.parameters())\n        loss.backward()\n",
            4,
        ),
        (
            "net = Net()\nopt = SGD(net.parameters())\nfor x in make():\n    f(x).backward()\n    opt.step()\n",
            3,
        ),  # the loader has no name
        ("net = Net()\nopt = SGD(net.parameters())\nf(1).backward()\nopt.step()\n", 3),  # no loop
        (
            "net = Net()\ndata = make()\nopt = SGD(net.parameters())\nfor e in range(2):\n    for x in data:\n"
            "        f(net(x)).backward()\n        opt.step()\n    data = make()\n",
            8,
        ),  # made again
    ],
)
def test_what_is_not_understood_is_refused_with_its_line(text, line):
    code, refusals, _ = changed(text)
    assert code == text
    assert refusals == [line]


def test_an_evaluation_that_cannot_be_gathered_is_left_and_noted():
    mean = next(script for script in SCRIPTS if script.choices["evaluation"] == "mean")
    code, _, notes = changed(mean.text)
    assert "gather_for_metrics" not in code
    assert len(notes) == 1
    assert "every process runs it over all samples" in notes[0]


def test_annotated_objects_are_as_others():
    code, refusals, _ = changed(
        """\
device: torch.device = torch.device("cuda")
sampler: DistributedSampler = DistributedSampler(dataset)
net: Net = Net().to(device)
loader: DataLoader = DataLoader(dataset, sampler=sampler)
opt: SGD = SGD(net.parameters())
scaler: GradScaler = GradScaler()
for x in loader:
    scaler.scale(net(x.to(device), torch.zeros(1).to(device))).backward()
    scaler.step(opt)
    scaler.update()
"""
    )
    assert refusals == []
    assert (
        code
        == """\
from accel_train import Accelerator
accelerator = Accelerator()
device: torch.device = accelerator.device
net: Net = Net()
loader: DataLoader = DataLoader(dataset, shuffle=True)
opt: SGD = SGD(net.parameters())
net, opt, loader = accelerator.prepare(net, opt, loader)
for x in loader:
    accelerator.backward(net(x, torch.zeros(1).to(device)))
    opt.step()
"""
    )


@pytest.mark.parametrize("text", ["x = 1\n", "", "from accel_train import Accelerator\nloss.backward()\n"])
def test_other_sources_stay_as_they_are(text):
    assert changed(text) == (text, [], [])
