"""What a script does where, against what one reads in it."""

import textwrap

import libcst as cst
import pytest
from libcst.metadata import MetadataWrapper

from accel_cli.migration.loop_facts import Facts, call_name


def facts_of(text):
    facts = Facts()
    MetadataWrapper(cst.parse_module(textwrap.dedent(text))).visit(facts)
    return facts


def test_assignments_with_names_lines_and_statements():
    frame = facts_of(
        """\
        import torch
        a = one()
        (b, [c, *d]), e.f = two()
        g = h = three()
        i: Kind = four()
        j: Kind
        if a:
            k = five()
        """
    ).frames[""]
    assert [(found.targets, found.line, found.index) for found in frame.assignments] == [
        (("a",), 2, 1),
        (("b", "c", "d"), 3, 2),
        (("g", "h"), 4, 3),
        (("i",), 5, 4),
        (("k",), 8, 6),
    ]
    assert [call_name(found.value) for found in frame.assignments] == ["one", "two", "three", "four", "five"]
    assert [found.line for found in frame.assigned("h")] == [4]
    assert frame.assigned("j") == []


@pytest.mark.parametrize(
    ("iterated", "loader"),
    [
        ("data", "data"),
        ("enumerate(data)", "data"),
        ("enumerate(tqdm(data, desc='x'), 1)", "data"),
        ("tqdm.auto.tqdm(iter(data))", "data"),
        ("range(3)", ""),
        ("self.data", ""),
        ("make_loader()", ""),
        ("zip(data, more)", ""),
        ("enumerate()", ""),
    ],
)
def test_what_a_loop_iterates_over(iterated, loader):
    (loop,) = facts_of(f"for i, (x, y) in {iterated}:\n    pass\n").frames[""].loops
    assert (loop.loader, loop.targets, loop.line) == (loader, ("i", "x", "y"), 1)


def test_calls_know_their_loops_and_functions():
    facts = facts_of(
        """\
        def train(net, *, data):
            for epoch in range(3):
                for x in data:
                    net(x).backward()
                    opt.step()
                net.eval()

        def fit():
            train(net, data=data)

        fit()
        print(net.name())
        """
    )
    train = facts.frames["train"]
    assert train.params == ("net", "data")
    assert [(call.owner, call.method, len(call.loops), call.line) for call in train.methods] == [
        ("", "backward", 2, 4),
        ("opt", "step", 2, 5),
        ("net", "eval", 1, 6),
    ]
    assert [loop.line for loop in train.methods[0].loops] == [2, 3]
    assert [call.method for call in facts.frames[""].methods] == ["name"]
    assert [(name, index) for name, _, index in facts.frames[""].calls] == [("fit", 2), ("print", 3)]
    assert facts.calling("backward") == {"train", "fit"}
    assert facts.calling("name") == {""}
    assert facts.callers_of({"fit"}) == {"fit"}
    assert train.locals() == {"net", "data", "epoch", "x"}


def test_names_go_through_calls():
    facts = facts_of(
        """\
        def main():
            net, data = make()
            run(data, model=net)

        def run(loader, model):
            step(model, 3, loader)

        def step(m, number, batches):
            pass

        def other(m):
            pass
        """
    )
    facts.resolve_names(facts.frames["main"])
    assert facts.frames["main"].roles == {"net": "net", "data": "data"}
    assert facts.frames["run"].roles == {"loader": "data", "model": "net"}
    assert facts.frames["step"].roles == {"m": "net", "batches": "data"}
    assert facts.frames["other"].roles == {}


def test_functions_see_globals_that_they_do_not_bind():
    facts = facts_of(
        """\
        net, data = make()

        def train(data):
            opt = net

        train(None)
        """
    )
    facts.resolve_names(facts.frames[""])
    assert facts.frames["train"].roles == {"net": "net"}


@pytest.mark.parametrize(
    ("call", "roles"),
    [
        ("train(net, data)", {"m": "net", "d": "data"}),
        ("train(net, *more, data)", {"m": "net"}),  # data may be any further parameter
        ("train(*more, net, d=data)", {"d": "data"}),
        ("train(net, d=data, **more)", {"m": "net", "d": "data"}),
        ("train(net, data, data, data, data)", {"m": "net", "d": "data", "o": "data"}),
    ],
)
def test_arguments_and_their_parameters(call, roles):
    facts = facts_of(f"def main():\n    net, data = make()\n    {call}\n\ndef train(m, d, o):\n    pass\n")
    facts.resolve_names(facts.frames["main"])
    assert facts.frames["train"].roles == roles


def test_functions_that_call_each_other_end():
    facts = facts_of(
        "def main():\n    a = 1\n    f(a)\n\ndef f(x):\n    g(x)\n\ndef g(y):\n    f(y)\n    y.backward()\n"
    )
    facts.resolve_names(facts.frames["main"])
    assert (facts.frames["f"].roles, facts.frames["g"].roles) == ({"x": "a"}, {"y": "a"})
    assert facts.calling("backward") == {"main", "f", "g"}
