"""Which modules of a model are sharded as one unit."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from accel_train.errors import PrepareError
from accel_train.strategies.blocks import repeated_blocks

if TYPE_CHECKING:
    from accel_train.plugins import FullyShardedDataParallelPlugin

__all__ = ["covering_shared", "find_units", "ignored_parameters"]

# Their children are used as a list or by the module's own forward, so they are no units themselves.
_LISTS = (nn.ModuleList, nn.ModuleDict)
_WHOLE = (nn.MultiheadAttention,)


def find_units(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> list[nn.Module]:
    """Find the modules that are sharded as units, inner ones before those that contain them.

    Args:
        model: the model; it is a unit itself and not in the result.
        plugin: its `auto_wrap_policy` decides.

    Raises:
        PrepareError: no module has a class in `transformer_cls_names_to_wrap`, or the policy cannot be called.
    """
    policy = plugin.auto_wrap_policy
    if policy == "NO_WRAP":
        return []
    if policy == "SIZE_BASED_WRAP":
        least = max(1, plugin.min_num_params or 0)
        return list(_by_policy_and_size(model, lambda _, left: left >= least, set()))
    if policy is None or policy == "TRANSFORMER_BASED_WRAP":
        names = plugin.transformer_cls_names_to_wrap or _no_split(model)
        if names:
            return _by_class(model, names, given=plugin.transformer_cls_names_to_wrap is not None)
        return _inner_first(model, {id(block) for block in repeated_blocks(model)}.__contains__)
    return _by_policy(model, policy)


def covering_shared(
    model: nn.Module, units: Sequence[nn.Module], whole: Collection[nn.Parameter]
) -> tuple[list[nn.Module], list[tuple[str, str]]]:
    """Drop units with parameters that are also used outside: a parameter must be gathered for all of its uses.

    The unit or model around all uses gathers such a parameter.

    Args:
        model: the model.
        units: the units that `find_units` returns.
        whole: parameters that are not divided.

    Returns:
        The remaining units, in the same order, and for each dropped unit two names of a shared parameter.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    if all(len(several) == 1 for several in names.values()):
        return list(units), []
    kept: list[nn.Module] = []
    shared: list[tuple[str, str]] = []
    for unit in units:
        outside = _own_outside(model, unit)
        both = [p for p in unit.parameters() if id(p) in outside and p not in whole]
        if both:
            inside = {f"{path}.{name}" for path in _paths(model, unit) for name, p in unit.named_parameters()}
            first, *others = names[id(both[0])]
            here = next((name for name in (first, *others) if name in inside), first)
            shared.append((here, next(name for name in (first, *others) if name != here)))
        else:
            kept.append(unit)
    return kept, shared


def _paths(model: nn.Module, module: nn.Module) -> list[str]:
    return [name for name, item in model.named_modules(remove_duplicate=False) if item is module]


def _own_outside(model: nn.Module, unit: nn.Module) -> set[int]:
    """The parameters, by `id`, that modules outside of a unit hold."""
    seen = {id(unit), id(model)}
    stack = [model]
    found: set[int] = set()
    while stack:
        module = stack.pop()
        found.update(id(p) for p in module._parameters.values() if p is not None)
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                stack.append(child)
    return found


def ignored_parameters(model: nn.Module, ignored: str | Iterable[nn.Module] | None) -> set[nn.Parameter]:
    """Find the parameters that stay whole on every rank: those of ignored modules, and scalars, which have no rows.

    Args:
        model: the model.
        ignored: modules of the model, or a regular expression that matches the whole names of modules.

    Raises:
        PrepareError: no module has such a name, or a module is not one of the model's.
    """
    numbers = {parameter for parameter in model.parameters() if parameter.dim() == 0}
    if ignored is None:
        return numbers
    named = dict(model.named_modules())
    if isinstance(ignored, str):
        modules = [module for name, module in named.items() if re.fullmatch(ignored, name)]
        if not modules:
            raise PrepareError(
                f"ignored_modules={ignored!r} matches no module of {type(model).__name__}; names look like "
                f"{_some(name for name in named if name)}."
            )
    else:
        modules = list(ignored)
        own = set(map(id, named.values()))
        stray = [module for module in modules if id(module) not in own]
        if stray:
            raise PrepareError(
                f"ignored_modules contains {type(stray[0]).__name__}, which is no module of {type(model).__name__}."
            )
    return numbers | {parameter for module in modules for parameter in module.parameters()}


def _inner_first(model: nn.Module, is_unit: Callable[[int], bool]) -> list[nn.Module]:
    """The units below a model by `id`, each once, inner ones first."""
    found: dict[int, nn.Module] = {}
    _add_inner_first(model, is_unit, found)
    found.pop(id(model), None)
    return list(found.values())


def _add_inner_first(module: nn.Module, is_unit: Callable[[int], bool], found: dict[int, nn.Module]) -> None:
    for child in module.children():
        _add_inner_first(child, is_unit, found)
        if is_unit(id(child)) and not isinstance(child, _LISTS):
            found.setdefault(id(child), child)


def _no_split(model: nn.Module) -> tuple[str, ...]:
    """Class names of blocks that transformers' models declare; of wrappers around one (PEFT) the model's."""
    for module in model.modules():
        names = getattr(module, "_no_split_modules", None)
        if names:
            return tuple(names)
    return ()


def _by_class(model: nn.Module, names: tuple[str, ...], given: bool) -> list[nn.Module]:
    present = {type(module).__name__ for module in model.modules()}
    missing = [name for name in names if name not in present]
    if (given and missing) or missing == list(names):
        near = difflib.get_close_matches(missing[0], present, n=3, cutoff=0.4)
        hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise PrepareError(
            f"{type(model).__name__} has no module of the class {missing[0]!r}, which "
            f"transformer_cls_names_to_wrap names. {hint}Its classes: {_some(sorted(present))}."
        )
    wanted = {id(module) for module in model.modules() if type(module).__name__ in names}
    return _inner_first(model, wanted.__contains__)


def _by_policy_and_size(
    parent: nn.Module, is_unit: Callable[[nn.Module, int], bool], taken: set[int]
) -> Iterable[nn.Module]:
    """The units below a module, inner ones first.

    Args:
        parent: a module.
        is_unit: called with a module and the number of its parameters that are in no unit inside it.
        taken: the parameters of units that were found, by `id`.
    """
    for child in parent.children():
        if not isinstance(child, _WHOLE):
            yield from _by_policy_and_size(child, is_unit, taken)
        left = {id(p): p.numel() for p in child.parameters() if id(p) not in taken}
        if not isinstance(child, _LISTS) and is_unit(child, sum(left.values())):
            taken.update(left)
            yield child


def _by_policy(model: nn.Module, policy: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a function, or a policy of `torch.distributed.fsdp.wrap`, chooses."""
    run = getattr(policy, "_run_policy", None)
    if run is not None:  # ModuleWrapPolicy, CustomPolicy
        return _inner_first(model, {id(module) for module in run(model, set(), {})}.__contains__)
    try:
        names = set(inspect.signature(policy).parameters)
    except ValueError as error:
        raise PrepareError(
            f"auto_wrap_policy={policy!r:.80} cannot be called with a module: {error}."
        ) from error
    if {"recurse", "nonwrapped_numel"} <= names:  # as version 1 calls it
        chosen = _by_policy_and_size(
            model, lambda module, left: policy(module=module, recurse=False, nonwrapped_numel=left), set()
        )
        return list(dict.fromkeys(chosen))
    return _inner_first(model, {id(module) for module in model.modules() if policy(module)}.__contains__)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:8]) + (", …" if len(listed) > 8 else "")
