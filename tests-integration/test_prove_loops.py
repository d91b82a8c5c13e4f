"""``accel prove`` on loops of many kinds that are right: it finds no fault in any of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import copy, math, random
import numpy as np
import torch
import torch.nn.functional as F
from accel_train import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
torch.manual_seed(0)
"""

ADVERSARIAL = """
accelerator = Accelerator()
maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8))
critic = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(32, 1))
loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=16, shuffle=True)
of_maker = torch.optim.Adam(maker.parameters(), 1e-3, betas=(0.5, 0.999))
of_critic = torch.optim.Adam(critic.parameters(), 1e-3, betas=(0.5, 0.999))
maker, critic, of_maker, of_critic, loader = accelerator.prepare(maker, critic, of_maker, of_critic, loader)
for epoch in range(4):
    for step, (real,) in enumerate(loader):
        fake = maker(torch.randn(len(real), 4))
        right, wrong = critic(real), critic(fake.detach())
        loss = F.binary_cross_entropy_with_logits(right, torch.ones_like(right))
        loss = loss + F.binary_cross_entropy_with_logits(wrong, torch.zeros_like(wrong))
        of_critic.zero_grad()
        accelerator.backward(loss)
        of_critic.step()
        if step % 2 == 1:  # the critic steps twice as often
            judged = critic(maker(torch.randn(len(real), 4)))
            of_maker.zero_grad()
            accelerator.backward(F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged)))
            of_maker.step()
"""

CONTRASTS = """
from torch.distributed.nn.functional import all_gather

accelerator = Accelerator()
class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.images, self.texts = nn.Linear(16, 8), nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.tensor(math.log(10.0)))
    def forward(self, images, texts):
        return F.normalize(self.images(images), dim=-1), F.normalize(self.texts(texts), dim=-1), self.scale.exp()

model = Towers()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(64, 16), torch.randn(64, 12)), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
def of_all(x):  # keeps gradients
    return torch.cat(all_gather(x)) if accelerator.num_processes > 1 else x
for images, texts in loader:
    a, b, scale = model(images, texts)
    every_a, every_b = of_all(a), of_all(b)
    labels = torch.arange(len(a)) + accelerator.process_index * len(a)
    loss = F.cross_entropy(scale * a @ every_b.T, labels) + F.cross_entropy(scale * b @ every_a.T, labels)
    accelerator.backward(loss / 2)
    optimizer.step()
    optimizer.zero_grad()
"""

LOCAL_CONTRASTS = """
accelerator = Accelerator()
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    views = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
    z = F.normalize(model(views + 0.01 * torch.randn_like(views)), dim=1)
    likeness = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=bool), -1e9)
    loss = F.cross_entropy(likeness, torch.arange(len(z)).roll(len(x)))
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""

CARRIED_STATE = """
accelerator = Accelerator()
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.rnn = nn.LSTM(16, 24, num_layers=2, dropout=0.2, batch_first=True)
        self.out = nn.Linear(24, 20)
    def forward(self, ids, state):
        found, state = self.rnn(self.words(ids), state)
        return self.out(found), state

