"""Check where each public name of Accelerate is imported from here.

``tools/data/accelerate_api.tsv`` holds the public names of Accelerate 1.15 and the package that is each one's
home. What a package really exports is read from its stub, ``__init__.pyi``; nothing is imported, so the check runs
without torch. Run from the repository root: ``python tools/import_table.py`` tells whether names and packages agree,
and ``--missing`` lists the names of Accelerate's modules (``tools/data/accelerate_modules.tsv``) that the answered
``accelerate`` does not have.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data" / "accelerate_api.tsv"
MODULES = Path("tools/data/accelerate_modules.tsv")
ALIAS = Path("packages/accel-cli/src/accel_cli/as_accelerate/path")
PACKAGES = ("accel-state", "accel-ckpt", "accel-bigmodel", "accel-train", "accel-cli")
# A script imports from one place where it can: training names are re-exported by accel-train, inference by
# bigmodel.
PREFERRED = ("accel-train", "accel-bigmodel", "accel-ckpt", "accel-state", "accel-cli")
NOT_YET = "not yet"
# Names of which two packages have a version of their own: the one that is not at home loads onto one device, or into
# shards, and takes no map of several devices.
TWO_VERSIONS = ("load_checkpoint_in_model",)


@dataclass(frozen=True)
class Row:
    """A name of Accelerate, the module it is imported from there, and its home here."""

    module: str
    name: str
    home: str


def load_rows(path: Path = DATA) -> list[Row]:
    """The rows of the data file, in its order."""
    with path.open(encoding="utf-8", newline="") as file:
        return [Row(**row) for row in csv.DictReader(file, delimiter="\t")]


def read_stub(path: Path) -> list[tuple[str, str]]:
    """Home module and name of each public name in a stub, as they stand there; without ``__version__``."""
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    named = [(words[1], words[3]) for words in lines if words[:1] == ["from"]]
    return [(home, name) for home, name in named if name != "__version__"]


def exports(root: Path) -> dict[str, frozenset[str]]:
    """Package to the public names that its stub lists."""
    stubs = {
        package: root / "packages" / package / "src" / package.replace("-", "_") / "__init__.pyi"
        for package in PACKAGES
    }
    return {package: frozenset(name for _, name in read_stub(stub)) for package, stub in stubs.items()}


def missing(root: Path) -> list[str]:
    """The names of Accelerate's modules that no stub of the answered package has."""
    found = []
    with (root / MODULES).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            place = root / ALIAS / row["module"].replace(".", "/")
            stub = place / "__init__.pyi" if place.is_dir() else place.with_suffix(".pyi")
            if not stub.exists() or row["name"] not in {name for _, name in read_stub(stub)}:
                found.append(f"{row['module']}.{row['name']}")
    return found


def import_line(row: Row, exported: Mapping[str, frozenset[str]]) -> str:
    """The import that replaces Accelerate's, or ``not yet``.

    Where two packages have versions of their own, it is the version of the name's home, which takes the arguments
    that Accelerate's takes.
    """
    for package in (row.home,) if row.name in TWO_VERSIONS else PREFERRED:
        if row.name in exported[package]:
            return f"from {package.replace('-', '_')} import {row.name}"
    return NOT_YET


def problems(rows: Sequence[Row], exported: Mapping[str, frozenset[str]]) -> list[str]:
    """Available names that are not at home, or that a training or inference script would have to look for."""
    found = []
    for row in rows:
        holders = [package for package in PACKAGES if row.name in exported[package]]
        if holders and row.home not in holders:
            found.append(f"{row.name}: its home is {row.home}, but only {', '.join(holders)} exports it")
        in_reach = row.home in {"accel-state", "accel-ckpt", "accel-train"}
        if (
            holders
            and in_reach
            and row.module in {"accelerate", "accelerate.utils"}
            and "accel-train" not in holders
        ):
            found.append(f"{row.name}: {row.module} has it, accel_train does not re-export it")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print what disagrees, or with ``--missing`` names without a counterpart; 1 when anything disagrees."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--missing", action="store_true", help="print names without a counterpart instead")
    parser.add_argument("--root", type=Path, default=Path(), help="repository root")
    options = parser.parse_args(arguments)
    if options.missing:
        print("\n".join(missing(options.root)))
        return 0
    rows, exported = load_rows(), exports(options.root)
    found = problems(rows, exported)
    for problem in found:
        print(problem)
    print(f"imports: {len(found)} problems in {len(rows)} names")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
