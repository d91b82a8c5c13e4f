"""What a script asks of its Accelerator."""

import pytest

from accel_cli.migration.attributes import accelerator_attributes, missing_attributes
from accel_cli.migration.source import PythonSource
from accel_train import Accelerator


def test_the_attributes_are_those_of_the_class():
    public = {name for name in dir(Accelerator) if not name.startswith("_")}
    assert public <= accelerator_attributes()


def test_what_does_not_exist_is_named_with_its_line():
    text = "acc = Accelerator()\nacc.prepare(m)\nacc.fly()\nother.fly()\nacc._private\nacc.project_dir\n"
    found = missing_attributes(PythonSource(text))
    assert [(remark.line, remark.text) for remark in found] == [(3, "acc.fly does not exist in this version")]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("acc = Accelerator(1) if tracked else Accelerator()\nacc.fly()\n", "acc"),
        ("self.acc = accelerate.Accelerator()\nself.acc.fly()\n", "self.acc"),
        ("def train(acc: Accelerator):\n    acc.fly()\n", "acc"),
        ("acc: Accelerator = make()\nacc.fly()\n", "acc"),
    ],
)
def test_accelerators_are_found_where_scripts_have_them(text, name):
    found = missing_attributes(PythonSource(text))
    assert [(remark.line, remark.text) for remark in found] == [
        (2, f"{name}.fly does not exist in this version")
    ]


def test_other_objects_are_not_judged():
    text = "acc = make(Accelerator)\nacc.fly()\nself.acc = Accelerator()\nacc.fly()\nother.acc.fly()\nf().fly()\n"
    assert missing_attributes(PythonSource(text)) == []