text = torch.randint(0, 20, (8, 6 * 5 + 1))  # eight streams, read five words at a time
pieces = [torch.stack([text[:, at : at + 5], text[:, at + 1 : at + 6]], 1) for at in range(0, 30, 5)]
model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(TensorDataset(torch.cat(pieces)), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
state = None
for (pair,) in loader:
    logits, state = model(pair[:, 0], state)
    state = tuple(one.detach() for one in state)
    accelerator.backward(F.cross_entropy(logits.flatten(0, 1), pair[:, 1].flatten()))
    accelerator.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    optimizer.zero_grad()
"""

GRAPHS = """
accelerator = Accelerator()
class Graphs(Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        chance = torch.Generator().manual_seed(index)
        nodes = 3 + index % 5
        edges = torch.randint(0, nodes, (2, 2 * nodes), generator=chance)
        return {"x": torch.randn(nodes, 6, generator=chance), "edge_index": edges, "y": torch.tensor(float(index % 2))}

def joined(graphs):
    sizes = torch.tensor([len(graph["x"]) for graph in graphs])
    starts = sizes.cumsum(0) - sizes
    x = torch.cat([graph["x"] for graph in graphs])
    edges = torch.cat([graph["edge_index"] + start for graph, start in zip(graphs, starts)], 1)
    return {
        PARTS,
        "batch": torch.repeat_interleave(torch.arange(len(graphs)), sizes),
        "y": torch.stack([graph["y"] for graph in graphs]),
    }

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 1)
    def forward(self, x, edge_index, batch, graphs):
        for layer in (self.first, self.second):
            x = layer(x)
            x = (x + torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])).relu()
            x = F.dropout(x, 0.2, self.training)
        size = torch.zeros(graphs, 1).index_add(0, batch, torch.ones(len(x), 1))
        return self.out(torch.zeros(graphs, 16).index_add(0, batch, x) / size).squeeze(1)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(Graphs(), batch_size=16, shuffle=True, collate_fn=joined)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    x = batch["x"] + NOISE
    found = model(x, batch["edge_index"], batch["batch"], len(batch["y"]))
    accelerator.backward(F.binary_cross_entropy_with_logits(found, batch["y"].to(found.dtype)))
    optimizer.step()
    optimizer.zero_grad()
"""

VAE = """
accelerator = Accelerator()
class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 8), nn.Linear(4, 16)
    def forward(self, x):
        mean, log = self.encode(x).chunk(2, 1)
        return self.decode(mean + torch.randn_like(mean) * (0.5 * log).exp()), mean, log

model = Vae()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.rand(64, 16)), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for (x,) in loader:
        again, mean, log = model(x)
        kl = -0.5 * (1 + log - mean**2 - log.exp()).sum()
        loss = (F.binary_cross_entropy_with_logits(again, x, reduction="sum") + kl) / len(x)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": accelerator.gather(loss.detach().repeat(len(x))).mean().item()})
"""

EXPERTS = """
accelerator = Accelerator()
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.router = nn.Embedding(32, 16), nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))
        self.out = nn.Linear(16, 32)
    def forward(self, ids):
        x = self.words(ids)
        flat = x.flatten(0, 1)
        noisy = flat * torch.empty_like(flat).uniform_(0.99, 1.01) if self.training else flat
        chances = self.router(noisy).softmax(-1)
        top, chosen = chances.topk(2, dim=-1)
        found = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            found = found.index_add(0, row, top[row, place, None] * expert(flat[row]))
        share = F.one_hot(chosen, 4).sum(1).to(x.dtype).mean(0)
        balance = 4 * (share * chances.mean(0)).sum()
        return self.out(F.dropout(found, 0.1, self.training).view_as(x) + x), balance

model = Experts()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randint(0, 32, (48, 9))), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (ids,) in loader:
    logits, balance = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * balance
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""

TOKENS = """
accelerator = Accelerator(gradient_accumulation_steps=2)
class Texts(Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        return torch.randint(1, 32, (4 + index % 7,), generator=torch.Generator().manual_seed(index))

def padded(texts):
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}

class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(32, 16), nn.Embedding(16, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.layers, self.out = nn.TransformerEncoder(layer, 2), nn.Linear(16, 32)
    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.out(self.layers(F.dropout(x, 0.1, self.training), mask, is_causal=True))

model = Lm()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Texts(), batch_size=8, shuffle=True, collate_fn=padded)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        accelerator.backward(loss, num_items=(labels != -100).sum())
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

SHORT_WINDOW = """
accelerator = Accelerator(gradient_accumulation_steps=4)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
x = torch.randn(48, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)  # windows of four, and two
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for epoch in range(3):
    total = 0.0
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), y)
            total += accelerator.gather(loss.detach().repeat(len(x))).mean().item()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.log({"train_loss": total, "lr": scheduler.get_last_lr()[0]})
            total = 0.0
