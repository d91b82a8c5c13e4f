"""Plain PyTorch training scripts in the shapes that people write, made from choices."""

import itertools
import random
from typing import NamedTuple

CHOICES = {
    "layout": ["module", "main", "functions"],
    "device": ["expression", "torch.device", "variable", "none"],
    "schedule": ["none", "step", "epoch", "metric"],
    "clip": [False, True],
    "evaluation": ["none", "append", "count", "mean"],
    "loop": ["plain", "enumerate", "tqdm", "dict"],
    "accumulate": [1, 2],
    "save": ["none", "weights", "all"],
    "zero": ["before", "after"],
    "made": ["separately", "by a function"],
}

_PAIRS = """\
class PairDataset(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}
"""


class Script(NamedTuple):
    """A script and the choices that made it."""

    choices: dict
    text: str


def scripts(number, seed=0):
    """Distinct scripts: each value of each choice occurs, then random combinations."""
    rng = random.Random(seed)
    found = {}
    for name, values in CHOICES.items():
        for value in values:
            picked = {other: rng.choice(options) for other, options in CHOICES.items()} | {name: value}
            found[tuple(map(str, picked.values()))] = picked
    while len(found) < number:
        picked = {name: rng.choice(options) for name, options in CHOICES.items()}
        found[tuple(map(str, picked.values()))] = picked
    return [Script(picked, write(**picked)) for picked in itertools.islice(found.values(), number)]


def write(layout, device, schedule, clip, evaluation, loop, accumulate, save, zero, made):
    """The text of a script."""
    to = {"none": "", "variable": ".to(dev)"}.get(device, ".to(device)")
    imports = [
        "import torch",
        "from torch import nn",
        "from torch.utils.data import DataLoader, TensorDataset",
    ]
    if loop == "tqdm":
        imports.append("from tqdm import tqdm")
    chosen = {
        "expression": ['device = "cuda" if torch.cuda.is_available() else "cpu"'],
        "torch.device": ['device = torch.device("cuda" if torch.cuda.is_available() else "cpu")'],
        "variable": ['dev = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")'],
        "none": [],
    }[device]
    dataset = "PairDataset(x, y)" if loop == "dict" else "TensorDataset(x, y)"
    data = ["x = torch.rand(50, 8)", "y = (x.sum(dim=1) > 4).long()", f"dataset = {dataset}"]
    loaders = [
        "train_loader = DataLoader(dataset, batch_size=8, shuffle=True)",
        "eval_loader = DataLoader(dataset, batch_size=8)",
    ]
    helper = [
        "def make_loaders(dataset):",
        "    return DataLoader(dataset, batch_size=8, shuffle=True), DataLoader(dataset, batch_size=8)",
    ]
    if made == "by a function":
        loaders = ["train_loader, eval_loader = make_loaders(dataset)"]
    model = [f"model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)){to}"]
    optimizer = [
        "optimizer = torch.optim.Adam(model.parameters(), lr=0.01)",
        "criterion = nn.CrossEntropyLoss()",
    ]
    scheduler = {
        "none": [],
        "step": ["scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.8)"],
        "epoch": ["scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)"],
        "metric": ["scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)"],
    }[schedule]
    train = _training(loop, to, accumulate, clip, zero, schedule)
    test = _evaluation(evaluation, loop, to)
    after = {"none": [], "step": [], "epoch": ["scheduler.step()"], "metric": ["scheduler.step(total)"]}[
        schedule
    ]
    saving = {
        "none": [],
        "weights": ['torch.save(model.state_dict(), "weights.pt")'],
        "all": ['torch.save({"model": model.state_dict(), "epoch": epoch}, "all.pt")'],
    }[save]
    passed = ["model", "train_loader", "optimizer", "criterion", "epoch"]
    passed += ["scheduler"] if schedule == "step" else []
    passed += [] if device == "none" else [to[4:-1]]
    setup = ["torch.manual_seed(0)", *data, *loaders, *model, *optimizer, *scheduler]
    blocks = ["\n".join(imports), *(["\n".join(helper)] if made == "by a function" else [])]
    if loop == "dict":
        blocks.append(_PAIRS)
    if layout == "functions":
        blocks.append(_function(f"train({', '.join(passed)})", [*train, "return total"]))
        tested = ["model", "eval_loader", *([] if device == "none" else [to[4:-1]])]
        if test:
            blocks.append(_function(f"evaluate({', '.join(tested)})", test))
        epoch = [
            f"total = train({', '.join(passed)})",
            *after,
            *([f"evaluate({', '.join(tested)})"] if test else []),
        ]
    else:
        epoch = [*train, *after, *test]
    body = [*chosen, *setup, "for epoch in range(2):", *("    " + line for line in epoch), *saving]
    body.append('print("weights", sum(p.double().abs().sum().item() for p in model.parameters()))')
    if layout == "module":
        blocks.append("\n".join(body))
    else:
        blocks += [_function("main()", body), 'if __name__ == "__main__":\n    main()']
    return "\n\n\n".join(block.strip() for block in blocks) + "\n"


