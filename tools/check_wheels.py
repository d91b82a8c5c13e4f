"""Prove that each built wheel works with only the dependencies that it declares.

Builds all distributions with ``hatch build --all``, then gives each package a fresh virtual environment that
holds its wheel, the wheels of the packages below it, and links to exactly the third-party distributions that
their metadata requires (links, so that nothing is downloaded twice). In this environment every public name must
import, and the other packages must be absent. Into the last one go the test kit and the strategy of an outside package,
which a test of the conformance suite must find. Run from the repository root, where the third-party distributions are
installed: ``python tools/check_wheels.py``.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from email.message import Message
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Package → the packages below it, which are installed with it; no other may be.
BELOW: dict[str, tuple[str, ...]] = {
    "accel-state": (),
    "accel-ckpt": ("accel-state",),
    "accel-bigmodel": ("accel-ckpt", "accel-state"),
    "accel-train": ("accel-ckpt", "accel-state"),
    "accel-cli": ("accel-train", "accel-bigmodel", "accel-ckpt", "accel-state"),
}

_PROBE = """
import importlib, importlib.util, sys
package, absent = sys.argv[1], sys.argv[2].split(",") if sys.argv[2] else []
module = importlib.import_module(package)
assert "site-packages" in module.__file__, module.__file__
for name in module.__all__:
    getattr(module, name)
visible = [name for name in absent if importlib.util.find_spec(name) is not None]
assert not visible, f"{package} can see {visible}"
print(f"{package}: {len(module.__all__)} public names import")
"""


ROOT = Path(__file__).parents[1]
OUTSIDE = ("tools", "docs/examples/zero_redundancy")
"""Projects that are no packages of ours, but are installed beside them."""
OUTSIDE_TEST = (
    "--conformance",
    "zero_redundancy",
    "-k",
    "test_training and 1-zero_redundancy-2",
    "-p",
    "no:cacheprovider",
    "-q",
)


class WheelError(RuntimeError):
    """A wheel is not what it should be."""


def import_name(package: str) -> str:
    """``accel-state`` → ``accel_state``."""
    return package.replace("-", "_")


def build(folder: Path) -> dict[str, Path]:
    """Build every workspace member into ``folder``; package → wheel."""
    _hatch_build("--all", str(folder))
    wheels: dict[str, Path] = {}
    for package in BELOW:
        found = sorted(folder.glob(f"{import_name(package)}-*.whl"))
        if len(found) != 1:
            raise WheelError(
                f"{package}: expected one wheel in {folder}, found {[path.name for path in found]}"
            )
        wheels[package] = found[0]
    return wheels


def _hatch_build(*words: str, cwd: Path = ROOT) -> None:
    hatch = shutil.which("hatch")
    if hatch is None:
        raise WheelError("hatch is not on the PATH; install it with: python3 -m pip install 'hatch>=1.18'")
    subprocess.run([hatch, "build", *words], check=True, stdout=subprocess.DEVNULL, cwd=cwd)


def wheel_metadata(wheel: Path) -> Message:
    """The METADATA of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        # Not one of a folder inside the package, such as that of the answered accelerate.
        name = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        return HeaderParser().parsestr(archive.read(name).decode())


def check_contents(package: str, wheel: Path) -> list[str]:
    """What is missing from a wheel or does not belong in it."""
    root = import_name(package)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    needed_files = (f"{root}/py.typed", f"{root}/__init__.pyi")
    problems = [f"{package}: {wheel.name} has no {path}" for path in needed_files if path not in names]
    if not any(re.fullmatch(r"[^/]+\.dist-info/licenses/LICENSE", name) for name in names):
        problems.append(f"{package}: {wheel.name} has no LICENSE")
    strays = [name for name in names if not name.startswith((f"{root}/", f"{root}-"))]
    problems += [f"{package}: {name} does not belong in {wheel.name}" for name in strays]
    ours = {one.name for one in requirements(wheel_metadata(wheel)) if one.name in BELOW}
    if not ours <= set(BELOW[package]):
        problems.append(f"{package}: depends on {sorted(ours - set(BELOW[package]))}, which is not below it")
    return problems


def requirements(message: Message) -> list[Requirement]:
    """Requirements of a METADATA that apply on this machine, without extras."""
    every = [Requirement(line) for line in message.get_all("Requires-Dist") or []]
    return [one for one in every if one.marker is None or one.marker.evaluate({"extra": ""})]


