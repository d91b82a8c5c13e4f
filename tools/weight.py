"""What each part of the code weighs, beside what it may weigh.

A line of code is neither blank nor a comment nor part of a docstring. ``python tools/weight.py`` prints the parts, the
verbs of a strategy and the class names that two modules share. With ``--check`` it exits with 1 if
anything is over its limit: make room in that part first, or ask what the new cell is worth (CONTRIBUTING, "What a cell
costs").
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Part:
    """A part of the code and its limit.

    Attributes:
        name: as it is printed.
        goal: the code lines that it may weigh.
        paths: its folders and files, from the root of the repository. A path inside another part's belongs to the part
            that names it more exactly.
        limit: what it may weigh until it reaches its goal: what it weighed last, never more. None: the goal.
    """

    name: str
    goal: int
    paths: tuple[str, ...]
    limit: int | None = None

    @property
    def allowed(self) -> int:
        """The code lines above which the check fails."""
        return self.goal if self.limit is None else self.limit


@dataclass(frozen=True)
class Figure:
    """A number beside its goal and its limit, which it must not exceed."""

    name: str
    value: int
    goal: int
    limit: int


def _source(package: str) -> str:
    return f"packages/{package.replace('_', '-')}/src/{package}"


def _train(*paths: str) -> tuple[str, ...]:
    return tuple(f"{_source('accel_train')}/{path}" for path in paths)


PARTS = (
    Part("accel-state", 15_000, (_source("accel_state"),), limit=15_888),
    Part("accel-ckpt", 12_000, (_source("accel_ckpt"),), limit=13_766),
    Part("accel-bigmodel", 9_000, (_source("accel_bigmodel"),), limit=9_164),
    Part("accel-cli", 8_500, (_source("accel_cli"),), limit=8_947),
    Part("accel-train: core", 13_000, _train(""), limit=15_125),
    Part("accel-train: data", 5_000, _train("data"), limit=5_176),
    Part(
        "proofs",
        1_800,
        (f"{_source('accel_cli')}/proof", f"{_source('accel_cli')}/commands/prove.py", *_train("proof")),
    ),
    Part(
        "engines of jobs",
        2_500,
        (
            f"{_source('accel_cli')}/commands/jobs.py",
            *_train("tracking/kubeflow.py"),
            *(
                f"{_source('accel_state')}/launching/submission/{name}.py"
                for name in (
                    *(
                        "base",
                        "dstack",
                        "kubernetes",
                        "kubernetes_api",
                        "kubernetes_objects",
                        "outcomes",
                        "ray",
                    ),
                    *("ray_function", "ray_machines", "skypilot", "slurm", "tools"),
                )
            ),
            *(
                f"{_source('accel_state')}/launching/machines/{name}.py"
                for name in ("failures", "machine_watch", "watched_agent")
            ),
            *(
                f"{_source('accel_state')}/clusters/{name}.py"
                for name in ("alone", "aws_batch", "dstack", "vertex_ai", "volcano")
            ),
        ),
        limit=2_816,
    ),
)
OPTIONS_GOAL, OPTIONS_LIMIT = 12_500, 12_500
# What a user may leave alone: together 12,500 lines, and none of them more than 2,500.
OPTIONS = (
    Part("pipelines", 2_500, _train("strategies/pipeline", "rehearsal.py")),
    Part(
        "experts",
        2_500,
        _train(*(f"strategies/fsdp2/{name}.py" for name in ("experts", "expert_lists", "expert_tokens"))),
    ),
    Part("Muon", 2_500, _train("muon")),
    Part("losses", 2_500, _train("losses")),
    Part("mixtures", 2_500, _train("data/mixing")),
    Part("sleep", 2_500, _train("offload", "loop/offloading.py")),
    Part("cp and sp", 2_500, _train("sequence")),
    Part("fp8", 2_500, _train("precision/fp8", "plugins/fp8.py", "setup/fp8.py")),
    Part("XLA", 2_500, _train("strategies/xla.py", "plugins/xla.py")),
    Part("Megatron-LM", 2_500, _train("strategies/megatron")),
    Part(
        "DeepSpeed",
        2_500,
        _train("strategies/deepspeed", "plugins/deepspeed.py", "plugins/deepspeed_config.py"),
    ),
)
OTHERS = (
    Part("tools", 12_500, ("tools",), limit=16_226),
    Part("tests", 85_000, ("tests-integration", "packages/*/tests"), limit=100_082),
)
SHARED_CLASS_NAMES_LIMIT = 1
VERBS = {"Strategy": 28, "StateAdapter": 18}  # how many each may have


@functools.cache
def code_lines(text: str) -> int:
    """The lines of a module's source that hold code."""
    documented: set[int] = set()
    quoted: set[int] = set()  # lines of strings, where "#" begins no comment
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno != node.lineno:
            quoted.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if number in quoted or (line.strip() and not line.lstrip().startswith("#"))
    }
    return len(lines - documented)


