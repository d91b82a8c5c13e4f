"""Which objects of a plain PyTorch script are the model, the optimizer, the loaders, and where they are made."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import libcst as cst

from accel_cli.migration.loop_facts import Facts, Frame, Loop, call_name
from accel_cli.migration.result import Remark

__all__ = ["NotUnderstoodError", "Roles", "find_roles"]

_PARAMETERS = frozenset({"parameters", "named_parameters"})
_CUDA = re.compile(r"cuda|mps|xpu|accelerator")


class NotUnderstoodError(Exception):
    """A loop that is not one of the shapes.

    Args:
        line: where.
        text: the problem, and the next step.
    """

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.remark = Remark(line, text)


@dataclasses.dataclass
class Roles:
    """The objects of a script, by their names in the frame that makes them.

    Attributes:
        home: the frame that makes them.
        models, optimizers, schedulers, loaders: names to prepare, in the order of their first assignment.
        devices: names of the device.
        scalers: names of gradient scalers.
        samplers: names of distributed samplers.
        evaluated: loaders of loops without backward whose results can be gathered.
        unprepared: names of schedulers that step once per epoch; prepared ones step once per process.
        made: number of the statement of the home's body after which all of them exist.
        first: number of the statement of the home's body that makes the first of them, or the device.
        notes: remarks for the reader.
    """

    home: Frame
    models: list[str] = dataclasses.field(default_factory=list)
    optimizers: list[str] = dataclasses.field(default_factory=list)
    schedulers: list[str] = dataclasses.field(default_factory=list)
    loaders: list[str] = dataclasses.field(default_factory=list)
    devices: set[str] = dataclasses.field(default_factory=set)
    scalers: set[str] = dataclasses.field(default_factory=set)
    samplers: set[str] = dataclasses.field(default_factory=set)
    evaluated: list[str] = dataclasses.field(default_factory=list)
    unprepared: list[str] = dataclasses.field(default_factory=list)
    made: int = -1
    first: int = 0
    notes: list[Remark] = dataclasses.field(default_factory=list)

    @property
    def prepared(self) -> list[str]:
        """The names in the order of ``prepare``."""
        return [*self.models, *self.optimizers, *self.loaders, *self.evaluated, *self.schedulers]


def find_roles(facts: Facts, gathers: Any) -> Roles:
    """Find the roles.

    Args:
        facts: the frames of the module.
        gathers: whether the results of a loop without backward can be gathered; called with a ``For``.

    Raises:
        NotUnderstoodError: the script has none of the shapes that are understood; names the line.
    """
    backwards = [
        (frame, call)
        for frame in facts.frames.values()
        for call in frame.methods
        if call.method == "backward"
    ]
    line = backwards[0][1].line
    homes = [frame for frame in facts.frames.values() if _optimizer_names(frame)]
    if not homes:
        raise NotUnderstoodError(
            line, "backward() is called, but no optimizer is made from model.parameters() here"
        )
    if len(homes) > 1:
        raise NotUnderstoodError(line, f"optimizers are made in {len(homes)} functions; one is understood")
    roles = Roles(homes[0])
    facts.resolve_names(roles.home)
    _name_objects(facts, roles)
    if not roles.optimizers:
        raise NotUnderstoodError(
            line, f"{', '.join(_optimizer_names(roles.home))}: step() is not called by this name where backward() is; "
            "pass the optimizer to that function by name",
        )  # fmt: skip
    for frame, call in backwards:
        if frame is not roles.home and not frame.roles:
            raise NotUnderstoodError(
                call.line, f"{frame.name}() calls backward(), but is not called with the model by name from "
                f"{roles.home.name or 'the module'}",
            )  # fmt: skip
        if not call.loops:
            raise NotUnderstoodError(call.line, "backward() is called outside of a loop over batches")
    _find_loops(facts, roles, gathers)
    _find_places(facts, roles)
    return roles


def _optimizer_names(frame: Frame) -> dict[str, tuple[str, ...]]:
    """Names of optimizers that a frame makes, and of the models whose parameters they get."""
    found: dict[str, tuple[str, ...]] = {}
    for made in frame.assignments:
        if len(made.targets) != 1 or not isinstance(made.value, cst.Call):
            continue
        owners = tuple(dict.fromkeys(_parameter_owners(made.value)))
        name = call_name(made.value)
        if owners and not name.endswith(("sum", "list", "max", "next", "len")):
            found[made.targets[0]] = owners
    return found


def _parameter_owners(call: cst.Call) -> Iterator[str]:
    class Owners(cst.CSTVisitor):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[str] = []

        def visit_Call(self, node: cst.Call) -> None:
            func = node.func
            if (
                isinstance(func, cst.Attribute)
                and func.attr.value in _PARAMETERS
                and isinstance(func.value, cst.Name)
            ):
                self.found.append(func.value.value)

    owners = Owners()
    for argument in call.args:
        argument.value.visit(owners)
    yield from owners.found


def _name_objects(facts: Facts, roles: Roles) -> None:
    home = roles.home
    optimizers = _optimizer_names(home)
    stepped = {
        frame.roles.get(call.owner, "")
        for frame in facts.frames.values()
        for call in frame.methods
        if call.method == "step"
    }
    for made in home.assignments:
        if not isinstance(made.value, cst.Call | cst.IfExp | cst.SimpleString):
            continue
        name = call_name(made.value)
        for target in made.targets:
            if name.endswith("GradScaler"):
                roles.scalers.add(target)
            elif name.endswith("DistributedSampler"):
                roles.samplers.add(target)
            elif (
                name.endswith("device") or isinstance(made.value, cst.IfExp | cst.SimpleString)
            ) and _CUDA.search(cst.Module([]).code_for_node(made.value)):
                roles.devices.add(target)
    roles.optimizers = [name for name in optimizers if _is_stepped(facts, name, stepped)]
    roles.models = list(dict.fromkeys(model for name in roles.optimizers for model in optimizers[name]))
    for model in roles.models:
        if not home.assigned(model):
            made = home.assigned(roles.optimizers[0])[0]
            raise NotUnderstoodError(
                made.line, f"the model {model} is not made in the same function as its optimizer"
            )


def _is_stepped(facts: Facts, name: str, stepped: set[str]) -> bool:
    if name in stepped:
        return True
    for frame in facts.frames.values():  # scaler.step(optimizer)
        for call in frame.methods:
            first = call.call.args[0].value if call.method == "step" and call.call.args else None
            if isinstance(first, cst.Name) and frame.roles.get(first.value) == name:
                return True
    return False


def _find_loops(facts: Facts, roles: Roles, gathers: Any) -> None:
    home = roles.home
    trained: list[Loop] = []
    seen: dict[str, list[tuple[Frame, Loop]]] = {}
    for frame in facts.frames.values():
        training = {
            id(call.loops[-1]): call.loops[-1]
            for call in frame.methods
            if call.method == "backward" and call.loops
        }
        for loop in training.values():
            loader = frame.roles.get(loop.loader)
            if loader is None:
                raise NotUnderstoodError(
                    loop.line, "the training loop iterates over something that is not a name made beside the model; "
                    "give the DataLoader a name there",
                )  # fmt: skip
            trained.append(loop)
            roles.loaders.append(loader)
        for loop in frame.loops:
            if loop.loader and id(loop) not in training and loop.loader in frame.roles:
                seen.setdefault(frame.roles[loop.loader], []).append((frame, loop))
        _find_schedulers(frame, roles, training)
    roles.loaders = list(dict.fromkeys(roles.loaders))
    for name in seen:
        if name in roles.loaders or not _is_loader(home, name):
            continue
        if all(gathers(loop.node) for _, loop in seen[name]):
            roles.evaluated.append(name)
        else:
            loop = seen[name][0][1]
            roles.notes.append(
                Remark(
                    loop.line,
                    f"this loop over {name} stays as it is, and every process runs it over all samples: to share "
                    f"the work, prepare {name} and use gather_for_metrics",
                )
            )


def _find_schedulers(frame: Frame, roles: Roles, training: dict[int, Loop]) -> None:
    for call in frame.methods:
        if call.method != "step" or call.owner not in frame.roles:
            continue
        name = frame.roles[call.owner]
        if name in roles.optimizers or name in roles.scalers or name in roles.schedulers:
            continue
        made = roles.home.assigned(name)
        if not made or not isinstance(made[-1].value, cst.Call):
            continue
        first = made[-1].value.args[0].value if made[-1].value.args else None
        if not isinstance(first, cst.Name) or first.value not in roles.optimizers:
            continue
        inside = bool(call.loops) and id(call.loops[-1]) in training
        (roles.schedulers if inside else roles.unprepared).append(name)


def _is_loader(home: Frame, name: str) -> bool:
    """Whether a name is made by a DataLoader, or together with others by a function, which may return loaders."""
    made = home.assigned(name)
    return bool(made) and (call_name(made[-1].value).endswith("DataLoader") or len(made[-1].targets) > 1)


def _find_places(facts: Facts, roles: Roles) -> None:
    home = roles.home
    missing = [name for name in roles.prepared if not home.assigned(name)]
    if missing:
        raise NotUnderstoodError(1, f"{missing[0]} is used before it is made in {home.name or 'the module'}")
    training = facts.calling("backward") - {home.name}
    starts = [call.index for call in home.methods if call.method == "backward"]
    starts += [index for name, _, index in home.calls if name in training]
    begins = min(starts)
    origins = [found for name in (*roles.prepared, *roles.unprepared) for found in home.assigned(name)]
    again = [found for found in origins if found.index >= begins]
    if again:
        raise NotUnderstoodError(
            again[0].line,
            f"{', '.join(again[0].targets)} is made after training has begun; make it in front of the loop",
        )
    devices = [found for name in roles.devices for found in home.assigned(name)]
    groups = [call for call in home.methods if call.method == "init_process_group"]
    roles.made = max(found.index for found in origins)
    roles.first = min([*(made.index for made in (*origins, *devices)), *(call.index for call in groups)])
