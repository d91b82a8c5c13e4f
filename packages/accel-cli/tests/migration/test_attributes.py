"""What a script asks of its Accelerator."""

import libcst

from accel_cli.migration.attributes import accelerator_attributes, missing_attributes
from accel_train import Accelerator


def test_the_attributes_are_those_of_the_class():
    public = {name for name in dir(Accelerator) if not name.startswith("_")}
    assert public <= accelerator_attributes()


def test_what_does_not_exist_is_named_with_its_line():
    text = "acc = Accelerator()\nacc.prepare(m)\nacc.fly()\nother.fly()\nacc._private\nacc.project_dir\n"
    found = missing_attributes(libcst.parse_module(text))
    assert [(remark.line, remark.text) for remark in found] == [(3, "acc.fly does not exist in this version")]