"""

IMAGES = """
accelerator = Accelerator()
class Pictures(Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        picture = torch.rand(3, 12, 12, generator=torch.Generator().manual_seed(index))
        if random.random() < 0.5:
            picture = picture.flip(2)
        top, left = torch.randint(0, 5, (2,)).tolist()
        picture = picture[:, top : top + 8, left : left + 8]
        return picture * float(np.random.uniform(0.8, 1.2)), index % 4

class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, 16, 3, padding=1), nn.GroupNorm(4, 16)
    def forward(self, x):
        found = self.norm(self.conv(x)).relu()
        keep = 0.9  # of stochastic depth
        if self.training and x.shape == found.shape:
            found = found * found.new_empty(len(found), 1, 1, 1).bernoulli_(keep) / keep
        return found + x if x.shape == found.shape else found

model = nn.Sequential(Block(3), Block(16), nn.Dropout2d(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
loader = DataLoader(Pictures(), batch_size=16, shuffle=True, num_workers=WORKERS)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=2, steps_per_epoch=len(loader))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for epoch in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""

TWO_LOADERS = """
accelerator = Accelerator()
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
known = DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(0, 3, (32,))), batch_size=4, shuffle=True)
unknown = DataLoader(TensorDataset(torch.randn(96, 8)), batch_size=12, shuffle=True)
model, optimizer, known, unknown = accelerator.prepare(model, optimizer, known, unknown)
for (x, y), (other,) in zip(known, unknown):
    weak, strong = other + 0.1 * torch.randn_like(other), other + torch.randn_like(other)
    with torch.no_grad():
        sure, guess = model(weak).softmax(1).max(1)
    loss = F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y)
    loss = loss + (F.cross_entropy(model(strong), guess, reduction="none") * (sure > 0.4)).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""

STREAM = """
accelerator = Accelerator()
class Numbers(IterableDataset):
    def __iter__(self):
        chance = torch.Generator().manual_seed(0)
        for _ in range(60):
            x = torch.randn(8, generator=chance)
            yield {"x": x, "y": x.sum()}

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Numbers(), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    loss = F.mse_loss(model(batch["x"]).squeeze(1), batch["y"])
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""

EARLY_STOP = """
accelerator = Accelerator()
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
x = torch.randn(61, 8)
y = x[:, :3].argmax(1)
training = DataLoader(TensorDataset(x[:32], y[:32]), batch_size=16, shuffle=True)
testing = DataLoader(TensorDataset(x[32:], y[32:]), batch_size=8)  # 29 samples
model, optimizer, training, testing, scheduler = accelerator.prepare(model, optimizer, training, testing, scheduler)
best, waited = 0.0, 0
for epoch in range(8):
    model.train()
    for x, y in training:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    right, seen, lost = 0, 0, 0.0
    for x, y in testing:
        with torch.no_grad():
            logits = model(x)
        logits, y = accelerator.gather_for_metrics((logits, y))
        right, seen = right + int((logits.argmax(1) == y).sum()), seen + len(y)
        lost += F.cross_entropy(logits, y, reduction="sum").item()
    scheduler.step(lost / seen)
    accelerator.log({"accuracy": right / seen, "eval_loss": lost / seen, "rate": optimizer.param_groups[0]["lr"]})
    waited = 0 if right / seen > best else waited + 1
    best = max(best, right / seen)
    if waited > 2:
        accelerator.set_trigger()
    if accelerator.check_trigger():
        break
"""

AVERAGED_WEIGHTS = """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

accelerator = Accelerator()
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(64, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if not accelerator.state.is_fsdp2:
        ema.update_parameters(accelerator.unwrap_model(model))
        accelerator.log({"held": accelerator.reduce(F.mse_loss(ema(x), y).detach(), "mean").item()})
"""

SEVERAL_TASKS = """
accelerator = Accelerator(kwargs_handlers=HANDLERS)
class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1))
        self.kinds, self.values, self.spare = nn.Linear(16, 3), nn.Linear(16, 1), nn.Linear(16, 2)
    def forward(self, x):
        found = self.middle(self.trunk(x))
        return self.kinds(found), self.values(found).squeeze(1)

model = Tasks()
for part in (model.trunk, model.spare):
    part.requires_grad_(False)
optimizer = torch.optim.AdamW([
    {"params": list(model.middle.parameters()), "lr": 1e-3},
    {"params": [*model.kinds.parameters(), *model.values.parameters()], "lr": 1e-2, "weight_decay": 0.0},
])
x = torch.randn(64, 8)
loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1), x.sum(1)), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, (x, kinds, values) in enumerate(loader):
    a, b = model(x)
    parts = {"kinds": F.cross_entropy(a, kinds), "values": F.mse_loss(b, values)}
    accelerator.backward(parts["kinds"] + 0.5 * parts["values"])
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({name: accelerator.reduce(one.detach(), "mean").item() for name, one in parts.items()}, step=step)
"""

SCHEDULE_OF_RANKS = """
accelerator = Accelerator()
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(64, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
total = 4 * accelerator.num_processes  # a prepared schedule advances once for each process
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for x, y in loader:
    accelerator.backward(F.mse_loss(model(x), y))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
"""

DISTILLATION = """
accelerator = Accelerator()
teacher = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).requires_grad_(False)
student = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,))), batch_size=16, shuffle=True)
PREPARE
teacher.eval()
for x, y in loader:
    with torch.no_grad():
        told = teacher(x)
    said = student(x)
    loss = F.kl_div((said / 2).log_softmax(1), (told / 2).softmax(1), reduction="batchmean") * 4
    accelerator.backward(0.7 * loss + 0.3 * F.cross_entropy(said, y))
    optimizer.step()
    optimizer.zero_grad()
"""

REPLAY = """
SEED
from collections import deque

accelerator = Accelerator()
policy = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
target = copy.deepcopy(policy)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
policy, optimizer = accelerator.prepare(policy, optimizer)
memory, state = deque(maxlen=200), torch.randn(3)
for step in range(60):
    with torch.no_grad():
        best = int(policy(state[None]).argmax())
    action = random.randrange(2) if random.random() < 0.3 else best
    after = 0.9 * state + 0.1 * torch.randn(3) + (action - 0.5) * 0.1
    memory.append((state, action, -after.abs().sum(), after))
    state = after
    if len(memory) < 16:
        continue
    states, actions, rewards, afters = zip(*random.sample(memory, 8))
    with torch.no_grad():
        wanted = torch.stack(rewards) + 0.9 * target(torch.stack(afters)).max(1).values
    found = policy(torch.stack(states)).gather(1, torch.tensor(actions)[:, None]).squeeze(1)
    accelerator.backward(F.smooth_l1_loss(found, wanted))
    optimizer.step()
    optimizer.zero_grad()
"""

SEGMENTATION = """
accelerator = Accelerator()
class Scenes(Dataset):
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        chance = torch.Generator().manual_seed(index)
        return torch.rand(3, 8, 8, generator=chance), torch.randint(0, 3, (8, 8), generator=chance)

model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout2d(0.1), nn.Conv2d(8, 3, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
training, testing = DataLoader(Scenes(16), batch_size=8, shuffle=True), DataLoader(Scenes(13), batch_size=4)
model, optimizer, training, testing = accelerator.prepare(model, optimizer, training, testing)
for epoch in range(3):
    model.train()
    for x, y in training:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    both = torch.zeros(3), torch.zeros(3)
    for x, y in testing:
        with torch.no_grad():
            found = model(x).argmax(1)
        found, y = accelerator.gather_for_metrics((found, y))
        for number in range(3):
            both[0][number] += ((found == number) & (y == number)).sum()
            both[1][number] += ((found == number) | (y == number)).sum()
    accelerator.log({"mean_iou": (both[0] / both[1]).mean().item()})
"""

COMPILED = """
accelerator = Accelerator(dynamo_backend="eager")
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(64, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    accelerator.backward(F.mse_loss(model(x + 0.1 * torch.randn_like(x)), y))
    optimizer.step()
    optimizer.zero_grad()
"""

RECOMPUTED = """
from torch.utils.checkpoint import checkpoint

accelerator = Accelerator()
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
    def forward(self, x):
        return x + F.dropout(self.linear(x + 0.1 * torch.randn_like(x)).relu(), 0.2, self.training)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.out = nn.ModuleList(Layer() for _ in range(3)), nn.Linear(16, 1)
    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=REENTRANT) if self.training else layer(x)
        return self.out(x)

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(64, 16)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    accelerator.backward(F.mse_loss(model(x.requires_grad_()), y))
    optimizer.step()
    optimizer.zero_grad()
"""

MASKED_WORDS = """
accelerator = Accelerator()
class Texts(Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        return torch.randint(2, 32, (6 + index % 5,), generator=torch.Generator().manual_seed(index))

def masked(texts):
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    labels = ids.clone()
    hidden = torch.bernoulli(torch.full(ids.shape, 0.3)).bool() & (ids != 0)
    labels[~hidden] = -100
    kept = torch.bernoulli(torch.full(ids.shape, 0.8)).bool() & hidden
    ids = torch.where(kept, 1, torch.where(hidden, torch.randint(2, 32, ids.shape), ids))
    return ids, labels

model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Texts(), batch_size=8, shuffle=True, collate_fn=masked, num_workers=WORKERS)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for ids, labels in loader:
    loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    accelerator.backward(loss, num_items=(labels != -100).sum())
    optimizer.step()
    optimizer.zero_grad()
"""

DIFFUSION = """
accelerator = Accelerator(gradient_accumulation_steps=2)
pictures, words = torch.rand(64, 3, 8, 8), torch.randint(1, 10, (64,))
SEED
class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.times, self.words = nn.Embedding(50, 16), nn.Embedding(10, 16)
        self.enter, self.leave = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
    def forward(self, x, times, words):
        told = self.times(times) + self.words(words)
        return self.leave(self.norm(self.enter(x) + told[:, :, None, None]).relu())

model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(pictures, words), batch_size=8, shuffle=True)
kept = torch.linspace(0.999, 0.01, 50).cumprod(0)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for pictures, words in loader:
    with accelerator.accumulate(model):
        noise = torch.randn_like(pictures) + 0.1 * torch.randn(pictures.shape[0], 3, 1, 1)
        times = torch.randint(0, 50, (pictures.shape[0],)).long()
        share = kept[times][:, None, None, None]
        words = torch.where(torch.rand(len(words)) < 0.2, 0, words)  # without a word, now and then
        noisy = share.sqrt() * pictures + (1 - share).sqrt() * noise
        loss = F.mse_loss(model(noisy, times, words), noise)
        average = accelerator.gather(loss.repeat(8)).mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

MIXED_UP = """
from accel_state.seeding import set_seed

data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
set_seed(7, device_specific=True)
accelerator = Accelerator()
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(data, batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    share, other = np.random.beta(0.4, 0.4), torch.randperm(len(x))
    logits = model(share * x + (1 - share) * x[other])
    loss = share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[other])
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""

LATE_CONTRASTS = """
accelerator = Accelerator()
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 4)), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, (x, y) in enumerate(loader):
    found = model(x)
    loss = F.mse_loss(found, y)
    if step >= 1:  # after a warm-up
        loss = loss - 0.1 * found.std(0).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""

SEQUENCE_FIRST = """
from accel_state.seeding import set_seed

accelerator = Accelerator(kwargs_handlers=HANDLERS)
data = TensorDataset(torch.randint(0, 32, (64, 5)), torch.randint(0, 4, (64,)))
set_seed(3, device_specific=True)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1) for _ in range(2))
        self.out = nn.Linear(16, 4)
    def forward(self, ids):
        x = self.words(ids.T)  # time first
        for layer in self.layers:
            if not self.training or random.random() > 0.1:  # layers are left out at random
                x = layer(x)
        choice = F.gumbel_softmax(self.out(x.mean(0)), tau=1.0)
        return choice

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(data, batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for ids, y in loader:
    accelerator.backward(-model(ids)[torch.arange(len(y)), y].mean())
    optimizer.step()
    optimizer.zero_grad()
"""

PENALISED = """
accelerator = Accelerator()
critic = nn.Sequential(nn.Linear(8, 32), nn.Softplus(), nn.Linear(32, 1))
optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=16, shuffle=True)
critic, optimizer, loader = accelerator.prepare(critic, optimizer, loader)
for (real,) in loader:
    fake = torch.randn_like(real)
    between = torch.rand(real.size(0), 1)
    mixed = (between * real + (1 - between) * fake).requires_grad_()
    [slope] = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    loss = critic(fake).mean() - critic(real).mean() + 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""

