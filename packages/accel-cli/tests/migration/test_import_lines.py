"""Where the import of a changed script goes, and which of its imports go."""

import ast

import libcst as cst
import pytest

from accel_cli.migration.import_lines import with_import, without_unused

NEW = "from accel_train import Accelerator\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import os\nimport torch\n", "\nx = 1\n"),
        ("from __future__ import annotations\n\nimport os\n", "x = 1\n"),
        ('"""A script."""\n', "x = 1\n"),
        ('"""A script."""\n\nfrom __future__ import annotations\n', "\nx = 1\n"),
        ("from __future__ import annotations\n", "x = 1\n"),
        ("#!/usr/bin/env python\n", "x = 1\n"),
        ("from . import nets\n", "x = 1\n"),
        ("import sys\n", 'sys.path.append("x")\nimport torch\n'),
        ("", "if fast:\n    import torch\n"),
    ],
)
def test_the_import_comes_after_the_first_imports(before, after):
    code = with_import(cst.parse_module(before + after)).code
    assert code == before + NEW + after
    compile(code, "script", "exec")
    assert ast.get_docstring(ast.parse(code)) == ast.get_docstring(ast.parse(before))


@pytest.mark.parametrize(
    ("imports", "before", "after", "kept"),
    [
        ("import os\nimport sys\n", "os.a, sys.b", "sys.b", "import sys\n"),
        ("import os, sys, re\n", "os, sys, re", "os, sys", "import os, sys\n"),
        ("import os.path\n", "os.path.join(a)", "a", ""),
        ("import torch.distributed as dist\n", "dist.a, torch", "torch", ""),
        (
            "import torch.distributed as dist\n",
            "dist.a, torch",
            "dist.a",
            "import torch.distributed as dist\n",
        ),
        ("from a import b as c, d\n", "b, c, d", "b, d", "from a import d\n"),
        ("from a import (b,\n    c)\n", "b, c", "b", "from a import (b)\n"),
        ("from a import b\n", "b", "x.b", "from a import b\n"),  # a name that is still written somewhere
        ("from a import *\n", "b", "x", "from a import *\n"),
        ("import never_used\n", "a", "b", "import never_used\n"),  # it may be imported for what it does
    ],
)
def test_imports_that_only_the_old_script_uses_go(imports, before, after, kept):
    found = without_unused(
        cst.parse_module(f"{imports}{before}\n"), cst.parse_module(f"{imports}{after}\n")
    ).code
    assert found == f"{kept}{after}\n"


def test_a_block_without_its_only_import_is_still_a_block():
    imports = "try:\n    import apex\nexcept ImportError:\n    raise\n"
    found = without_unused(cst.parse_module(f"{imports}apex.x\n"), cst.parse_module(imports)).code
    assert found == "try:\n    pass\nexcept ImportError:\n    raise\n"
