"""A rank that its launcher watches runs a script as the interpreter does."""

import json
import os
import subprocess
import sys

import pytest

SHOW = """
import json, os, pickle, sys
class Thing: pass
pickle.loads(pickle.dumps(Thing()))
print(json.dumps({
    "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "spec": __spec__ is None,
    "module": Thing.__module__, "doc": __doc__, "main": sys.modules["__main__"].__dict__ is globals(),
}))
"""


def run(*words, cwd):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environ, capture_output=True, text=True, timeout=60
    )


def both(folder, kind, name, *args):
    """What the interpreter gives a target, and what the worker gives it."""
    direct = (["-m"] if kind == "module" else []) + [name]
    return run(*direct, *args, cwd=folder), run(
        "-m", "accel_state.launching.ranks.worker", kind, name, *args, cwd=folder
    )


@pytest.fixture
def folder(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "script.py").write_text(SHOW)
    (inner / "__main__.py").write_text("import sys\nprint(__name__, sys.argv[1:], sys.path[0])\n")
    (tmp_path / "link.py").symlink_to(inner / "script.py")
    return tmp_path


@pytest.mark.parametrize("name", ["inner/script.py", "link.py"])
def test_a_script_sees_what_it_sees_without(folder, name):
    plain, watched = both(folder, "script", name, "-x", "a b")
    assert watched.stdout == plain.stdout, watched.stderr
    assert json.loads(plain.stdout)["name"] == "__main__"


def test_a_folder_runs_its_main(folder):
    plain, watched = both(folder, "script", "inner", "1")
    assert watched.stdout == plain.stdout, watched.stderr


def test_a_module_sees_its_name_and_arguments(folder):
    plain, watched = both(folder, "module", "inner.script", "1")
    kept = ("name", "file", "argv", "path")
    shown = [json.loads(done.stdout) for done in (plain, watched)]
    assert {key: shown[0][key] for key in kept} == {key: shown[1][key] for key in kept}


@pytest.mark.parametrize(
    "body", ["def f():\n    raise ValueError('no')\nf()\n", "x = (\n", "import sys\nsys.exit(7)\n"]
)
def test_errors_look_as_they_do_without(folder, body):
    (folder / "bad.py").write_text(body)
    plain, watched = both(folder, "script", "bad.py")
    assert (watched.returncode, watched.stderr) == (plain.returncode, plain.stderr)


def test_processes_that_a_script_spawns_find_its_functions(folder):
    (folder / "spawn.py").write_text(
        "import multiprocessing\n"
        "def double(x):\n    return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [1, 2]))\n"
    )
    _, watched = both(folder, "script", "spawn.py")
    assert watched.stdout == "[2, 4]\n", watched.stderr
