"""Evaluation loops: which results can be gathered from all processes, and how."""

from __future__ import annotations

from typing import Any

import libcst as cst
import libcst.matchers as m

__all__ = ["gather_results", "gathers"]

_APPEND = m.Call(func=m.Attribute(attr=m.Name("append") | m.Name("extend")), args=[m.Arg()])
_SUM_OF = m.Call(
    func=m.Attribute(value=m.Call(func=m.Attribute(attr=m.Name("sum")), args=[]), attr=m.Name("item")),
    args=[],
)  # (a == b).sum().item()
_SIZE = (
    m.Call(func=m.Attribute(attr=m.Name("size")), args=[m.Arg(value=m.Integer("0"))])
    | m.Call(func=m.Name("len"), args=[m.Arg(value=m.Name())])
    | m.Subscript(value=m.Attribute(attr=m.Name("shape")))
)


def gathers(loop: cst.For) -> bool:
    """Whether every result that the loop collects is one value per sample, so that it can be gathered.

    Understood are ``list.append(tensor)``, ``right += (a == b).sum().item()`` and ``total += labels.size(0)``.
    """
    found = False
    for statement in _statements(loop):
        if isinstance(statement, cst.AugAssign):
            if not isinstance(statement.operator, cst.AddAssign):
                return False
            if not (m.matches(statement.value, _SUM_OF) or m.matches(statement.value, _SIZE)):
                return False
            found = True
        elif isinstance(statement, cst.Expr) and m.matches(statement.value, _APPEND):
            if not _per_sample(statement.value):
                return False
            found = True
    return found


def gather_results(loop: cst.For) -> cst.For:
    """The loop with ``accelerator.gather_for_metrics`` around each result."""
    changed = loop.visit(_Gatherer())
    assert isinstance(changed, cst.For)
    return changed


class _Gatherer(cst.CSTTransformer):
    def leave_Expr(self, original_node: cst.Expr, updated_node: cst.Expr) -> cst.Expr:
        """``list.append(gather_for_metrics(tensor))``."""
        call = updated_node.value
        if not m.matches(call, _APPEND) or not isinstance(call, cst.Call):
            return updated_node
        return updated_node.with_changes(
            value=call.with_changes(args=[cst.Arg(_gathered(call.args[0].value))])
        )

    def leave_AugAssign(self, original_node: cst.AugAssign, updated_node: cst.AugAssign) -> cst.AugAssign:
        """``right += gather_for_metrics(a == b).sum().item()``."""
        value: Any = updated_node.value
        if m.matches(value, _SUM_OF):
            inner = value.func.value.func.value
            return updated_node.with_deep_changes(value.func.value.func, value=_gathered(_bare(inner)))
        if m.matches(value, m.Call(func=m.Name("len"))):
            return updated_node.with_deep_changes(value.args[0], value=_gathered(value.args[0].value))
        if isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute):
            return updated_node.with_deep_changes(value.func, value=_gathered(value.func.value))
        return updated_node.with_deep_changes(value.value, value=_gathered(value.value.value))


def _statements(loop: cst.For) -> list[cst.BaseSmallStatement]:
    class Collector(cst.CSTVisitor):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[cst.BaseSmallStatement] = []

        def visit_AugAssign(self, node: cst.AugAssign) -> None:
            self.found.append(node)

        def visit_Expr(self, node: cst.Expr) -> None:
            self.found.append(node)

    collector = Collector()
    loop.body.visit(collector)
    return collector.found


def _per_sample(call: Any) -> bool:
    """Whether the appended value can be a tensor with one value per sample: no number, no result of a reduction."""
    reduced = m.Call(
        func=m.Attribute(attr=m.Name("item") | m.Name("mean") | m.Name("sum") | m.Name("tolist"))
    )
    converted = m.Call(func=m.Attribute(attr=m.Name("numpy"))) | m.Call(func=m.Name("float"))
    method = call.func.attr.value
    value = call.args[0].value
    return method == "append" and not m.matches(value, reduced | converted | m.Name("loss"))


def _bare(node: Any) -> Any:
    return node.with_changes(lpar=[], rpar=[]) if hasattr(node, "lpar") else node


def _gathered(value: Any) -> cst.Call:
    func = cst.Attribute(cst.Name("accelerator"), cst.Name("gather_for_metrics"))
    return cst.Call(func, [cst.Arg(_bare(value))])
