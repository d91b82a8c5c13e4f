"""``import accelerate`` answered by this library: in one process, in what it starts, and never silently."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from accel_cli import as_accelerate


def python(*words, cwd, **environ):
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | environ
    return subprocess.run(
        [sys.executable, *words], env=variables, cwd=cwd, capture_output=True, text=True, timeout=120
    )


def run(tmp_path, body, *words, **environ):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(body))
    return python("-m", "accel_cli.as_accelerate", *(words or [str(script)]), cwd=tmp_path, **environ)


@pytest.fixture
def real(tmp_path):
    """A package that stands for the real Accelerate, and a client that holds an object of it."""
    folder = tmp_path / "elsewhere"
    (folder / "accelerate").mkdir(parents=True)
    (folder / "accelerate/__init__.py").write_text('__version__ = "1.9.9"\nclass Accelerator:\n    pass\n')
    (folder / "holder.py").write_text("from accelerate import Accelerator\n")
    info = folder / "accelerate-1.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 1.9.9\n")
    return str(folder)


WHO = """
    import importlib.metadata, accelerate
    from accelerate import Accelerator
    from accelerate.utils import tqdm, set_seed
    print(accelerate.__version__, importlib.metadata.version("accelerate"), Accelerator.__module__, callable(tqdm))
"""
ANSWER = "1.15.0 1.15.0 accel_train.accelerator True\n"


@pytest.mark.wide
def test_a_script_is_answered_even_if_the_real_one_is_installed(tmp_path, real):
    done = run(tmp_path, WHO, PYTHONPATH=os.pathsep.join([*filter(None, sys.path), real]))
    assert done.stdout == ANSWER, done.stderr
    assert done.stderr.count("is answered by accel-train") == 1


def test_the_metadata_is_what_clients_look_for(tmp_path):
    """sentence-transformers trains only if the home page is Accelerate's; transformers asks for the version."""
    body = """
        import importlib.metadata
        found = importlib.metadata.metadata("accelerate")
        print(found["Name"], found["Version"], found["Home-page"], "not Accelerate itself" in found["Summary"])
    """
    done = run(tmp_path, body)
    assert done.stdout == "accelerate 1.15.0 https://github.com/huggingface/accelerate True\n", done.stderr


@pytest.mark.wide
def test_a_module_is_answered(tmp_path):
    (tmp_path / "package.py").write_text(textwrap.dedent(WHO) + "import sys\nprint(sys.argv[1:], __name__)\n")
    done = run(tmp_path, "", "-m", "package", "--flag", "x")
    assert done.stdout == ANSWER + "['--flag', 'x'] __main__\n", done.stderr


@pytest.mark.wide
def test_what_the_script_starts_is_answered_and_says_it_again_only_where_it_is_a_program_of_its_own(tmp_path):
    body = """
        import multiprocessing, subprocess, sys
        def ask(queue):
            import accelerate
            queue.put(accelerate.Accelerator.__module__)
        if __name__ == "__main__":
            import accelerate
            print(subprocess.run([sys.executable, "-c", "import accelerate; print(accelerate.__version__)"],
                  capture_output=True, text=True).stdout)
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=ask, args=(queue,))
            process.start()
            print(queue.get())
            process.join()
    """
    done = run(tmp_path, body)
    assert done.stdout.split() == ["1.15.0", "accel_train.accelerator"], done.stderr
    assert done.stderr.count("is answered by accel-train") == 1