def third_party(wheels: Iterable[Path]) -> set[str]:
    """Names of the installed distributions that ``wheels`` need, directly and through others."""
    waiting = [requirement for wheel in wheels for requirement in requirements(wheel_metadata(wheel))]
    needed: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in needed or name in BELOW:
            continue
        distribution = metadata.distribution(name)
        if not requirement.specifier.contains(distribution.version, prereleases=True):
            raise WheelError(f"{name} {distribution.version} is installed, {requirement} is required")
        needed.add(name)
        waiting += requirements(HeaderParser().parsestr(distribution.read_text("METADATA") or ""))
    return needed


def link(distributions: Iterable[str], folder: Path) -> None:
    """Link into ``folder`` what the distributions installed at the top of their site-packages."""
    folder.mkdir()
    for name in distributions:
        for file in metadata.distribution(name).files or []:
            top = file.parts[0]
            target = Path(str(metadata.distribution(name).locate_file(top)))
            if top not in {"..", "__pycache__"} and not (folder / top).exists():
                (folder / top).symlink_to(target, target_is_directory=target.is_dir())


def install(wheels: list[Path], home: Path) -> Path:
    """Make an environment of these wheels and what they need; its interpreter."""
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python)]
    _run([*command, "install", "--quiet", "--no-deps", "--no-index", *map(str, wheels)])
    links = home / "dependencies"
    link(third_party(wheels), links)
    site = next((home / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(f"{links}\n")
    return python


def check_outside(wheels: dict[str, Path], folder: Path) -> str:
    """Install the test kit and an outside strategy beside all packages, and run a test of the conformance suite on it.

    Returns:
        One line that says what was run.

    Raises:
        WheelError: with the output of the command that failed.
    """
    for project in OUTSIDE:
        _hatch_build("-t", "wheel", str(folder / "outside"), cwd=ROOT / project)
    python = install([*wheels.values(), *(folder / "outside").glob("*.whl")], folder / "with-testkit")
    (folder / "project").mkdir()
    (folder / "project" / "test_conformance.py").write_text("from testkit.conformance_suite import *\n")
    output = _run([str(python), "-m", "pytest", *OUTSIDE_TEST], cwd=folder / "project")
    return f"accel-testkit: pytest {' '.join(OUTSIDE_TEST)}: {output.strip().splitlines()[-1]}"


def check_install(package: str, wheels: dict[str, Path], folder: Path) -> str:
    """Install ``package`` and those below it into a fresh environment under ``folder`` and import it.

    Returns:
        One line that says what was imported.

    Raises:
        WheelError: with the output of the command that failed.
    """
    home = folder / package
    python = install([wheels[name] for name in (package, *BELOW[package])], home)
    absent = [import_name(name) for name in BELOW if name != package and name not in BELOW[package]]
    output = _run([str(python), "-I", "-c", _PROBE, import_name(package), ",".join(absent)])
    for script in _scripts(wheels[package]):
        _run([str(home / "bin" / script), "--help"])
        output += f"{package}: {script} --help works\n"
    return output.strip()


def _scripts(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".dist-info/entry_points.txt"):
                section = archive.read(name).decode().partition("[console_scripts]")[2].partition("[")[0]
                return [line.split("=")[0].strip() for line in section.splitlines() if "=" in line]
    return []


def _run(command: list[str], cwd: Path | None = None) -> str:
    done = subprocess.run(command, text=True, capture_output=True, check=False, cwd=cwd)
    if done.returncode:
        raise WheelError(
            f"{' '.join(command[:3])} … exited with {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def main(arguments: list[str] | None = None) -> int:
    """Build and check; 1 when a wheel fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="accel-wheels-") as temporary:
        folder = Path(temporary)
        wheels = build(folder / "dist")
        for package, wheel in wheels.items():
            problems += check_contents(package, wheel)
            try:
                print(check_install(package, wheels, folder), flush=True)
            except WheelError as error:
                problems.append(f"{package}: {error}")
        try:
            print(check_outside(wheels, folder), flush=True)
        except WheelError as error:
            problems.append(f"accel-testkit: {error}")
    for problem in problems:
        print(problem)
    print(f"wheels: {len(problems)} problems in {len(BELOW)} packages")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
