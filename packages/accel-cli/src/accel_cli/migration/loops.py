"""Plain PyTorch training loops become loops with an ``Accelerator``, as the guide "From plain PyTorch" shows."""

from __future__ import annotations

import difflib
import re
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider

from accel_cli.migration.gathering import gather_results, gathers
from accel_cli.migration.import_lines import with_import, without_unused
from accel_cli.migration.loop_facts import Facts, Frame, bound_names, call_name, names_in
from accel_cli.migration.loop_roles import NotUnderstoodError, Roles, find_roles
from accel_cli.migration.result import Remark

__all__ = ["rewrite_loops"]

_REMOVED_CALLS = re.compile(
    r"(^|\.)(init_process_group|destroy_process_group|set_epoch|set_device|unscale_|update|DistributedSampler)$"
)
_WRAPPED = re.compile(r"(^|\.)(DistributedDataParallel|DDP|DataParallel)$")
_CLIPS = re.compile(r"(^|\.)(clip_grad_norm_|clip_grad_value_)$")
_REWRITTEN = frozenset(
    {
        "autocast",
        "backward",
        "clip_grad_norm_",
        "clip_grad_value_",
        "cuda",
        "get_rank",
        "module",
        "save",
        "state_dict",
    }
)
_AUTOCAST = re.compile(r"(^|\.)autocast$")


def rewrite_loops(module: cst.Module) -> tuple[cst.Module, list[Remark], list[Remark]]:
    """Rewrite a module that trains with plain PyTorch.

    Args:
        module: the parsed source.

    Returns:
        The new module, refusals (then the module is returned as it was), and notes. A module without ``backward()``, or
        with an ``Accelerator``, is returned as it was.
    """
    if "Accelerator" in module.code or not m.findall(
        module, m.Call(func=m.Attribute(attr=m.Name("backward")))
    ):
        return module, [], []
    wrapper = MetadataWrapper(module)
    facts = Facts()
    wrapper.visit(facts)
    try:
        roles = find_roles(facts, gathers)
        rewriter = _Rewriter(facts, roles)
        changed = wrapper.visit(rewriter)
    except NotUnderstoodError as error:
        return module, [error.remark], []
    if not m.findall(changed, m.Call(func=m.Attribute(value=m.Name("accelerator"), attr=m.Name("backward")))):
        return module, [Remark(1, "backward() is called in a way that is not understood")], []
    return with_import(without_unused(module, changed)), [], sorted(roles.notes + rewriter.notes)


