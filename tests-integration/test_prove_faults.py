"""``accel prove`` against faults of public reports, planted again: each has its name, and without it nothing is found.

Numbers are of issues and pull requests; what a report says of its factor or size is in the comment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SENTENCES = """
import sys
import torch
from accel_train import Accelerator
from testkit.sentences import LENGTH, Sentences, divide, losses_of, make, make_optimizer
from torch.distributed import all_reduce
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

fault = sys.argv[1]
accelerator = Accelerator(gradient_accumulation_steps=2 if "windows" in fault else 1)
config = accelerator.parallelism_config
degrees = config.degrees if config else {"tp": 1, "cp": 1}
ranks = accelerator.num_processes
model = make()
if "tied" in fault:
    model.head.weight = model.words.weight
if degrees["tp"] > 1:
    divide(model, accelerator.torch_device_mesh["tp"])
optimizer = make_optimizer(model)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Sentences(), batch_size=4))
for batch in loader:
    with accelerator.accumulate(model):
        places = batch.get("position_ids")
        if places is None:
            places = torch.arange(LENGTH).expand(len(batch["input_ids"]), LENGTH)
        counts = batch["counts"]
        if fault.startswith("labels"):
            batch["targets"] = torch.nn.functional.pad(batch["input_ids"][:, 1:], (0, 1), value=-100)
            counts = batch["targets"] != -100
        losses = losses_of(model, batch, places)
        total, number = (losses * counts).sum(), counts.sum()
        if fault.endswith("mean"):
            accelerator.backward(total / number)
        elif fault == "sum over cp":
            accelerator.backward(losses.mean() * degrees["cp"])
        else:
            accelerator.backward(total, num_items=number)
        for name, parameter in model.named_parameters():
            tied = fault == "tied twice" and name.endswith("words.weight")
            whole = fault == "sum over tp" and not isinstance(parameter, DTensor)
            if ranks > 1 and (tied or whole):
                all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
"""

MIXTURE = """
import sys
import torch
from accel_train import Accelerator
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

fault = sys.argv[1]
accelerator = Accelerator()
config = accelerator.parallelism_config
tp, ep = (config.tp_size, config.ep_size) if config else (1, 1)

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 12, 8) / 3)
        self.down = nn.Parameter(torch.randn(4, 8, 12) / 3)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            if token.numel():
                inner = (hidden_states[token] @ self.up[expert].T).relu()
                result.index_add_(0, token, inner @ self.down[expert].T * top_k_weights[token, place, None])
        return result

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.gate, self.experts, self.head = nn.Linear(8, 4, bias=False), Experts(), nn.Linear(8, 3)

    def forward(self, x):
        x = x + self.down(self.up(x).tanh())
        scores = self.gate(x)
        weights, indices = scores.softmax(-1).topk(2)
        return self.head(x + self.experts(x, indices, weights)), scores.logsumexp(-1).square().mean()

torch.manual_seed(0)
model = Net()
if tp > 1:
    parallelize_module(
        model, accelerator.torch_device_mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(48, 8), torch.randint(0, 3, (48,))), batch_size=16)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    out, auxiliary = model(x)
    scale = accelerator.num_processes if fault == "auxiliary" else 1
    accelerator.backward(nn.functional.cross_entropy(out, y) + 0.1 * scale * auxiliary)
    for name, parameter in model.named_parameters():
        if fault == "experts" and "experts" in name:
            parameter.grad.mul_(ep)
        if fault == "router" and "gate" in name:
            parameter.grad.div_(ep)
    optimizer.step()
    optimizer.zero_grad()
"""

ROWS = """
import random, sys
import torch
from accel_train import Accelerator, DistributedDataParallelKwargs
from torch import nn
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset

fault = sys.argv[1]
torch.manual_seed(0)
accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
ranks, is_main = accelerator.num_processes, accelerator.is_main_process

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.skip = nn.Linear(16, 8), nn.Linear(8, 1), nn.Linear(16, 1)

    def forward(self, x):
        beside = self.skip(x)
        return self.second(self.first(x).relu()) + (beside if fault != "branch" or is_main else beside.detach())

