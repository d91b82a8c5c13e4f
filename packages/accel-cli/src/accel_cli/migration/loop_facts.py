"""Facts about a plain PyTorch training script: functions, assignments, loops, and the roles of its objects.

Names are resolved through calls: a function ``train(model, loader)`` that ``main`` calls as ``train(net, data)`` knows
``main``'s objects under its own names. ``Frame.roles`` maps a function's names to those of the frame that creates the
objects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import PositionProvider

__all__ = ["Assignment", "Facts", "Frame", "Loop", "MethodCall", "bound_names", "call_name", "names_in"]

_WRAPPERS = frozenset(
    {"enumerate", "tqdm", "tqdm.tqdm", "tqdm.auto.tqdm", "trange", "iter", "track", "progress"}
)
"""Functions around the loader of a loop."""


@dataclasses.dataclass(frozen=True)
class Assignment:
    """``a = …``, ``a: Kind = …`` or ``a, b = …``.

    Attributes:
        targets: the names on the left.
        value: the expression on the right.
        line: its line.
        index: number of the statement of the frame's body that it is, or is inside of.
    """

    targets: tuple[str, ...]
    value: cst.BaseExpression
    line: int
    index: int


@dataclasses.dataclass(frozen=True)
class MethodCall:
    """``name.method(…)`` or ``….method(…)``.

    Attributes:
        owner: the name before the dot; empty: another expression.
        method: the method.
        call: the call.
        loops: the loops around it, outermost first.
        line: its line.
        index: as in ``Assignment``.
    """

    owner: str
    method: str
    call: cst.Call
    loops: tuple[Loop, ...]
    line: int
    index: int


@dataclasses.dataclass
class Loop:
    """A ``for`` loop.

    Attributes:
        node: the statement.
        loader: the name that it iterates over, perhaps through ``enumerate`` or ``tqdm``; empty: another expression.
        targets: the names that it binds.
        line: its line.
        index: as in ``Assignment``.
    """

    node: cst.For
    loader: str
    targets: tuple[str, ...]
    line: int
    index: int


@dataclasses.dataclass
class Frame:
    """A function, or the module outside of functions.

    Attributes:
        name: the function's name; empty: the module.
        params: its parameters.
        assignments, methods, loops: its assignments, method calls and loops, in order.
        calls: calls of plain names, with the number of the statement.
        roles: its names to those of the frame that creates the objects.
    """

    name: str
    params: tuple[str, ...] = ()
    assignments: list[Assignment] = dataclasses.field(default_factory=list)
    methods: list[MethodCall] = dataclasses.field(default_factory=list)
    loops: list[Loop] = dataclasses.field(default_factory=list)
    calls: list[tuple[str, cst.Call, int]] = dataclasses.field(default_factory=list)
    roles: dict[str, str] = dataclasses.field(default_factory=dict)

    def assigned(self, name: str) -> list[Assignment]:
        """The assignments of a name."""
        return [found for found in self.assignments if name in found.targets]

    def locals(self) -> set[str]:
        """Names that the function binds itself."""
        bound = {name for found in self.assignments for name in found.targets}
        return bound | set(self.params) | {name for loop in self.loops for name in loop.targets}


class Facts(cst.CSTVisitor):
    """Collects the frames of a module.

    Attributes:
        frames: name of the function to its frame; methods of classes are frames too, and are not resolved.
    """

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.frames: dict[str, Frame] = {"": Frame("")}
        self._stack: list[Frame] = [self.frames[""]]
        self._indices: list[int] = [-1]
        self._loops: list[list[Loop]] = [[]]
        self._bodies: list[dict[int, int]] = [{}]

    def line(self, node: cst.CSTNode) -> int:
        """The line of a node."""
        return int(self.get_metadata(PositionProvider, node).start.line)

    def visit_Module(self, node: cst.Module) -> None:
        """Number the statements."""
        self._bodies[0] = {id(statement): index for index, statement in enumerate(node.body)}

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        """Enter a frame."""
        params = (*node.params.posonly_params, *node.params.params, *node.params.kwonly_params)
        frame = Frame(node.name.value, tuple(param.name.value for param in params))
        self.frames[frame.name] = frame
        self._stack.append(frame)
        self._indices.append(-1)
        self._loops.append([])
        self._bodies.append({id(statement): index for index, statement in enumerate(node.body.body)})

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        """Leave it."""
        for pile in (self._stack, self._indices, self._loops, self._bodies):
            pile.pop()

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Keep the number of the current statement of the frame's body."""
        index = self._bodies[-1].get(id(node))
        if index is not None:
            self._indices[-1] = index
        return super().on_visit(node)

    def visit_Assign(self, node: cst.Assign) -> None:
        """Record the names that are bound."""
        self._assign(node, node.value)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        """Record the name, if it gets a value."""
        if node.value is not None:
            self._assign(node, node.value)

    def _assign(self, node: cst.Assign | cst.AnnAssign, value: cst.BaseExpression) -> None:
        targets = tuple(bound_names(node))
        self._stack[-1].assignments.append(Assignment(targets, value, self.line(node), self._indices[-1]))

    def visit_For(self, node: cst.For) -> None:
        """Record the loop."""
        loop = Loop(
            node, _iterated(node.iter), tuple(names_in(node.target)), self.line(node), self._indices[-1]
        )
        self._stack[-1].loops.append(loop)
        self._loops[-1].append(loop)

    def leave_For(self, original_node: cst.For) -> None:
        """Leave the loop."""
        self._loops[-1].pop()

    def visit_Call(self, node: cst.Call) -> None:
        """Record calls of methods and of functions."""
        frame = self._stack[-1]
        if isinstance(node.func, cst.Attribute):
            owner = node.func.value.value if isinstance(node.func.value, cst.Name) else ""
            frame.methods.append(
                MethodCall(
                    owner,
                    node.func.attr.value,
                    node,
                    tuple(self._loops[-1]),
                    self.line(node),
                    self._indices[-1],
                )
            )
        elif isinstance(node.func, cst.Name):
            frame.calls.append((node.func.value, node, self._indices[-1]))

    def calling(self, method: str) -> set[str]:
        """Names of the functions that call a method, themselves or through functions that they call."""
        own = {
            frame.name
            for frame in self.frames.values()
            if any(call.method == method for call in frame.methods)
        }
        return self.callers_of(own)

    def callers_of(self, names: set[str]) -> set[str]:
        """``names``, and the functions that call them, directly or not."""
        found = set(names)
        while True:
            more = {
                frame.name
                for frame in self.frames.values()
                if frame.name and any(name in found for name, _, _ in frame.calls)
            }
            if more <= found:
                return found
            found |= more

    def resolve_names(self, home: Frame) -> None:
        """Fill in ``roles`` of all frames that ``home`` reaches by calls, and of functions that see its globals.

        Args:
            home: the frame that creates the objects.
        """
        home.roles = {name: name for name in home.locals()}
        waiting = [home]
        reached = {home.name}
        while waiting:
            frame = waiting.pop()
            for name, call, _ in frame.calls:
                called = self.frames.get(name)
                if called is None or name in reached:
                    continue
                reached.add(name)
                waiting.append(called)
                called.roles = {
                    param: frame.roles[argument]
                    for param, argument in _arguments(called, call)
                    if argument in frame.roles
                }
                if home.name == "":
                    own = called.locals()
                    called.roles |= {name: role for name, role in home.roles.items() if name not in own}