class _Rewriter(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, facts: Facts, roles: Roles) -> None:
        super().__init__()
        self.notes: list[Remark] = []
        self._facts = facts
        self._roles = roles
        self._stack: list[Frame] = [facts.frames[""]]
        self._batches: list[set[str]] = []
        self._guards = 0
        self._precision = ""
        self._threaded = _threaded(facts, roles)

    # Frames and loops

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._stack.append(self._facts.frames[node.name.value])

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        frame = self._stack.pop()
        if frame.name in self._threaded:
            params = updated_node.params
            first = cst.Param(
                cst.Name("accelerator"), comma=_comma() if params.params else cst.MaybeSentinel.DEFAULT
            )
            updated_node = updated_node.with_changes(
                params=params.with_changes(params=[first, *params.params])
            )
        if frame is self._roles.home:
            body = updated_node.body.with_changes(
                body=self._with_setup(original_node.body.body, updated_node.body.body)
            )
            updated_node = updated_node.with_changes(body=body)
        return updated_node

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        if self._roles.home.name:
            return updated_node
        return updated_node.with_changes(body=self._with_setup(original_node.body, updated_node.body))

    def visit_For(self, node: cst.For) -> None:
        loop = next((found for found in self._frame.loops if found.node is node), None)
        role = self._role(loop.loader) if loop is not None else None
        known = role in (*self._roles.loaders, *self._roles.evaluated)
        self._batches.append(set(names_in(node.target)) if known else set())

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:
        self._batches.pop()
        loop = next((found for found in self._frame.loops if found.node is original_node), None)
        if loop is not None and self._role(loop.loader) in self._roles.evaluated:
            return gather_results(updated_node)
        return updated_node

    def visit_If_body(self, node: cst.If) -> None:
        self._guards += _asks_for_rank(node)

    def leave_If_body(self, node: cst.If) -> None:
        self._guards -= _asks_for_rank(node)

    # Statements

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        kept = [small for small in updated_node.body if not self._is_superfluous(small)]
        if len(kept) == len(updated_node.body):
            return updated_node
        return updated_node.with_changes(body=kept) if kept else cst.RemoveFromParent()

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> Any:
        """An ``if`` whose body became empty is removed."""
        body = updated_node.body
        if isinstance(body, cst.IndentedBlock) and not body.body and updated_node.orelse is None:
            return cst.RemoveFromParent()
        return updated_node

    # Expressions

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> Any:
        name = call_name(original_node)
        func = updated_node.func
        if name == "print" and self._frame.roles and not self._guards:
            return updated_node.with_changes(func=_method("print"))
        if name in self._threaded and self._frame.roles:
            first = cst.Arg(
                cst.Name("accelerator"), comma=_comma() if updated_node.args else cst.MaybeSentinel.DEFAULT
            )
            return updated_node.with_changes(args=[first, *updated_node.args])
        if _WRAPPED.search(name) and updated_node.args:
            return updated_node.args[0].value
        if _CLIPS.search(name) and not name.startswith("accelerator."):
            return updated_node.with_changes(func=_method(name.rsplit(".", 1)[-1]))
        if _AUTOCAST.search(name):
            self._set_precision(original_node)
            return cst.Call(_method("autocast"))
        if name == "torch.save":
            return updated_node.with_changes(func=_method("save"))
        if name.endswith("get_rank") and not name.startswith("accelerator"):
            return cst.Attribute(cst.Name("accelerator"), cst.Name("process_index"))
        if name.endswith("DataLoader"):
            return self._loader(updated_node)
        return (
            self._method_call(original_node, updated_node)
            if isinstance(func, cst.Attribute)
            else updated_node
        )

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> Any:
        """``model.module`` is the model without its wrapper."""
        value = original_node.value
        if (
            original_node.attr.value == "module"
            and isinstance(value, cst.Name)
            and self._role(value.value) in self._roles.models
        ):
            return cst.Call(_method("unwrap_model"), [cst.Arg(value)])
        return updated_node

    @property
    def _frame(self) -> Frame:
        return self._stack[-1]

    def _role(self, name: str) -> str | None:
        return self._frame.roles.get(name)

    def _method_call(self, original: cst.Call, updated: cst.Call) -> Any:
        func = updated.func
        assert isinstance(func, cst.Attribute)
        value, method = func.value, func.attr.value
        owner = value.value if isinstance(value, cst.Name) else ""
        role = self._role(owner)
        if method == "backward" and self._frame.roles:
            scaled = (
                isinstance(value, cst.Call)
                and isinstance(value.func, cst.Attribute)
                and value.func.attr.value == "scale"
            )
            loss = value.args[0].value if scaled and isinstance(value, cst.Call) else value
            more = [
                cst.Arg(loss, comma=_comma() if updated.args else cst.MaybeSentinel.DEFAULT),
                *updated.args,
            ]
            return updated.with_changes(func=_method("backward"), args=more)
        if method == "step" and role in self._roles.scalers and updated.args:
            return cst.Call(cst.Attribute(updated.args[0].value, cst.Name("step")))
        if method == "state_dict" and role in self._roles.models:
            if not self._guards:
                return cst.Call(_method("get_state_dict"), [cst.Arg(value)])
            return updated.with_deep_changes(func, value=cst.Call(_method("unwrap_model"), [cst.Arg(value)]))
        unwrapped = isinstance(value, cst.Call) and call_name(value) == "accelerator.unwrap_model"
        if method == "state_dict" and isinstance(value, cst.Call) and unwrapped and not self._guards:
            return cst.Call(
                _method("get_state_dict"), [value.args[0].with_changes(comma=cst.MaybeSentinel.DEFAULT)]
            )
        if method in ("to", "cuda") and self._moves_to_device(original) and self._is_placed(original):
            return value
        if method == "cuda" and self._frame.roles:
            device = cst.Attribute(cst.Name("accelerator"), cst.Name("device"))
            return cst.Call(cst.Attribute(value, cst.Name("to")), [cst.Arg(device)])
        return updated

    def _moves_to_device(self, call: cst.Call) -> bool:
        if call_name(call).endswith(".cuda") or (
            isinstance(call.func, cst.Attribute) and call.func.attr.value == "cuda"
        ):
            return True
        names = [
            argument.value
            for argument in call.args
            if argument.keyword is None or argument.keyword.value == "device"
        ]
        return any(
            (isinstance(value, cst.Name) and self._role(value.value) in self._roles.devices)
            or (isinstance(value, cst.SimpleString) and "cuda" in value.value)
            or (isinstance(value, cst.Name) and value.value in ("rank", "local_rank", "gpu", "device_id"))
            for value in names
        )

    def _is_placed(self, call: cst.Call) -> bool:
        """Whether ``prepare`` moves the object of the call: the model, or a batch of a prepared loader."""
        func = call.func
        assert isinstance(func, cst.Attribute)
        value: cst.BaseExpression = func.value
        while isinstance(value, cst.Subscript | cst.Attribute):
            value = value.value
        if isinstance(value, cst.Name) and (
            self._role(value.value) in self._roles.models
            or any(value.value in names for names in self._batches)
        ):
            return True
        return self._frame is self._roles.home and any(
            found.value is call for model in self._roles.models for found in self._frame.assigned(model)
        )

    def _loader(self, call: cst.Call) -> cst.Call:
        """A loader without its distributed sampler: the prepared loader divides the samples."""
        args = []
        for argument in call.args:
            sampled = argument.keyword is not None and argument.keyword.value == "sampler"
            if (
                sampled
                and isinstance(argument.value, cst.Name)
                and self._role(argument.value.value) in self._roles.samplers
            ):
                argument = argument.with_changes(
                    keyword=cst.Name("shuffle"), value=cst.Name(self._shuffled(argument.value.value))
                )
            args.append(argument)
        names = [argument.keyword.value for argument in args if argument.keyword is not None]
        if names.count("shuffle") > 1:
            args = [
                a
                for a in args
                if not (
                    a.keyword is not None
                    and a.keyword.value == "shuffle"
                    and m.matches(a.value, m.Name("False"))
                )
            ]
        if args:
            args[-1] = args[-1].with_changes(comma=call.args[-1].comma)
        return call.with_changes(args=args)

    def _shuffled(self, sampler: str) -> str:
        made = self._roles.home.assigned(sampler)[-1].value
        assert isinstance(made, cst.Call)
        for argument in made.args:
            if argument.keyword is not None and argument.keyword.value == "shuffle":
                return str(getattr(argument.value, "value", "True"))
        return "True"

    def _set_precision(self, call: cst.Call) -> None:
        text = cst.Module([]).code_for_node(call)
        wanted = "bf16" if "bfloat16" in text or ('"cpu"' in text and "float16" not in text) else "fp16"
        if self._precision not in ("", wanted):
            line = int(self.get_metadata(PositionProvider, call).start.line)
            raise NotUnderstoodError(
                line, f"autocast in {wanted} and in {self._precision}; one precision is understood"
            )
        self._precision = wanted

    def _is_superfluous(self, small: cst.BaseSmallStatement) -> bool:
        """Whether the Accelerator does the statement's work, or the statement only assigns names to themselves."""
        if isinstance(small, cst.AnnAssign) or (isinstance(small, cst.Assign) and len(small.targets) == 1):
            target = small.target if isinstance(small, cst.AnnAssign) else small.targets[0].target
            if small.value is None:
                return False
            if target.deep_equals(small.value) or _same_names(target, small.value):
                return True
            if isinstance(target, cst.Name) and self._frame is self._roles.home:
                return target.value in (self._roles.samplers | self._roles.scalers)
            return False
        if not isinstance(small, cst.Expr):
            return False
        value = small.value
        if isinstance(value, cst.Name) and self._role(value.value) in self._roles.models:  # model.to(device)
            return True
        name = call_name(value)
        if not _REMOVED_CALLS.search(name):
            return False
        owner, _, method = name.rpartition(".")
        if method in ("unscale_", "update"):
            return self._role(owner) in self._roles.scalers
        if method == "set_epoch":
            return self._role(owner) in self._roles.samplers or owner.endswith(".sampler")
        return method != "set_device" or "cuda" in owner

    # Set-up

    def _with_setup(self, before: Any, after: Any) -> list[Any]:
        """The body with the Accelerator and the call of prepare; ``before`` identifies the statements."""
        places = _places(before, after)
        body = list(after)
        prepared = ", ".join(self._roles.prepared)
        call = f"{prepared} = accelerator.prepare({prepared})"
        if len(call) > 100:
            call = f"{prepared} = accelerator.prepare(\n    {prepared}\n)"
        made, exists = places[self._roles.made]
        body.insert(made + exists, cst.parse_statement(call))
        start, _ = places[self._roles.first]
        options = f'mixed_precision="{self._precision}"' if self._precision else ""
        new = [cst.parse_statement(f"accelerator = Accelerator({options})")]
        if start < len(body) and self._is_device(body[start]):
            line = body[start]
            new[0] = new[0].with_changes(leading_lines=line.leading_lines)
            new += self._device_statement(line, body)
            return [*body[:start], *new, *body[start + 1 :]]
        body = [self._plain_device(statement) for statement in body]
        if start < len(body) and hasattr(body[start], "leading_lines"):
            old = before[self._roles.first]
            new[0] = new[0].with_changes(leading_lines=old.leading_lines)
            if old.leading_lines and old.leading_lines == body[start].leading_lines:
                body[start] = body[start].with_changes(leading_lines=[])
        return [*body[:start], *new, *body[start:]]

    def _is_device(self, statement: Any) -> bool:
        if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
            return False
        small = statement.body[0]
        names = set(bound_names(small)) if isinstance(small, cst.Assign | cst.AnnAssign) else set()
        return bool(names) and names <= self._roles.devices

    def _device_statement(self, line: cst.SimpleStatementLine, body: list[Any]) -> list[Any]:
        """``device = accelerator.device`` if the device is still used, else nothing."""
        name = next(bound_names(line.body[0]))  # type: ignore[arg-type] # an assignment
        rest = [statement for statement in body if statement is not line]
        used = any(m.findall(statement, m.Name(name)) for statement in rest)
        return [self._plain_device(line).with_changes(leading_lines=[])] if used else []

    def _plain_device(self, statement: Any) -> Any:
        if not self._is_device(statement):
            return statement
        small = statement.body[0]
        device = cst.Attribute(cst.Name("accelerator"), cst.Name("device"))
        return statement.with_changes(body=[small.with_changes(value=device)])