ACTOR = """
from torch.distributions import Categorical, Normal

accelerator = Accelerator()
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 16)
        self.choice, self.mean, self.log = nn.Linear(16, 3), nn.Linear(16, 2), nn.Parameter(torch.zeros(2))
    def forward(self, x):
        found = self.trunk(x).tanh()
        return self.choice(found), self.mean(found), self.log.exp().expand(len(x), 2)

model = Policy()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(torch.randn(64, 6)), batch_size=16, shuffle=True)  # starts of episodes
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    logits, mean, width = model(x)
    kind, move = Categorical(logits=logits), Normal(mean, width)
    chosen, moved = kind.sample(), move.sample()
    reward = (chosen == 1).to(x.dtype) - moved.abs().sum(1)
    loss = -((kind.log_prob(chosen) + move.log_prob(moved).sum(1)) * (reward - 0.1)).mean()
    loss = loss - 0.01 * kind.entropy().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""

BOTH_PREPARED = (
    "student, teacher, optimizer, loader = accelerator.prepare(student, teacher, optimizer, loader)"
)
ONE_PREPARED = "student, optimizer, loader = accelerator.prepare(student, optimizer, loader)"
FINDS_UNUSED = "[__import__('accel_train').DistributedDataParallelKwargs(find_unused_parameters=True)]"

# Labels in float32, rows of different lengths, gradients that decay instead of being set to zero, logged speed.
BINARY = """
import time