def weigh(parts: Iterable[Part], root: Path = ROOT) -> dict[str, int]:
    """The code lines of each part, by its name. A file counts once, for the part that names it most exactly."""
    parts = tuple(parts)
    owners: dict[Path, tuple[int, str]] = {}
    for part in parts:
        for pattern in part.paths:
            for place in root.glob(pattern):
                for file in [place] if place.is_file() else place.rglob("*.py"):
                    depth = len(place.relative_to(root).parts)
                    owners[file] = max(owners.get(file, (0, "")), (depth, part.name))
    weights = dict.fromkeys((part.name for part in parts), 0)
    for file, (_, name) in owners.items():
        weights[name] += code_lines(file.read_text(encoding="utf-8"))
    return weights


def public_methods(path: Path, name: str) -> list[str]:
    """The methods and properties without an underscore of a class in a module."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return [
                entry.name
                for entry in node.body
                if isinstance(entry, ast.FunctionDef) and not entry.name.startswith("_")
            ]
    raise ValueError(f"{path} has no class {name!r}.")


def shared_class_names(root: Path = ROOT) -> dict[str, list[str]]:
    """The public class names that more than one module of the packages defines, with these modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in sorted(root.glob("packages/*/src/**/*.py")):
        for name in re.findall(r"^class ([^_\W]\w*)", file.read_text(encoding="utf-8"), re.MULTILINE):
            places[name].append(file.relative_to(root).as_posix().split("/src/")[1])
    return {name: modules for name, modules in sorted(places.items()) if len(modules) > 1}


def figures(root: Path = ROOT) -> Iterator[Figure]:
    """Everything that has a limit."""
    weights = weigh((*PARTS, *OPTIONS, *OTHERS), root)
    for part in (*PARTS, *OPTIONS, *OTHERS):
        yield Figure(part.name, weights[part.name], part.goal, part.allowed)
    yield Figure("options together", sum(weights[part.name] for part in OPTIONS), OPTIONS_GOAL, OPTIONS_LIMIT)
    packages = sum(weights[part.name] for part in (*PARTS, *OPTIONS))
    yield Figure("packages together", packages, 74_000, sum(part.allowed for part in PARTS) + OPTIONS_LIMIT)
    strategies = root / _source("accel_train") / "strategies"
    for name, module in (("Strategy", "base.py"), ("StateAdapter", "state_adapter.py")):
        verbs = len(public_methods(strategies / module, name))
        yield Figure(f"verbs of {name}", verbs, VERBS[name], VERBS[name])
    yield Figure("class names of two modules", len(shared_class_names(root)), 0, SHARED_CLASS_NAMES_LIMIT)


def main(arguments: list[str]) -> int:
    """Print all figures; with ``--check`` only those over their limits, and 1 if there are any."""
    found = list(figures())
    if "--check" not in arguments:
        print(f"{'':28}{'is':>8}{'limit':>8}{'goal':>8}")
        for figure in found:
            print(f"{figure.name:28}{figure.value:8,}{figure.limit:8,}{figure.goal:8,}")
        for name, modules in shared_class_names().items():
            print(f"  {name}: {', '.join(modules)}")
        return 0
    over = [figure for figure in found if figure.value > figure.limit]
    for figure in over:
        print(
            f"{figure.name}: {figure.value:,}, which is over its limit of {figure.limit:,} (tools/weight.py)"
        )
    print(f"weight: {len(over)} of {len(found)} figures over their limits")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