def bound_names(node: cst.Assign | cst.AnnAssign) -> Iterator[str]:
    """The plain names that an assignment binds, with an annotation or without."""
    targets = [node.target] if isinstance(node, cst.AnnAssign) else [part.target for part in node.targets]
    for target in targets:
        yield from names_in(target)


def names_in(node: cst.CSTNode) -> Iterator[str]:
    """The plain names in the target of an assignment or a loop."""
    if isinstance(node, cst.Name):
        yield node.value
    elif isinstance(node, cst.Tuple | cst.List):
        for element in node.elements:
            yield from names_in(element.value)


def call_name(node: Any) -> str:
    """The dotted name of the called object; empty if ``node`` is not a call of a name."""
    return (get_full_name_for_node(node.func) or "") if isinstance(node, cst.Call) else ""


def _iterated(node: cst.BaseExpression) -> str:
    while isinstance(node, cst.Call) and call_name(node) in _WRAPPERS and node.args:
        node = node.args[0].value
    return node.value if isinstance(node, cst.Name) else ""


def _arguments(called: Frame, call: cst.Call) -> Iterator[tuple[str, str]]:
    positional = iter(called.params)
    for argument in call.args:
        if argument.star:
            positional = iter(())  # how many parameters it fills is not known
            continue
        param = argument.keyword.value if argument.keyword is not None else next(positional, None)
        if param is not None and isinstance(argument.value, cst.Name):
            yield param, argument.value.value