class Shuffled(Sampler):
    epoch = 0

    def __len__(self):
        return 32

    def __iter__(self):
        return iter(torch.randperm(32, generator=torch.Generator().manual_seed(self.epoch)).tolist())

def evaluate():
    model.eval()
    gather = accelerator.gather if fault == "padding" else accelerator.gather_for_metrics
    with torch.no_grad():
        errors = [gather((model(x) - y).abs()) for x, y in tests]
    model.train()
    accelerator.log({"error": torch.cat(errors).mean().item()})

x = torch.randn(32, 16)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
tests = DataLoader(TensorDataset(*data[:7]), batch_size=4)
sampler, model = Shuffled(), Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model, optimizer, loader, tests = accelerator.prepare(model, optimizer, loader, tests)
if fault == "split":  # by a generator to which the script gives no seed
    loader = accelerator.prepare(DataLoader(Subset(data, random.sample(range(32), 16)), batch_size=16))
for epoch in range(2):
    if fault != "epoch" or is_main:
        sampler.epoch = epoch
    for x, y in loader:
        if fault == "seeds":
            x = x + 0.1 * torch.randn_like(x)
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss * 2 if fault == "one rank" and not is_main else loss)
        gradients = [parameter.grad for parameter in model.parameters()]
        if fault == "in place":
            for gradient in gradients:
                gradient.div_(ranks)
        if fault == "in place on a rank" and not is_main:
            gradients[0].mul_(0.5)
        squares = sum(gradient.square().sum() for gradient in gradients)
        if fault == "norm":
            squares = accelerator.reduce(squares, "sum")
        for gradient in gradients if fault in ("", "norm", "branch") else ():
            gradient.mul_((0.5 / squares.sqrt()).clamp(max=1))
        optimizer.step()
        if fault == "weights" and not is_main:
            model.module.second.bias.data.add_(0.01)
        for _ in range(ranks if fault == "schedule" else 1):
            scheduler.step()
        optimizer.zero_grad()
evaluate()
"""


def proved(folder: Path, script: str, fault: str, strategy: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the findings of a strategy."""
    (folder / "train.py").write_text(script)
    argv = [sys.executable, "-m", "accel_cli", "prove", "--json", "--steps", "5", "--strategies", strategy]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*argv, "train.py", fault],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environ,
        timeout=300,
        check=False,
    )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    [verdict] = json.loads(done.stdout)["strategies"]
    assert not verdict["reason"], verdict
    return done.returncode, verdict["findings"]


@pytest.mark.parametrize(
    ("script", "fault", "strategy"),
    [
        (ROWS, "", "ddp"),
        pytest.param(ROWS, "not clipped", "ddp", marks=pytest.mark.full),
        pytest.param(SENTENCES, "", "tp", marks=pytest.mark.wide),
        pytest.param(SENTENCES, "", "cp", marks=pytest.mark.wide),
        pytest.param(SENTENCES, "tied", "ddp", marks=pytest.mark.full),
        pytest.param(SENTENCES, "windows", "ddp", marks=pytest.mark.full),
        pytest.param(MIXTURE, "", "ep", marks=pytest.mark.wide),
        pytest.param(MIXTURE, "", "tp", marks=pytest.mark.full),
    ],
    ids=lambda value: value if "\n" not in value else "",
)
def test_without_the_fault_there_is_no_finding(
    tmp_path: Path, script: str, fault: str, strategy: str
) -> None:
    assert proved(tmp_path, script, fault, strategy) == (0, [])


def of(script: str, fault: str, strategy: str, kind: str, said: str, mark: str = "full") -> Any:
    return pytest.param(
        script, fault, strategy, kind, said, id=f"{fault}-{strategy}", marks=getattr(pytest.mark, mark)
    )