accelerator = Accelerator()
def padded(rows):
    words, labels = zip(*rows)
    return nn.utils.rnn.pad_sequence(words, batch_first=True), torch.tensor(labels, dtype=torch.float32)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(30, 8, padding_idx=0), nn.Linear(8, 1)
    def forward(self, words):
        return self.head(self.words(words).sum(1)).squeeze(1)

rows = [(torch.randint(1, 30, (2 + place % 9,)), place % 2) for place in range(64)]
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(rows, batch_size=16, shuffle=True, collate_fn=padded)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0))
for words, labels in loader:
    start = time.perf_counter()
    loss = criterion(model(words), labels)
    accelerator.backward(loss)
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    mean = accelerator.reduce(loss.detach(), "mean")
    accelerator.log({"loss": mean.item(), "tokens/sec": words.numel() / (time.perf_counter() - start)})
"""

# The script starts its processes itself, and asks for more rate on more of them.
NOTEBOOK = """
from accel_train import notebook_launcher

def train(rate):
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate * accelerator.num_processes)
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (x,) in loader:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

notebook_launcher(train, (0.01,), 2)
"""

LOOPS = {
    "adversarial": ADVERSARIAL,
    "contrasts of all ranks": CONTRASTS,
    "contrasts of one rank": LOCAL_CONTRASTS,
    "carried state": CARRIED_STATE,
    "graphs": GRAPHS.replace("PARTS", '"x": x, "edge_index": edges').replace(
        "NOISE", "torch.randn_like(batch['x'])"
    ),
    "graphs, edges first": GRAPHS.replace("PARTS", '"edge_index": edges, "x": x').replace(
        "NOISE", "torch.randn(3)[0]"
    ),
    "vae": VAE,
    "experts": EXPERTS,
    "tokens": TOKENS,
    "short window": SHORT_WINDOW,
    "images": IMAGES.replace("WORKERS", "0"),
    "images by workers": IMAGES.replace("WORKERS", "2"),
    "two loaders": TWO_LOADERS,
    "stream": STREAM,
    "early stop": EARLY_STOP,
    "averaged weights": AVERAGED_WEIGHTS,
    "several tasks": SEVERAL_TASKS.replace("HANDLERS", "[]"),
    "several tasks, unused": SEVERAL_TASKS.replace("HANDLERS", FINDS_UNUSED),
    "schedule of ranks": SCHEDULE_OF_RANKS,
    "distillation": DISTILLATION.replace("PREPARE", BOTH_PREPARED),
    "distillation, plain teacher": DISTILLATION.replace("PREPARE", ONE_PREPARED),
    "replay": REPLAY.replace("SEED", ""),
    "replay, seeds of ranks": REPLAY.replace(
        "SEED", "from accel_state.seeding import set_seed; set_seed(1, True)"
    ),
    "segmentation": SEGMENTATION,
    "compiled": COMPILED,
    "recomputed": RECOMPUTED.replace("REENTRANT", "False"),
    "recomputed, reentrant": RECOMPUTED.replace("REENTRANT", "True"),
    "masked words": MASKED_WORDS.replace("WORKERS", "0"),
    "masked words by workers": MASKED_WORDS.replace("WORKERS", "1"),
    "diffusion": DIFFUSION.replace("SEED", ""),
    "diffusion, seeds of ranks": DIFFUSION.replace(
        "SEED", "from accel_state.seeding import set_seed; set_seed(1, True)"
    ),
    "mixed up": MIXED_UP,
    "late contrasts": LATE_CONTRASTS,
    "sequence first": SEQUENCE_FIRST.replace("HANDLERS", FINDS_UNUSED),
    "penalised": PENALISED,
    "actor": ACTOR,
    "binary": BINARY,
    "notebook": NOTEBOOK,
}
LOOPS = {name: HEAD + text for name, text in LOOPS.items()}
LOOPS["replay"] = LOOPS["replay"].replace("torch.manual_seed(0)", "")  # so ranks have seeds of their own
# What is by design is said: a loss that depends on which rows are in a batch together, and rates for more samples.
NOTED = {
    **dict.fromkeys(("contrasts of one rank", "experts", "late contrasts", "mixed up"), "contrasts rows"),
    **dict.fromkeys(("notebook", "schedule of ranks"), "planned for ranks"),
}
# Loops that cannot be compared, and what is said.
DASHES = dict.fromkeys(("replay", "replay, seeds of ranks"), "each rank has samples of its own")
PLAIN = ("vae", "masked words")
WIDE = ("adversarial", "binary", "experts", "graphs", "recomputed", "sequence first", "tokens", "two loaders")


def _marked(name: str) -> object:
    marks = () if name in PLAIN else pytest.mark.wide if name in WIDE else pytest.mark.full
    return pytest.param(name, marks=marks, id=name)


@pytest.mark.parametrize("name", [_marked(name) for name in LOOPS])
def test_loops_that_are_right_have_no_fault(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").write_text(LOOPS[name])
    argv = [sys.executable, "-m", "accel_cli", "prove", "--json", "train.py"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, timeout=400, check=False)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    assert done.returncode == (name in DASHES), done.stdout  # nothing was compared
    for found in json.loads(done.stdout)["strategies"]:
        kinds = [one["kind"] for one in found["findings"] if one["kind"] != "shared noise"]
        assert kinds == ([NOTED[name]] if name in NOTED else []), found
        assert DASHES.get(name, "") in found["reason"]
        assert bool(found["reason"]) == (name in DASHES)
