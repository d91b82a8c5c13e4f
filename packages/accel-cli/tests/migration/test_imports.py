"""Imports of ``accelerate``: where each name is found here, with the formatting kept."""

import pytest

from accel_cli.migration.imports import rewrite_imports
from accel_cli.migration.source import PythonSource


def changed(text):
    after, refusals, notes = rewrite_imports(PythonSource(text))
    return after, [(remark.line, remark.text) for remark in refusals], [remark.line for remark in notes]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from accelerate import Accelerator\n", "from accel_train import Accelerator\n"),
        (
            "from accelerate import Accelerator as A  # why\n",
            "from accel_train import Accelerator as A  # why\n",
        ),
        (
            "from accelerate import Accelerator\nfrom accelerate.utils import set_seed, gather\n",
            "from accel_train import Accelerator, set_seed, gather\n",
        ),
        (
            "from accelerate import Accelerator, init_empty_weights\n",
            "from accel_train import Accelerator\nfrom accel_bigmodel import init_empty_weights\n",
        ),
        (
            "from accelerate.utils import (\n    set_seed,  # seeds\n    gather,\n)\n",
            "from accel_train import (\n    set_seed,  # seeds\n    gather,\n)\n",
        ),
        (
            "import accelerate\na = accelerate.Accelerator()\n",
            "import accel_train\na = accel_train.Accelerator()\n",
        ),
        (
            "import accelerate.utils as u\nu.set_seed(1)\nu.operations.gather(x)\n",
            "import accel_train\naccel_train.set_seed(1)\naccel_train.gather(x)\n",
        ),
        (
            "import os, accelerate\nm = accelerate.big_modeling.init_empty_weights()\n",
            "import os, accel_bigmodel\nm = accel_bigmodel.init_empty_weights()\n",
        ),
        (
            "from accelerate import utils, Accelerator\nutils.set_seed(0)\n",
            "import accel_train\nfrom accel_train import Accelerator\naccel_train.set_seed(0)\n",
        ),
        (
            "try:\n    from accelerate import Accelerator\nexcept ImportError:\n    Accelerator = None\n",
            "try:\n    from accel_train import Accelerator\nexcept ImportError:\n    Accelerator = None\n",
        ),
        ("x = 1\nimport accelerate\n", "x = 1\n"),
        ("if x: import accelerate\n", "if x: pass\n"),
        (
            "\ufeffimport accelerate\naccelerate.gather(x)\n",
            "\ufeffimport accel_train\naccel_train.gather(x)\n",
        ),
        (
            "é = 1\r\nimport accelerate as a\r\ns = f'é {a.Accelerator()}' + \"é\"; a.utils.set_seed(0)\r\n",
            "é = 1\r\nimport accel_train\r\ns = f'é {accel_train.Accelerator()}' + \"é\"; accel_train.set_seed(0)\r\n",
        ),
        (
            "if x:\n    from accelerate import Accelerator, cpu_offload\n    from accelerate import hooks  # c\n",
            "if x:\n    from accel_train import Accelerator\n    from accel_bigmodel import cpu_offload  # c\n",
        ),
        ("if x:\n    import accelerate\n", "if x:\n    pass\n"),
        (
            "x = 1; from accelerate import Accelerator; y = 2\n",
            "x = 1; from accel_train import Accelerator; y = 2\n",
        ),
        ("f(accelerate=1)\nself.accelerate.go()\n", "f(accelerate=1)\nself.accelerate.go()\n"),
        (
            "from .accelerate import x\nfrom accelerated import y\n",
            "from .accelerate import x\nfrom accelerated import y\n",
        ),
    ],
)
def test_imports_and_uses(before, after):
    assert changed(before) == (after, [], [])


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("x = 1\nfrom accelerate import *\n", 2, "import the names that are used"),
        (
            "import accelerate\naccelerate.utils.ParallelismConfigure\n",
            2,
            "ParallelismConfigure has no counterpart",
        ),
        ("import accelerate\nf(accelerate)\n", 2, "the module accelerate is used as a value"),
        ("from accelerate import utils\ndef f(utils): pass\n", 2, "the module utils is used as a value"),
        ("import accelerate as a\na . Accelerator()\n", 2, "write a.Accelerator on one line, without spaces"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_line(text, line, message):
    _, refusals, _ = changed(text)
    assert [found for found, _ in refusals] == [line]
    assert message in refusals[0][1]


def test_imports_without_a_counterpart_are_left_and_noted():
    source = PythonSource(
        "from accelerate import Accelerator\n"
        "if testing:\n"
        "    from accelerate.test_utils.training import mocked_dataloaders\n"
        "from accelerate.utils import set_seed, no_such_name as other\n"
    )
    code, refusals, notes = rewrite_imports(source)
    assert code == (
        "from accel_train import Accelerator\n"
        "if testing:\n"
        "    from accelerate.test_utils.training import mocked_dataloaders\n"
        "from accel_train import set_seed\nfrom accelerate.utils import no_such_name as other\n"
    )
    assert refusals == []
    assert [note.line for note in notes] == [3, 4]
    assert "it is for Accelerate's tests: remove the lines that use it" in notes[0].text
    assert "accelerate.utils.no_such_name is left as it is, and needs Accelerate" in notes[1].text


def test_texts_are_left_and_noted():
    code, refusals, notes = changed('find_spec("accelerate")\nrun("accelerate launch x.py")\n')
    assert (refusals, notes) == ([], [1, 2])
    assert '"accelerate launch x.py"' in code


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "import accelerate\nv = accelerate.__version__\na = accelerate.Accelerator()\n",
            "import accelerate, accel_train\nv = accelerate.__version__\na = accel_train.Accelerator()\n",
        ),
        (
            "import accelerate as acc\nv = acc.__version__\n",
            "import accelerate\nv = accelerate.__version__\n",
        ),
        (
            "from accelerate import Accelerator, __version__\n",
            "from accel_train import Accelerator\nfrom accelerate import __version__\n",
        ),
    ],
)
def test_a_version_of_accelerate_is_left_and_noted(before, after):
    code, refusals, notes = changed(before)
    assert (code, refusals) == (after, [])
    assert len(notes) == 1


def test_a_trainer_that_uses_accelerate_is_noted():
    text = "from transformers import Trainer, TrainingArguments\n"
    assert changed(text) == (text, [], [])  # a file without Accelerate uses one library
    _, refusals, notes = changed(text + "from accelerate import Accelerator\n")
    assert (refusals, notes) == ([], [1])