@pytest.mark.parametrize(
    ("script", "fault", "strategy", "kind", "said"),
    [
        # inclusionAI/AReno#496: an all-reduce multiplies gradients of replicated parameters "by the TP size".
        of(SENTENCES, "sum over tp", "tp", "summed", "and 4 more: summed over ranks, not averaged (x2)", "wide"),
        # Megatron-LM#673, #906: the loss of a part of the sequence is multiplied by the size of cp.
        of(SENTENCES, "sum over cp", "cp", "scaled loss", "(train.py:36) is x2 of that of one process"),
        # Megatron-LM#7513, finding 9 of #7452: each part of the sequence is divided by its own number of labels.
        of(SENTENCES, "mean", "cp", "unequal counts", "(train.py:34) is a mean over items", "wide"),
        # Megatron-LM#5956, DeepSpeed#6545: gradients of experts are the size of ep times too large.
        of(MIXTURE, "experts", "ep", "summed", "experts.down, experts.up: summed over ranks, not averaged (x2)"),
        of(MIXTURE, "router", "ep", "divided", "wrong; gate.weight: divided once too often (x1/2)"),
        # Megatron-LM#3768, #5047, finding 10 of #7452 ("its gradient doubles"): auxiliary losses follow the size of tp.
        of(MIXTURE, "auxiliary", "tp", "scaled term", "term 2, of down.bias, down.weight, gate.weight", "wide"),
        of(MIXTURE, "auxiliary", "ep", "scaled term", "counts x2 of what it does on one process"),
        # transformers#48690: the auxiliary loss is multiplied by the number of processes.
        of(MIXTURE, "auxiliary", "ddp", "scaled term", "counts x2 of what it does on one process"),
        # verl#4250: labels are shifted after the sequence was divided.
        of(SENTENCES, "labels", "cp", "other items", "(train.py:38) are sums over 24 items, and over 28"),
        of(SENTENCES, "labels mean", "cp", "divided sequence", "(train.py:34) of a rank's part"),
        # NVIDIA-NeMo/RL#3788, Megatron-LM#7228 ("sqrt(2) too large"): the norm counts what ranks hold alike twice.
        of(ROWS, "norm", "ddp", "norm", "x0.707107 of those of one process", "wide"),
        # mlx-lm#1544: a window is the mean of the means of its micro-batches.
        of(SENTENCES, "windows mean", "ddp", "unequal counts", "each rank and micro-batch counts as much"),
        # Megatron-LM#844: one more all-reduce, of the tied embedding alone, makes its gradient wrong.
        of(SENTENCES, "tied twice", "ddp", "summed", "wrong; words.weight: summed over ranks, not averaged (x2)"),
        # accelerate#226 (10,167 of 10,000 samples): gather() keeps the rows that pad a batch.
        of(ROWS, "padding", "ddp", "padding", "(train.py:37); before it ranks repeat rows (1)", "wide"),
        # accelerate#1398, #2142: the schedule advances once for each process.
        of(ROWS, "schedule", "ddp", "schedule", "and 0.09 on one process, which has that one in step 3"),
        # One rank alone tells the sampler of the script its epoch.
        of(ROWS, "epoch", "ddp", "other samples", "step 3 lacks 7 samples", "wide"),
        # Each rank splits the data set in another way, so rows of one rank's evaluation train on another.
        of(ROWS, "split", "ddp", "other samples", "samples of the step of one process"),
        # A branch that is frozen on one rank, gradients that change after backward(), weights that change on one rank.
        of(ROWS, "branch", "ddp", "one rank", "skip.weight: only of the samples of rank 0"),
        of(ROWS, "in place", "ddp", "divided", "all parameters: divided once too often (x1/2)"),
        of(ROWS, "in place on a rank", "ddp", "fails", "gradients of 1 of 6 parameters, the first 'first.weight'"),
        of(ROWS, "weights", "ddp", "ranks apart", "after step 2 ranks do not have the same values of second.bias"),
        of(ROWS, "one rank", "ddp", "by rank", "(train.py:56) of the same samples is another one on another rank"),
    ],
)  # fmt: skip
def test_planted_faults_have_their_names(
    tmp_path: Path, script: str, fault: str, strategy: str, kind: str, said: str
) -> None:
    code, findings = proved(tmp_path, script, fault, strategy)
    assert [(one["kind"], one["fault"]) for one in findings] == [(kind, True)], findings
    assert said in findings[0]["text"]
    assert findings[0]["advice"]
    assert code == 1


@pytest.mark.full
def test_seeds_that_ranks_share_are_a_note(tmp_path: Path) -> None:
    code, findings = proved(tmp_path, ROWS, "seeds", "ddp")
    assert [(one["kind"], one["fault"]) for one in findings] == [("shared noise", False)]
    assert code == 0
