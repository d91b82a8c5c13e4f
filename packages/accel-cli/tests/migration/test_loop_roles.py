"""Which object is what, in scripts whose answer one reads; and scripts that are refused, with their line."""

import textwrap

import libcst as cst
import pytest
from libcst.metadata import MetadataWrapper

from accel_cli.migration.loop_facts import Facts
from accel_cli.migration.loop_roles import NotUnderstoodError, find_roles


def roles_of(text, gathers=lambda loop: False):
    facts = Facts()
    MetadataWrapper(cst.parse_module(textwrap.dedent(text))).visit(facts)
    return find_roles(facts, gathers)


SCRIPT = """\
import torch

names = ["a"]
device: torch.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
net = Net()
critic = Critic()
optimizer = torch.optim.SGD([*net.parameters(), *critic.parameters()])
number = sum(p.numel() for p in net.parameters())
train, test, extra = loaders()
scaler = torch.amp.GradScaler("cuda")
each_batch = StepLR(optimizer, 1)
each_epoch = StepLR(optimizer, 1)
print("begins")
for epoch in range(2):
    for x in train:
        scaler.scale(net(x)).backward()
        scaler.step(optimizer)
        each_batch.step()
    each_epoch.step()
    for x in test:
        net(x)
    for name in names:
        print(name)
"""


@pytest.mark.parametrize("can_gather", [True, False])
def test_every_role(can_gather):
    roles = roles_of(SCRIPT, lambda loop: can_gather)
    assert roles.home.name == ""
    assert roles.models == ["net", "critic"]
    assert roles.optimizers == ["optimizer"]
    assert roles.loaders == ["train"]
    assert roles.schedulers == ["each_batch"]
    assert roles.unprepared == ["each_epoch"]
    assert roles.scalers == {"scaler"}
    assert roles.devices == {"device"}
    assert roles.evaluated == (["test"] if can_gather else [])
    assert roles.prepared == ["net", "critic", "optimizer", "train", *roles.evaluated, "each_batch"]
    # From the statement of the device, the third after the import, to that of the last scheduler.
    assert (roles.first, roles.made) == (2, 10)
    lines = [remark.line for remark in roles.notes]
    assert lines == ([] if can_gather else [20])


def test_objects_of_a_function_that_passes_them_on():
    roles = roles_of(
        """\
        def fit(model, batches, opt):
            for batch in batches:
                model(batch).backward()
                opt.step()

        def main():
            sampler = DistributedSampler(data)
            loader = DataLoader(data, sampler=sampler)
            net = Net()
            adam = Adam(net.parameters())
            fit(net, opt=adam, batches=loader)
        """
    )
    assert roles.home.name == "main"
    assert roles.prepared == ["net", "adam", "loader"]
    assert roles.samplers == {"sampler"}
    assert (roles.first, roles.made) == (1, 3)


def test_a_process_group_comes_after_the_accelerator():
    roles = roles_of(
        "init = 1\ndist.init_process_group('nccl')\nnet = Net()\nopt = SGD(net.parameters())\n"
        "data = DataLoader(d)\nfor x in data:\n    net(x).backward()\n    opt.step()\n"
    )
    assert (roles.first, roles.made) == (1, 4)


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("x = 1\nloss.backward()\n", 2, "no optimizer is made"),
        (
            "def a():\n    o = SGD(m.parameters())\ndef b():\n    o = SGD(m.parameters())\n    l.backward()\n",
            5,
            "optimizers are made in 2 functions",
        ),
        (
            "net = Net()\nopt = SGD(net.parameters())\nopts = [opt]\nfor x in data:\n    net(x).backward()\n"
            "    opts[0].step()\n",
            5,
            r"opt: step\(\) is not called by this name",
        ),
        (
            "def fit(m, d, o):\n    for x in d:\n        m(x).backward()\n        o.step()\n"
            "net = Net()\nopt = SGD(net.parameters())\ndata = DataLoader(d)\nfit(*everything)\n",
            3,
            r"opt: step\(\) is not called by this name",
        ),
        (
            "def fit(m):\n    m().backward()\ndef main():\n    net = Net()\n    opt = SGD(net.parameters())\n"
            "    opt.step()\n",
            2,
            r"fit\(\) calls backward\(\), but is not called with the model by name from main",
        ),
        (
            "def main(net, data):\n    opt = SGD(net.parameters())\n    for x in data:\n        net(x).backward()\n"
            "        opt.step()\n",
            2,
            "the model net is not made in the same function",
        ),
        (
            "def main(data):\n    net = Net()\n    opt = SGD(net.parameters())\n    for x in data:\n"
            "        net(x).backward()\n        opt.step()\n",
            1,
            "data is used before it is made in main",
        ),
    ],
)
def test_what_is_not_understood(text, line, told):
    with pytest.raises(NotUnderstoodError, match=told) as error:
        roles_of(text)
    assert error.value.remark.line == line