def test_accel_launch_answers_on_all_ranks_and_one_of_them_says_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import accelerate\nprint(accelerate.PartialState().num_processes, accelerate.__version__)\n"
    )
    flags = ["launch", "--cpu", "--num_processes", "2", "--as-accelerate"]
    done = python("-m", "accel_cli", *flags, str(script), cwd=tmp_path, XDG_CONFIG_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 2 1.15.0", "[rank 1] 2 1.15.0"]
    assert done.stderr.count("is answered by accel-train") == 1


def test_installing_in_a_running_process(tmp_path, real):
    body = f"""
        import sys
        from accel_cli import as_accelerate
        print(as_accelerate.is_installed())
        as_accelerate.install()
        as_accelerate.install()
        sys.path.append({real!r})
        import accelerate
        print(as_accelerate.is_installed(), accelerate.__version__, len([p for p in sys.path if "as_accelerate" in p]))
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(body))
    done = python(str(script), cwd=tmp_path)
    assert done.stdout.splitlines() == ["False", "True 1.15.0 1"], done.stderr


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("import holder", ["accelerate 1.9.9 is imported already, from", "it is held by holder"]),
        ("import accelerate as other", ["accelerate 1.9.9 is imported already", "it is held by __main__"]),
        ("import peft", ["peft has been imported, and looked for accelerate then"]),
    ],
)
def test_installing_too_late_is_refused(tmp_path, real, before, words):
    (Path(real) / "peft.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {real!r})\n{before}\n"
        "from accel_cli import as_accelerate\nas_accelerate.install()\n"
    )
    done = python(str(script), cwd=tmp_path)
    assert done.returncode == 1
    for word in [*words, "python -m accel_cli.as_accelerate"]:
        assert word in done.stderr


@pytest.mark.wide
def test_a_name_of_a_newer_level_is_an_import_error_that_says_so(tmp_path):
    body = """
        import accelerate, accelerate.utils
        print(hasattr(accelerate, "Newer"), getattr(accelerate.utils, "newer", "absent"))
        try:
            accelerate.Newer
        except AttributeError as error:
            print(error)
        from accelerate.utils import newer
    """
    done = run(tmp_path, body)
    assert done.stdout.startswith("False absent\naccelerate.Newer does not exist: ")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: accelerate.utils.newer does not exist: ")
    assert "at the level of Accelerate 1.15.0" in last


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ([], 2, "usage: python -m accel_cli.as_accelerate"),
        (["--help"], 0, "usage: python -m accel_cli.as_accelerate"),
        (["--mode", "x.py"], 2, "option --mode does not exist"),
        (["nowhere.py"], 2, "the script 'nowhere.py' does not exist"),
    ],
)
def test_wrong_command_lines(tmp_path, words, code, text):
    done = python("-m", "accel_cli.as_accelerate", *words, cwd=tmp_path)
    assert done.returncode == code
    assert text in (done.stderr if code else done.stdout)


def test_the_exit_code_is_the_scripts(tmp_path):
    assert run(tmp_path, "raise SystemExit(3)").returncode == 3


def test_the_search_path_of_children_has_the_folder_once():
    once = as_accelerate.environment({"PYTHONPATH": f"a{os.pathsep}b", "OTHER": "x"})
    folder, *others = once["PYTHONPATH"].split(os.pathsep)
    assert others == ["a", "b"]
    assert (Path(folder) / "accelerate/__init__.py").is_file()
    assert as_accelerate.environment(once) == once
    assert as_accelerate.environment({})["PYTHONPATH"] == folder


def test_children_find_the_command(tmp_path):
    text = """
        import subprocess
        done = subprocess.run(["accelerate", "launch", "--help"], capture_output=True, text=True)
        print(done.returncode, "num_processes" in done.stdout)
    """
    assert run(tmp_path, text).stdout.split() == ["0", "True"]


@pytest.mark.wide
def test_type_checkers_are_told_what_is_answered(tmp_path):
    """Every name of a stub is the object that its module gives."""
    body = """
        import ast, importlib, pathlib, accelerate
        root, names = pathlib.Path(accelerate.__file__).parent, 0
        for stub in sorted(root.rglob("*.pyi")):
            parts = stub.relative_to(root.parent).with_suffix("").parts
            module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
            for node in ast.parse(stub.read_text()).body:
                for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                    home = importlib.import_module(node.module)
                    assert getattr(module, alias.asname) is getattr(home, alias.name), (stub, alias.name)
                    names += 1
        print(names > 1000, sorted(accelerate.state.__all__) == sorted(
            alias.asname for node in ast.parse((root / "state.pyi").read_text()).body
            if isinstance(node, ast.ImportFrom) for alias in node.names))
    """
    done = run(tmp_path, body)
    assert done.stdout == "True True\n", done.stderr
