"""``accel launch``: its flags, which words belong to whom, and that nothing typed is ignored."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_state.config.flags import parse_flags
from accel_state.config.roots import complete_root
from accel_state.config.sagemaker import SageMakerConfig
from accel_state.config.schema import plain_flag, schema_of

REFERENCE = (Path(__file__).parent.parent / "data/accelerate_launch_flags.txt").read_text().splitlines()


def accel(*words, cwd=None, **environ):
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environ
    return subprocess.run(
        [sys.executable, "-m", "accel_cli", "launch", *words],
        env=variables, cwd=cwd, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def surface():
    local, cloud = schema_of(complete_root()), schema_of(SageMakerConfig)
    return {*local.by_flag, *local.switches, *cloud.by_flag, "help", "-h", "config_file"}


def known(flag):
    name = plain_flag(flag)
    return name in surface() or name.removeprefix("no_") in surface()


def test_every_flag_of_accelerate_launch_is_accepted():
    assert len(REFERENCE) == 124
    assert [flag for line in REFERENCE for flag in line.split() if not known(flag)] == []


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import os, sys\nsys.stdout.write(f\"{sys.argv[1:]} {os.environ.get('WORLD_SIZE')}\\n\")\n"
    )
    return str(path)


def test_words_after_the_script_are_the_scripts(script):
    done = accel("--cpu", script, "--num_processes", "9", "--unknown", "-h")
    assert (done.returncode, done.stdout) == (0, "['--num_processes', '9', '--unknown', '-h'] None\n")
    assert done.stderr == (
        f"accel: --num_processes comes after {script}, so it goes to the script; "
        "flags of accel launch come before it. If the script has such options itself, put -- before it: "
        f"accel launch -- {script} ...\n"
    )
    assert accel("--cpu", "--", script, "--num-processes=9").stderr == ""
    assert accel("--cpu", "--quiet", script, "--num-processes=9").stderr == ""
    assert accel("--cpu", "--no_python", sys.executable, script, "--num_processes", "9").stderr == ""


@pytest.mark.parametrize(
    "flag", ["--num_processes", "--num-processes", "--nproc_per_node", "--nproc-per-node"]
)
def test_spellings(flag, script):
    done = accel("--cpu", flag, "2", script)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] [] 2", "[rank 1] [] 2"], done.stderr
    assert accel("--cpu", f"{flag}=2", script).stdout.count("[] 2") == 2


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ["--num_procesess", "2", "SCRIPT"],
            2,
            "flag --num_procesess does not exist; did you mean --num_processes",
        ),
        (["--cpu"], 2, "there is no script to launch; example: accel launch"),
        (["--num_processes"], 2, "--num_processes needs a value"),
        (["--mixed_precision", "fp17", "SCRIPT"], 2, "expected one of no, fp16, bf16, fp8"),
        (["--multi_gpu", "--num_processes", "2", "SCRIPT"], 2, "pass --cpu"),
        (["--multi_gpu", "--cpu", "--num_processes", "2", "SCRIPT"], 2, "--cpu contradicts --multi_gpu"),
        (
            ["--use_megatron_lm", "SCRIPT"],
            2,
            "--use_megatron_lm needs megatron-core, which is not installed; pip install",
        ),
        (["--aws_access_key_id", "key", "SCRIPT"], 2, "is for a SageMaker job"),
        (["--config_file", "nowhere.yaml", "SCRIPT"], 2, "nowhere.yaml does not exist"),
        (["--module", "no.such.module"], 2, "no module named 'no.such.module'"),
        (["trian.py"], 2, "did you mean 'train.py'?"),
        (["--num_processes", "3", "--num_machines", "2", "SCRIPT"], 2, "is not divisible"),
    ],
)
def test_mistakes(words, code, message, script):
    folder = Path(script).parent
    done = accel(
        *(script if word == "SCRIPT" else word for word in words), cwd=folder, ACCEL_DEVICE_COUNT="0"
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("accel launch: error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_more_processes_than_gpus(script):
    done = accel("--num_processes", "3", script, ACCEL_DEVICE_COUNT="2")
    assert done.returncode == 2
    assert (
        "3 processes on this machine (--num_processes 3) need 3 accelerators, but this machine has 2"
        in done.stderr
    )
    assert "--cpu" in done.stderr


def test_a_misspelt_variable_is_told_once(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("from accel_state.world.process import PartialState\nPartialState()\n")
    done = accel("--cpu", str(path), ACCELERATE_DEBUG_MOD="1")
    note = (
        "accel: environment variable ACCELERATE_DEBUG_MOD is not read; did you mean ACCELERATE_DEBUG_MODE?\n"
    )
    assert (done.returncode, done.stderr) == (0, note)
    assert accel("--cpu", "--quiet", str(path), ACCELERATE_DEBUG_MOD="1").stderr == ""


def test_a_file_is_used_and_flags_beat_it(script, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\nmixed_precision: bf16\n")
    assert accel("--config_file", str(file), script).stdout.count("[] 2") == 2
    assert accel("--config_file", str(file), "--num_processes", "3", script).stdout.count("[] 3") == 3
    shown = accel("--config_file", str(file), "--mixed_precision", "fp16", "--dry_run", script).stdout
    assert shown.count("ACCELERATE_MIXED_PRECISION=fp16") == 2


def test_t15_typos_in_a_file_are_errors_at_any_depth(script, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("num_processes: 1\nfsdp_config:\n  fsdp_offload_parms: true\n")
    done = accel("--config_file", str(file), script)
    assert done.returncode == 2
    assert "fsdp_offload_parms" in done.stderr
    assert "fsdp_offload_params" in done.stderr


def test_a_section_of_the_file_that_is_not_used_is_mentioned(script, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("distributed_type: 'NO'\nuse_cpu: true\nfsdp_config:\n  fsdp_version: 2\n")
    done = accel("--config_file", str(file), script)
    assert done.returncode == 0
    assert f"accel: fsdp in {file} is not used by this run" in done.stderr
    done = accel("--cpu", "--fsdp_forward_prefetch", "true", script)
    assert done.returncode == 0
    assert "accel: --fsdp_forward_prefetch is used only if the script passes the plugin itself" in done.stderr
    assert "add --use_fsdp" in done.stderr


def test_accelerates_own_file_is_read_and_said(script, tmp_path):
    home = tmp_path / "home"
    theirs = home / "accelerate/default_config.yaml"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 1\nuse_cpu: true\n"
                      "mixed_precision: bf16\nmachine_rank: 0\nnum_machines: 1\ndowncast_bf16: 'no'\n")  # fmt: skip
    before = theirs.read_bytes()
    done = accel("--dry_run", script, HF_HOME=str(home))
    assert "ACCELERATE_MIXED_PRECISION=bf16" in done.stdout
    assert done.stderr.count("using Accelerate's configuration file") == 1
    assert theirs.read_bytes() == before


def test_flags_stop_at_two_dashes(script):
    assert accel("--cpu", "--", script, "x").stdout == "['x'] None\n"


def test_parse_flags_leaves_the_rest_alone():
    assert parse_flags(["--cpu", "a.py", "--cpu"]).rest == ("a.py", "--cpu")


def test_a_log_that_cannot_be_written_is_named_before_anything_runs(script, tmp_path):
    (tmp_path / "logs").write_text("a file, not a folder")
    done = accel("--cpu", "--num_processes", "2", "--log_dir", "logs", script, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "accel launch: error: logs/run_0.json cannot be written" in done.stderr
    assert "--log_dir" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("extra", [[], ["--num_processes", "2", "--log_dir", "logs"], ["--dry-run"]])
def test_words_that_are_no_text_are_passed_on(extra, tmp_path):
    (tmp_path / "show.py").write_text("import os, sys\nprint(os.fsencode(sys.argv[1]))")
    done = accel("--cpu", *extra, "show.py", os.fsdecode(b"a\xff"), cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "show.py" in done.stdout if extra == ["--dry-run"] else "b'a\\xff'" in done.stdout


@pytest.mark.parametrize("flag", ["--num_processes", "--mixed_precision", "--main_process_port"])
def test_an_empty_value_is_no_value(flag, script):
    # What a shell makes of --num_processes "$N" where N is not set.
    for words in ([flag, ""], [f"{flag}="]):
        done = accel("--cpu", "--dry-run", *words, script)
        assert done.returncode == 2, done.stdout
        assert f"{flag} is ''; expected" in done.stderr
    done = accel("--config_file", "", script)
    assert (done.returncode, "--config_file is ''; expected a value" in done.stderr) == (2, True)


def test_flags_without_use_on_one_machine_are_mentioned(script):
    done = accel("--cpu", "--num_processes", "2", "--rdzv-conf", "timeout=900", "--same_network", script)
    assert done.returncode == 0
    assert "accel: --rdzv-conf has no effect on one machine\n" in done.stderr
    assert "accel: --same_network has no effect on one machine\n" in done.stderr


@pytest.mark.parametrize("extra", [[], ["--dry-run"], ["--num_processes", "2"]])
def test_a_wrong_tee_leaves_nothing_behind(extra, script, tmp_path):
    done = accel("--cpu", "--tee", "9", *extra, script, TMPDIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("accel launch: error: --tee is '9'; expected 0, 1, 2 or 3")
    assert not list(tmp_path.glob("accel-logs-*"))


def test_debug_says_where_each_value_comes_from(script, tmp_path):
    (tmp_path / "c.yaml").write_text("num_processes: 2\nuse_cpu: true\n")
    done = accel("--debug", "--config_file", "c.yaml", "--mixed_precision", "bf16", script, cwd=tmp_path)
    assert "accel: num_processes is 2, from c.yaml, line 1: num_processes\n" in done.stderr
    assert "accel: mixed_precision is bf16, from flag --mixed_precision\n" in done.stderr
    assert "max_restarts" not in done.stderr
    assert done.returncode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c_ends_a_loop_of_a_shell_too(tmp_path):
    """A shell goes on with its loop after an exit code, 130 included, but not after a death by SIGINT."""
    script = tmp_path / "wait.py"
    script.write_text("import os, time\nopen(f'ready_{os.environ[\"RANK\"]}', 'w').close()\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_processes", "2", str(script)],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + 30
    while len(list(tmp_path.glob("ready_*"))) < 2:
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in err
    assert f"accel: ended by Ctrl-C; rank 0 was in {script}, line 3" in err


@pytest.mark.skipif(sys.platform == "win32", reason="signals and terminals of POSIX")
@pytest.mark.parametrize("from_terminal", [True, False])
def test_ctrl_c_while_the_script_imports_a_library(tmp_path, from_terminal):
    library = tmp_path / "lib/site-packages/heavy"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("from heavy import core\n")
    (library / "core.py").write_text(
        "import os, time\nopen(f'rank_{os.getpid()}', 'w').close()\ntime.sleep(60)\n"
    )
    script = tmp_path / "train.py"
    script.write_text("import heavy\n")
    words = ["-m", "accel_cli", "launch", "--cpu", "--num_processes", "2", "train.py"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(library.parent), *sys.path]), "COLUMNS": "400"}

    def wait_for_ranks():
        until = time.monotonic() + 30
        while len(found := list(tmp_path.glob("rank_*"))) < 2:
            assert time.monotonic() < until
            time.sleep(0.02)
        return [int(path.name.removeprefix("rank_")) for path in found]

    if from_terminal:
        import pexpect

        shell = pexpect.spawn(
            sys.executable, words, cwd=tmp_path, env=environ, dimensions=(40, 200), encoding="utf-8"
        )
        ranks = wait_for_ranks()
        shell.sendintr()
        shell.expect(pexpect.EOF, timeout=30)
        shell.close()
        shown, ended_by = shell.before, shell.signalstatus
    else:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=tmp_path, env=environ, start_new_session=True, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        ranks = wait_for_ranks()
        os.killpg(process.pid, signal.SIGINT)
        _, shown = process.communicate(timeout=30)
        ended_by = -process.returncode
    assert ended_by == signal.SIGINT
    assert [line for line in shown.splitlines() if "share" not in line] == [
        f"{'^C' if from_terminal else ''}accel: interrupted; ranks have 5 s to exit, Ctrl-C again kills them",
        f"accel: ended by Ctrl-C; rank 0 was in {script}, line 1",
    ]
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)
