"""What is checked about the script before anything starts."""

import os

import pytest

from accel_state.errors import LaunchError, TargetError
from accel_state.launching.target import Target, check_target


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('a check must not import this')")
    (package / "finetune.py").write_text("")
    return tmp_path


def check(name, kind="script", environ=None):
    check_target(Target(name, kind=kind), environ or {"PATH": os.environ["PATH"]}, path=[os.getcwd()])


def test_what_is_there_passes(folder):
    (folder / "project/__main__.py").write_text("")
    check("train.py")
    check(str(folder / "train.py"))
    check("project")
    check("project", "module")
    check("project.finetune", "module")
    check("json.tool", "module")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trian.py", r"script 'trian.py' does not exist; did you mean 'train.py'\?"),
        ("project/finetun.py", r"did you mean 'project.finetune.py'\?"),
        ("nope.py", "script 'nope.py' does not exist; (?!did you mean)"),  # all of them end in .py
        ("nowhere/train.py", "the folder 'nowhere' does not exist either"),
        ("some.module", "to run the module some.module, pass --module"),
        ("xyz", "to run the module"),
        ("zzzzzz.py", "the current folder is"),
        ("projec.py", "the current folder is"),  # a folder that cannot be started is no suggestion
        ("project.finetune", "to run the module project.finetune, pass --module"),
        ("", "the name of the script is empty"),
        ("project", "folder without a __main__.py"),
    ],
)
def test_scripts_that_are_not_there(folder, name, message):
    with pytest.raises(LaunchError, match=message):
        check(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("projcet", r"no module named 'projcet'.*did you mean 'project'\?"),
        ("project.finetunes", r"'finetunes' is not in project; did you mean 'project.finetune'\?"),
        ("project.finetune.more", "project.finetune is not a package"),
        ("project", "package without a __main__ module"),
        ("train.py", "is not a module name"),
        ("project/finetune", "is not a module name"),
    ],
)
def test_modules_that_are_not_there(folder, name, message):
    with pytest.raises(LaunchError, match=message):
        check(name, "module")


def test_programs(folder):
    check("sh", "program")
    with pytest.raises(LaunchError, match="'no-such-program' was not found"):
        check("no-such-program", "program")
    with pytest.raises(LaunchError, match=r"chmod \+x \./train.py"):
        check("./train.py", "program")


@pytest.mark.skipif(os.name != "posix", reason="elsewhere the current folder cannot be removed")
@pytest.mark.parametrize(("name", "kind"), [("nothere.py", "script"), ("nothere", "module")])
def test_a_current_folder_that_is_gone(tmp_path, monkeypatch, name, kind):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(LaunchError, match="the current folder has been removed"):
        check_target(Target(name, kind=kind), {})


@pytest.mark.parametrize("name", ["python", "python3", "python3.11", "/usr/bin/python3", "python.exe"])
def test_an_interpreter_is_no_script(name):
    with pytest.raises(TargetError, match="leave it out, since the launcher starts Python itself"):
        check_target(Target(name, ("train.py",)), {})


def test_a_script_may_be_called_python(tmp_path):
    (tmp_path / "python.py").write_text("")
    check_target(Target(str(tmp_path / "python.py")), {})


@pytest.mark.parametrize("name", ["run.sh", "./run.sh", "job.slurm"])
def test_a_shell_script_is_no_python_script(folder, name):
    (folder / name).write_text("echo hi")
    with pytest.raises(TargetError, match=r"is a shell script, and each rank runs Python; .* --no_python"):
        check(name)


def test_a_program_in_the_place_of_a_script(folder):
    with pytest.raises(
        TargetError, match=r"script 'sh' does not exist; .* to run the program sh .* --no_python"
    ):
        check("sh")


def test_a_pipe_or_a_device_is_no_script(folder):
    os.mkfifo(folder / "pipe.py")
    for name in (str(folder / "pipe.py"), "/dev/zero", "/dev/null"):
        with pytest.raises(TargetError, match="is a pipe or a device, not a script"):
            check(name)
    reader, writer = os.pipe()
    check(f"/dev/fd/{reader}")  # of a shell's <(command)
    os.close(reader)
    os.close(writer)