def _threaded(facts: Facts, roles: Roles) -> set[str]:
    """The functions that need the Accelerator as an argument: those whose code uses it, and those that call them."""
    if not roles.home.name:
        return set()  # it is a global name
    found = {
        frame.name
        for frame in facts.frames.values()
        if frame.roles
        and frame is not roles.home
        and (
            any(call.method in _REWRITTEN for call in frame.methods)
            or any(name in ("print", "autocast", *_REWRITTEN) for name, _, _ in frame.calls)
            or any(frame.roles.get(loop.loader) in roles.evaluated for loop in frame.loops)
        )
    }
    return facts.callers_of(found) - {"", roles.home.name}


def _places(before: Any, after: Any) -> dict[int, tuple[int, bool]]:
    """Number of each old statement to that of the new one, and whether it still exists.

    If it does not, the number is that of the new statement in front of which it was.
    """
    old = [cst.Module([]).code_for_node(node).strip() for node in before]
    new = [cst.Module([]).code_for_node(node).strip() for node in after]
    places: dict[int, tuple[int, bool]] = {}
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for offset, index in enumerate(range(i1, i2)):
            exists = tag != "delete" and j1 + offset < j2
            places[index] = (j1 + offset if exists else j2, exists)
    return places


def _same_names(target: cst.BaseExpression, value: cst.BaseExpression) -> bool:
    """``a, b = a, b``, also with parentheses."""
    names, values = list(names_in(target)), list(names_in(value))
    sizes = [len(node.elements) if isinstance(node, cst.Tuple | cst.List) else 1 for node in (target, value)]
    return bool(names) and names == values and sizes[0] == sizes[1] == len(names)


def _asks_for_rank(node: cst.If) -> bool:
    """Whether the body of an ``if`` runs on one process only."""
    text = cst.Module([]).code_for_node(node.test)
    return re.search(r"rank|is_main|is_master", text) is not None


def _method(name: str) -> cst.Attribute:
    return cst.Attribute(cst.Name("accelerator"), cst.Name(name))


def _comma() -> cst.Comma:
    return cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
