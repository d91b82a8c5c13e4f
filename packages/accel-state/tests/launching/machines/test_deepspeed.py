"""The commands of DeepSpeed's launchers; tests-integration/engines/test_deepspeed_launchers.py runs them."""

from __future__ import annotations

import os

import pytest

from accel_state.config.flags import parse_flags
from accel_state.config.merge import resolve
from accel_state.errors import ConfigError, LaunchError
from accel_state.launching.machines.deepspeed import (
    check_deepspeed,
    deepspeed_argv,
    deepspeed_size,
    hosts_of,
    uses_deepspeed_launcher,
)
from accel_state.launching.target import Target


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# machines\nworker-1 slots=4\n\nworker-2 slots=2\n")
    return str(path)


def configured(*flags):
    return resolve(environ={}, flags=parse_flags(("--use_deepspeed", *flags)), use_default_file=False).local()


TRAIN = Target("train.py", ("--lr", "1"))


def argv(*flags, target=TRAIN, port=None):
    return deepspeed_argv(configured(*flags), target, "python", {"A": "1"}, port)


def test_a_launcher_or_a_hostfile_chooses_deepspeeds(hostfile):
    assert uses_deepspeed_launcher(configured("--deepspeed_multinode_launcher", "mpich"))
    assert uses_deepspeed_launcher(configured("--deepspeed_hostfile", hostfile))
    assert not uses_deepspeed_launcher(configured())
    standard = ("--deepspeed_multinode_launcher", "standard", "--deepspeed_hostfile", hostfile)
    assert not uses_deepspeed_launcher(configured(*standard))


def test_pdsh_starts_the_ranks_with_their_variables(hostfile):
    words = argv("--deepspeed_hostfile", hostfile, "--main_process_port", "7")
    assert words[:3] == ("python", "-m", "deepspeed.launcher.runner")
    assert words[3:] == ("--hostfile", hostfile, "--launcher", "pdsh", "--no_local_rank", "--master_addr", "worker-1",
                         "--master_port", "7", "--no_python", "env", "A=1", "MASTER_ADDR=worker-1", "MASTER_PORT=7",
                         "python", "train.py", "--lr", "1")  # fmt: skip
    assert deepspeed_size(configured("--deepspeed_hostfile", hostfile)) == (6, 2)


def test_nossh_runs_this_machines_part(hostfile):
    words = argv("--deepspeed_multinode_launcher", "nossh", "--deepspeed_hostfile", hostfile, "--machine_rank", "1",
                 "--num_processes", "4")  # fmt: skip
    text = " ".join(words)
    assert "--no_ssh --node_rank 1" in text
    assert "--num_accelerators 2" in text


def test_slurm_places_the_interpreter_itself(hostfile):
    words = argv("--deepspeed_multinode_launcher", "slurm", "--deepspeed_hostfile", hostfile)
    assert words[-3:] == ("train.py", "--lr", "1")
    assert "--no_python" not in words


def test_mpi_uses_the_whole_hostfile(hostfile):
    words = argv(
        "--deepspeed_multinode_launcher", "openmpi", "--deepspeed_hostfile", hostfile, "--num_processes", "4"
    )
    assert "--num_accelerators" not in words  # DeepSpeed's runner refuses it


def test_modules_and_programs(hostfile):
    flags = ("--deepspeed_hostfile", hostfile)
    assert argv(*flags, target=Target("a.b", kind="module"))[-3:] == ("python", "-m", "a.b")
    assert argv(*flags, target=Target("prog", kind="program"))[-1] == "prog"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("worker-1", "line 1 .*'worker-1'.*slots=4"),
        ("a slots=1\na slots=2", "line 2.*names a again"),
        ("a slots=99999999999", "line 1 .*slots=99999999999"),
        ("a slots=1\n-oProxyCommand=x slots=1", "line 2 .*-oProxyCommand"),
        ("a slots=-1", "line 1 "),
        ("b" * 10_000, "line 1 .{0,500}$"),
        ("#\n", "no host"),
    ],
)
def test_a_wrong_hostfile_is_named(tmp_path, text, match):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match=match):
        hosts_of(str(tmp_path / "hosts"))


def test_a_missing_hostfile_is_named(tmp_path):
    with pytest.raises(LaunchError, match=r"nothing'.*--deepspeed_hostfile"):
        hosts_of(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (
            ("--deepspeed_inclusion_filter", "worker-1", "--deepspeed_exclusion_filter", "worker-2"),
            "exclude each other",
        ),
        (("--deepspeed_inclusion_filter", "worker-9"), "worker-9.*worker-1, worker-2"),
        (("--deepspeed_exclusion_filter", "worker-2:2"), "slot 2 of worker-2.*0 to 1"),
        (
            ("--deepspeed_inclusion_filter", "worker-1", "--deepspeed_multinode_launcher", "mpich"),
            "mpich.*every slot",
        ),
        (("--deepspeed_multinode_launcher", "slurm", "-m"), "--module.*scripts only"),
    ],
)
def test_what_does_not_fit_is_named(hostfile, flags, match):
    with pytest.raises(ConfigError, match=match):
        check_deepspeed(configured("--deepspeed_hostfile", hostfile, "--dry_run", *flags), {})


def test_several_machines_need_a_hostfile():
    with pytest.raises(ConfigError, match="--deepspeed_hostfile"):
        check_deepspeed(
            configured("--deepspeed_multinode_launcher", "pdsh", "--num_machines", "2", "--dry_run"), {}
        )


def test_hostfiles_that_are_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr("accel_state.whole_files._PATIENCE", 0.2)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for place in (tmp_path, tmp_path / "pipe", tmp_path / "bytes", "/dev/zero"):
        with pytest.raises(LaunchError, match=r"the hostfile .* cannot be read"):
            hosts_of(str(place))