def _function(head, body):
    return f"def {head}:\n" + "\n".join(f"    {line}" for line in body)


def _batches(loop, loader):
    return {
        "plain": f"for inputs, labels in {loader}:",
        "enumerate": f"for i, (inputs, labels) in enumerate({loader}):",
        "tqdm": f"for inputs, labels in tqdm({loader}, disable=True):",
        "dict": f"for batch in {loader}:",
    }[loop]


def _moves(loop, to):
    if loop == "dict":
        return [f'inputs, labels = batch["x"]{to}, batch["y"]{to}']
    return [] if not to else [f"inputs, labels = inputs{to}, labels{to}"]


def _training(loop, to, accumulate, clip, zero, schedule):
    step = [
        *(["torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)"] if clip else []),
        "optimizer.step()",
        *(["scheduler.step()"] if schedule == "step" else []),
    ]
    lines = ["loss = criterion(model(inputs), labels)"]
    if accumulate > 1:
        lines += [f"loss = loss / {accumulate}", "loss.backward()", "total += loss.item()", "seen += 1"]
        lines += [
            f"if seen % {accumulate} == 0:",
            *("    " + line for line in [*step, "optimizer.zero_grad()"]),
        ]
    elif zero == "before":
        lines = ["optimizer.zero_grad()", *lines, "loss.backward()", *step, "total += loss.item()"]
    else:
        lines += ["loss.backward()", *step, "optimizer.zero_grad(set_to_none=True)", "total += loss.item()"]
    body = [*_moves(loop, to), *lines]
    return [
        "model.train()",
        "total, seen = 0.0, 0",
        _batches(loop, "train_loader"),
        *("    " + line for line in body),
        'print("epoch", epoch, f"{total:.9f}")',
    ]


def _evaluation(evaluation, loop, to):
    results = {
        "none": None,
        "append": (["right = []"], ["right.append(model(inputs).argmax(dim=1) == labels)"],
                   ['print("accuracy", torch.cat(right).float().mean().item())']),
        "count": (["correct, count = 0, 0"],
                  ["correct += (model(inputs).argmax(dim=1) == labels).sum().item()", "count += labels.size(0)"],
                  ['print("accuracy", correct / count)']),
        "mean": (["losses = []"], ["losses.append(nn.functional.cross_entropy(model(inputs), labels).item())"],
                 ['print("loss", sum(losses) / len(losses))']),
    }[evaluation]  # fmt: skip
    if results is None:
        return []
    before, inside, after = results
    body = [_batches(loop, "eval_loader"), *("    " + line for line in [*_moves(loop, to), *inside])]
    return ["model.eval()", *before, "with torch.no_grad():", *("    " + line for line in body), *after]
