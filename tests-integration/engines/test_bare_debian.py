"""README's commands on a machine that has nothing but Python. Run as root with `hatch run engines:bare`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TORCH = "torch==2.13.0"
# What PyTorch's wheels bring along, of which this library needs no more than they do.
OF_TORCH = (
    "torch",
    "torchgen",
    "functorch",
    "sympy",
    "networkx",
    "nvidia",
    "triton",
    "numpy",
    "mpmath",
    "setuptools",
)


def commands(heading: str) -> list[str]:
    """The lines of the first block of shell commands below a heading of the README."""
    section = README.partition(f"\n## {heading}\n")[2]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert block is not None, heading
    return [line.partition("  #")[0].strip() for line in block[1].splitlines()]


def pip_options() -> list[tuple[str, str]]:
    """How pip finds packages on this machine, as names and values of variables."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    found = dict(re.findall(r"^(?:global|install)\.([\w-]+)='(.*)'$", listed, re.MULTILINE))
    options = {
        f"PIP_{name.upper().replace('-', '_')}": value.replace("\\n", " ") for name, value in found.items()
    }
    given = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    return [*(options | given).items()]


class Bare:
    """A bare Debian with a clone of this repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, script: str, timeout: float) -> subprocess.CompletedProcess[str]:
        """Run a script of a shell in the clone, with this machine's network and sources of packages."""
        given = dict(pip_options()) | {"PIP_CONSTRAINT": "/constraint.txt", "REPOSITORY": "/given"}
        words_given = [word for value in given.values() for word in value.split()]
        paths = {Path(word) for word in words_given if word.startswith("/")}
        # An index in a folder links to files that are beside it.
        paths |= {
            Path(word.removeprefix("file://")).parent for word in words_given if word.startswith("file://")
        }
        shared = sorted(path for path in {*paths, Path("/etc/resolv.conf")} if path.exists())
        mounts = [f"mount -t proc proc {self.folder}/proc", f"mount --rbind /dev {self.folder}/dev"]
        for path in shared:
            inside = self.folder / path.relative_to("/")
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.mkdir(exist_ok=True) if path.is_dir() else inside.touch()
            mounts.append(f"mount --bind {path} {inside}")
        environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8", **given}
        words = ["env", "-i", *(f"{name}={value}" for name, value in environ.items())]
        chroot = shlex.join(["chroot", str(self.folder), *words, "bash", "-ec", script])
        alone = ["unshare", "--mount", "--fork", "--kill-child"]  # the mounts end with the script
        return subprocess.run(
            [*alone, "bash", "-ec", "; ".join([*mounts, f"exec {chroot}"])],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A copy of the bare system, to which the repository was given."""
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("it makes a system in a folder, which needs root and Linux")
    made = Path(os.environ.get("ACCEL_BARE_FOLDER", Path.home() / ".cache/accel/bare-debian"))
    subprocess.run(["bash", str(ROOT / "tools/engines/bare_debian.sh"), str(made)], check=True)
    folder = tmp_path_factory.mktemp("bare") / "root"
    subprocess.run(["cp", "-a", "--reflink=auto", str(made), str(folder)], check=True)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "given")], check=True)
    (folder / "constraint.txt").write_text(TORCH)
    yield Bare(folder)
    shutil.rmtree(folder)


def test_nothing_is_there_that_a_laptop_may_lack(bare):
    found = bare.run("for name in gcc cc ip ssh zsh; do command -v $name || true; done", 60)
    assert (found.stdout, found.returncode) == ("", 0), found.stderr


@pytest.mark.timeout(1800)
def test_the_install_lines_and_a_run(bare):
    began = time.monotonic()
    done = bare.run("; ".join(["cd /root", *commands("Install")]), 1800)
    assert done.returncode == 0, done.stdout + done.stderr
    print(f"installed in {time.monotonic() - began:.0f} s")
    site = next(bare.folder.glob("root/accel/.venv/lib/python3*/site-packages"))
    sizes = {
        entry.name: sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())
        for entry in site.iterdir()
        if not entry.name.lower().startswith(OF_TORCH) and not entry.name.startswith("pip")
    }
    print(f"{sum(sizes.values()) / 1e6:.0f} MB besides PyTorch")
    assert sum(sizes.values()) <= 150e6, sorted(sizes.items(), key=lambda item: -item[1])[:10]
    script = README.partition("```diff\n")[2].partition("```")[0]
    loop = "".join(f"{line[1:]}\n" for line in script.splitlines() if not line.startswith("-"))
    (bare.folder / "root/loop.py").write_text(loop)
    ran = bare.run(
        ". /root/accel/.venv/bin/activate; cd /root; accel launch --cpu --num_processes 2 loop.py", 300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [line.split()[-2] for line in ran.stdout.splitlines()] == ["0", "1", "2"], ran.stdout


@pytest.mark.timeout(3600)
def test_the_two_commands(bare):
    demo, tests = commands("Try it in two commands")
    began = time.monotonic()
    done = bare.run(f"git clone --quiet /given /root/demo; cd /root/demo; {demo}", 1800)
    assert done.returncode == 0, done.stdout + done.stderr
    took = time.monotonic() - began
    print(f"from nothing to the demo's table in {took:.0f} s\n{done.stdout[-1500:]}")
    few = bare.run(f"cd /root/demo; {tests} packages/accel-state/tests/test_messages.py", 1800)
    assert few.returncode == 0, few.stdout + few.stderr
    assert took <= 180
